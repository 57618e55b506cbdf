"""ImageDecoder: decodes finished latents and previews while steps run; on a GPU the result arrives in a later tick."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from diffserve.engine.base_engine import failure_of
from diffserve.engine.image.batch import LatentPool
from diffserve.engine.image.caches import CachedLatents, LatentCache
from diffserve.engine.image.preparer import latent_key_of
from diffserve.engine.image.room import Room
from diffserve.engine.image.task import ImageTask, StepPreview, TickOutcome
from diffserve.engine.image.unet_calls import UNetCaller
from diffserve.runtime import DiffusionModel
from diffserve.runtime.memory import without_frames
from diffserve.runtime.transfer import Fetched, SideQueue, fetch
from diffserve.runtime.vae.vae import Decoded, DecodePlan, plan_decode

GRAY: Final = 128

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Decoding:
    """An image that is being decoded: image ``index`` of ``decoded``.

    Attributes:
        started_s: When decoding began.
        source: The latents, which must live until decoding is done.
        latents: (C, h, w) for requests that want them.
    """

    started_s: float
    decoded: Decoded
    index: int
    source: Tensor
    latents: Fetched | None


@dataclass(frozen=True, eq=False)
class PreviewDecoding:
    """A preview that is being decoded: image ``index`` of ``decoded``, after ``num_steps`` steps."""

    decoded: Decoded
    index: int
    num_steps: int
    source: Tensor


class ImageDecoder:
    """Decodes the latents in the slots of ``pool`` with the model's VAE.

    On a CUDA device decoding has its own stream: steps do not wait for it, and the engine waits for it only when there
    are no steps to run.

    Args:
        model: The loaded model.
        pool: The latent pool.
        clock: In seconds.
        caller: Frees cached memory when a call runs out of memory.
        room: Limits the images of a call by free memory; a larger image is decoded in tiles.
        cache: Gets the latents of requests that use the latent cache.
        is_alone: Whether each image has a call of its own, so that its bytes do not depend on other images.
        tile_px: Longest side of a tile in pixels; 0 for no limit.
    """

    def __init__(
        self,
        model: DiffusionModel,
        pool: LatentPool,
        clock: Callable[[], float],
        caller: UNetCaller,
        room: Room,
        cache: LatentCache,
        *,
        is_alone: bool,
        tile_px: int = 0,
    ) -> None:
        self.model = model
        self.pool = pool
        self.clock = clock
        self.cache = cache
        self.is_alone = is_alone
        self.tile_px = tile_px
        self._caller = caller
        self._room = room
        self._queue = SideQueue(model.device)
        self._decoding: dict[ImageTask, Decoding] = {}
        self._previews: dict[ImageTask, PreviewDecoding] = {}

    def decode(self, tasks: Sequence[ImageTask], outcome: TickOutcome, *, may_wait: bool) -> None:
        """Start decoding new ``tasks``, and add finished images to ``outcome``; with ``may_wait``, wait for all."""
        by_shape = defaultdict[tuple[int, int, int], list[ImageTask]](list)
        for task in tasks:
            if task not in self._decoding:
                by_shape[task.loaded_state.shape].append(task)
        for (_, height, width), group in by_shape.items():
            step = self._plan(len(group), height, width).images_per_call
            for start in range(0, len(group), step):
                batch = group[start : start + step]
                self._begin(batch, outcome)
                self._collect(batch, outcome, may_wait=False)
        self._collect(tasks, outcome, may_wait=may_wait)

    def trim(self) -> None:
        """Drop decoded data of images that have left."""
        self._decoding = {task: decoding for task, decoding in self._decoding.items() if task.state is not None}
        self._previews = {task: preview for task, preview in self._previews.items() if task.state is not None}

    def show(self, tasks: Sequence[ImageTask], denoised: Tensor) -> None:
        """Start previews of ``denoised`` (len(tasks), C, h, w), the estimates of the current step, in one call."""
        with self._queue:
            decoded = self.model.preview_later(denoised)
        for index, task in enumerate(tasks):
            self._previews[task] = PreviewDecoding(decoded, index, task.steps_done + 1, denoised)

    def is_showing(self, task: ImageTask) -> bool:
        """Return whether a preview of ``task`` is being decoded; the next one starts after it."""
        return task in self._previews

    def collect_previews(self, tasks: Sequence[ImageTask], outcome: TickOutcome) -> None:
        """Add finished previews of ``tasks`` that end a step to ``outcome``."""
        for task in tasks:
            if task.ends_step and task in self._previews and self._previews[task].decoded.is_here:
                preview = self._previews.pop(task)
                outcome.previews[task] = StepPreview(preview.num_steps, preview.decoded.picture(preview.index))

    def _begin(self, tasks: Sequence[ImageTask], outcome: TickOutcome) -> None:
        started_s = self.clock()
        try:
            latents = self._caller.with_room(lambda: torch.stack([self._latents(task) for task in tasks]))
            decoded = self.pictures(latents)
            for index, task in enumerate(tasks):
                self._decoding[task] = Decoding(
                    started_s, decoded, index, latents, self._fetch_latents(task, latents, index)
                )
        except Exception as error:
            reason = failure_of(error, "generating this image")
            without_frames(error)
            if len(tasks) == 1:
                outcome.failures[tasks[0]] = reason
                outcome.decode_s[tasks[0]] = self.clock() - started_s
                return
            for task in tasks:
                self._begin([task], outcome)

    def _collect(self, tasks: Sequence[ImageTask], outcome: TickOutcome, *, may_wait: bool) -> None:
        for task in tasks:
            decoding = self._decoding.get(task)
            if decoding is not None and (may_wait or decoding.decoded.is_here):
                del self._decoding[task]
                self._end(task, decoding, outcome)

    def _end(self, task: ImageTask, decoding: Decoding, outcome: TickOutcome) -> None:
        try:
            outcome.pictures[task] = self._caller.with_room(lambda: decoding.decoded.picture(decoding.index))
            latents = None if decoding.latents is None else decoding.latents.read().numpy()
            if latents is not None and self._wants_latents(task):
                outcome.latents[task] = latents
            if latents is not None and task.loaded_state.embedding is not None and not task.is_interrupted:
                self.cache.put_latents(
                    latent_key_of(task), task.prompt, CachedLatents(task.loaded_state.embedding, latents)
                )
        except Exception as error:
            outcome.failures[task] = failure_of(error, "generating this image")
        outcome.decode_s[task] = self.clock() - decoding.started_s

    def _fetch_latents(self, task: ImageTask, latents: Tensor, index: int) -> Fetched | None:
        """Fetch the finished latents if the request or the latent cache needs them."""
        if not (self._wants_latents(task) or task.loaded_state.embedding is not None):
            return None
        return self._caller.with_room(lambda: fetch(latents[index]))

    def _wants_latents(self, task: ImageTask) -> bool:
        return task.live.request.return_latents

    def _latents(self, task: ImageTask) -> Tensor:
        assert task.slot is not None
        return task.table.out_scale * self.pool.latent(task.loaded_state.shape, task.slot)

    def _plan(self, num_images: int, height: int, width: int) -> DecodePlan:
        num_images = 1 if self.is_alone else num_images
        most_cells = self._room.decodable_cells(num_images * height * width)
        tile_share = min(1.0, self.tile_px / (self.model.vae.factor * max(height, width)) or 1.0)
        return plan_decode(num_images, height, width, most_cells=most_cells, tile_share=tile_share)

    def _start(self, latents: Tensor) -> Decoded:
        plan = self._plan(*latents[:, 0].shape)
        with self._queue:
            return self.model.vae.decode_later(latents, plan.tile_share)

    def pictures(self, latents: Tensor) -> Decoded:
        """Decode ``latents`` (B, C, h, w); without memory, retry after freeing some, and then in tiles.

        Raises:
            torch.OutOfMemoryError: Several images do not fit together; each alone may.
        """
        try:
            return self._caller.with_room(lambda: self._start(latents))
        except torch.OutOfMemoryError as error:
            without_frames(error)
        self._caller.free_caches()
        if len(latents) > 1:
            raise torch.OutOfMemoryError("not enough memory to decode images in one batch")
        logger.warning("not enough memory to decode an image at once: it is decoded in tiles")
        with self._queue:
            return Decoded.of(torch.from_numpy(self.model.vae.decode_in_tiles(latents)))


class LatentReader(ImageDecoder):
    """Delivers finished latents for another process to decode, with a single gray pixel as the image."""

    def pictures(self, latents: Tensor) -> Decoded:
        """Return a gray pixel for each of ``latents``."""
        return Decoded.of(torch.full((len(latents), 1, 1, 3), GRAY, dtype=torch.uint8))

    def _wants_latents(self, task: ImageTask) -> bool:
        return True
