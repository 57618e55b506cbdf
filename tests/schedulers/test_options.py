"""Table options from scheduler configurations: agreement with diffusers, and errors and warnings for other fields."""

from __future__ import annotations

import re
from typing import Any

import diffusers
import numpy as np
import pytest

from schedulers import SAMPLERS, NoiseSchedule, TableOptions, UnsupportedOption
from schedulers.formulations import DISCRETE_CLASSES

SD15: dict[str, Any] = {
    "_class_name": "PNDMScheduler",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "num_train_timesteps": 1000,
    "set_alpha_to_one": False,
    "skip_prk_steps": True,
    "steps_offset": 1,
    "clip_sample": False,
}


def test_stable_diffusion_configuration_is_read_for_any_sampler() -> None:
    assert TableOptions.from_config(SD15) == TableOptions("plms", "leading", None, 1, False, "zero")
    assert TableOptions.from_config(SD15, "Euler a").spacing == "linspace"
    assert TableOptions.from_config(SD15, "DPM++ 2M Karras").sigma_schedule == "karras"
    assert TableOptions.from_config({**SD15, "timestep_spacing": "trailing"}, "euler").spacing == "trailing"


@pytest.mark.parametrize(
    ("config", "sampler"),
    [
        ({"_class_name": "DPMSolverMultistepScheduler"}, "dpmpp_2m"),
        ({"_class_name": "DPMSolverMultistepScheduler", "algorithm_type": "sde-dpmsolver++"}, "dpmpp_2m_sde"),
        (
            {"_class_name": "DPMSolverMultistepScheduler", "algorithm_type": "sde-dpmsolver++", "solver_order": 3},
            "dpmpp_3m_sde",
        ),
        ({"_class_name": "DDPMScheduler"}, "ddpm"),
        ({"_class_name": "DDPMScheduler", "variance_type": "fixed_large"}, "ddpm_large"),
        ({"_class_name": "UniPCMultistepScheduler"}, "unipc"),
    ],
)
def test_configuration_determines_its_sampler(config: dict[str, Any], sampler: str) -> None:
    assert TableOptions.from_config(config).sampler == sampler


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"_class_name": "DDIMScheduler", "clip_sample": True}, "clip_sample is True; ddim supports False only"),
        ({"_class_name": "DDPMScheduler", "thresholding": True}, "thresholding is True"),
        ({"_class_name": "DPMSolverMultistepScheduler", "solver_order": 3}, "of solver_order 3 is not supported"),
        ({"_class_name": "DPMSolverMultistepScheduler", "use_lu_lambdas": True}, "use_lu_lambdas is True"),
        ({"_class_name": "DPMSolverMultistepScheduler", "solver_type": "heun"}, "solver_type is 'heun'"),
        ({"_class_name": "UniPCMultistepScheduler", "solver_order": 3}, "solver_order is 3; unipc supports 2 only"),
        ({"_class_name": "UniPCMultistepScheduler", "solver_type": "bh1"}, "solver_type is 'bh1'"),
        ({"_class_name": "UniPCMultistepScheduler", "disable_corrector": [0]}, r"disable_corrector is \[0\]"),
        ({"_class_name": "DPMSolverMultistepScheduler", "lambda_min_clipped": -2.0}, "lambda_min_clipped is -2.0"),
        ({"_class_name": "LCMScheduler", "original_inference_steps": 0}, "original_inference_steps is 0"),
        ({"_class_name": "LCMScheduler", "timestep_scaling": 1.0}, "timestep_scaling is 1.0"),
        ({"_class_name": "PNDMScheduler", "skip_prk_steps": False}, "skip_prk_steps is False"),
        ({"_class_name": "EulerDiscreteScheduler", "timestep_type": "continuous"}, "'continuous' with epsilon"),
        ({"_class_name": "DDPMScheduler", "variance_type": "learned_range"}, "variance_type is 'learned_range'"),
        (
            {"_class_name": "EulerDiscreteScheduler", "use_karras_sigmas": True, "use_beta_sigmas": True},
            "karras and beta sigmas at once",
        ),
    ],
)
def test_unsupported_option_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedOption, match=message):
        TableOptions.from_config(config)


def test_option_can_be_ignored_by_name() -> None:
    config = {"_class_name": "DDIMScheduler", "clip_sample": True}
    assert TableOptions.from_config(config, ignore={"clip_sample"}).sampler == "ddim"


def test_option_that_is_not_applied_produces_a_warning() -> None:
    config = {"_class_name": "DDIMScheduler", "clip_sample": True}
    options = TableOptions.from_config(config, not_applied={"clip_sample"})
    table = options.compile(NoiseSchedule.from_config(config), 5)
    expected = "clip_sample is True in the model's scheduler configuration; ddim does not apply it."
    assert table.warnings == (expected,)
    assert TableOptions.from_config({**config, "clip_sample": False}, not_applied={"clip_sample"}).warnings == ()


@pytest.mark.parametrize(
    ("sampler", "config", "warning"),
    [
        ("dpmpp_2m", {"solver_order": 3}, "solver_order is 3 .*; dpmpp_2m uses 2; for 3 use dpmpp_3m_sde"),
        ("dpmpp_2m", {"algorithm_type": "sde-dpmsolver++"}, "'sde-dpmsolver\\+\\+'.*for .* use dpmpp_2m_sde"),
        ("ddpm", {"variance_type": "fixed_large"}, "variance_type is 'fixed_large' .*for .* use ddpm_large"),
    ],
)
def test_field_that_the_sampler_name_overrides_produces_a_warning(
    sampler: str, config: dict[str, Any], warning: str
) -> None:
    """Test row "named-by-sampler" of docs/parity.md."""
    [text] = TableOptions.from_config(config, sampler).warnings
    assert re.search(warning, text)
    assert TableOptions.from_config({}, sampler).warnings == ()


def test_distillation_steps_are_read_for_lcm_and_tcd_only() -> None:
    config = {"_class_name": "LCMScheduler", "original_inference_steps": 100}
    for sampler in ("lcm", "tcd"):
        table = TableOptions.from_config(config, sampler).compile(NoiseSchedule.from_config(config), 60)
        scheduler = getattr(diffusers, SAMPLERS[sampler].diffusers_class).from_config(config)
        scheduler.set_timesteps(60)
        np.testing.assert_array_equal(table.timestep, scheduler.timesteps.numpy())
    assert TableOptions.from_config(config, "ddim").distillation_steps == 50


def test_flow_matching_models_are_refused() -> None:
    with pytest.raises(UnsupportedOption, match=r"FlowMatchEulerDiscreteScheduler \(a flow-matching model"):
        TableOptions.from_config({"_class_name": "FlowMatchEulerDiscreteScheduler"})


@pytest.mark.parametrize("zero_snr", [False, True])
@pytest.mark.parametrize("betas", ["linear", "scaled_linear", "squaredcos_cap_v2"])
def test_noise_schedule_matches_diffusers(betas: str, zero_snr: bool) -> None:
    scheduler = diffusers.DDIMScheduler(beta_schedule=betas, rescale_betas_zero_snr=zero_snr, beta_start=1e-3)
    schedule = NoiseSchedule.from_config(scheduler.config)
    np.testing.assert_allclose(schedule.alphas_cumprod, scheduler.alphas_cumprod.numpy(), rtol=2e-4, atol=1e-12)


@pytest.mark.filterwarnings("ignore:__array:DeprecationWarning")
@pytest.mark.parametrize("name", [name for name in DISCRETE_CLASSES if name != "DPMSolverSDEScheduler"])  # torchsde
def test_missing_betas_have_the_defaults_of_the_class(name: str) -> None:
    schedule = NoiseSchedule.from_config({"_class_name": name})
    expected = getattr(diffusers, name)().alphas_cumprod.numpy()
    np.testing.assert_allclose(schedule.alphas_cumprod, expected, rtol=2e-5)


@pytest.mark.filterwarnings("ignore:__array:DeprecationWarning")
def test_missing_betas_do_not_depend_on_the_sampler() -> None:
    """Test row "betas-of-the-file" of docs/parity.md: diffusers uses the betas of the sampler's class instead."""
    file = {"_class_name": "LCMScheduler"}
    schedule = NoiseSchedule.from_config(file)
    euler = diffusers.EulerDiscreteScheduler.from_config(file).alphas_cumprod.numpy()
    assert np.abs(schedule.alphas_cumprod - euler).max() > 0.1


def test_trained_betas_are_used_unchanged() -> None:
    schedule = NoiseSchedule.from_config({"trained_betas": [0.1, 0.2]})
    np.testing.assert_allclose(schedule.alphas_cumprod, [0.9, 0.72])
