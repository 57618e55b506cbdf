"""Registry of samplers, and the resolution of sampler names in other spellings."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from schedulers import multistep, singlestep
from schedulers.errors import UnknownSampler
from schedulers.grids import SIGMA_SCHEDULES, Grid
from schedulers.table import Row

RowWriter = Callable[[Grid, float], list[Row]]
"""Function (grid, eta) that returns the rows of a sampler."""


@dataclass(frozen=True)
class Sampler:
    """Sampling method, with the metadata that user interfaces and :func:`schedulers.compile_table` need.

    Attributes:
        name: Canonical name.
        label: Label in A1111.
        summary: Description in one line.
        diffusers_class: Scheduler class of diffusers with the same results.
        family: Interpretation of spacings, see :data:`schedulers.grids.FAMILIES`.
        final: Option that determines the last sigma: "alpha" (set_alpha_to_one) or "sigma" (final_sigmas_type); or the
            fixed choice "zero" or "sigma_min".
        write_rows: Function that returns the rows for a grid and eta.
        order: Order of convergence with a full history; convergence in distribution if stochastic.
        stochastic: Whether the sampler adds fresh noise by default.
        evaluations_per_step: Network evaluations per step; the first and last steps may need fewer.
        default_eta: Default fraction of fresh noise; ``None`` if the sampler ignores eta.
        keeps_noise: Whether the rows reproduce the noise levels of the table (False for ddpm_large only).
    """

    name: str
    label: str
    summary: str
    diffusers_class: str
    family: str
    final: str
    write_rows: RowWriter = field(repr=False)
    order: int = 1
    stochastic: bool = False
    evaluations_per_step: int = 1
    default_eta: float | None = None
    keeps_noise: bool = True

    @property
    def takes_eta(self) -> bool:
        """Whether the sampler uses eta."""
        return self.default_eta is not None

    @property
    def variance_preserving(self) -> bool:
        """Whether diffusers keeps the latents of this sampler at unit variance."""
        return self.family != "k"

    @property
    def default_spacing(self) -> str:
        """Default timestep spacing of the diffusers class."""
        return "leading" if self.family in ("ddim", "lcm") else "linspace"


_DPM = "DPMSolverMultistepScheduler"

_ALL = (
    Sampler(
        "ddim", "DDIM", "deterministic and predictable; eta adds noise, up to that of ddpm",
        "DDIMScheduler", "ddim", "alpha", singlestep.ddim_rows, default_eta=0.0,
    ),
    Sampler(
        "ddpm", "DDPM", "the original random walk back; best with hundreds of steps",
        "DDPMScheduler", "ddim", "zero", singlestep.ddpm_rows, stochastic=True,
    ),
    Sampler(
        "ddpm_large", "DDPM large variance", "ddpm with the forward variance; noise unless given hundreds of steps",
        "DDPMScheduler", "ddim", "zero", singlestep.ddpm_large_rows, stochastic=True, keeps_noise=False,
    ),
    Sampler(
        "euler", "Euler", "simple, smooth and sturdy",
        "EulerDiscreteScheduler", "k", "sigma", singlestep.euler_rows,
    ),
    Sampler(
        "euler_a", "Euler a", "Euler with fresh noise: lively, never quite settles as steps grow",
        "EulerAncestralDiscreteScheduler", "k", "zero", singlestep.euler_a_rows, stochastic=True, default_eta=1.0,
    ),
    Sampler(
        "heun", "Heun", "second order by a second look: twice the evaluations, careful",
        "HeunDiscreteScheduler", "k", "zero", singlestep.heun_rows, order=2, evaluations_per_step=2,
    ),
    Sampler(
        "dpmpp_2m", "DPM++ 2M", "second order for one evaluation a step; a fine default at 15 to 30 steps",
        _DPM, "dpm", "sigma", partial(multistep.dpmpp_2m_rows, k=1.0), order=2,
    ),
    Sampler(
        "dpmpp_2m_sde", "DPM++ 2M SDE", "dpmpp_2m with fresh noise: more detail, a few more steps",
        _DPM, "dpm", "sigma", partial(multistep.dpmpp_2m_rows, k=2.0), order=2, stochastic=True,
    ),
    Sampler(
        "dpmpp_3m_sde", "DPM++ 3M SDE", "third order by k-diffusion's formula, not diffusers'; wants 30 steps or more",
        _DPM, "dpm", "sigma", multistep.dpmpp_3m_sde_rows, order=2, stochastic=True,
    ),
    Sampler(
        "lms", "LMS", "fourth order from remembered slopes; good at many steps",
        "LMSDiscreteScheduler", "k", "zero", multistep.lms_rows, order=4,
    ),
    Sampler(
        "plms", "PLMS", "the first fast sampler of Stable Diffusion; one evaluation more than steps",
        "PNDMScheduler", "ddim", "alpha", multistep.plms_rows, order=2,
    ),
    Sampler(
        "deis", "DEIS", "second order, exact for slopes straight in log sigma; strong at few steps",
        "DEISMultistepScheduler", "dpm", "sigma_min", multistep.deis_rows, order=2,
    ),
    Sampler(
        "unipc", "UniPC", "predicts, then corrects with the same evaluations; strong at 5 to 15 steps",
        "UniPCMultistepScheduler", "dpm", "sigma", multistep.unipc_rows, order=3,
    ),
    Sampler(
        "lcm", "LCM", "made for latent consistency models: 1 to 8 steps",
        "LCMScheduler", "lcm", "zero", singlestep.lcm_rows, stochastic=True,
    ),
    Sampler(
        "tcd", "TCD", "made for trajectory consistency models: few steps; eta is its gamma",
        "TCDScheduler", "lcm", "sigma_min", singlestep.tcd_rows, stochastic=True, default_eta=0.3,
    ),
    Sampler(
        "pc", "Predictor-corrector", "score-based: a reverse step, then Langevin dynamics at the new noise level",
        "ScoreSdeVeScheduler", "ddim", "zero", singlestep.pc_rows, stochastic=True, evaluations_per_step=2,
    ),
)  # fmt: skip

SAMPLERS: dict[str, Sampler] = {sampler.name: sampler for sampler in _ALL}
"""Every sampler by canonical name."""


_ALIASES = {
    "ancestral": "euler_a",
    "ddpm_fixed_large": "ddpm_large",
    "ddpm_fixed_small": "ddpm",
    "deis_multistep": "deis",
    "dpm_multistep": "dpmpp_2m",
    "dpm_solver_multistep": "dpmpp_2m",
    "dpmsolver_multistep": "dpmpp_2m",
    "dpmsolvermultistep": "dpmpp_2m",
    "deismultistep": "deis",
    "euler_ancestral": "euler_a",
    "euler_ancestral_discrete": "euler_a",
    "eulerancestraldiscrete": "euler_a",
    "euler_discrete": "euler",
    "eulerdiscrete": "euler",
    "heun_discrete": "heun",
    "heundiscrete": "heun",
    "lms_discrete": "lms",
    "lmsdiscrete": "lms",
    "pndm": "plms",
    "predictor_corrector": "pc",
    "scoresdeve": "pc",
    "uni_pc": "unipc",
    "uni_pc_bh2": "unipc",
    "unipc_bh2": "unipc",
    "unipcmultistep": "unipc",
}
"""Canonical sampler name by normalized alias."""

_CLOSEST_SUPPORTED = {
    "ddim_cfgpp": "ddim",
    "dpm2": "heun",
    "dpm2_a": "euler_a",
    "dpm_adaptive": "dpmpp_2m",
    "dpm_fast": "dpmpp_2m",
    "dpmpp_2m_sde_heun": "dpmpp_2m_sde",
    "dpmpp_2s_a": "dpmpp_2m_sde",
    "dpmpp_sde": "dpmpp_2m_sde",
    "ipndm": "deis",
    "restart": "heun",
}
"""Supported sampler of a similar kind and order, by the name of an A1111 or ComfyUI sampler that is not supported."""

_SUFFIXES = tuple(sorted(SIGMA_SCHEDULES, key=len, reverse=True))


def _normalize(name: str) -> str:
    """Return the name in lower case, with "pp" for "++" and one underscore for other non-alphanumeric characters."""
    lowered = name.strip().lower().replace("++", "pp")
    return "_".join("".join(c if c.isalnum() else " " for c in lowered).split())


_LABELS = {_normalize(sampler.label): sampler.name for sampler in SAMPLERS.values()}


def _look_up(key: str) -> str | None:
    for prefix in ("", "k_", "sample_"):
        for suffix in ("", "_gpu", "scheduler", "_scheduler"):
            if key.startswith(prefix) and key.endswith(suffix):
                bare = key[len(prefix) : len(key) - len(suffix)]
                if bare in SAMPLERS:
                    return bare
                if bare in _ALIASES:
                    return _ALIASES[bare]
    return _LABELS.get(key)


def resolve_sampler(name: str) -> tuple[str, str | None]:
    """Resolve a sampler name in any common spelling: "DPM++ 2M Karras", "k_euler_a", "DDIMScheduler".

    Returns:
        The canonical name, and the sigma schedule in the name or ``None``.

    Raises:
        UnknownSampler: If the name is unknown; the message lists the known names and the closest one.
    """
    key = _normalize(name)
    for suffix in ("", *_SUFFIXES):
        bare = key.removesuffix(f"_{suffix}") if suffix else key
        sampler = _look_up(bare)
        if sampler and (not suffix or bare != key):
            return sampler, suffix or None
    bare = next((key.removesuffix(f"_{suffix}") for suffix in _SUFFIXES if key.endswith(f"_{suffix}")), key)
    known_names = [*SAMPLERS, *_ALIASES, *_LABELS]
    matches = difflib.get_close_matches(key, known_names, n=1, cutoff=0.5)
    suggestion = _look_up(matches[0]) if matches else None
    hint = f" Did you mean {suggestion!r}?" if suggestion else ""
    if substitute := _CLOSEST_SUPPORTED.get(bare.removeprefix("k_")):
        hint = f" The closest supported one is {substitute!r}."
    raise UnknownSampler(
        f"sampler is {name!r}, which is unknown.{hint} Choose from {', '.join(SAMPLERS)}, "
        f"each optionally followed by a sigma schedule ({', '.join(SIGMA_SCHEDULES)})."
    )
