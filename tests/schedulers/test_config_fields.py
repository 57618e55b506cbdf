"""Scheduler configuration fields, compared with diffusers for every sampler and every scheduler class.

The fields come from the installed diffusers, so a field of a new release fails here until it has a probe. Every
intentional difference is listed in ``DIFFERENCES`` and has a row with the same key in docs/parity.md.
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
from tests.schedulers.diffusers_samplers import COMPARED, SD, scheduler_class
from tests.schedulers.trajectories import make_network, run_diffusers, run_table

pytestmark = pytest.mark.filterwarnings("ignore")

BOUND = 1e-4
NUM_STEPS = 20
ABSENT = "absent"
"""Probe value that omits the field from the configuration."""

PUBLISHED = {**SD, "_class_name": "EulerDiscreteScheduler", "clip_sample": False, "skip_prk_steps": True}
"""Configuration like that of Stable Diffusion XL, to which every probe is added."""

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
"""Values to test, by field."""

FROM_CONFIG_ARGUMENTS: dict[str, dict[str, Any]] = {
    "ddpm_large": {"variance_type": "fixed_large"},
    "dpmpp_2m_sde": {"algorithm_type": "sde-dpmsolver++"},
    "dpmpp_3m_sde": {"algorithm_type": "sde-dpmsolver++"},
}
"""Arguments of diffusers' ``from_config`` that select the sampler, by sampler name."""


class Difference(NamedTuple):
    """Row of docs/parity.md: field values for which some samplers intentionally differ from diffusers."""

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
    """Return the names of the configuration fields of a diffusers scheduler class."""
    names = inspect.signature(getattr(diffusers, class_name).__init__).parameters
    return tuple(name for name in names if name != "self")


FIELDS = sorted({field for name in DISCRETE_CLASSES if name != "DPMSolverSDEScheduler" for field in fields_of(name)})
"""Fields of all supported classes except DPMSolverSDEScheduler, which requires torchsde."""


def test_probes_cover_exactly_the_fields_of_diffusers() -> None:
    assert sorted(PROBES) == FIELDS


def config_with(class_name: str, field: str, value: Any) -> dict[str, Any]:
    """Return a configuration of a scheduler class with ``field`` set to ``value``, or omitted if it is ABSENT."""
    file = {**PUBLISHED, "_class_name": class_name, field: value}
    if field == "rescale_betas_zero_snr":
        file |= VELOCITY  # other prediction types are undefined at zero signal
    return {name: value for name, value in file.items() if value is not ABSENT}


def run_both(file: Mapping[str, Any], sampler: str) -> float | str:
    """Compare a run with diffusers.

    Returns:
        The largest error of the final latents relative to the largest value, or the reason why there is no comparison:
        a refusal or a warning.
    """
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
        scheduler = scheduler_class(sampler).from_config(file, **FROM_CONFIG_ARGUMENTS.get(sampler, {}))
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
            outcome = run_both(config_with(class_name, field, value), sampler)
            is_listed = any(
                field == row.field and value in row.values and sampler in row.samplers for row in DIFFERENCES.values()
            )
            if is_listed:
                differs = outcome > BOUND if isinstance(outcome, float) else outcome.startswith("diffusers refuses")
                assert differs, f"{value!r} matches diffusers now: remove it from DIFFERENCES ({outcome})"
            elif isinstance(outcome, float):
                assert outcome < BOUND, f"{field}={value!r} of {class_name}"
            elif not outcome.startswith("diffusers refuses"):
                assert field in outcome, f"{field}={value!r} of {class_name}: {outcome}"
