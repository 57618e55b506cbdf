"""Supported noise formulations: an allow-list of diffusers scheduler classes and of their parameters.

The scheduler configuration of a checkpoint describes how its network was trained: betas and timesteps, or EDM's range
of sigmas. Every sampler works with every class listed here. Classes that are not listed (flow matching, cascades,
consistency models) use another training objective and would generate garbage, so they are refused.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any, Final

from schedulers.errors import UnsupportedOption

DISCRETE_CLASSES: Final = (
    "DDIMParallelScheduler", "DDIMScheduler", "DDPMParallelScheduler", "DDPMScheduler", "DEISMultistepScheduler",
    "DPMSolverMultistepScheduler", "DPMSolverSDEScheduler", "DPMSolverSinglestepScheduler",
    "EulerAncestralDiscreteScheduler", "EulerDiscreteScheduler", "HeunDiscreteScheduler",
    "KDPM2AncestralDiscreteScheduler", "KDPM2DiscreteScheduler", "LCMScheduler", "LMSDiscreteScheduler",
    "PNDMScheduler", "SASolverScheduler", "TCDScheduler", "UniPCMultistepScheduler",
)  # fmt: skip
"""Scheduler classes with betas, whose networks take the training timestep as input."""

EDM_CLASSES: Final = ("EDMDPMSolverMultistepScheduler", "EDMEulerScheduler")
"""Scheduler classes with a range of sigmas, whose networks take ln(sigma) / 4 as input (Karras et al. 2022)."""

SERVED_CLASSES: Final = (*DISCRETE_CLASSES, *EDM_CLASSES)
"""All scheduler classes that are supported."""

_UNSUPPORTED_KINDS: Final = {
    "FlowMatch": "a flow-matching model, which moves on straight lines from noise to image",
    "CMStochasticIterative": "a consistency model of Song et al. 2023",
    "ScoreSde": "a score-based SDE model",
    "CosineDPMSolver": "a model of continuous cosine noise, made for audio",
    "KarrasVe": "a variance-exploding model",
    "UnCLIP": "an unCLIP cascade",
    "VQDiffusion": "a discrete-token model",
    "DDPMWuerstchen": "a Wuerstchen cascade",
    "Amused": "a masked-token model",
    "CogVideoX": "a video model",
}
"""Kind of model by class name prefix, for the messages about unsupported classes."""

_ACCEPTED_PARAMETERS: Final = {
    "num_train_timesteps", "beta_start", "beta_end", "beta_schedule", "trained_betas", "prediction_type",
    "rescale_betas_zero_snr", "timestep_spacing", "steps_offset", "set_alpha_to_one", "final_sigmas_type",
    "use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "timestep_type", "sigma_min", "sigma_max",
    "sigma_data", "sigma_schedule", "rho", "variance_type",
    "algorithm_type", "solver_order", "solver_type", "solver_p", "solver_p_type", "lower_order_final",
    "euler_at_final", "use_lu_lambdas", "lambda_min_clipped", "predict_x0", "disable_corrector", "interpolation_type",
    "skip_prk_steps", "clip_sample", "clip_sample_range", "dynamic_thresholding_ratio", "sample_max_value",
    "original_inference_steps", "timestep_scaling", "noise_sampler_seed", "predictor_order", "corrector_order",
    "tau_func", "flow_shift", "time_shift_type", "shift_terminal", "sample_schedule", "eta", "gamma", "s_churn",
    "tensor_format", "skip_type",
}  # fmt: skip
"""Parameters that are applied, or that concern a sampler only and not how the network was trained."""

_SPACINGS: Final = ("leading", "linspace", "trailing")

_FIXED_PARAMETERS: Final[Mapping[str, tuple[Any, str]]] = {
    "use_flow_sigmas": (False, "it is for flow-matching models"),
    "use_dynamic_shifting": (False, "only flow-matching models shift their sigmas"),
    "thresholding": (False, "it is for pixel-space models"),
    "snr_shift_scale": (1.0, "shifted noise is not supported"),
}
"""Parameters with a single supported value, and the reason."""


def is_edm(config: Mapping[str, Any]) -> bool:
    """Return whether the configuration is of an EDM scheduler class."""
    return config.get("_class_name") in EDM_CLASSES


def is_continuous(config: Mapping[str, Any]) -> bool:
    """Return whether the network takes ln(sigma) / 4 as input instead of a training timestep."""
    return is_edm(config) or config.get("timestep_type") == "continuous"


def check_formulation(config: Mapping[str, Any]) -> None:
    """Check that the class and the parameters of a ``scheduler_config.json`` are supported.

    A configuration without ``_class_name`` is treated as one with betas. Unknown parameters are allowed if they are off
    (null, false or 0).

    Raises:
        UnsupportedOption: If the class or a parameter is not supported.
    """
    name = config.get("_class_name", DISCRETE_CLASSES[0])
    if name not in SERVED_CLASSES:
        raise UnsupportedOption(_unsupported_class_message(str(name)))
    if config.get("timestep_spacing") not in (None, *_SPACINGS):
        spacings = ", ".join(_SPACINGS)
        raise UnsupportedOption(f"timestep_spacing is {config['timestep_spacing']!r}; choose from {spacings}.")
    for option, (supported, reason) in _FIXED_PARAMETERS.items():
        if config.get(option, supported) not in (supported, None):
            raise UnsupportedOption(f"{option} is {config[option]!r}: {reason}; only {supported!r} is supported.")
    if str(config.get("variance_type", "")).startswith("learned"):
        raise UnsupportedOption(
            f"variance_type is {config['variance_type']!r}; networks that predict a variance are not supported."
        )
    for option, value in config.items():
        is_known = option.startswith("_") or option in _ACCEPTED_PARAMETERS or option in _FIXED_PARAMETERS
        if not is_known and value:
            raise UnsupportedOption(f"{option} is {value!r}, which no supported scheduler has.")
    check_edm(config) if is_edm(config) else _check_discrete(config)


def _unsupported_class_message(name: str) -> str:
    kind = next((text for prefix, text in _UNSUPPORTED_KINDS.items() if name.startswith(prefix)), None)
    near = difflib.get_close_matches(name, SERVED_CLASSES, n=1, cutoff=0.8)
    hint = f" ({kind})" if kind else f"; did you mean {near[0]}?" if near else ""
    supported = ", ".join(class_name.removesuffix("Scheduler") for class_name in SERVED_CLASSES)
    return f"the scheduler is {name}{hint}, which is not supported; supported are {supported}."


def _check_discrete(config: Mapping[str, Any]) -> None:
    kind = config.get("timestep_type", "discrete")
    if kind not in ("discrete", "continuous"):
        raise UnsupportedOption(f"timestep_type is {kind!r}; choose from continuous, discrete.")
    predicts = config.get("prediction_type", "epsilon")
    if kind == "continuous" and predicts != "v_prediction":
        raise UnsupportedOption(
            f"timestep_type is 'continuous' with {predicts}; it is supported with v_prediction only."
        )
    bounds = [name for name in ("sigma_min", "sigma_max") if config.get(name) is not None]
    if bounds and kind == "discrete":
        raise UnsupportedOption(
            f"{bounds[0]} is {config[bounds[0]]!r}; it is supported with continuous timesteps only."
        )
    if len(bounds) == 1:
        raise UnsupportedOption(f"{bounds[0]} is set alone; set sigma_min and sigma_max together.")
    if bounds and not (config.get("use_karras_sigmas") or config.get("use_exponential_sigmas")):
        raise UnsupportedOption("sigma_min and sigma_max are supported with Karras or exponential sigmas only.")


def check_edm(config: Mapping[str, Any]) -> None:
    """Check the parameters of an EDM configuration.

    Raises:
        UnsupportedOption: If a parameter has a value that is not supported.
    """
    predicts = config.get("prediction_type", "epsilon")
    if predicts not in ("epsilon", "v_prediction"):
        raise UnsupportedOption(f"prediction_type is {predicts!r}; EDM supports epsilon and v_prediction.")
    if config.get("rho", 7.0) != 7.0:
        raise UnsupportedOption(f"rho is {config['rho']!r}; only 7 is supported.")
    ramp = config.get("sigma_schedule", "karras")
    if ramp not in ("karras", "exponential"):
        raise UnsupportedOption(f"sigma_schedule is {ramp!r}; choose from exponential, karras.")


def edm_range(config: Mapping[str, Any]) -> tuple[float, float]:
    """Return (sigma_min, sigma_max) of a continuous configuration.

    Raises:
        UnsupportedOption: If they do not form a range of positive, finite numbers.
    """
    low, high = float(config.get("sigma_min", 0.002)), float(config.get("sigma_max", 80.0))
    if not (0.0 < low < high and math.isfinite(high)):
        raise UnsupportedOption(
            f"sigma_min is {low} and sigma_max {high}; they must be finite, and 0 < sigma_min < sigma_max."
        )
    return low, high
