"""Upscaling: one tile of one image between two image steps.

Up to ``MAX_ACTIVE`` images are in progress and take turns; interactive requests come before batch work.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from cachetools import LRUCache

from diffserve.api.errors import InsufficientMemory, InvalidRequest, ModelLoadError
from diffserve.api.types import Picture
from diffserve.api.upscale_types import Upscaled, UpscaleEvent, UpscaleRequest, check_output_size
from diffserve.engine.image.engines import ImageEngines
from diffserve.engine.stages import QueuedRequest, RequestQueue
from diffserve.models.upscalers import UpscalerFile, UpscalerFolders, read_upscaler
from diffserve.runtime import choose_device
from diffserve.runtime.memory import free_bytes, give_memory_back
from diffserve.runtime.upscaling.network import Upscaler
from diffserve.runtime.upscaling.tiles import MIN_CORE_PX, TiledImage

MAX_WAITING: Final = 64
MAX_ACTIVE: Final = 4
KEPT_UPSCALERS: Final = 2
"""Upscalers that stay in memory."""

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class QueuedUpscale(QueuedRequest[UpscaleRequest]):
    """Upscaling in progress.

    Attributes:
        upscaler: The loaded upscaler; ``None`` before the first tile.
        image: The tiles.
        device_s: Seconds spent on tiles.
        num_turns: Number of turns so far.
    """

    upscaler: Upscaler | None = None
    image: TiledImage | None = None
    device_s: float = 0.0
    num_turns: int = 0


class UpscalerQueue(RequestQueue[UpscaleRequest]):
    """Queue of upscaling requests; ``tick`` runs in the engine thread."""

    doing = "upscaling this image"
    goal = "the image was upscaled"
    entry = QueuedUpscale

    def __init__(self, images: ImageEngines, clock: Callable[[], float]) -> None:
        super().__init__(images, MAX_WAITING, clock)
        self._folders = UpscalerFolders(images.info.upscaler_dir)
        self._loaded: LRUCache[tuple[Path, int, int], Upscaler] = LRUCache(KEPT_UPSCALERS)

    @property
    def has_work(self) -> bool:
        """Whether a request waits: no image model is needed."""
        return bool(self._waiting)

    def check(self, request: UpscaleRequest, *, num_ahead: int = 0) -> None:
        """Raise InvalidRequest for an unknown or damaged file, or if the result would be too large."""
        path = self._folders.find(request.upscaler)
        scale = _read(request.upscaler, path).shape.scale
        check_output_size(scale * request.image.width_px, scale * request.image.height_px, "image")

    def tick(self) -> list[UpscaleEvent]:
        """Run one tile of one image and return the events."""
        events: list[UpscaleEvent] = self._expire()
        queued = self._next()
        if queued is None:
            return events
        started_s = self._clock()
        try:
            self._run(queued)
        except Exception as error:
            return [*events, *self._fail([queued], error)]
        queued.device_s += self._clock() - started_s
        queued.num_turns += 1
        image, upscaler = queued.image, queued.upscaler
        assert image is not None
        assert upscaler is not None
        if image.is_done and self.cancel(queued.request.request_id):
            done = Upscaled(
                request_id=queued.request.request_id,
                image=Picture.from_array(image.result()),
                upscaler=queued.request.upscaler,
                scale=upscaler.shape.scale,
                device_s=queued.device_s,
                waited_s=self._clock() - queued.since_s,
            )
            events.append(done)
        return events

    def _next(self) -> QueuedUpscale | None:
        """Return the request whose turn it is: of the images in progress the one with the fewest turns."""
        waiting: list[QueuedUpscale] = sorted(
            self._entries(), key=lambda each: (each.request.priority == "batch", each.image is None, each.since_s)
        )
        active = waiting[:MAX_ACTIVE]
        interactive = [each for each in active if each.request.priority != "batch"]
        return min(interactive or active, key=lambda each: each.num_turns, default=None)

    def _run(self, queued: QueuedUpscale) -> None:
        """Run the next tile of an image, in smaller tiles if memory is short."""
        if queued.upscaler is None or queued.image is None:
            queued.upscaler = self._load(queued.request.upscaler)
            queued.image = queued.upscaler.tiled(queued.request.image.array)
        image, upscaler = queued.image, queued.upscaler
        try:
            image.run_next(upscaler.enlarge)
            return
        except torch.OutOfMemoryError:
            if image.plan.core_px <= MIN_CORE_PX:
                raise
        side = image.plan.core_px // 2 + 2 * image.plan.margin_px
        logger.warning("upscaling continues in tiles of %d px: memory is short", image.plan.core_px // 2)
        give_memory_back(upscaler.device)
        queued.image = upscaler.tiled(queued.request.image.array, side**2)

    def _load(self, name: str) -> Upscaler:
        """Return the upscaler ``name``, from memory or its file.

        Raises:
            InvalidRequest: The file is missing or cannot be used.
            InsufficientMemory: The device has too little free memory.
        """
        path = self._folders.find(name)
        status = path.stat()
        key = (path, status.st_size, status.st_mtime_ns)
        if key not in self._loaded:
            info = self._images.info
            choice = choose_device(info.device, info.dtype)
            need, free = 4 * _read(name, path).num_parameters, free_bytes(choice.device)
            if free is not None and need > free:
                raise InsufficientMemory(
                    f"upscaler {name!r} needs {need >> 20} MiB of memory, and {free >> 20} MiB are free; try again "
                    "later, or choose a smaller one."
                )
            try:
                self._loaded[key] = Upscaler.load(path, choice)
            except ModelLoadError as error:
                raise _refused(name, path, error) from None
        return self._loaded[key]


def _read(name: str, path: Path) -> UpscalerFile:
    try:
        return read_upscaler(path)
    except ModelLoadError as error:
        raise _refused(name, path, error) from None


def _refused(name: str, path: Path, error: ModelLoadError) -> InvalidRequest:
    """Return ``error`` as an error of the request, without the path of the folder."""
    problem = error.message.replace(str(path), path.name)
    return InvalidRequest(f"upscaler {name!r} cannot be used: {problem}", param="upscaler")
