"""Table options from a diffusers ``scheduler_config.json``, read for one sampler like diffusers' ``from_config``.

Fields of the sampler's own diffusers class are applied, refused or reported in a warning. Fields of other classes are
ignored, as in diffusers. ``tests/schedulers/test_config_fields.py`` compares every sampler and field with diffusers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from schedulers.compile import compile_table
from schedulers.errors import UnsupportedOption
from schedulers.formulations import EDM_CLASSES, check_formulation
from schedulers.grids import DISTILLATION_STEPS
from schedulers.noise import NoiseSchedule
from schedulers.samplers import SAMPLERS, resolve_sampler
from schedulers.table import StepTable

_DPMPP = ("dpmpp_2m", "dpmpp_2m_sde", "dpmpp_3m_sde")
_DPMPP_2M = ("dpmpp_2m", "dpmpp_2m_sde")

_SIGMA_SCHEDULE_SAMPLERS = ("euler", "heun", *_DPMPP, "lms", "deis", "unipc")
"""Samplers whose diffusers class has ``use_karras_sigmas``, ``use_exponential_sigmas`` and ``use_beta_sigmas``."""

_FIXED_FIELDS: dict[str, tuple[object, tuple[str, ...]]] = {
    "clip_sample": (False, ("ddim", "ddpm", "ddpm_large", "heun", "lcm", "tcd")),
    "thresholding": (False, ("ddim", "ddpm", "ddpm_large", "lcm", "tcd", "deis", *_DPMPP, "unipc")),
    "lower_order_final": (True, ("deis", *_DPMPP_2M, "unipc")),
    "euler_at_final": (False, _DPMPP_2M),
    "use_lu_lambdas": (False, _DPMPP),
    "predict_x0": (True, ("unipc",)),
    "disable_corrector": ([], ("unipc",)),
    "solver_p": (None, ("unipc",)),
    "interpolation_type": ("linear", ("euler",)),
    "skip_prk_steps": (True, ("plms",)),
    "timestep_scaling": (10.0, ("lcm",)),
}
"""Fields with a single supported value: (the value, the samplers whose diffusers class applies the field)."""

_REFUSED_SOLVER_TYPES = {"dpmpp_2m": ("heun",), "dpmpp_2m_sde": ("heun",), "unipc": ("bh1",)}
"""Unsupported values of ``solver_type`` by sampler; diffusers treats all other values as the default."""

_SET_BY_SAMPLER: dict[str, tuple[object, dict[str, object]]] = {
    "algorithm_type": ("dpmsolver++", {"dpmpp_2m": "dpmsolver++", **dict.fromkeys(_DPMPP[1:], "sde-dpmsolver++")}),
    "solver_order": (2, {"dpmpp_2m": 2, "dpmpp_2m_sde": 2, "dpmpp_3m_sde": 3}),
    "variance_type": ("fixed_small", {"ddpm": "fixed_small", "ddpm_large": "fixed_large"}),
}
"""Fields determined by the sampler name: (diffusers' default, value by sampler). Other values produce a warning."""

_DDPM_VARIANTS = {"fixed_small": "ddpm", "fixed_small_log": "ddpm", "fixed_large": "ddpm_large"}
"""Canonical sampler name by ``variance_type``."""


def sampler_of_config(config: Mapping[str, Any]) -> str:
    """Return the canonical name of the sampler that a scheduler configuration describes.

    Raises:
        UnknownSampler: If the class is unknown.
        UnsupportedOption: If the solver or variance type is not supported.
    """
    cls = str(config.get("_class_name", ""))
    name, _ = resolve_sampler(cls.removeprefix("EDM") if cls in EDM_CLASSES else cls)
    if name == "dpmpp_2m":
        algorithm, order = str(config.get("algorithm_type", "dpmsolver++")), int(config.get("solver_order", 2))
        sampler_by_solver = {
            ("dpmsolver++", 2): name,
            ("sde-dpmsolver++", 2): "dpmpp_2m_sde",
            ("sde-dpmsolver++", 3): "dpmpp_3m_sde",
        }
        if (algorithm, order) not in sampler_by_solver:
            raise UnsupportedOption(
                f"algorithm_type {algorithm!r} of solver_order {order} is not supported; "
                "use 'dpmsolver++' of order 2, or 'sde-dpmsolver++' of order 2 or 3."
            )
        return sampler_by_solver[algorithm, order]
    if name == "ddpm":
        variance = str(config.get("variance_type", "fixed_small"))
        if variance not in _DDPM_VARIANTS:
            raise UnsupportedOption(f"variance_type is {variance!r}; choose from fixed_large, fixed_small.")
        return _DDPM_VARIANTS[variance]
    return name


def _sigma_schedule(config: Mapping[str, Any], sampler: str) -> str | None:
    if sampler not in _SIGMA_SCHEDULE_SAMPLERS:
        return None
    enabled = [name for name in ("karras", "exponential", "beta") if config.get(f"use_{name}_sigmas")]
    if len(enabled) > 1:
        raise UnsupportedOption(f"the configuration enables {' and '.join(enabled)} sigmas at once; keep one of them.")
    return enabled[0] if enabled else None


def _distillation_steps(config: Mapping[str, Any], sampler: str) -> int:
    steps = config.get("original_inference_steps")
    if SAMPLERS[sampler].family != "lcm" or steps is None:
        return DISTILLATION_STEPS
    if not isinstance(steps, int) or steps < 1:
        raise UnsupportedOption(f"original_inference_steps is {steps!r}; it must be a whole number of at least 1.")
    return steps


def _check_fields(config: Mapping[str, Any], sampler: str, unchecked: Collection[str]) -> None:
    """Raise :class:`UnsupportedOption` if a field outside ``unchecked`` has a value the sampler does not support."""
    for name, (supported, samplers) in _FIXED_FIELDS.items():
        value = config.get(name, supported)
        if sampler in samplers and name not in unchecked and value != supported:
            raise UnsupportedOption(f"{name} is {value!r}; {sampler} supports {supported!r} only.")
    if "solver_type" not in unchecked and config.get("solver_type") in _REFUSED_SOLVER_TYPES.get(sampler, ()):
        raise UnsupportedOption(f"solver_type is {config['solver_type']!r}; {sampler} does not support it.")
    if sampler in ("deis", "unipc") and "solver_order" not in unchecked and config.get("solver_order", 2) != 2:
        raise UnsupportedOption(f"solver_order is {config['solver_order']}; {sampler} supports 2 only.")
    min_lambda = config.get("lambda_min_clipped")
    if sampler in _DPMPP and min_lambda is not None and "lambda_min_clipped" not in unchecked:
        last_alpha = float(NoiseSchedule.from_config(config).alphas_cumprod[-1])
        if (
            last_alpha * (1.0 + math.exp(-2.0 * min_lambda)) < 1.0
        ):  # log(alpha / sigma) of the last timestep is below it
            raise UnsupportedOption(
                f"lambda_min_clipped is {min_lambda}, which skips the first timesteps; {sampler} does not support it."
            )


def _warnings(config: Mapping[str, Any], sampler: str, not_applied: Collection[str]) -> tuple[str, ...]:
    warnings = [
        f"{name} is {config[name]!r} in the model's scheduler configuration; {sampler} does not apply it."
        for name in not_applied
        if sampler in _FIXED_FIELDS[name][1] and config.get(name, _FIXED_FIELDS[name][0]) != _FIXED_FIELDS[name][0]
    ]
    for name, (default, by_sampler) in _SET_BY_SAMPLER.items():
        value, used = config.get(name, default), by_sampler.get(sampler)
        if used is None or value in (None, default, used) or (name == "variance_type" and value == "fixed_small_log"):
            continue
        hint = next((f"; for {value!r} use {other}" for other, setting in by_sampler.items() if setting == value), "")
        warnings.append(f"{name} is {value!r} in the model's scheduler configuration; {sampler} uses {used!r}{hint}.")
    return tuple(warnings)


@dataclass(frozen=True)
class TableOptions:
    """Arguments of :func:`schedulers.compile_table` that a model's scheduler configuration determines.

    ``warnings`` holds one message for each field of the configuration that the sampler does not apply.
    """

    sampler: str
    spacing: str
    sigma_schedule: str | None
    steps_offset: int
    set_alpha_to_one: bool
    final_sigmas_type: str
    distillation_steps: int = DISTILLATION_STEPS
    warnings: tuple[str, ...] = ()

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        sampler: str | None = None,
        *,
        ignore: Collection[str] = (),
        not_applied: Collection[str] = (),
    ) -> TableOptions:
        """Read the options of a sampler on a model with this scheduler configuration.

        Missing fields have the defaults of the sampler's diffusers class ("linspace" spacing for euler,
        ``set_alpha_to_one`` False for plms).

        Args:
            config: Content of ``scheduler_config.json``.
            sampler: Any sampler name; default: the sampler of the configuration.
            ignore: Fields to ignore without a warning (StableDiffusionPipeline drops ``clip_sample``, for example).
            not_applied: Fields to ignore with a warning if their value is not the supported one.

        Raises:
            UnknownSampler: If ``sampler`` is unknown.
            UnsupportedOption: If a field cannot be applied (clipping, Lu lambdas, ...), or the noise formulation is not
                supported.
        """
        check_formulation(config)
        named_schedule = None
        if sampler is None:
            name = sampler_of_config(config)
        else:
            name, named_schedule = resolve_sampler(sampler)
        _check_fields(config, name, (*ignore, *not_applied))
        return cls(
            sampler=name,
            spacing=str(config.get("timestep_spacing") or SAMPLERS[name].default_spacing),
            sigma_schedule=named_schedule or _sigma_schedule(config, name),
            steps_offset=int(config.get("steps_offset", 0)),
            set_alpha_to_one=bool(config.get("set_alpha_to_one", name != "plms")),
            final_sigmas_type=str(config.get("final_sigmas_type", "zero")),
            distillation_steps=_distillation_steps(config, name),
            warnings=_warnings(config, name, not_applied),
        )

    def compile(
        self,
        schedule: NoiseSchedule,
        num_steps: int,
        *,
        eta: float | None = None,
        strength: float = 1.0,
        restart: int | None = None,
        sigma_range: tuple[float | None, float | None] = (None, None),
    ) -> StepTable:
        """Compile a table with these options.

        Args and exceptions are those of :func:`schedulers.compile_table`. The table includes :attr:`warnings`.
        """
        options = asdict(self)
        warnings = options.pop("warnings")
        table = compile_table(
            schedule=schedule,
            num_steps=num_steps,
            eta=eta,
            strength=strength,
            restart=restart,
            sigma_range=sigma_range,
            **options,
        )
        return replace(table, warnings=table.warnings + warnings) if warnings else table
