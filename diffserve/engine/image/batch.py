"""A mixed batch: the images of one tick, gathered from their slots, and the rows they send through the UNet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from diffserve.api.tiles import TileLayout
from diffserve.engine.image.state import draw_noise
from diffserve.engine.image.task import UNCOND, ImageTask, RowLabel
from diffserve.runtime.transfer import send
from schedulers.update import HISTORY, NUM_COLUMNS, scale_input


class BatchRow(NamedTuple):
    """One evaluation of the UNet in a batch.

    Attributes:
        image: Index of the image in the batch.
        part: The text that conditions it: 0 for the prompt, further numbers for the further parts of a prompt, and
            ``task.UNCOND`` for the unconditional row.
        view: The tile of the latent that it evaluates; 0, the entire latent, for an image without tiles.
    """

    image: int
    part: int
    view: int = 0

    @property
    def is_uncond(self) -> bool:
        """Whether it is an unconditional row."""
        return self.part == UNCOND


@dataclass(frozen=True)
class ImageBatch:
    """B images of one shape, each at its own row of its own table.

    slots     (B,) int64
    x         (B, C, h, w) float32 latents in sigma coordinates
    history   (B, HISTORY, C, h, w) float32
    rows      (B, K) float32 table rows
    guidance  (B,) float32 guidance scales
    guided    positions of the images that also run an unconditional row
    unet_rows the rows that the UNet evaluates: all conditional rows, image by image, then the unconditional rows of the
              guided
    owners    (num_rows,) int64, the image that each of ``unet_rows`` belongs to
    drawing   (D,) int64 positions of the images whose row draws noise
    """

    tasks: tuple[ImageTask, ...]
    slots: Tensor
    x: Tensor
    history: Tensor
    rows: Tensor
    guidance: Tensor
    guided: tuple[int, ...]
    unet_rows: tuple[BatchRow, ...]
    owners: Tensor
    drawing: Tensor

    @classmethod
    def gather(cls, tasks: Sequence[ImageTask], pool: LatentPool) -> ImageBatch:
        """Copy the latents and histories of ``tasks`` out of their slots, with two transfers for all indices."""
        unet_rows = rows_of(tasks)
        guided = tuple(row.image for row in unet_rows if row.is_uncond)
        drawing = [index for index, task in enumerate(tasks) if task.draws_now]
        sizes = [len(tasks), len(unet_rows), len(drawing)]
        indices = [*(task.slot for task in tasks), *(row.image for row in unet_rows), *drawing]
        packed = np.empty((len(tasks), NUM_COLUMNS + 1), np.float32)  # (B, K + 1)
        for row, task in zip(packed, tasks, strict=True):
            row[:NUM_COLUMNS], row[NUM_COLUMNS] = task.table.packed[task.row_index], task.guidance_now
        slots, owners, places = send(torch.tensor(indices), pool.device).split(sizes)
        rows = send(torch.from_numpy(packed), pool.device)
        x, history = pool.gather(tasks[0].loaded_state.shape, slots)
        table_rows, guidance = rows[:, :NUM_COLUMNS], rows[:, NUM_COLUMNS]
        return cls(tuple(tasks), slots, x, history, table_rows, guidance, guided, unet_rows, owners, places)

    @property
    def num_rows(self) -> int:
        """Number of UNet rows, where a tiled image counts as if it were not tiled."""
        return len(self.unet_rows)

    @cached_property
    def scaled(self) -> Tensor:
        """Inputs of the UNet, (B, C, h, w)."""
        return scale_input(self.x, self.rows)

    @cached_property
    def noise(self) -> Tensor:
        """(B, C, h, w): a fresh draw from the generator of every image whose row draws, zeros elsewhere."""
        states = [task.loaded_state for task in self.tasks if task.draws_now]
        if not states:
            return torch.zeros_like(self.x)
        drawn = draw_noise(states, self.x.device)
        return torch.zeros_like(self.x).index_copy_(0, self.drawing, drawn)


class UNetRows:
    """Rows that share UNet calls: of one batch, or of several batches with latents of different shapes and tiles.

    Without tiles the inputs are those of the only batch, and the rows are its rows. Otherwise each tile of an image is
    an input, which the rows of all parts of its conditioning share.

    Attributes:
        batches: The batches, in order.
        tasks: Their images, in order; ``unet_rows`` count these.
        unet_rows: The rows: batch after batch in the order of its own rows, for each of them its tiles.
        scaled: (I, C, h, w) inputs of the UNet.
        rows: (I, K) float32 table rows of the inputs.
        owners: (num_rows,) int64, the input of each of ``unet_rows``.
        inputs: The same as a tuple.
    """

    def __init__(self, batches: Sequence[ImageBatch]) -> None:
        self.batches = tuple(batches)
        first = self.batches[0]
        if len(self.batches) == 1 and all(task.settings.tiles is None for task in first.tasks):
            self.tasks, self.unet_rows, self.owners = first.tasks, first.unet_rows, first.owners
            self.scaled, self.rows = first.scaled, first.rows
            self.inputs: tuple[int, ...] = tuple(row.image for row in first.unet_rows)
            return
        self.tasks = tuple(task for batch in self.batches for task in batch.tasks)
        self.scaled = torch.cat([tile for batch in self.batches for tile in _tiles_of(batch)])
        views = torch.tensor([task.settings.num_views for task in self.tasks])
        self.rows = torch.cat([batch.rows for batch in self.batches]).repeat_interleave(
            send(views, first.x.device), dim=0, output_size=int(views.sum())
        )
        begins = (views.cumsum(0) - views).tolist()  # the first input of each image
        offsets = [sum(len(batch.tasks) for batch in self.batches[:index]) for index in range(len(self.batches))]
        self.unet_rows = tuple(
            BatchRow(offset + row.image, row.part, view)
            for offset, batch in zip(offsets, self.batches, strict=True)
            for row in batch.unet_rows
            for view in range(batch.tasks[row.image].settings.num_views)
        )
        self.inputs = tuple(begins[row.image] + row.view for row in self.unet_rows)
        self.owners = send(torch.tensor(self.inputs), first.x.device)

    @property
    def num_rows(self) -> int:
        """Number of UNet rows."""
        return len(self.unet_rows)

    def task_of(self, row: int) -> ImageTask:
        """Return the image of UNet row ``row``."""
        return self.tasks[self.unet_rows[row].image]

    def label(self, row: int) -> RowLabel:
        """Return the label of UNet row ``row``."""
        task, part = self.task_of(row), self.unet_rows[row].part
        name = "uncond" if part == UNCOND else f"cond {part + 1}" if part else "cond"
        return RowLabel(task.live.request_id, task.image_index, task.step_index, name)

    def outputs(self, output: Tensor) -> list[Tensor]:
        """Return for each batch the outputs (its ``num_rows``, C, h, w) of ``output`` (num_rows, C, tile h, tile w).

        Tiles are blended with the weights of their layout; see ``tiles``.
        """
        if len(self.unet_rows) == self.batches[0].num_rows:
            return [output]
        results, start = [], 0
        for batch in self.batches:
            blended = []
            for row in batch.unet_rows:
                tiles = batch.tasks[row.image].settings.tiles
                stop = start + (1 if tiles is None else tiles.num_tiles)
                blended.append(output[start] if tiles is None else blend(output[start:stop], tiles))
                start = stop
            results.append(torch.stack(blended))
        return results


def _tiles_of(batch: ImageBatch) -> Iterable[Tensor]:
    """Yield the inputs (views, C, h, w) of each image of ``batch``: its tiles, or its entire latent."""
    for image, task in enumerate(batch.tasks):
        yield (
            batch.scaled[image : image + 1]
            if task.settings.tiles is None
            else cut(batch.scaled[image], task.settings.tiles)
        )


def cut(latent: Tensor, tiles: TileLayout) -> Tensor:
    """Return the tiles (num_tiles, C, tile h, tile w) of ``latent`` (C, h, w)."""
    return torch.stack([latent[:, rows, columns] for rows, columns in map(tiles.slices, range(tiles.num_tiles))])


def blend(values: Tensor, tiles: TileLayout) -> Tensor:
    """Return the weighted mean (C, h, w) of overlapping tiles ``values`` (num_tiles, C, tile h, tile w)."""
    weighted = values * _weights(tiles, values.device)
    blended = values.new_zeros((values.shape[1], *tiles.latent))
    for view in range(tiles.num_tiles):
        rows, columns = tiles.slices(view)
        blended[:, rows, columns] += weighted[view]
    return blended


@lru_cache(maxsize=16)
def _weights(tiles: TileLayout, device: torch.device) -> Tensor:
    """Return the weights (num_tiles, 1, tile h, tile w) of ``tiles`` on ``device``."""
    return send(torch.from_numpy(tiles.weights)[:, None], device)


def rows_of(tasks: Sequence[ImageTask]) -> tuple[BatchRow, ...]:
    """Return the UNet rows of ``tasks``: all conditional rows, image by image, then the unconditional ones."""
    rows = [BatchRow(image, part) for image, task in enumerate(tasks) for part in task.parts_now]
    return (*(row for row in rows if not row.is_uncond), *(row for row in rows if row.is_uncond))


LatentShape = tuple[int, int, int]


class LatentPool:
    """One float32 tensor of latents (slots, C, h, w) and one of histories (slots, HISTORY, C, h, w) per latent shape.

    Slots are numbered across shapes by the scheduler's ``SlotQueue``; what a shape has is reserved, or grows to
    the next power of two above the highest slot that used it; :meth:`keep_only` drops it when many have come and gone.
    Latents are in sigma coordinates (noise std over unit signal).
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._latents: dict[LatentShape, torch.Tensor] = {}
        self._history: dict[LatentShape, torch.Tensor] = {}

    def reserve(self, shape: LatentShape, num_lanes: int) -> None:
        """Allocate space for ``num_lanes`` latents of ``shape``, at least eight."""
        old_size = self._latents[shape].shape[0] if shape in self._latents else 0
        if old_size >= num_lanes:
            return
        size = max(8, 1 << (num_lanes - 1).bit_length())
        latents = torch.zeros((size, *shape), device=self.device)  # (slots, C, h, w)
        history = torch.zeros((size, HISTORY, *shape), device=self.device)  # (slots, HISTORY, C, h, w)
        if old_size:
            latents[:old_size] = self._latents[shape]
            history[:old_size] = self._history[shape]
        self._latents[shape], self._history[shape] = latents, history

    def open(self, slot: int, start: torch.Tensor, history: torch.Tensor | None = None) -> None:
        """Write the start latent (C, h, w) into ``slot``: nothing of the last holder is left.

        ``history`` (HISTORY, C, h, w) is that of an image that resumes; without it the history is zero.
        """
        shape = (start.shape[0], start.shape[1], start.shape[2])
        self.reserve(shape, slot + 1)
        self._latents[shape][slot] = start
        self._history[shape][slot] = 0.0 if history is None else history

    def gather(self, shape: LatentShape, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy latents (B, C, h, w) and histories (B, HISTORY, C, h, w) of ``slots`` (B,) int64."""
        return self._latents[shape].index_select(0, slots), self._history[shape].index_select(0, slots)

    def scatter(self, slots: torch.Tensor, latents: torch.Tensor, history: torch.Tensor) -> None:
        """Write the advanced latents and histories back."""
        shape = (latents.shape[1], latents.shape[2], latents.shape[3])
        self._latents[shape].index_copy_(0, slots, latents)
        self._history[shape].index_copy_(0, slots, history)

    def latent(self, shape: LatentShape, slot: int) -> torch.Tensor:
        """Return a view (C, h, w) of one slot's latent."""
        return self._latents[shape][slot]

    def history(self, shape: LatentShape, slot: int) -> torch.Tensor:
        """Return a view (HISTORY, C, h, w) of one slot's history."""
        return self._history[shape][slot]

    @property
    def num_shapes(self) -> int:
        """Shapes that have storage."""
        return len(self._latents)

    def keep_only(self, shapes: Iterable[LatentShape]) -> None:
        """Drop the storage of every other shape."""
        for shape in set(self._latents) - set(shapes):
            del self._latents[shape], self._history[shape]
