"""Pairs of starting noise and converged latents for a set of prompts, and the sampling that computes them.

Latents are computed with gradients enabled if the caller wants them, by the text encoders, the UNet runner and the
updates that serve images. Each prompt has one seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from diffserve.experiments.search.learnable_table import LearnableTable
from diffserve.runtime.model import DiffusionModel
from schedulers.table import COLUMNS
from schedulers.update import advance, guide, new_history, scale_input

TIMESTEP = COLUMNS.index("timestep")
SIGMA = COLUMNS.index("sigma")


class Texts(NamedTuple):
    """Conditioning of B images with two rows each: negative prompts in the first half, prompts in the second.

    Attributes:
        contexts: (2 B, tokens, dim).
        pooled: (2 B, P), or ``None`` for models without.
        time_ids: (2 B, 6), or ``None`` for models without.
    """

    contexts: Tensor
    pooled: Tensor | None
    time_ids: Tensor | None

    @classmethod
    def encode(cls, model: DiffusionModel, prompts: Sequence[str]) -> Texts:
        """Encode prompts at the model's native size, with empty negative prompts."""
        width_px, height_px = model.native_size
        parts = [model.text.encode(prompt, width_px=width_px, height_px=height_px) for prompt in prompts]

        def stack(tensors: Sequence[Tensor | None]) -> Tensor | None:
            there = [tensor for tensor in tensors if tensor is not None]
            return torch.stack(there).clone() if there else None  # a clone of inference tensors may enter gradients

        contexts = stack([part.uncond for part in parts] + [part.cond for part in parts])
        assert contexts is not None
        pooled = stack([part.pooled_uncond for part in parts] + [part.pooled_cond for part in parts])
        return cls(contexts, pooled, stack([part.time_ids for part in parts] * 2))

    def take(self, places: Sequence[int]) -> Texts:
        """Select images."""
        count = len(self.contexts) // 2
        rows = torch.tensor([*places, *(place + count for place in places)], device=self.contexts.device)
        pooled, time_ids = (None if tensor is None else tensor[rows] for tensor in (self.pooled, self.time_ids))
        return Texts(self.contexts[rows], pooled, time_ids)


class Pairs(NamedTuple):
    """Noise and converged trajectories of B images, on the model's device.

    Attributes:
        noise: (B, C, h, w).
        path: Latents (T, B, C, h, w) of the converged sampler, scaled to unit variance; the last are its images. Only
            the last are kept without ``keeps_path``.
        timesteps: Training timesteps (T,) of ``path``, descending; -1 for the last.
        texts: Conditioning.
    """

    noise: Tensor
    path: Tensor
    timesteps: Tensor
    texts: Texts

    @classmethod
    def make(
        cls,
        model: DiffusionModel,
        prompts: Sequence[str],
        first_seed: int,
        guidance_scale: float,
        *,
        num_steps: int,
        batch: int,
        keeps_path: bool = False,
        check: Callable[[], None] = lambda: None,
    ) -> Pairs:
        """Compute converged trajectories with ``num_steps`` steps of DPM-Solver++(2M).

        Prompt i has seed ``first_seed`` + i. ``check`` is called between batches and may raise to stop.
        """
        texts = Texts.encode(model, prompts)
        noise = start_noise(model, range(first_seed, first_seed + len(prompts)))
        table = LearnableTable(model.schedule, num_steps)  # DPM-Solver++(2M) as long as nothing is learned
        paths = []
        for part in parts_of(len(noise), batch):
            check()
            path: list[Tensor] = []
            with torch.no_grad():
                rows = table().float().to(model.device)
                latents = run_rows(
                    model, rows, noise[part.start : part.stop], texts.take(part), guidance_scale, path=path
                )
            paths.append(torch.stack([*path, latents] if keeps_path else [latents]))
        timesteps = torch.cat([table.timesteps.detach(), torch.tensor([-1.0], dtype=torch.float64)])
        return cls(noise, torch.cat(paths, dim=1), timesteps if keeps_path else timesteps[-1:], texts)

    @property
    def target(self) -> Tensor:
        """Converged latents (B, C, h, w)."""
        return self.path[-1]

    def take(self, places: Sequence[int]) -> Pairs:
        """Select images."""
        index = torch.tensor(list(places), device=self.noise.device)
        return Pairs(self.noise[index], self.path[:, index], self.timesteps, self.texts.take(places))

    def at(self, timestep: float) -> Tensor:
        """Interpolate the path (B, C, h, w) at ``timestep`` by the cubic polynomial through the four nearest points."""
        count = len(self.timesteps)
        first = int((self.timesteps > timestep).sum()) - 2
        first = max(0, min(first, count - 4))
        places = range(first, min(first + 4, count))
        times = self.timesteps.tolist()
        result = torch.zeros_like(self.path[0], dtype=torch.float64)
        for place in places:
            other_times = [times[other] for other in places if other != place]
            result += self.path[place] * math.prod((timestep - other) / (times[place] - other) for other in other_times)
        return result


def parts_of(count: int, size: int) -> list[range]:
    """Split ``range(count)`` into parts of at most ``size``."""
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def start_noise(model: DiffusionModel, seeds: Sequence[int]) -> Tensor:
    """Return the noise (B, C, h, w) from which images with these seeds start at the native size."""
    width_px, height_px = model.native_size
    shape = (1, model.unet.latent_channels, height_px // model.vae.factor, width_px // model.vae.factor)
    noise = [torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed)) for seed in seeds]
    return torch.cat(noise).to(model.device)


@torch.no_grad()
def sample(
    model: DiffusionModel, rows: Tensor, noise: Tensor, texts: Texts, guidance_scale: float, *, batch: int
) -> Tensor:
    """Return final latents (B, C, h, w), computed without gradients in batches of ``batch`` images."""
    parts = parts_of(len(noise), batch)
    return torch.cat(
        [run_rows(model, rows, noise[part.start : part.stop], texts.take(part), guidance_scale) for part in parts]
    )


def guided_output(
    model: DiffusionModel, scaled: Tensor, timestep: Tensor, texts: Texts, guidance_scale: float
) -> Tensor:
    """Return the guided output (B, C, h, w) of the UNet for scaled latents, float32."""
    call = model.unet.call(
        torch.cat([scaled, scaled]),
        timestep.expand(2 * len(scaled)),
        texts.contexts,
        pooled=texts.pooled,
        time_ids=texts.time_ids,
    )
    uncond, cond = model.unet.plain(call).float().chunk(2)
    return guide(uncond, cond, torch.full((len(scaled),), guidance_scale, device=scaled.device))


def run_rows(
    model: DiffusionModel,
    rows: Tensor,
    noise: Tensor,
    texts: Texts,
    guidance_scale: float,
    *,
    recompute: bool = False,
    path: list[Tensor] | None = None,
) -> Tensor:
    """Run the rows of one deterministic table that ends without noise.

    Args:
        model: The model; its UNet is not changed.
        rows: Table rows (R, NUM_COLUMNS), float32; gradients pass through them.
        noise: Starting noise (B, C, h, w).
        texts: Conditioning of the B images.
        guidance_scale: Scale of classifier-free guidance; every row is guided.
        recompute: Recompute each UNet call in the backward pass instead of keeping its activations.
        path: Gets the latents (B, C, h, w) before each row, scaled to unit variance.

    Returns:
        Final latents (B, C, h, w).
    """
    x = math.hypot(1.0, rows[0, SIGMA].item()) * noise
    history, no_noise = new_history(x), torch.zeros_like(x)
    for row in rows:
        same_row = row.expand(len(x), -1)
        scaled = scale_input(x, same_row)
        if path is not None:
            path.append(model.schedule.sigma_data * scaled)
        arguments = model, scaled, row[TIMESTEP], texts, guidance_scale
        output = checkpoint(guided_output, *arguments, use_reentrant=False) if recompute else guided_output(*arguments)
        x, _, history = advance(x, output, history, no_noise, same_row)
    return x


def squared_errors(latents: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared error (B,) of each image."""
    return ((latents - target) ** 2).flatten(1).mean(1)
