"""Training data of the distillation: the points of trajectories and the teacher's target velocities.

With signal and noise as cosine and sine of an angle, DDIM turns a point x by d = angle - angle' towards the image:

    x' = cos(d) x - sin(d) v                                (Salimans & Ho, 2022, arXiv 2202.00512, appendix D)

The teacher takes several guided steps from one timestep of the distilled model to the next; the distilled model learns
the velocity that gets there in a single step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from diffserve.training.denoiser_training import Denoiser, build_scheduler

NUM_STEPS = 4


@dataclass(frozen=True)
class Trajectories:
    """N trajectories of one canvas.

    Points and target velocities are (N, NUM_STEPS, 8, h, w) in 16 bits, the captions' token ids (N, MAX_TOKENS).
    """

    points: Tensor
    velocities: Tensor
    token_ids: Tensor


class Ladder:
    """Timesteps of the distilled model and the teacher's steps between them, as angles of the noise schedule."""

    def __init__(self, substeps: int, num_steps: int = NUM_STEPS) -> None:
        scheduler = build_scheduler()
        scheduler.set_timesteps(num_steps * substeps)
        self.fine: list[list[int]] = torch.tensor(scheduler.timesteps.tolist()).view(num_steps, substeps).tolist()
        self.timesteps = [steps[0] for steps in self.fine]
        self._angles = scheduler.alphas_cumprod.double().sqrt().acos().tolist()

    def turn(self, timestep: int, after: int | None) -> float:
        """Return the DDIM angle d from ``timestep`` to the timestep ``after``; None is the clean end."""
        return float(self._angles[timestep] - (0.0 if after is None else self._angles[after]))

    def turns(self) -> list[float]:
        """Return the angles of the distilled model's own steps."""
        return [self.turn(now, after) for now, after in zip(self.timesteps, [*self.timesteps[1:], None], strict=True)]

    def steps(self, index: int) -> Iterator[tuple[int, float]]:
        """Yield (timestep, angle) of each of the teacher's steps for the distilled model's step ``index``."""
        end = self.timesteps[index + 1] if index + 1 < len(self.timesteps) else None
        fine = self.fine[index]
        for now, after in zip(fine, [*fine[1:], end], strict=True):
            yield now, self.turn(now, after)


def ddim_step(points: Tensor, velocities: Tensor, angle: float) -> Tensor:
    """Take one DDIM step: turn ``points`` by ``angle`` towards the image."""
    return math.cos(angle) * points - math.sin(angle) * velocities


def velocity_to(points: Tensor, goal: Tensor, angle: float) -> Tensor:
    """Return the velocity with which :func:`ddim_step` takes ``points`` to ``goal``."""
    return (math.cos(angle) * points - goal) / math.sin(angle)


@torch.no_grad()
def collect(
    teacher: Denoiser, distilled: Denoiser | None, points: Tensor, token_ids: Tensor, empty_ids: Tensor,
    ladder: Ladder, guidance_scale: float,
) -> Trajectories:  # fmt: skip
    """Follow trajectories from the noise ``points`` (N, 8, h, w) and record the teacher's target velocities.

    The path is the distilled model's, or the teacher's if ``distilled`` is None. The targets are recorded at every
    timestep of the distilled model.
    """
    visited, targets = [], []
    with torch.autocast(points.device.type, dtype=torch.bfloat16):
        cond, uncond = (teacher.text_encoder(ids).last_hidden_state for ids in (token_ids, empty_ids))
        both = torch.cat([cond, uncond.expand_as(cond)])
        for index, (timestep, angle) in enumerate(zip(ladder.timesteps, ladder.turns(), strict=True)):
            goal = points
            for fine, small_angle in ladder.steps(index):
                with_text, without = teacher.unet(goal.repeat(2, 1, 1, 1), fine, both).sample.float().chunk(2)
                goal = ddim_step(goal, without + guidance_scale * (with_text - without), small_angle)
            visited.append(points.half().cpu())
            targets.append(velocity_to(points, goal, angle).half().cpu())
            predicted = None if distilled is None else distilled.unet(points, timestep, cond).sample.float()
            points = goal if predicted is None else ddim_step(points, predicted, angle)
    return Trajectories(torch.stack(visited, 1), torch.stack(targets, 1), token_ids.cpu())
