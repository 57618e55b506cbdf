"""A smooth network made of one random matrix, and whole trajectories through our tables and diffusers' classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from schedulers import NoiseSchedule, StepTable
from schedulers.update import advance, new_history, scale_input

SHAPE = (1, 2, 3, 3)

Network = Callable[[Tensor, float], Tensor]


def make_network(schedule: NoiseSchedule) -> Network:
    """(scaled latents, timestep) -> output of the schedule's prediction type: exact for Gaussian data, then bent."""
    size = int(np.prod(SHAPE))
    draw = np.random.default_rng(7).standard_normal((size, size))
    matrix = torch.tensor(draw / np.linalg.norm(draw, 2))
    index = np.arange(schedule.num_timesteps, dtype=np.float64)
    signal = np.sqrt(schedule.alphas_cumprod)

    def network(scaled: Tensor, timestep: float) -> Tensor:
        left = float(np.interp(timestep, index, signal))
        by_type = {"epsilon": (1.0 - left * left) ** 0.5, "sample": left, "v_prediction": 0.0}
        straight = by_type[schedule.prediction_type]
        bent: Tensor = torch.tanh(matrix.to(scaled.dtype) @ scaled.reshape(-1) + 0.001 * timestep)
        output: Tensor = straight * scaled + 0.3 * bent.reshape(scaled.shape)
        return output

    return network


@dataclass(frozen=True)
class Trajectory:
    """Latents after each row at unit variance, as the network sees them; the final latents; the generator's state."""

    states: list[Tensor]
    latents: Tensor
    generator_state: Tensor

    def error(self, other: Trajectory) -> float:
        """Largest absolute difference, at any row or at the end; infinite where lengths differ or it is not finite."""
        if len(self.states) != len(other.states):
            return float("inf")
        pairs = [*zip(self.states, other.states, strict=True), (self.latents, other.latents)]
        worst = max(float((mine - theirs).abs().max()) for mine, theirs in pairs)
        return worst if np.isfinite(worst) else float("inf")


def run_table(
    table: StepTable, network: Network, *, image: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> Trajectory:
    """One image through its own table, seed 0; image-to-image from clean latents ``image``."""
    generator = torch.Generator("cpu").manual_seed(0)
    start = torch.randn(SHAPE, generator=generator).to(dtype)
    x = table.init_scale * start if image is None else image.to(dtype) + float(table.sigma[0]) * start
    history, rows, states = new_history(x), torch.tensor(table.columns).to(dtype), []
    for row in range(table.num_rows):
        at = rows[row : row + 1]
        output = network(scale_input(x, at), float(table.timestep[row]))
        draw = torch.randn(SHAPE, generator=generator, dtype=dtype) if table.draws[row] else torch.zeros_like(x)
        x, _, history = advance(x, output, history, draw, at)
        states.append(x / float(np.hypot(1.0, table.sigma_next[row])))
    return Trajectory(states, x * table.out_scale, generator.get_state())


class Stride:
    """Stands in for ``num_inference_steps``, so that ``length // num_inference_steps`` is the true distance."""

    def __init__(self, distance: int) -> None:
        self.distance = distance

    def __rfloordiv__(self, length: int) -> int:
        return self.distance


def true_distances(timesteps: list[int]) -> list[int]:
    """Distance from each timestep to the next different one; from the last to below 0."""
    later = [next((t for t in timesteps[i:] if t < timesteps[i]), -1) for i in range(len(timesteps))]
    return [now - then for now, then in zip(timesteps, later, strict=True)]


def run_diffusers(
    scheduler: Any,
    table: StepTable,
    network: Network,
    *,
    eta: float | None = None,
    image: Tensor | None = None,
    true_strides: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Trajectory:
    """The loop of diffusers' pipelines, seed 0, on a scheduler whose timesteps are set.

    ``table`` tells only where to begin and at which scale to compare. ``true_strides`` mends a known bug.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    start = torch.randn(SHAPE, generator=generator).to(dtype)
    begin = (table.requested_steps - table.num_steps) * scheduler.order
    timesteps = scheduler.timesteps[begin:]
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(begin)
    x = (
        start * scheduler.init_noise_sigma
        if image is None
        else scheduler.add_noise(image.to(dtype), start, timesteps[:1])
    )
    options: dict[str, Any] = {} if eta is None else {"eta": eta}
    if "generator" in scheduler.step.__code__.co_varnames:
        options["generator"] = generator
    unit = isinstance(scheduler.init_noise_sigma, float) and scheduler.init_noise_sigma == 1.0
    distances = true_distances([int(t) for t in timesteps]) if true_strides else []
    if len(distances) > 1 and table.sampler == "plms":
        distances[1] = distances[0]  # its second evaluation redoes the first step
    states = []
    for row, t in enumerate(timesteps):
        if true_strides:
            scheduler.num_inference_steps = Stride(distances[row])
        output = network(scheduler.scale_model_input(x, t), float(t))
        x = scheduler.step(output, t, x, **options).prev_sample
        level = 0.0 if unit or row >= table.num_rows else float(table.sigma_next[row])
        states.append(x / float(np.hypot(1.0, level)))
    return Trajectory(states, x, generator.get_state())
