"""What a diffusers ``scheduler_config.json`` asks of a sampler, read as diffusers' ``from_config`` would read it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from schedulers.compile import compile_table
from schedulers.errors import UnsupportedOption
from schedulers.formulations import EDM_CLASSES, check_formulation
from schedulers.names import resolve_sampler
from schedulers.noise import NoiseSchedule
from schedulers.samplers import SAMPLERS
from schedulers.table import StepTable

_NOT_ROWS: dict[str, tuple[object, tuple[str, ...]]] = {
    "clip_sample": (False, ("ddim", "ddpm", "ddpm_large", "heun", "lcm")),
    "thresholding": (
        False,
        ("ddim", "ddpm", "ddpm_large", "lcm", "deis", "dpmpp_2m", "dpmpp_2m_sde", "dpmpp_3m_sde", "unipc"),
    ),
    "lower_order_final": (True, ("deis", "dpmpp_2m", "dpmpp_2m_sde", "dpmpp_3m_sde", "unipc")),
    "euler_at_final": (False, ("dpmpp_2m", "dpmpp_2m_sde", "dpmpp_3m_sde")),
    "use_lu_lambdas": (False, ("dpmpp_2m", "dpmpp_2m_sde", "dpmpp_3m_sde")),
    "predict_x0": (True, ("unipc",)),
    "interpolation_type": ("linear", ("euler",)),
    "skip_prk_steps": (True, ("plms",)),
}
"""Options that are honoured at one value only: (that value, the samplers that diffusers gives the option to)."""

_SOLVER_TYPES = {"dpmpp_2m": ("heun",), "dpmpp_2m_sde": ("heun",), "dpmpp_3m_sde": ("heun",), "unipc": ("bh1",)}
"""Values of ``solver_type`` that change the rows; diffusers takes any other for its default."""

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


def _sigma_schedule(config: Mapping[str, Any]) -> str | None:
    wanted = [name for name in ("karras", "exponential", "beta") if config.get(f"use_{name}_sigmas")]
    if len(wanted) > 1:
        raise UnsupportedOption(f"the configuration asks for {' and '.join(wanted)} sigmas at once; keep one.")
    return wanted[0] if wanted else None


@dataclass(frozen=True)
class TableOptions:
    """The arguments of :func:`schedulers.compile_table` that a model's configuration decides."""

    sampler: str
    spacing: str
    sigma_schedule: str | None
    steps_offset: int
    set_alpha_to_one: bool
    final_sigmas_type: str

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], sampler: str | None = None, *, ignore: Collection[str] = ()
    ) -> TableOptions:
        """Options of ``sampler`` (default: the configuration's own) on a model with this scheduler configuration.

        What the file does not say has the default of the sampler's own class in diffusers (euler: "linspace"; plms:
        ``set_alpha_to_one`` False). Raises :class:`UnsupportedOption` for what no row can do (clipping, thresholding,
        Lu lambdas, ...), unless its name is in ``ignore``: StableDiffusionPipeline, for one, drops ``clip_sample``;
        and for a formulation that is not served.
        """
        check_formulation(config)
        named_schedule = None
        if sampler is None:
            name = sampler_of_config(config)
        else:
            name, named_schedule = resolve_sampler(sampler)
        for option, (only, owners) in _NOT_ROWS.items():
            value = config.get(option, only)
            if name in owners and option not in ignore and value != only:
                raise UnsupportedOption(f"{option} is {value!r}; {name} offers {only!r} only.")
        if "solver_type" not in ignore and config.get("solver_type") in _SOLVER_TYPES.get(name, ()):
            raise UnsupportedOption(f"solver_type is {config['solver_type']!r}; {name} does not offer it.")
        if name in ("deis", "unipc") and "solver_order" not in ignore and config.get("solver_order", 2) != 2:
            raise UnsupportedOption(f"solver_order is {config['solver_order']}; {name} offers 2 only.")
        return cls(
            sampler=name,
            spacing=str(config.get("timestep_spacing") or SAMPLERS[name].default_spacing),
            sigma_schedule=named_schedule or _sigma_schedule(config),
            steps_offset=int(config.get("steps_offset", 0)),
            set_alpha_to_one=bool(config.get("set_alpha_to_one", name != "plms")),
            final_sigmas_type=str(config.get("final_sigmas_type", "zero")),
        )

    def compile(
        self, schedule: NoiseSchedule, num_steps: int, *, eta: float | None = None, strength: float = 1.0
    ) -> StepTable:
        """The table of these options; raises as :func:`schedulers.compile_table` does."""
        return compile_table(schedule=schedule, num_steps=num_steps, eta=eta, strength=strength, **asdict(self))
