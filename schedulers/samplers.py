"""The samplers on offer: how each is called, what it is, and which function writes its rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from schedulers import adams, singlestep, unipc
from schedulers.grids import Grid
from schedulers.multistep import dpmpp_2m_rows, dpmpp_3m_sde_rows
from schedulers.table import Row

RowWriter = Callable[[Grid, float], list[Row]]


@dataclass(frozen=True)
class Sampler:
    """One sampling method, described for a list in a user interface and for :func:`schedulers.compile_table`.

    name, label            canonical name; the label that A1111 users know
    summary                one line
    diffusers_class        the scheduler class of diffusers that it agrees with
    family                 how it reads a spacing, see :mod:`schedulers.grids`
    final                  what decides the last sigma: "alpha" (set_alpha_to_one), "sigma" (final_sigmas_type), or
                           always "zero" or "sigma_min"
    write_rows             (grid, eta) -> rows
    order                  order of convergence once the history is full (in distribution where stochastic)
    stochastic             draws fresh noise on the way (ddim only when eta is not 0)
    evaluations_per_step   network evaluations a step, apart from the first and last steps
    default_eta            share of fresh noise unless asked otherwise; ``None``: eta has no meaning here
    keeps_noise            obeys the noise law
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
        """eta means something here."""
        return self.default_eta is not None

    @property
    def variance_preserving(self) -> bool:
        """diffusers keeps this sampler's latents at unit variance: they start from noise of standard deviation 1."""
        return self.family != "k"

    @property
    def default_spacing(self) -> str:
        """The spacing that diffusers' class takes when a configuration does not say."""
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
