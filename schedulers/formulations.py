"""Which noise formulations are served: an allow-list of diffusers' scheduler classes, and of what may stand in them.

A checkpoint's scheduler says how its network was trained: betas and timesteps, or EDM's range of sigmas. Which class
wrote that down does not matter, as any sampler paints from any of these. What is not listed (flow matching, cascades,
consistency) was trained otherwise, and its pictures would be garbage.
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
"""Betas, and training timesteps that the network is told."""

EDM_CLASSES: Final = ("EDMDPMSolverMultistepScheduler", "EDMEulerScheduler")
"""A range of sigmas, and ln(sigma) / 4 that the network is told (Karras et al. 2022)."""

SERVED_CLASSES: Final = (*DISCRETE_CLASSES, *EDM_CLASSES)

_OTHERS: Final = {
    "FlowMatch": "a flow-matching model, which moves on straight lines from noise to picture",
    "CMStochasticIterative": "a consistency model of Song et al. 2023",
    "ScoreSde": "a model of score-based differential equations",
    "CosineDPMSolver": "a model of continuous cosine noise, made for sound",
    "KarrasVe": "a model of exploding variance",
    "UnCLIP": "an unCLIP cascade",
    "VQDiffusion": "a model of discrete tokens",
    "DDPMWuerstchen": "a Wuerstchen cascade",
    "Amused": "a model of masked tokens",
    "CogVideoX": "a video model",
}
"""Beginnings of class names -> what they belong to."""

_NEUTRAL: Final = {
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
"""Parameters that are honoured, or that belong to a sampler and leave what the network was trained for as it is."""

_SPACINGS: Final = ("leading", "linspace", "trailing")

_ONE_VALUE: Final[Mapping[str, tuple[Any, str]]] = {
    "use_flow_sigmas": (False, "it makes a flow-matching model of it"),
    "use_dynamic_shifting": (False, "only flow-matching models shift their sigmas"),
    "thresholding": (False, "it is for models that paint in pixels"),
    "snr_shift_scale": (1.0, "shifted noise is not offered"),
}
"""Parameters that may stand at one value only, and why."""


def is_edm(config: Mapping[str, Any]) -> bool:
    """The configuration is one of EDM's classes."""
    return config.get("_class_name") in EDM_CLASSES


def is_continuous(config: Mapping[str, Any]) -> bool:
    """The network is told ln(sigma) / 4 and not a timestep."""
    return is_edm(config) or config.get("timestep_type") == "continuous"


def check_formulation(config: Mapping[str, Any]) -> None:
    """Raise :class:`UnsupportedOption` for a class or parameter of a ``scheduler_config.json`` that is not served.

    Without a class the file is taken for one of betas. Parameters that nobody knows may stand there as long as they
    are off: null, false or 0.
    """
    name = config.get("_class_name", DISCRETE_CLASSES[0])
    if name not in SERVED_CLASSES:
        raise UnsupportedOption(_what_it_is(str(name)))
    if config.get("timestep_spacing") not in (None, *_SPACINGS):
        known = ", ".join(_SPACINGS)
        raise UnsupportedOption(f"timestep_spacing is {config['timestep_spacing']!r}; diffusers knows {known}.")
    for option, (only, why) in _ONE_VALUE.items():
        if config.get(option, only) not in (only, None):
            raise UnsupportedOption(f"{option} is {config[option]!r}: {why}; only {only!r} is served.")
    if str(config.get("variance_type", "")).startswith("learned"):
        raise UnsupportedOption(f"variance_type is {config['variance_type']!r}; the network must predict no variance.")
    for option, value in config.items():
        if not option.startswith("_") and option not in _NEUTRAL and option not in _ONE_VALUE and value:
            raise UnsupportedOption(f"{option} is {value!r}, which no scheduler that is served knows.")
    check_edm(config) if is_edm(config) else _check_discrete(config)


def _what_it_is(name: str) -> str:
    kind = next((text for start, text in _OTHERS.items() if name.startswith(start)), None)
    near = difflib.get_close_matches(name, SERVED_CLASSES, n=1, cutoff=0.8)
    said = f" ({kind})" if kind else f"; did you mean {near[0]}?" if near else ""
    served = ", ".join(served.removesuffix("Scheduler") for served in SERVED_CLASSES)
    return f"the scheduler is {name}{said}, which is not served; served are those of {served}."


def _check_discrete(config: Mapping[str, Any]) -> None:
    kind = config.get("timestep_type", "discrete")
    if kind not in ("discrete", "continuous"):
        raise UnsupportedOption(f"timestep_type is {kind!r}; known are continuous, discrete.")
    predicts = config.get("prediction_type", "epsilon")
    if kind == "continuous" and predicts != "v_prediction":
        raise UnsupportedOption(f"timestep_type is 'continuous' with {predicts}; it is served with v_prediction only.")
    bounds = [name for name in ("sigma_min", "sigma_max") if config.get(name) is not None]
    if bounds and kind == "discrete":
        raise UnsupportedOption(f"{bounds[0]} is {config[bounds[0]]!r}; it is served with continuous timesteps only.")
    if len(bounds) == 1:
        raise UnsupportedOption(f"{bounds[0]} stands alone; sigma_min and sigma_max come together.")
    if bounds and not (config.get("use_karras_sigmas") or config.get("use_exponential_sigmas")):
        raise UnsupportedOption("sigma_min and sigma_max are read with Karras or exponential sigmas only.")


def check_edm(config: Mapping[str, Any]) -> None:
    """Raise :class:`UnsupportedOption` for parameters of EDM that no table holds."""
    predicts = config.get("prediction_type", "epsilon")
    if predicts not in ("epsilon", "v_prediction"):
        raise UnsupportedOption(f"prediction_type is {predicts!r}; EDM has epsilon and v_prediction.")
    if config.get("rho", 7.0) != 7.0:
        raise UnsupportedOption(f"rho is {config['rho']!r}; 7 is offered.")
    ramp = config.get("sigma_schedule", "karras")
    if ramp not in ("karras", "exponential"):
        raise UnsupportedOption(f"sigma_schedule is {ramp!r}; known are exponential, karras.")


def edm_range(config: Mapping[str, Any]) -> tuple[float, float]:
    """(sigma_min, sigma_max) of a continuous configuration; :class:`UnsupportedOption` where they are no range."""
    low, high = float(config.get("sigma_min", 0.002)), float(config.get("sigma_max", 80.0))
    if not (0.0 < low < high and math.isfinite(high)):
        raise UnsupportedOption(f"sigma_min is {low} and sigma_max {high}; a range of noise runs from low to high.")
    return low, high
