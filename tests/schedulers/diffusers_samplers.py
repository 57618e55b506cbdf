"""Schedulers of diffusers to compare with: classes, arguments, known bugs and workarounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import diffusers
import numpy as np
import torch
from diffusers.schedulers.scheduling_utils import SchedulerOutput
from torch import Tensor

from schedulers import SAMPLERS, StepTable
from schedulers.grids import timesteps_of_sigmas

SD = {"num_train_timesteps": 1000, "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
HO = {"num_train_timesteps": 1000, "beta_start": 0.0001, "beta_end": 0.02, "beta_schedule": "linear"}
COSINE = {"num_train_timesteps": 1000, "beta_schedule": "squaredcos_cap_v2"}

ARGUMENTS: dict[str, dict[str, Any]] = {
    "ddim": {"clip_sample": False},
    "ddpm": {"clip_sample": False},
    "ddpm_large": {"clip_sample": False, "variance_type": "fixed_large"},
    "dpmpp_2m": {"algorithm_type": "dpmsolver++", "solver_order": 2},
    "dpmpp_2m_sde": {"algorithm_type": "sde-dpmsolver++", "solver_order": 2},
    "dpmpp_3m_sde": {"algorithm_type": "sde-dpmsolver++", "solver_order": 3},
    "plms": {"skip_prk_steps": True},
}

COMPARED = tuple(name for name in SAMPLERS if name != "pc")
"""Every sampler with a discrete-time class in diffusers; pc has a separate test of single steps."""


class Case(NamedTuple):
    """Sampler settings to compare."""

    sampler: str
    spacing: str = "leading"
    num_steps: int = 10
    prediction_type: str = "epsilon"
    steps_offset: int = 0
    strength: float = 1.0
    extra: tuple[tuple[str, Any], ...] = ()

    @property
    def sigma_schedule(self) -> str | None:
        """Sigma schedule in the extra arguments, or ``None``."""
        options = [key for key, value in self.extra if key.startswith("use_") and value]
        return options[0].removeprefix("use_").removesuffix("_sigmas") if options else None


class KDiffusion3M(diffusers.DPMSolverMultistepScheduler):  # type: ignore[misc] # it has no types
    """k-diffusion's ``sample_dpmpp_3m_sde`` (version 0.1.1, eta 1) on the timesteps and sigmas of diffusers.

    Row "third-order-sde" of docs/parity.md.
    """

    def step(
        self,
        model_output: Tensor,
        timestep: Tensor,
        sample: Tensor,
        generator: torch.Generator,
        return_dict: bool = True,
    ) -> Any:
        """Make one step in the coordinates image + sigma * noise; the last step returns the denoised estimate."""
        if self.step_index is None:
            self._init_step_index(timestep)
            self.past: list[tuple[Tensor, Tensor]] = []
        sigma, target = (self.sigmas[self.step_index + k].to(sample.dtype) for k in (0, 1))
        denoised = self.convert_model_output(model_output, sample=sample)
        noise = torch.randn(sample.shape, generator=generator, dtype=sample.dtype).to(sample.device)
        x = sample * torch.sqrt(1.0 + sigma**2)
        h = torch.log(sigma) - torch.log(target)
        if self.step_index == len(self.timesteps) - 1:
            x = denoised if target == 0.0 else x if h == 0.0 else self._first_order(x, denoised, noise, sigma, target)
        else:
            x = self._first_order(x, denoised, noise, sigma, target)
            phi_2 = torch.expm1(-2.0 * h) / (2.0 * h) + 1.0
            if len(self.past) > 1:
                (before, h_1), (first, h_2) = self.past[-1], self.past[-2]
                r0, r1 = h_1 / h, h_2 / h
                d1_0, d1_1 = (denoised - before) / r0, (before - first) / r1
                d1 = d1_0 + (d1_0 - d1_1) * r0 / (r0 + r1)
                d2 = (d1_0 - d1_1) / (r0 + r1)
                x = x + phi_2 * d1 - (phi_2 / (2.0 * h) - 0.5) * d2
            elif self.past:
                before, h_1 = self.past[-1]
                x = x + phi_2 * (denoised - before) / (h_1 / h)
        self.past.append((denoised, h))
        self._step_index += 1
        previous = x / torch.sqrt(1.0 + target**2)
        return SchedulerOutput(previous) if return_dict else (previous,)

    def _first_order(self, x: Tensor, denoised: Tensor, noise: Tensor, sigma: Tensor, target: Tensor) -> Tensor:
        ratio = target / sigma
        fresh = noise * target * torch.sqrt(1.0 - ratio**2)
        return ratio**2 * x + (1.0 - ratio**2) * denoised + fresh


def scheduler_class(sampler: str) -> Any:
    """Return the class to compare a sampler with: that of diffusers, or :class:`KDiffusion3M` for dpmpp_3m_sde."""
    return KDiffusion3M if sampler == "dpmpp_3m_sde" else getattr(diffusers, SAMPLERS[sampler].diffusers_class)


def make_scheduler(case: Case, betas: dict[str, Any]) -> Any:
    """Create the scheduler to compare ``case`` with."""
    return scheduler_class(case.sampler)(
        **betas,
        **ARGUMENTS.get(case.sampler, {}),
        timestep_spacing=case.spacing,
        prediction_type=case.prediction_type,
        steps_offset=case.steps_offset,
        **dict(case.extra),
    )


def config_of(scheduler: Any, case: Case) -> dict[str, Any]:
    """Return the scheduler's configuration in the form in which diffusers saves it."""
    return {**scheduler.config, "_class_name": SAMPLERS[case.sampler].diffusers_class}


def uneven(case: Case) -> bool:
    """Return whether the timesteps are not 1000 // num_steps apart."""
    return case.spacing == "linspace" or (case.spacing == "trailing" and 1000 % case.num_steps != 0)


def has_fixed_stride(case: Case) -> bool:
    """Return whether diffusers computes the next timestep with a fixed stride, as DDIM and PNDM do."""
    return case.sampler in ("ddim", "plms")


class Bug(NamedTuple):
    """Known difference: the affected cases, what diffusers does, and an example case that shows it."""

    applies: Callable[[Case], bool]
    what: str
    example: Case


def _uses_spacing(case: Case) -> bool:
    return SAMPLERS[case.sampler].family != "lcm"


MENDED: dict[str, Bug] = {
    "uniform-stride": Bug(
        lambda c: has_fixed_stride(c) and uneven(c),
        "assumes that the previous timestep is 1000 // num_steps below (diffusers #11347); this also affects trailing"
        " spacing if num_steps does not divide the length",
        Case("ddim", "linspace", 20),
    ),
    "timestep-rounding": Bug(
        lambda c: SAMPLERS[c.sampler].family == "dpm" and c.sigma_schedule is not None,
        "rounds the timesteps of sigmas in float32; within 0.002 of an edge the result differs",
        Case("dpmpp_2m", "linspace", 17, extra=(("use_exponential_sigmas", True),)),
    ),
}
"""Bugs that :func:`mend` or the arguments of the run work around, so that the cases are compared."""

EXCLUDED: dict[str, Bug] = {
    "one-step-linspace": Bug(
        lambda c: c.spacing == "linspace" and c.num_steps == 1 and SAMPLERS[c.sampler].family in ("k", "ddim"),
        "denoises pure noise once at timestep 0, for which almost no noise is expected; we start at the last timestep",
        Case("euler", "linspace", 1),
    ),
    "offset-overflow": Bug(
        lambda c: (
            c.spacing == "leading"
            and _uses_spacing(c)
            and c.steps_offset > 0
            and c.num_steps >= (999 if SAMPLERS[c.sampler].family == "dpm" else 1000)
        ),
        "exceeds the last timestep (IndexError, or two equal sigmas and NaN); we lower the offset (#10003)",
        Case("ddim", "leading", 1000, steps_offset=1),
    ),
    "offset-at-stride-one": Bug(
        lambda c: c.sampler == "ddim" and c.spacing == "leading" and c.steps_offset > 0 and c.num_steps > 500,
        "stops at timestep 0 instead of the clean image if the offset is not below the stride",
        Case("ddim", "leading", 501, steps_offset=1),
    ),
    "repeated-timesteps": Bug(
        lambda c: SAMPLERS[c.sampler].family == "dpm" and c.spacing in ("leading", "linspace") and c.num_steps == 1000,
        "puts 1001 points on 1000 timesteps: some are repeated (leading: all are 0); we use each timestep once",
        Case("dpmpp_2m", "leading", 1000),
    ),
    "pndm-mixes-v": Bug(
        lambda c: c.sampler == "plms" and c.prediction_type == "v_prediction" and c.num_steps > 1,
        "averages v outputs of different timesteps, which are different mixtures; we average slopes",
        Case("plms", "leading", 10, "v_prediction"),
    ),
    "no-sample-prediction": Bug(
        lambda c: c.sampler in ("plms", "euler_a") and c.prediction_type == "sample",
        "raises: not implemented for this prediction type",
        Case("euler_a", "leading", 10, "sample"),
    ),
    "nothing-denoised": Bug(
        lambda c: (
            c.num_steps == 1
            and c.sigma_schedule is not None
            and (c.sampler == "deis" or (c.sampler == "unipc" and ("final_sigmas_type", "sigma_min") in c.extra))
        ),
        "repeats the last of the scheduled sigmas as the end, so that a single step has size 0",
        Case("deis", "leading", 1, extra=(("use_karras_sigmas", True),)),
    ),
    "lcm-more-than-origin": Bug(
        lambda c: not _uses_spacing(c) and c.num_steps > 50,
        "raises above the 50 timesteps of the distillation; we then use all training timesteps",
        Case("lcm", "leading", 100),
    ),
    "late-lms": Bug(
        lambda c: c.sampler == "lms" and c.strength < 1.0,
        "uses weights for four slopes with a history of one in image-to-image; we start at order 1",
        Case("lms", "leading", 10, strength=0.5),
    ),
    "late-plms": Bug(
        lambda c: c.sampler == "plms" and c.strength < 1.0,
        "repeats the wrong timestep in image-to-image, so that noise levels do not match",
        Case("plms", "leading", 10, strength=0.5),
    ),
}
"""Bugs without a workaround: the affected cases are not compared."""


class WideTorch:
    """The torch module with float64 as ``float32``, because several schedulers cast to float32 within a step."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def mend(scheduler: Any, case: Case, table: StepTable, *, exact: bool = False) -> None:
    """Replace rounded values of a scheduler by those of the table, after a check that they are close.

    Timesteps are replaced if they are affected by the bug "timestep-rounding"; with ``exact`` also the timesteps and
    sigmas, in float64.
    """
    if MENDED["timestep-rounding"].applies(case):
        differing = np.flatnonzero(scheduler.timesteps.numpy() != table.timestep)
        alphas = scheduler.alphas_cumprod.double().numpy()
        exact_timesteps = timesteps_of_sigmas(table.sigma, np.sqrt((1.0 - alphas) / alphas))[differing]
        edge = 0.5 if case.sigma_schedule == "karras" else 0.0
        assert (np.abs((exact_timesteps + edge + 0.5) % 1.0 - 0.5) < 2e-3).all()
        scheduler.timesteps = torch.tensor(table.timestep)
    if not exact:
        return
    if hasattr(scheduler, "sigmas"):
        np.testing.assert_allclose(scheduler.timesteps.numpy(), table.timestep, rtol=1e-6, atol=1e-5)
        scheduler.timesteps = torch.tensor(table.timestep)
        sigmas = np.append(table.sigma, table.sigma_end)
        np.testing.assert_allclose(scheduler.sigmas.numpy(), sigmas, rtol=3e-6, atol=0.0)
        scheduler.sigmas = torch.tensor(sigmas)
