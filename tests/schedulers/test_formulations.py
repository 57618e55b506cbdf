"""EDM and continuous velocity models: agreement with diffusers, and errors for unsupported formulations."""

from __future__ import annotations

from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from torch import Tensor

from schedulers import (
    SAMPLERS,
    SIGMA_SCHEDULES,
    NoiseSchedule,
    Preconditioning,
    StepTable,
    TableOptions,
    UnsupportedOption,
    compile_table,
)
from schedulers.formulations import DISCRETE_CLASSES, SERVED_CLASSES, check_formulation
from schedulers.update import advance, new_history, rows_of, scale_input

SHAPE = (1, 4, 3, 3)
BOUND = 4e-5

PLAYGROUND: dict[str, Any] = {
    "_class_name": "EDMDPMSolverMultistepScheduler",
    "sigma_data": 0.5,
    "sigma_max": 80.0,
    "sigma_min": 0.002,
}
COSXL: dict[str, Any] = {
    "_class_name": "EDMEulerScheduler",
    "sigma_data": 1.0,
    "sigma_max": 120.0,
    "sigma_min": 0.002,
    "prediction_type": "v_prediction",
    "sigma_schedule": "exponential",
}
CONTINUOUS: dict[str, Any] = {
    "_class_name": "EulerDiscreteScheduler",
    "timestep_type": "continuous",
    "prediction_type": "v_prediction",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
}
WIDE = {**CONTINUOUS, "use_karras_sigmas": True, "sigma_min": 0.002, "sigma_max": 200.0}


def network(sample: Tensor, timestep: Tensor | float) -> Tensor:
    """Return an arbitrary smooth function of the inputs of a UNet."""
    return torch.tanh(0.7 * sample + 0.3 * float(timestep)) - 0.2 * sample


def sample_with_table(table: StepTable) -> Tensor:
    """Return the final latents of a run with a table, seed 0."""
    generator = torch.Generator().manual_seed(0)
    rows = rows_of(table)
    x = table.init_scale * torch.randn(SHAPE, generator=generator)
    history = new_history(x)
    for row in range(table.num_rows):
        at = rows[row : row + 1]
        output = network(scale_input(x, at), table.timestep[row])
        noise = torch.randn(SHAPE, generator=generator) if table.draws[row] else torch.zeros(SHAPE)
        x, _, history = advance(x, output, history, noise, at)
    return table.out_scale * x


def sample_with_diffusers(config: dict[str, Any], num_steps: int) -> Tensor:
    """Return the final latents of a run with the diffusers scheduler of a configuration, seed 0."""
    config = dict(config)
    scheduler = getattr(diffusers, config.pop("_class_name"))(**config)
    generator = torch.Generator().manual_seed(0)
    scheduler.set_timesteps(num_steps)
    x: torch.Tensor = scheduler.init_noise_sigma * torch.randn(SHAPE, generator=generator)
    for timestep in scheduler.timesteps:
        output = network(scheduler.scale_model_input(x, timestep), timestep)
        x = scheduler.step(output, timestep, x, generator=generator).prev_sample
    return x


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("num_steps", [1, 2, 3, 10, 14, 15, 25])
@pytest.mark.parametrize(
    "config",
    [
        PLAYGROUND,
        PLAYGROUND | {"final_sigmas_type": "sigma_min", "sigma_schedule": "exponential"},
        PLAYGROUND | {"algorithm_type": "sde-dpmsolver++"},
        PLAYGROUND | {"_class_name": "EDMEulerScheduler"},
        COSXL,
        COSXL | {"sigma_schedule": "karras", "sigma_data": 0.7},
        CONTINUOUS,
        CONTINUOUS | {"timestep_spacing": "trailing", "rescale_betas_zero_snr": False},
        CONTINUOUS | {"use_karras_sigmas": True},
        WIDE,
    ],
)
def test_continuous_noise_trajectory_matches_diffusers(config: dict[str, Any], num_steps: int) -> None:
    if config.get("final_sigmas_type") == "sigma_min" and config["_class_name"].startswith("EDMDPM") and num_steps < 3:
        pytest.skip("diffusers divides by zero in a last step of size 0")
    if num_steps == 1 and (config.get("sigma_schedule") == "exponential" or "timestep_type" in config):
        pytest.skip("diffusers starts a single step from the lowest noise level")
    table = TableOptions.from_config(config).compile(NoiseSchedule.from_config(config), num_steps)
    expected = sample_with_diffusers(config, num_steps)
    error = (sample_with_table(table) - expected).abs().max() / expected.abs().max().clamp(min=1.0)
    assert error < BOUND


def test_time_input_of_continuous_noise_is_a_quarter_of_log_sigma() -> None:
    table = compile_table("heun", NoiseSchedule.from_config(COSXL), 8)
    np.testing.assert_allclose(table.timestep, np.log(table.sigma) / 4)
    assert table.sigma[0] == pytest.approx(120.0)
    assert table.sigma_schedule == "exponential"


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_compiles_for_continuous_noise(sampler: str) -> None:
    for config in (PLAYGROUND, COSXL, CONTINUOUS, WIDE):
        schedule = NoiseSchedule.from_config(config)
        for sigma_schedule in (None, *SIGMA_SCHEDULES):
            for num_steps in (1, 7):
                compile_table(sampler, schedule, num_steps, spacing="leading", sigma_schedule=sigma_schedule)


def test_edm_factors_keep_input_and_target_at_unit_variance() -> None:
    sigma = np.geomspace(0.002, 80.0, 20)
    c_in, c_skip, c_out = Preconditioning("edm", 0.5, True).factors(sigma)
    np.testing.assert_allclose(c_in**2 * (sigma**2 + 0.25), 1.0)
    np.testing.assert_allclose((1 - c_skip) ** 2 * 0.25 + c_skip**2 * sigma**2, c_out**2)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}, r"FlowMatchEulerDiscreteScheduler \(a flow"),
        ({"_class_name": "FlowMatchHeunDiscreteScheduler"}, r"\(a flow-matching model"),
        ({"_class_name": "CMStochasticIterativeScheduler"}, r"\(a consistency model"),
        ({"_class_name": "CosineDPMSolverMultistepScheduler"}, r"\(a model of continuous cosine noise"),
        ({"_class_name": "EulerDiscretScheduler"}, r"did you mean EulerDiscreteScheduler\?"),
        ({"_class_name": "Homemade"}, "Homemade, which is not supported; supported are DDIMParallel"),
        ({"_class_name": "UniPCMultistepScheduler", "use_flow_sigmas": True}, "use_flow_sigmas is True"),
        ({"_class_name": "EulerDiscreteScheduler", "use_dynamic_shifting": True}, "use_dynamic_shifting is True"),
        ({"_class_name": "DDIMScheduler", "thresholding": True}, "thresholding is True"),
        ({"_class_name": "DDIMScheduler", "snr_shift_scale": 3.0}, "snr_shift_scale is 3.0"),
        ({"_class_name": "DDIMScheduler", "prediction_type": "flow_prediction"}, "is 'flow_prediction'"),
        ({"_class_name": "DDPMScheduler", "variance_type": "learned"}, "variance_type is 'learned'"),
        (
            {"_class_name": "DDIMScheduler", "use_new_noise": True},
            "use_new_noise is True, which no supported scheduler",
        ),
        ({"_class_name": "EulerDiscreteScheduler", "sigma_max": 700.0}, "sigma_max is 700.0"),
        (CONTINUOUS | {"sigma_max": 700.0}, "sigma_max is set alone"),
        (CONTINUOUS | {"sigma_max": 7.0, "sigma_min": 1.0}, "Karras or exponential"),
        (CONTINUOUS | {"prediction_type": "epsilon"}, "'continuous' with epsilon"),
        (CONTINUOUS | {"timestep_type": "fuzzy"}, "timestep_type is 'fuzzy'"),
        (PLAYGROUND | {"prediction_type": "sample"}, "prediction_type is 'sample'"),
        (PLAYGROUND | {"rho": 5.0}, "rho is 5.0"),
        (PLAYGROUND | {"sigma_schedule": "beta"}, "sigma_schedule is 'beta'"),
        (PLAYGROUND | {"sigma_max": 0.001}, "0 < sigma_min < sigma_max"),
        (PLAYGROUND | {"sigma_data": 0.0}, "sigma_data is 0.0"),
    ],
)
def test_unsupported_formulation_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedOption, match=message):
        NoiseSchedule.from_config(config)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SERVED_CLASSES)
def test_supported_class_loads_with_the_defaults_that_diffusers_saves(name: str) -> None:
    if name == "DPMSolverSDEScheduler":
        pytest.skip("needs torchsde")
    saved_config = {**getattr(diffusers, name)().config, "_class_name": name, "_diffusers_version": "1"}
    check_formulation(saved_config)
    NoiseSchedule.from_config(saved_config)


def test_unknown_parameters_that_are_off_are_accepted() -> None:
    check_formulation({"_class_name": DISCRETE_CLASSES[1], "use_new_noise": False, "shift": None, "_anything": True})
