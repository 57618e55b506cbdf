"""What a streamed image request is told: OpenAI's events, and beside them progress that its clients pass over.

Those of edits and variations begin with ``image_edit`` instead.

``image_generation.partial_image`` and ``image_generation.completed`` are OpenAI's, with additive fields: they carry no
index of their own, so ``image_index`` says which picture of the request is meant. Partial images have the preview's own
size. ``image_generation.progress`` is ours and comes first with the place in the queue, again as that changes, and then
with the steps: ``seconds_left`` is then of that picture, ``request_seconds_left`` always of the last of the request.
``image_generation.image_failed`` is ours too and costs one picture, not the request.
"""

from __future__ import annotations

import base64
import time
from collections import Counter
from typing import Any, Final, Protocol

from diffserve.api.types import Accepted, ImageFailed, ImageResult, Preview, Progress, Queued
from diffserve.service.http.errors import told
from diffserve.service.http.streams import event
from diffserve.service.images.answers import delivery, image_entry, recipe, usage
from diffserve.service.images.painting import CheckedImages

PARTIAL: Final = "partial_image"
COMPLETED: Final = "completed"
PROGRESS: Final = "progress"
IMAGE_FAILED: Final = "image_failed"
PROGRESS_EVERY_S: Final = 0.1
"""More often than this nobody can see; the last step is always told."""


class Teller(Protocol):
    """Writes what happens to one request as bytes; ``None``: nothing of it is told. What has pictures takes a while:
    call it in a thread.
    """

    def queued(self, event: Accepted | Queued, **fields: Any) -> bytes | None:
        """It is accepted, or has moved up in the queue, and how long all of it takes."""

    def progressed(self, progress: Progress) -> bytes | None:
        """Steps done and seconds left."""

    def partial(self, preview: Preview) -> bytes | None:
        """A picture of the way."""

    def completed(self, result: ImageResult, warnings: list[str]) -> bytes:
        """A finished picture."""

    def image_failed(self, failed: ImageFailed) -> bytes | None:
        """One picture is lost."""


class Throttle:
    """Keeps progress from being told more often than anybody can see."""

    def __init__(self) -> None:
        self._told_s: dict[int, float] = {}

    def lets_pass(self, progress: Progress) -> bool:
        """Whether it is to be told; the last step always is."""
        now_s, index = time.monotonic(), progress.image_index
        is_last = progress.step_index == progress.num_steps
        if not is_last and now_s - self._told_s.get(index, 0.0) < PROGRESS_EVERY_S:
            return False
        self._told_s[index] = now_s
        return True


class ImageEvents:
    """Writes the events of one request as bytes. Those with pictures take a while: call them in a thread."""

    def __init__(self, painting: CheckedImages) -> None:
        self._painting = painting
        self._num_partials: Counter[int] = Counter()
        self._throttle = Throttle()

    def progressed(self, progress: Progress) -> bytes | None:
        """Steps done and seconds left; ``None`` where the last such event is too fresh."""
        if not self._throttle.lets_pass(progress):
            return None
        return self.progress(
            image_index=progress.image_index,
            step=progress.step_index,
            steps=progress.num_steps,
            seconds_left=progress.seconds_left,
            request_seconds_left=progress.request_seconds_left,
        )

    def queued(self, event: Accepted | Queued, **fields: Any) -> bytes | None:
        """The place in the queue, and the seconds until all of it is done."""
        left = {"seconds_left": event.seconds_left, "request_seconds_left": event.seconds_left}
        return self.progress(step=0, queue_position=event.queue_position, **left, **fields)

    def partial(self, preview: Preview) -> bytes:
        """A picture of the way, in the format that was asked for."""
        picture, painting = preview.picture, self._painting
        index = self._num_partials[preview.image_index]
        self._num_partials[preview.image_index] += 1
        file = painting.preview_file(picture)
        return self._event(
            PARTIAL,
            b64_json=base64.b64encode(file).decode("ascii"),
            partial_image_index=index,
            **delivery(painting) | {"size": f"{picture.width_px}x{picture.height_px}"},
            image_index=preview.image_index,
            step=preview.step_index,
        )

    def completed(self, result: ImageResult, warnings: list[str]) -> bytes:
        """A finished picture, with all that is said of it in an answer that is not streamed."""
        painting, entry = self._painting, image_entry(self._painting, result)
        return self._event(
            COMPLETED,
            **entry,
            **delivery(painting),
            safety_identifier=painting.safety_identifier,
            usage=usage(painting, [result]),
            image_index=result.image_index,
            warnings=[*warnings, *painting.url_warnings],
            **recipe(painting, result),
        )

    def image_failed(self, failed: ImageFailed) -> bytes:
        """One picture is lost. Not called an error: clients take that for the end of everything."""
        return self._event(
            IMAGE_FAILED, image_index=failed.image_index, failure={"code": failed.code, "message": told(failed)}
        )

    def progress(self, **fields: Any) -> bytes | None:
        """How far it is; ``None`` where nobody wants to know."""
        if not self._painting.has_progress:
            return None
        names = ("image_index", "step", "steps", "seconds_left", "request_seconds_left", "queue_position")
        blank = dict.fromkeys(names)
        return self._event(PROGRESS, **blank | fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        kind = f"{self._painting.events}.{kind}"
        head = {"type": kind, "created_at": int(time.time()), "id": self._painting.request.request_id}
        return event(head | fields, kind)
