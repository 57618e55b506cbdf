"""Every field of every diffusers scheduler class, for every sampler: as in diffusers, or refused, or warned, or listed.

The fields are read from the classes of the installed diffusers, so a field that a new release adds fails here until it
has a probe. A difference that is meant to stay has a row in docs/parity.md under the key in ``DIFFERENCES``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import diffusers
import numpy as np
import pytest

from schedulers import SAMPLERS, NoiseSchedule, TableOptions, UnsupportedOption
from schedulers.formulations import DISCRETE_CLASSES
from tests.schedulers.theirs import COMPARED, SD, scheduler_class
from tests.schedulers.trajectories import make_network, run_diffusers, run_table

pytestmark = pytest.mark.filterwarnings("ignore")

BOUND = 1e-4
NUM_STEPS = 20
ABSENT = "absent"
"""Marks a probe that leaves the field out of the file."""

PUBLISHED = {**SD, "_class_name": "EulerDiscreteScheduler", "clip_sample": False, "skip_prk_steps": True}
"""A file as Stable Diffusion XL's, to which every probe is added."""

VELOCITY = {"prediction_type": "v_prediction"}
PROBES: dict[str, tuple[Any, ...]] = {
    "algorithm_type": ("dpmsolver", "dpmsolver++", "sde-dpmsolver", "sde-dpmsolver++"),
    "beta_end": (0.02,),
    "beta_schedule": ("linear", "squaredcos_cap_v2"),
    "beta_start": (0.001,),
    "clip_sample": (True, ABSENT),
    "clip_sample_range": (0.5,),
    "corrector_order": (1,),
    "disable_corrector": ([0], []),
    "dynamic_thresholding_ratio": (0.5,),
    "euler_at_final": (True,),
    "final_sigmas_type": ("sigma_min", "zero"),
    "flow_shift": (3.0,),
    "interpolation_type": ("log_linear", "linear"),
    "lambda_min_clipped": (-2.0, -5.1, float("-inf")),
    "lower_order_final": (False,),
    "num_train_timesteps": (500,),
    "original_inference_steps": (100, 50),
    "predict_x0": (False,),
    "prediction_type": ("sample", "v_prediction"),
    "predictor_order": (1,),
    "rescale_betas_zero_snr": (True,),
    "sample_max_value": (2.0,),
    "set_alpha_to_one": (True, False),
    "shift_terminal": (0.1,),
    "sigma_max": (10.0,),
    "sigma_min": (0.1,),
    "skip_prk_steps": (False, ABSENT),
    "solver_order": (1, 3),
    "solver_p": ("DDIMScheduler",),
    "solver_type": ("bh1", "bh2", "heun", "logrho", "midpoint"),
    "steps_offset": (1,),
    "tau_func": ("any",),
    "thresholding": (True,),
    "time_shift_type": ("linear",),
    "timestep_scaling": (1.0,),
    "timestep_spacing": ("leading", "linspace", "trailing"),
    "timestep_type": ("continuous",),
    "trained_betas": (np.linspace(0.0001, 0.02, 1000).tolist(),),
    "use_beta_sigmas": (True,),
    "use_dynamic_shifting": (True,),
    "use_exponential_sigmas": (True,),
    "use_flow_sigmas": (True,),
    "use_karras_sigmas": (True,),
    "use_lu_lambdas": (True,),
    "variance_type": ("fixed_large", "fixed_small", "fixed_small_log"),
}
"""Values to try of each field."""

NAMED: dict[str, dict[str, Any]] = {
    "ddpm_large": {"variance_type": "fixed_large"},
    "dpmpp_2m_sde": {"algorithm_type": "sde-dpmsolver++"},
    "dpmpp_3m_sde": {"algorithm_type": "sde-dpmsolver++"},
}
"""Arguments that a user of diffusers has to add to ``from_config`` to get the sampler of this name."""


class Difference(NamedTuple):
    """A row of docs/parity.md: at these values of the field the samplers differ from diffusers."""

    field: str
    values: tuple[Any, ...]
    samplers: tuple[str, ...]


DIFFERENCES: dict[str, Difference] = {
    "zero-snr-everywhere": Difference("rescale_betas_zero_snr", (True,), ("heun", "lms", "plms", "deis")),
    "pndm-mixes-v": Difference("prediction_type", ("v_prediction",), ("plms",)),
    "no-sample-prediction": Difference("prediction_type", ("sample",), ("plms", "euler_a")),
    "uniform-stride": Difference("timestep_spacing", ("linspace",), ("ddim", "plms")),
    "pure-noise": Difference("beta_schedule", ("squaredcos_cap_v2",), ("heun",)),
    "plms-warm-up": Difference("skip_prk_steps", (ABSENT,), ("plms",)),
    "clip-sample": Difference("clip_sample", (ABSENT,), ("ddim", "ddpm", "ddpm_large")),
}


def fields_of(class_name: str) -> tuple[str, ...]:
    """The fields of a scheduler configuration that a class of diffusers reads."""
    names = inspect.signature(getattr(diffusers, class_name).__init__).parameters
    return tuple(name for name in names if name != "self")


FIELDS = sorted({field for name in DISCRETE_CLASSES if name != "DPMSolverSDEScheduler" for field in fields_of(name)})
"""Of every class that is served; DPMSolverSDEScheduler cannot be imported without torchsde."""


def test_every_field_of_diffusers_has_a_probe_and_no_probe_is_left_over() -> None:
    assert sorted(PROBES) == FIELDS


def file_of(class_name: str, field: str, value: Any) -> dict[str, Any]:
    """A scheduler_config.json of this class with the field set, or left out."""
    file = {**PUBLISHED, "_class_name": class_name, field: value}
    if field == "rescale_betas_zero_snr":
        file |= VELOCITY  # the only kind of prediction that means something at zero signal
    return {name: value for name, value in file.items() if value is not ABSENT}


def run_both(file: Mapping[str, Any], sampler: str) -> float | str:
    """Error of the final latents relative to the largest, or why there is none: who refused, or that it was warned."""
    try:
        options = TableOptions.from_config(file, sampler)
        schedule = NoiseSchedule.from_config(file)
        table = options.compile(schedule, NUM_STEPS)
    except UnsupportedOption as error:
        return f"refused: {error}"
    if options.warnings:
        assert set(options.warnings) <= set(table.warnings)
        return f"warned: {' '.join(options.warnings)}"
    network = make_network(schedule)
    try:
        scheduler = scheduler_class(sampler).from_config(file, **NAMED.get(sampler, {}))
        scheduler.set_timesteps(NUM_STEPS)
        expected = run_diffusers(scheduler, table, network).latents
    except (NotImplementedError, ValueError, IndexError) as error:
        return f"diffusers refuses: {error}"
    latents = run_table(table, network).latents
    return float((latents - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("sampler", COMPARED)
def test_field_is_applied_as_in_diffusers_or_named_in_a_refusal_or_warning(sampler: str, field: str) -> None:
    own_class = SAMPLERS[sampler].diffusers_class
    for class_name in {str(PUBLISHED["_class_name"]), own_class}:
        for value in PROBES[field]:
            outcome = run_both(file_of(class_name, field, value), sampler)
            is_listed = any(
                field == row.field and value in row.values and sampler in row.samplers for row in DIFFERENCES.values()
            )
            if is_listed:
                differs = outcome > BOUND if isinstance(outcome, float) else outcome.startswith("diffusers refuses")
                assert differs, f"{value!r} is as in diffusers now: take it out of the list ({outcome})"
            elif isinstance(outcome, float):
                assert outcome < BOUND, f"{field}={value!r} of {class_name}"
            elif not outcome.startswith("diffusers refuses"):
                assert field in outcome, f"{field}={value!r} of {class_name}: {outcome}"
