"""Trajectories through step tables and diffusers schedulers, with a smooth random network."""

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
    """Create a network (scaled latents, timestep) -> output.

    The output has the prediction type of the schedule: the exact one for Gaussian data plus a nonlinear term.
    """
    size = int(np.prod(SHAPE))
    draw = np.random.default_rng(7).standard_normal((size, size))
    matrix = torch.tensor(draw / np.linalg.norm(draw, 2))
    index = np.arange(schedule.num_timesteps, dtype=np.float64)
    signal = np.sqrt(schedule.alphas_cumprod)

    def network(scaled: Tensor, timestep: float) -> Tensor:
        alpha = float(np.interp(timestep, index, signal))
        by_type = {"epsilon": (1.0 - alpha * alpha) ** 0.5, "sample": alpha, "v_prediction": 0.0}
        linear = by_type[schedule.prediction_type]
        nonlinear: Tensor = torch.tanh(matrix.to(scaled.dtype) @ scaled.reshape(-1) + 0.001 * timestep)
        output: Tensor = linear * scaled + 0.3 * nonlinear.reshape(scaled.shape)
        return output

    return network


@dataclass(frozen=True)
class Trajectory:
    """Latents of a run: after each row (at unit variance), at the end, and the final state of the generator."""

    states: list[Tensor]
    latents: Tensor
    generator_state: Tensor

    def error(self, other: Trajectory) -> float:
        """Return the largest absolute difference; infinite if the lengths differ or a value is not finite."""
        if len(self.states) != len(other.states):
            return float("inf")
        pairs = [*zip(self.states, other.states, strict=True), (self.latents, other.latents)]
        largest = max(float((latents - other_latents).abs().max()) for latents, other_latents in pairs)
        return largest if np.isfinite(largest) else float("inf")


def run_table(
    table: StepTable, network: Network, *, image: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> Trajectory:
    """Run one image through a table with seed 0; image-to-image if clean latents ``image`` are set."""
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
    """Replacement for ``num_inference_steps`` that makes ``length // num_inference_steps`` the true distance."""

    def __init__(self, distance: int) -> None:
        self.distance = distance

    def __rfloordiv__(self, length: int) -> int:
        return self.distance


def true_distances(timesteps: list[int]) -> list[int]:
    """Return the distance from each timestep to the next lower one; the last is followed by -1."""
    next_timesteps = [next((t for t in timesteps[i:] if t < timesteps[i]), -1) for i in range(len(timesteps))]
    return [current - following for current, following in zip(timesteps, next_timesteps, strict=True)]


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
    """Run the loop of diffusers' pipelines with seed 0 on a scheduler whose timesteps are set.

    Args:
        scheduler: Scheduler of diffusers.
        table: Table to compare with; provides the first step and the scale of the recorded latents.
        network: Network to sample from.
        eta: Argument of ``scheduler.step``, if any.
        image: Clean latents for image-to-image.
        true_strides: Work around the bug "uniform-stride".
        dtype: Type of the latents.
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
    is_unit_variance = isinstance(scheduler.init_noise_sigma, float) and scheduler.init_noise_sigma == 1.0
    distances = true_distances([int(t) for t in timesteps]) if true_strides else []
    if len(distances) > 1 and table.sampler == "plms":
        distances[1] = distances[0]  # its second evaluation redoes the first step
    states = []
    for row, t in enumerate(timesteps):
        if true_strides:
            scheduler.num_inference_steps = Stride(distances[row])
        output = network(scheduler.scale_model_input(x, t), float(t))
        x = scheduler.step(output, t, x, **options).prev_sample
        level = 0.0 if is_unit_variance or row >= table.num_rows else float(table.sigma_next[row])
        states.append(x / float(np.hypot(1.0, level)))
    return Trajectory(states, x, generator.get_state())
