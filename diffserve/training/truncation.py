"""Truncation of a low-rank change: each layer gets the rank that its effect on the predicted velocity is worth.

The change of a layer is ``up @ down``. An error E of this matrix moves the velocity by about g' E x, where x is an
input of the layer and g a gradient at its output. Truncation therefore minimizes |G' E X|, where G G' and X X' are the
mean g g' and x x': a singular value decomposition in the metric of K-FAC (Martens & Grosse, 2015, arXiv 1503.05671).
The singular values of all layers then compete for one number of bytes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
from torch import Tensor, nn
from transformers import CLIPTokenizer

from diffserve.training.denoiser_training import Denoiser
from diffserve.training.distillation import Ladder, LowRankChange, apply_down, ddim_step
from diffserve.training.latents import tuning_scenes
from diffserve.training.vae_training import LATENT_CHANNELS
from diffserve.world.captions import loose_caption

MAX_BYTES = 2_500_000
NUM_CAPTIONS = 64
BATCH_ROWS = 16
LATENT_SIZE = 16
SEED = 77
DAMPING = 1e-4
"""Added to the diagonal of each second moment, as a share of its mean: unseen directions count a little."""
BYTES_PER_NUMBER = 2  # factors are saved in 16 bits


@dataclass
class Moments:
    """Second moments of one layer, summed over all positions and calls.

    hidden    of ``down`` applied to the layer's inputs, (rank, rank); they represent the inputs
    gradient  of the velocity's gradient at the layer's output, (out, out), averaged over the positions of a call
    """

    hidden: Tensor
    gradient: Tensor

    def record(self, down: Tensor, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        """Forward hook: add the moments of one call, those of the gradient when it is computed."""
        with torch.no_grad():
            self.hidden += _second_moment(layer, apply_down(down, layer, args[0]))

        def add_gradient(gradient: Tensor) -> None:
            positions = gradient.numel() // len(self.gradient)
            self.gradient += _second_moment(layer, gradient) / positions

        output.register_hook(add_gradient)


def measure_moments(
    change: LowRankChange, denoiser: Denoiser, tokenizer: CLIPTokenizer, num_captions: int = NUM_CAPTIONS
) -> list[Moments]:
    """Measure the moments of every layer along the four-step trajectories of ``denoiser`` with ``change``.

    Args:
        change: the change to be truncated.
        denoiser: the network without the change.
        tokenizer: the denoiser's.
        num_captions: how many random training captions to draw images of.
    """
    device = next(denoiser.unet.parameters()).device
    unet = change.merge_into(denoiser).unet.requires_grad_(True)
    moments = []
    for name, down, up in zip(change.layers, change.down, change.up, strict=True):
        shapes = (len(down), len(down)), (len(up), len(up))
        moments.append(Moments(*(torch.zeros(shape, device=device) for shape in shapes)))
        kernel = down.detach().view(-1, *change.kernels[name])
        unet.get_submodule(name).register_forward_hook(partial(moments[-1].record, kernel))
    rng, generator = random.Random(SEED), torch.Generator().manual_seed(SEED)
    captions = [loose_caption(scene, rng) for scene in islice(tuning_scenes(SEED), num_captions)]
    ladder = Ladder(substeps=1)
    for start in range(0, num_captions, BATCH_ROWS):
        words = captions[start : start + BATCH_ROWS]
        ids = tokenizer(words, padding="max_length", truncation=True, return_tensors="pt").input_ids.to(device)
        with torch.no_grad():
            context = denoiser.context(ids)
        shape = (len(words), LATENT_CHANNELS, LATENT_SIZE, LATENT_SIZE)
        points = torch.randn(shape, generator=generator).to(device)
        for timestep, angle in zip(ladder.timesteps, ladder.turns(), strict=True):
            velocity = unet(points, timestep, context).sample
            # An error of the velocity moves the next point by sin(angle) times as much. A random direction estimates
            # the sum over all directions without bias (Hutchinson, 1989).
            direction = torch.randn(shape, generator=generator).to(device)
            (math.sin(angle) * (velocity * direction).sum()).backward()
            points = ddim_step(points, velocity.detach(), angle)
    return moments


@torch.no_grad()
def truncate(change: LowRankChange, moments: Sequence[Moments], max_bytes: int = MAX_BYTES) -> LowRankChange:
    """Keep the ranks of ``change`` with the largest effect per byte, and at least one rank in every layer.

    Args:
        change: the change to truncate; it is not modified.
        moments: of its layers, see :func:`measure_moments`.
        max_bytes: size of all factors together, in 16 bits.
    """
    parts = [_decompose(*layer) for layer in zip(change.down, change.up, moments, strict=True)]
    sizes = [BYTES_PER_NUMBER * (down.shape[1] + up.shape[0]) for down, up, _ in parts]
    ranks, used = [1] * len(parts), sum(sizes)
    effects = (
        (float(value) ** 2 / size, index)
        for index, ((_, _, values), size) in enumerate(zip(parts, sizes, strict=True))
        for value in values[1:]
    )
    for _, index in sorted(effects, reverse=True):
        if used + sizes[index] > max_bytes:
            break
        ranks[index] += 1
        used += sizes[index]
    cut = [(down[:rank], up[:, :rank]) for (down, up, _), rank in zip(parts, ranks, strict=True)]
    return change.with_factors(*zip(*cut, strict=True))


def _decompose(down: Tensor, up: Tensor, moments: Moments) -> tuple[Tensor, Tensor, Tensor]:
    """Decompose a change by the singular values of its effect.

    Returns:
        ``down`` and ``up`` of the same change, ordered so that any first ranks are the best approximation of that rank,
        and the singular values (rank,).
    """
    inputs, outputs = _root(moments.hidden), _root(moments.gradient)
    left, values, right = torch.linalg.svd(outputs.T @ up.cpu().double() @ inputs, full_matrices=False)
    scale = values.sqrt()
    new_up = torch.linalg.solve_triangular(outputs.T, left * scale, upper=True)
    mixed = torch.linalg.solve_triangular(inputs, scale[:, None] * right, upper=False, left=False)
    return (mixed @ down.cpu().double()).float(), new_up.float(), values


def _root(moment: Tensor) -> Tensor:
    """Return the Cholesky factor of a second moment, in float64, with ``DAMPING``."""
    moment = moment.cpu().double()
    damping = DAMPING * moment.diagonal().mean() + torch.finfo(torch.float32).tiny
    factor: Tensor = torch.linalg.cholesky(moment + damping * torch.eye(len(moment), dtype=torch.float64))
    return factor


def _second_moment(layer: nn.Module, values: Tensor) -> Tensor:
    """Sum v v' over all positions of ``values``, whose channel axis depends on the kind of ``layer``."""
    channels_last = values.movedim(1, -1) if isinstance(layer, nn.Conv2d) else values
    rows = channels_last.flatten(0, -2)
    return rows.T @ rows
