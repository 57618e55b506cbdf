"""Latents and sampler histories of all images in flight, pooled: a mixed batch is one gather and one scatter."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from schedulers.update import HISTORY

LatentShape = tuple[int, int, int]


class LanePool:
    """One float32 tensor of latents (lanes, C, h, w) and one of histories (lanes, HISTORY, C, h, w) per latent shape.

    Lanes are numbered across shapes by the scheduler's ``LaneTable``; storage of a shape grows to the next power of two
    above the highest lane that used it, and is dropped by :meth:`keep_only` when many shapes have come and gone.
    Latents are in sigma coordinates (noise std over unit signal).
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._latents: dict[LatentShape, torch.Tensor] = {}
        self._history: dict[LatentShape, torch.Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes held now."""
        return sum(pool.nbytes for pool in (*self._latents.values(), *self._history.values()))

    def open(self, lane: int, start: torch.Tensor) -> None:
        """Write the start latent (C, h, w) into ``lane`` and zero its history: nothing of the last holder is left."""
        shape = (start.shape[0], start.shape[1], start.shape[2])
        self._reserve(shape, lane + 1)
        self._latents[shape][lane] = start
        self._history[shape][lane] = 0.0

    def gather(self, shape: LatentShape, lanes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of (latents (B, C, h, w), history (B, HISTORY, C, h, w)) of ``lanes`` (B,) int64."""
        return self._latents[shape].index_select(0, lanes), self._history[shape].index_select(0, lanes)

    def scatter(self, lanes: torch.Tensor, latents: torch.Tensor, history: torch.Tensor) -> None:
        """Write the advanced latents and histories back."""
        shape = (latents.shape[1], latents.shape[2], latents.shape[3])
        self._latents[shape].index_copy_(0, lanes, latents)
        self._history[shape].index_copy_(0, lanes, history)

    def latent(self, shape: LatentShape, lane: int) -> torch.Tensor:
        """A view (C, h, w) of one lane's latent."""
        return self._latents[shape][lane]

    @property
    def num_shapes(self) -> int:
        """Shapes that have storage."""
        return len(self._latents)

    def keep_only(self, shapes: Iterable[LatentShape]) -> None:
        """Drop the storage of every other shape."""
        for shape in set(self._latents) - set(shapes):
            del self._latents[shape], self._history[shape]

    def _reserve(self, shape: LatentShape, num_lanes: int) -> None:
        held = self._latents[shape].shape[0] if shape in self._latents else 0
        if held >= num_lanes:
            return
        size = max(8, 1 << (num_lanes - 1).bit_length())
        latents = torch.zeros((size, *shape), device=self.device)  # (lanes, C, h, w)
        history = torch.zeros((size, HISTORY, *shape), device=self.device)  # (lanes, HISTORY, C, h, w)
        if held:
            latents[:held] = self._latents[shape]
            history[:held] = self._history[shape]
        self._latents[shape], self._history[shape] = latents, history
