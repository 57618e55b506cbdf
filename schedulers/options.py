"""Reads a diffusers ``scheduler_config.json`` for one sampler, field by field, as diffusers' ``from_config`` does.

A field that the sampler's class in diffusers has is applied, refused or reported in a warning; a field of other classes
is ignored, as there. ``tests/schedulers/test_config_fields.py`` holds every sampler and field against diffusers.
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
from schedulers.names import resolve_sampler
from schedulers.noise import NoiseSchedule
from schedulers.samplers import SAMPLERS
from schedulers.table import StepTable

_DPMPP = ("dpmpp_2m", "dpmpp_2m_sde", "dpmpp_3m_sde")
_DPMPP_2M = ("dpmpp_2m", "dpmpp_2m_sde")

_SIGMA_SCHEDULE_SAMPLERS = ("euler", "heun", *_DPMPP, "lms", "deis", "unipc")
"""Samplers whose diffusers class has ``use_karras_sigmas``, ``use_exponential_sigmas`` and ``use_beta_sigmas``."""

_ONE_VALUE: dict[str, tuple[object, tuple[str, ...]]] = {
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
"""Fields that are served at one value only: (that value, the samplers whose diffusers class applies the field)."""

_REFUSED_SOLVER_TYPES = {"dpmpp_2m": ("heun",), "dpmpp_2m_sde": ("heun",), "unipc": ("bh1",)}
"""Values of ``solver_type`` that change the rows; diffusers takes any other for its default."""

_NAMED_BY_SAMPLER: dict[str, tuple[object, dict[str, object]]] = {
    "algorithm_type": ("dpmsolver++", {"dpmpp_2m": "dpmsolver++", **dict.fromkeys(_DPMPP[1:], "sde-dpmsolver++")}),
    "solver_order": (2, {"dpmpp_2m": 2, "dpmpp_2m_sde": 2, "dpmpp_3m_sde": 3}),
    "variance_type": ("fixed_small", {"ddpm": "fixed_small", "ddpm_large": "fixed_large"}),
}
"""Fields that the name of a sampler decides: (diffusers' default, value by sampler). Other values get a warning."""

_VARIANTS = {"fixed_small": "ddpm", "fixed_small_log": "ddpm", "fixed_large": "ddpm_large"}


def sampler_of_config(config: Mapping[str, Any]) -> str:
    """Canonical name of the sampler a configuration stands for; :class:`UnsupportedOption` where there is none."""
    cls = str(config.get("_class_name", ""))
    name, _ = resolve_sampler(cls.removeprefix("EDM") if cls in EDM_CLASSES else cls)
    if name == "dpmpp_2m":
        kind, order = str(config.get("algorithm_type", "dpmsolver++")), int(config.get("solver_order", 2))
        known = {
            ("dpmsolver++", 2): name,
            ("sde-dpmsolver++", 2): "dpmpp_2m_sde",
            ("sde-dpmsolver++", 3): "dpmpp_3m_sde",
        }
        if (kind, order) not in known:
            raise UnsupportedOption(
                f"algorithm_type {kind!r} of solver_order {order} is not offered; "
                "take 'dpmsolver++' of order 2, or 'sde-dpmsolver++' of order 2 or 3."
            )
        return known[kind, order]
    if name == "ddpm":
        variance = str(config.get("variance_type", "fixed_small"))
        if variance not in _VARIANTS:
            raise UnsupportedOption(f"variance_type is {variance!r}; known are fixed_large, fixed_small.")
        return _VARIANTS[variance]
    return name


def _sigma_schedule(config: Mapping[str, Any], sampler: str) -> str | None:
    if sampler not in _SIGMA_SCHEDULE_SAMPLERS:
        return None
    wanted = [name for name in ("karras", "exponential", "beta") if config.get(f"use_{name}_sigmas")]
    if len(wanted) > 1:
        raise UnsupportedOption(f"the configuration asks for {' and '.join(wanted)} sigmas at once; keep one.")
    return wanted[0] if wanted else None


def _distillation_steps(config: Mapping[str, Any], sampler: str) -> int:
    steps = config.get("original_inference_steps")
    if SAMPLERS[sampler].family != "lcm" or steps is None:
        return DISTILLATION_STEPS
    if not isinstance(steps, int) or steps < 1:
        raise UnsupportedOption(f"original_inference_steps is {steps!r}; it must be a whole number from 1 on.")
    return steps


def _check_fields(config: Mapping[str, Any], sampler: str, unchecked: Collection[str]) -> None:
    """Raise :class:`UnsupportedOption` for a value that ``sampler`` does not offer, except of fields ``unchecked``."""
    for name, (only, samplers) in _ONE_VALUE.items():
        value = config.get(name, only)
        if sampler in samplers and name not in unchecked and value != only:
            raise UnsupportedOption(f"{name} is {value!r}; {sampler} offers {only!r} only.")
    if "solver_type" not in unchecked and config.get("solver_type") in _REFUSED_SOLVER_TYPES.get(sampler, ()):
        raise UnsupportedOption(f"solver_type is {config['solver_type']!r}; {sampler} does not offer it.")
    if sampler in ("deis", "unipc") and "solver_order" not in unchecked and config.get("solver_order", 2) != 2:
        raise UnsupportedOption(f"solver_order is {config['solver_order']}; {sampler} offers 2 only.")
    bound = config.get("lambda_min_clipped")
    if sampler in _DPMPP and bound is not None and "lambda_min_clipped" not in unchecked:
        noisiest = float(NoiseSchedule.from_config(config).alphas_cumprod[-1])
        if noisiest * (1.0 + math.exp(-2.0 * bound)) < 1.0:  # log(alpha / sigma) of the last timestep is below it
            raise UnsupportedOption(
                f"lambda_min_clipped is {bound}, which leaves out the noisiest timesteps; {sampler} does not offer it."
            )


def _warnings(config: Mapping[str, Any], sampler: str, not_applied: Collection[str]) -> tuple[str, ...]:
    warnings = [
        f"{name} is {config[name]!r} in the model's scheduler configuration; {sampler} does not apply it."
        for name in not_applied
        if sampler in _ONE_VALUE[name][1] and config.get(name, _ONE_VALUE[name][0]) != _ONE_VALUE[name][0]
    ]
    for name, (default, by_sampler) in _NAMED_BY_SAMPLER.items():
        value, used = config.get(name, default), by_sampler.get(sampler)
        if used is None or value in (None, default, used) or (name == "variance_type" and value == "fixed_small_log"):
            continue
        other = next((f"; {other} has it" for other, has in by_sampler.items() if has == value), "")
        warnings.append(f"{name} is {value!r} in the model's scheduler configuration; {sampler} uses {used!r}{other}.")
    return tuple(warnings)


@dataclass(frozen=True)
class TableOptions:
    """The arguments of :func:`schedulers.compile_table` that a model's configuration decides.

    ``warnings`` name the fields that the configuration has and the sampler does not apply.
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

        What the file does not say has the default of the sampler's own class in diffusers (euler: "linspace"; plms:
        ``set_alpha_to_one`` False).

        Args:
            config: Content of ``scheduler_config.json``.
            sampler: Any name of a sampler; default: the configuration's own.
            ignore: Fields that are not read (StableDiffusionPipeline, for one, drops ``clip_sample``).
            not_applied: Fields of one value that are not applied either, with a warning for another value.

        Raises:
            UnsupportedOption: For a field that no row can apply (clipping, Lu lambdas, ...), and for a formulation that
                is not served.
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
    ) -> StepTable:
        """The table of these options; raises as :func:`schedulers.compile_table` does."""
        options = asdict(self)
        warnings = options.pop("warnings")
        table = compile_table(
            schedule=schedule, num_steps=num_steps, eta=eta, strength=strength, restart=restart, **options
        )
        return replace(table, warnings=table.warnings + warnings) if warnings else table
