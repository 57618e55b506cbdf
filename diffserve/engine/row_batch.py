"""A mixed batch: the images of one tick, gathered from their lanes, and the rows they send through the UNet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from diffserve.engine.lane_pool import LanePool
from diffserve.engine.plan import RowLabel
from diffserve.engine.task import ImageTask
from schedulers.update import scale_input


@dataclass(frozen=True)
class ImageBatch:
    """B images of one shape, each at its own row of its own table.

    lanes     (B,) int64
    x         (B, C, h, w) float32 latents in sigma coordinates
    history   (B, HISTORY, C, h, w) float32
    rows      (B, K) float32 table rows
    guided    positions of the images that also run an unconditional row
    """

    tasks: tuple[ImageTask, ...]
    lanes: Tensor
    x: Tensor
    history: Tensor
    rows: Tensor
    guided: tuple[int, ...]

    @classmethod
    def gather(cls, tasks: Sequence[ImageTask], pool: LanePool) -> ImageBatch:
        """Copy the latents and histories of ``tasks`` out of their lanes."""
        lanes = torch.tensor([task.lane for task in tasks], device=pool.device)
        x, history = pool.gather(tasks[0].canvas.shape, lanes)
        packed = np.stack([task.table.packed[task.row_index] for task in tasks])
        rows = torch.from_numpy(packed).to(pool.device)
        guided = tuple(index for index, task in enumerate(tasks) if task.is_guided_now)
        return cls(tuple(tasks), lanes, x, history, rows, guided)

    @property
    def num_rows(self) -> int:
        """UNet rows: every image's conditional row, then the unconditional rows of the guided."""
        return len(self.tasks) + len(self.guided)

    @cached_property
    def image_of_row(self) -> tuple[int, ...]:
        """Which image each row belongs to."""
        return (*range(len(self.tasks)), *self.guided)

    @cached_property
    def scaled(self) -> Tensor:
        """(B, C, h, w) what the UNet sees."""
        return scale_input(self.x, self.rows)

    @cached_property
    def guidance(self) -> Tensor:
        """(B,) guidance scales."""
        return torch.tensor([task.settings.guidance_scale for task in self.tasks], device=self.x.device)

    @cached_property
    def noise(self) -> Tensor:
        """(B, C, h, w): a fresh draw from the generator of every image whose row draws, zeros elsewhere."""
        drawing = [index for index, task in enumerate(self.tasks) if task.table.draws[task.row_index]]
        noise = torch.zeros_like(self.x)
        for index in drawing:
            noise[index] = self.tasks[index].canvas.draw()
        return noise

    def is_uncond(self, row: int) -> bool:
        """Whether ``row`` is an unconditional one."""
        return row >= len(self.tasks)

    def label(self, row: int) -> RowLabel:
        """Whose row it is."""
        task = self.tasks[self.image_of_row[row]]
        part = "uncond" if self.is_uncond(row) else "cond"
        return RowLabel(task.live.request_id, task.image_index, task.step_index, part)
