"""Upscaling: one tile of one image between two image steps.

Up to ``MAX_ACTIVE`` images are in progress and take turns; interactive requests come before batch work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from diffserve.api.upscale_types import Upscaled, UpscaleEvent, UpscaleRequest
from diffserve.engine.image.engines import ImageEngines
from diffserve.engine.stages import QueuedRequest, RequestQueue
from diffserve.runtime.upscaling.store import NetworkRun, UpscalerStore

MAX_WAITING: Final = 64
MAX_ACTIVE: Final = 4


@dataclass(eq=False)
class QueuedUpscale(QueuedRequest[UpscaleRequest]):
    """Upscaling in progress.

    Attributes:
        run: The tiles of the image; ``None`` before the first one.
        device_s: Seconds spent on tiles.
        num_turns: Number of turns so far.
    """

    run: NetworkRun | None = None
    device_s: float = 0.0
    num_turns: int = 0


class UpscalerQueue(RequestQueue[UpscaleRequest]):
    """Queue of upscaling requests; ``tick`` runs in the engine thread."""

    doing = "upscaling this image"
    goal = "the image was upscaled"
    entry = QueuedUpscale

    def __init__(self, images: ImageEngines, clock: Callable[[], float]) -> None:
        super().__init__(images, MAX_WAITING, clock)
        self._upscalers = UpscalerStore(images.info)

    @property
    def has_work(self) -> bool:
        """Whether a request waits: no image model is needed."""
        return bool(self._waiting)

    def check(self, request: UpscaleRequest, *, num_ahead: int = 0) -> None:
        """Raise InvalidRequest for an unknown or damaged file, or if the result would be too large."""
        image = request.image
        self._upscalers.check_image(request.upscaler, image.width_px, image.height_px, param="image")

    def tick(self) -> list[UpscaleEvent]:
        """Run one tile of one image and return the events."""
        events: list[UpscaleEvent] = self._expire()
        queued = self._next()
        if queued is None:
            return events
        started_s = self._clock()
        try:
            if queued.run is None:
                queued.run = NetworkRun(self._upscalers.load(queued.request.upscaler), queued.request.image.array)
            queued.run.run_next()
        except Exception as error:
            return [*events, *self._fail([queued], error)]
        queued.device_s += self._clock() - started_s
        queued.num_turns += 1
        if queued.run.is_done and self.cancel(queued.request.request_id):
            done = Upscaled(
                request_id=queued.request.request_id,
                image=queued.run.result(),
                upscaler=queued.request.upscaler,
                scale=queued.run.upscaler.shape.scale,
                device_s=queued.device_s,
                waited_s=self._clock() - queued.since_s,
            )
            events.append(done)
        return events

    def _next(self) -> QueuedUpscale | None:
        """Return the request whose turn it is: of the images in progress the one with the fewest turns."""
        waiting: list[QueuedUpscale] = sorted(
            self._entries(), key=lambda each: (each.request.priority == "batch", each.run is None, each.since_s)
        )
        active = waiting[:MAX_ACTIVE]
        interactive = [each for each in active if each.request.priority != "batch"]
        return min(interactive or active, key=lambda each: each.num_turns, default=None)
