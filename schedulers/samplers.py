"""Registry of samplers: names, descriptions, properties and the functions that write their rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from schedulers import adams, singlestep, unipc
from schedulers.grids import Grid
from schedulers.multistep import dpmpp_2m_rows, dpmpp_3m_sde_rows
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
        _DPM, "dpm", "sigma", partial(dpmpp_2m_rows, k=1.0), order=2,
    ),
    Sampler(
        "dpmpp_2m_sde", "DPM++ 2M SDE", "dpmpp_2m with fresh noise: more detail, a few more steps",
        _DPM, "dpm", "sigma", partial(dpmpp_2m_rows, k=2.0), order=2, stochastic=True,
    ),
    Sampler(
        "dpmpp_3m_sde", "DPM++ 3M SDE", "third order by k-diffusion's formula, not diffusers'; wants 30 steps or more",
        _DPM, "dpm", "sigma", dpmpp_3m_sde_rows, order=2, stochastic=True,
    ),
    Sampler(
        "lms", "LMS", "fourth order from remembered slopes; good at many steps",
        "LMSDiscreteScheduler", "k", "zero", adams.lms_rows, order=4,
    ),
    Sampler(
        "plms", "PLMS", "the first fast sampler of Stable Diffusion; one evaluation more than steps",
        "PNDMScheduler", "ddim", "alpha", adams.plms_rows, order=2,
    ),
    Sampler(
        "deis", "DEIS", "second order, exact for slopes straight in log sigma; strong at few steps",
        "DEISMultistepScheduler", "dpm", "sigma_min", adams.deis_rows, order=2,
    ),
    Sampler(
        "unipc", "UniPC", "predicts, then corrects with the same evaluations; strong at 5 to 15 steps",
        "UniPCMultistepScheduler", "dpm", "sigma", unipc.unipc_rows, order=3,
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
