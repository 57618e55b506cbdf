"""From finished latents to pictures, beside the steps: begun in one tick, and on a GPU told in a later one."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from diffserve.engine.engine import failure_of
from diffserve.engine.image.batch import LatentPool
from diffserve.engine.image.latent_cache import KeptLatents, LatentCache
from diffserve.engine.image.preparer import kin_of
from diffserve.engine.image.room import Room
from diffserve.engine.image.task import ImageTask, ShownPreview, TickOutcome
from diffserve.engine.image.unet_calls import UNetCaller
from diffserve.runtime import DiffusionModel
from diffserve.runtime.memory import without_frames
from diffserve.runtime.transfer import Fetched, SideQueue, fetch
from diffserve.runtime.vae.plan import DecodePlan, plan_decode
from diffserve.runtime.vae.vae import Decoded

GREY: Final = 128

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Decoding:
    """One image on its way: the ``place``-th picture of ``decoded``, begun at ``started_s``; ``source`` is what is
    decoded, kept until that is done; ``latents`` (C, h, w) are for who wants them.
    """

    started_s: float
    decoded: Decoded
    place: int
    source: Tensor
    latents: Fetched | None


@dataclass(frozen=True, eq=False)
class Showing:
    """A preview on its way: the ``place``-th of ``decoded``, as it was after ``num_steps``; see ``Decoding``."""

    decoded: Decoded
    place: int
    num_steps: int
    source: Tensor


class ImageDecoder:
    """Decodes with the VAE of ``model`` what lies in the slots of ``pool``.

    On a CUDA device this has a queue of its own there: no step waits for it, and nobody for the answer while there are
    steps to run.

    caller    holds memory that is only kept to save time, and gives it back
    room      how much the free memory lets one call decode; a larger image is decoded in tiles
    kept      gets the latents of those who take part
    is_alone  whether each image is decoded in a call of its own, so that its bytes do not depend on other images;
              otherwise images of one size share calls as far as memory allows
    tile_px   longest side of a tile in pixels that the configuration allows; 0: no limit
    """

    def __init__(
        self,
        model: DiffusionModel,
        pool: LatentPool,
        clock: Callable[[], float],
        caller: UNetCaller,
        room: Room,
        kept: LatentCache,
        *,
        is_alone: bool,
        tile_px: int = 0,
    ) -> None:
        self.model = model
        self.pool = pool
        self.clock = clock
        self.kept = kept
        self.is_alone = is_alone
        self.tile_px = tile_px
        self._caller = caller
        self._room = room
        self._queue = SideQueue(model.device)
        self._going: dict[ImageTask, Decoding] = {}
        self._shown: dict[ImageTask, Showing] = {}

    def decode(self, tasks: Sequence[ImageTask], outcome: TickOutcome, *, may_wait: bool) -> None:
        """Begin with those of ``tasks`` that are new, and tell ``outcome`` of all whose picture is here, or must be
        waited for.
        """
        by_shape = defaultdict[tuple[int, int, int], list[ImageTask]](list)
        for task in tasks:
            if task not in self._going:
                by_shape[task.loaded_state.shape].append(task)
        for (_, height, width), group in by_shape.items():
            step = self._plan(len(group), height, width).images_per_call
            for start in range(0, len(group), step):
                batch = group[start : start + step]
                self._begin(batch, outcome)
                self._tell(batch, outcome, may_wait=False)
        self._tell(tasks, outcome, may_wait=may_wait)

    def trim(self) -> None:
        """Forget pictures of images that have left."""
        self._going = {task: going for task, going in self._going.items() if task.state is not None}
        self._shown = {task: showing for task, showing in self._shown.items() if task.state is not None}

    def show(self, tasks: Sequence[ImageTask], denoised: Tensor) -> None:
        """Begin previews of ``denoised`` (len(tasks), C, h, w), the estimates after the step that is being made, in one
        call.
        """
        with self._queue:
            decoded = self.model.preview_later(denoised)
        for place, task in enumerate(tasks):
            self._shown[task] = Showing(decoded, place, task.step_index + 1, denoised)

    def is_showing(self, task: ImageTask) -> bool:
        """Whether a preview of ``task`` is on its way; the next begins after it."""
        return task in self._shown

    def tell_previews(self, tasks: Sequence[ImageTask], outcome: TickOutcome) -> None:
        """Tell ``outcome`` of previews that are here, of those of ``tasks`` who end a step."""
        for task in tasks:
            if task.ends_step and task in self._shown and self._shown[task].decoded.is_here:
                showing = self._shown.pop(task)
                outcome.previews[task] = ShownPreview(showing.num_steps, showing.decoded.picture(showing.place))

    def try_once(self, latents: Tensor) -> None:
        """Decode ``latents`` (C, h, w) and throw the picture away."""
        self.pictures(latents[None]).picture(0)

    def _begin(self, tasks: Sequence[ImageTask], outcome: TickOutcome) -> None:
        started_s = self.clock()
        try:
            latents = self._caller.with_room(lambda: torch.stack([self._latents(task) for task in tasks]))
            decoded = self.pictures(latents)
            for place, task in enumerate(tasks):
                self._going[task] = Decoding(started_s, decoded, place, latents, self._wanted(task, latents, place))
        except Exception as error:
            reason = failure_of(error, "painting this image")
            without_frames(error)
            if len(tasks) == 1:
                outcome.failures[tasks[0]] = reason
                outcome.decode_s[tasks[0]] = self.clock() - started_s
                return
            for task in tasks:
                self._begin([task], outcome)

    def _tell(self, tasks: Sequence[ImageTask], outcome: TickOutcome, *, may_wait: bool) -> None:
        for task in tasks:
            going = self._going.get(task)
            if going is not None and (may_wait or going.decoded.is_here):
                del self._going[task]
                self._end(task, going, outcome)

    def _end(self, task: ImageTask, going: Decoding, outcome: TickOutcome) -> None:
        try:
            outcome.pictures[task] = self._caller.with_room(lambda: going.decoded.picture(going.place))
            latents = None if going.latents is None else going.latents.read().numpy()
            if latents is not None and self._tells(task):
                outcome.latents[task] = latents
            if latents is not None and task.loaded_state.embedding is not None and not task.is_interrupted:
                self.kept.put(kin_of(task), task.live.request.prompt, KeptLatents(task.loaded_state.embedding, latents))
        except Exception as error:
            outcome.failures[task] = failure_of(error, "painting this image")
        outcome.decode_s[task] = self.clock() - going.started_s

    def _wanted(self, task: ImageTask, latents: Tensor, place: int) -> Fetched | None:
        """Finished latents for who asked for them, or for whoever asks for something similar."""
        is_wanted = task.live.request.return_latents or task.loaded_state.embedding is not None
        return self._caller.with_room(lambda: fetch(latents[place])) if is_wanted else None

    def _tells(self, task: ImageTask) -> bool:
        return task.live.request.return_latents

    def _latents(self, task: ImageTask) -> Tensor:
        assert task.slot is not None
        return task.table.out_scale * self.pool.latent(task.loaded_state.shape, task.slot)

    def _plan(self, num_images: int, height: int, width: int) -> DecodePlan:
        num_images = 1 if self.is_alone else num_images
        most_cells = self._room.picture_cells(num_images * height, width)
        tile_share = min(1.0, self.tile_px / (self.model.vae.factor * max(height, width)) or 1.0)
        return plan_decode(num_images, height, width, most_cells=most_cells, tile_share=tile_share)

    def _start(self, latents: Tensor) -> Decoded:
        plan = self._plan(*latents[:, 0].shape)
        with self._queue:
            return self.model.vae.decode_later(latents, plan.tile_share)

    def pictures(self, latents: Tensor) -> Decoded:
        """Decode ``latents`` (B, C, h, w) as planned, again after freeing memory, and at last in smaller tiles.

        Raises ``torch.OutOfMemoryError`` when several images do not fit; each alone may.
        """
        try:
            return self._caller.with_room(lambda: self._start(latents))
        except torch.OutOfMemoryError as error:
            without_frames(error)
        self._caller.ease()
        if len(latents) > 1:
            raise torch.OutOfMemoryError("no memory to decode pictures together")
        logger.warning("no memory to decode a picture in one piece: it is decoded in tiles")
        with self._queue:
            return Decoded.of(torch.from_numpy(self.model.vae.decode_in_tiles(latents)))


class LatentReader(ImageDecoder):
    """Tells finished latents, which somebody else decodes; in place of a picture there is a single grey pixel."""

    def pictures(self, latents: Tensor) -> Decoded:
        """As many pixels as there are ``latents``."""
        return Decoded.of(torch.full((len(latents), 1, 1, 3), GREY, dtype=torch.uint8))

    def _wanted(self, task: ImageTask, latents: Tensor, place: int) -> Fetched | None:
        return self._caller.with_room(lambda: fetch(latents[place]))

    def _tells(self, task: ImageTask) -> bool:
        return True
