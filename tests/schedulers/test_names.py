"""Sampler name resolution, and the errors for unknown names."""

from __future__ import annotations

import pytest

import schedulers
from schedulers import SAMPLERS, SIGMA_SCHEDULES, UnknownSampler, resolve_sampler


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("DPM++ 2M Karras", ("dpmpp_2m", "karras")),
        ("DPM++ 2M SDE Exponential", ("dpmpp_2m_sde", "exponential")),
        ("DPM++ 3M SDE Karras", ("dpmpp_3m_sde", "karras")),
        ("DPM++ 2M SGM Uniform", ("dpmpp_2m", "sgm_uniform")),
        ("Euler a", ("euler_a", None)),
        ("euler_ancestral", ("euler_a", None)),
        ("k_euler_a", ("euler_a", None)),
        ("k_euler", ("euler", None)),
        ("Euler Simple", ("euler", "simple")),
        ("euler beta", ("euler", "beta")),
        ("LMS Karras", ("lms", "karras")),
        ("k_lms", ("lms", None)),
        ("sample_dpmpp_2m", ("dpmpp_2m", None)),
        ("dpmpp_2m_sde_gpu", ("dpmpp_2m_sde", None)),
        ("UniPC", ("unipc", None)),
        ("uni_pc", ("unipc", None)),
        ("PLMS", ("plms", None)),
        ("Heun", ("heun", None)),
        ("  DDIM ", ("ddim", None)),
        ("Predictor-corrector", ("pc", None)),
        ("DDIMScheduler", ("ddim", None)),
        ("DDPMScheduler", ("ddpm", None)),
        ("PNDMScheduler", ("plms", None)),
        ("LCMScheduler", ("lcm", None)),
        ("EulerDiscreteScheduler", ("euler", None)),
        ("EulerAncestralDiscreteScheduler", ("euler_a", None)),
        ("HeunDiscreteScheduler", ("heun", None)),
        ("LMSDiscreteScheduler", ("lms", None)),
        ("DPMSolverMultistepScheduler", ("dpmpp_2m", None)),
        ("DEISMultistepScheduler", ("deis", None)),
        ("UniPCMultistepScheduler", ("unipc", None)),
        ("ScoreSdeVeScheduler", ("pc", None)),
    ],
)
def test_common_name_is_resolved(name: str, expected: tuple[str, str | None]) -> None:
    assert resolve_sampler(name) == expected


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_name_label_and_every_schedule_suffix_resolve(sampler: str) -> None:
    for spelling in (sampler, sampler.upper(), SAMPLERS[sampler].label):
        assert resolve_sampler(spelling) == (sampler, None)
        for schedule in SIGMA_SCHEDULES:
            assert resolve_sampler(f"{spelling} {schedule}") == (sampler, schedule)


def test_unknown_sampler_error_lists_the_closest_and_all_names() -> None:
    with pytest.raises(UnknownSampler, match=r"'dpmpp_2n'.*Did you mean 'dpmpp_2m'") as caught:
        resolve_sampler("dpmpp_2n")
    assert isinstance(caught.value, ValueError)
    assert all(name in str(caught.value) for name in SAMPLERS)


@pytest.mark.parametrize("name", ["", "karras", "!!!", "FlowMatchEulerDiscreteScheduler", "DPM++ SDE", "dpm2"])
def test_unsupported_name_is_refused(name: str) -> None:
    with pytest.raises(UnknownSampler, match="Choose from ddim"):
        resolve_sampler(name)


def test_every_sampler_has_valid_metadata() -> None:
    for name, sampler in SAMPLERS.items():
        assert sampler.name == name
        assert sampler.label
        assert 20 < len(sampler.summary) < 90
        assert sampler.order in (1, 2, 3, 4)
        assert sampler.evaluations_per_step in (1, 2)
    assert [name for name, sampler in SAMPLERS.items() if sampler.takes_eta] == ["ddim", "euler_a", "tcd"]


def test_public_names_exist() -> None:
    assert len(set(schedulers.__all__)) == len(schedulers.__all__)
    assert all(hasattr(schedulers, name) for name in schedulers.__all__)
