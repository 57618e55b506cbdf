"""Encoders of a streamed response: OpenAI's numbered events of its text and its images.

::

    created, in_progress                                                    when it is in the queue
    output_item.added, content_part.added, output_text.delta ..., output_text.done, content_part.done, output_item.done
    output_item.added, image_generation_call.in_progress, generating, partial_image ..., completed, output_item.done
    completed, incomplete (also if it was cancelled) or failed              with the complete object

``response.diffserve.progress`` is an extension, sent if the tool has ``progress``.
"""

from __future__ import annotations

import base64
from collections import Counter
from typing import Any, Final

from diffserve.api.errors import DiffserveError, ModerationBlocked
from diffserve.api.text_types import TextDelta
from diffserve.api.types import Accepted, ImageFailed, ImageResult, Preview, Progress, Queued
from diffserve.service.http.errors import told
from diffserve.service.http.streams import event
from diffserve.service.images.openai_encoder import Throttle, blocked_image, delivery_fields, image_entry
from diffserve.service.images.plan import ImagePlan
from diffserve.service.responses.response_objects import (
    Json,
    call_error,
    call_of,
    completed_call,
    logprob_of,
    message_of,
    response_error,
    response_of,
    text_part,
)

PROGRESS: Final = "diffserve.progress"


class ResponseEvents:
    """Numbers and encodes the events of one response; ``head`` has the fixed fields of its object."""

    def __init__(self, head: Json) -> None:
        self.head = head
        self.is_open = self.is_ended = False
        self._number = 0

    def opened(self) -> bytes:
        """Encode the start of the response; empty after the first call."""
        if self.is_open:
            return b""
        self.is_open = True
        response = response_of(self.head, "in_progress", [])
        return self.write("created", response=response) + self.write("in_progress", response=response)

    def ended(self, response: Json) -> bytes:
        """Return the last event, with the complete response; OpenAI has no event for a cancelled one."""
        self.is_ended = True
        kind = "incomplete" if response["status"] == "cancelled" else response["status"]
        return self.write(kind, response=response)

    def failed(self, error: DiffserveError, output: list[Json]) -> bytes:
        """Encode the last event of a response that failed."""
        return self.ended(response_of(self.head, "failed", output, error=response_error(error)))

    def write(self, kind: str, **fields: Any) -> bytes:
        """Encode one event with the next number."""
        kind = f"response.{kind}"
        number, self._number = self._number, self._number + 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)


class TextEvents:
    """Encodes the events of a message."""

    def __init__(self, events: ResponseEvents, item_id: str, end_ids: frozenset[int], has_logprobs: bool) -> None:
        self._events = events
        self._at = {"item_id": item_id, "output_index": 0, "content_index": 0}
        self._item_id = item_id
        self._end_ids = end_ids
        self._has_logprobs = has_logprobs
        self._text = ""

    def opened(self) -> bytes:
        """Encode the start of the message."""
        item = message_of(self._item_id, "in_progress", [])
        return (
            self._events.opened()
            + self._events.write("output_item.added", output_index=0, item=item)
            + self._events.write("content_part.added", **self._at, part=text_part(""))
        )

    def delta(self, told: TextDelta) -> bytes:
        """Encode new text; empty if there is neither text nor a token to report."""
        tokens = [token for token in told.tokens if self._has_logprobs and token.token_id not in self._end_ids]
        if not told.text and not tokens:
            return b""
        self._text += told.text
        content = {"delta": told.text, "logprobs": [logprob_of(token) for token in tokens]}
        return self._events.write("output_text.delta", **self._at, **content)

    def done(self, message: Json) -> bytes:
        """Encode the end of the message."""
        [part] = message["content"]
        return (
            self._events.write("output_text.done", **self._at, text=part["text"], logprobs=part["logprobs"])
            + self._events.write("content_part.done", **self._at, part=part)
            + self._events.write("output_item.done", output_index=0, item=message)
        )

    def so_far(self) -> list[Json]:
        """Return the incomplete message as the output of a failed response."""
        return [message_of(self._item_id, "incomplete", [text_part(self._text)])]


class CallEncoder:
    """Encodes image events as the events of a response; an ``EventEncoder``. Each image is an output item."""

    encodes_images = True

    def __init__(self, events: ResponseEvents, plan: ImagePlan, ids: list[str]) -> None:
        self._events = events
        self._plan = plan
        self._ids = ids
        self._throttle = Throttle()
        self._num_partials: Counter[int] = Counter()
        self._begun: set[int] = set()
        self.output = [call_of(plan, item_id, "in_progress") for item_id in ids]
        self.results: list[ImageResult] = []
        self.warnings: list[str] = []

    def queued(self, event: Accepted | Queued, **fields: Any) -> bytes | None:
        """Encode the queue position; the first call starts the response."""
        opened = self._opened()
        if not self._plan.has_progress:
            return opened or None
        left = {"seconds_left": event.seconds_left, "request_seconds_left": event.seconds_left}
        return opened + self._events.write(PROGRESS, step=0, queue_position=event.queue_position, **left, **fields)

    def progressed(self, progress: Progress) -> bytes | None:
        """Encode the completed steps; None if the last such event is too recent."""
        index = progress.image_index
        if not self._is_item(index):
            return None
        head = self._generating(index)
        if not self._plan.has_progress or not self._throttle.allows(progress):
            return head or None
        far = {"step": progress.step_index, "steps": progress.num_steps, "seconds_left": progress.seconds_left}
        request_seconds_left = progress.request_seconds_left
        return head + self._events.write(PROGRESS, **self._at(index), **far, request_seconds_left=request_seconds_left)

    def partial(self, preview: Preview) -> bytes | None:
        """Encode a preview."""
        picture, plan, index = preview.picture, self._plan, preview.image_index
        if not self._is_item(index):
            return None
        file = plan.preview_file(picture)
        number = self._num_partials[index]
        self._num_partials[index] += 1
        how = delivery_fields(plan) | {"size": f"{picture.width_px}x{picture.height_px}"}
        return self._generating(index) + self._call(
            index,
            "partial_image",
            partial_image_index=number,
            partial_image_b64=base64.b64encode(file).decode("ascii"),
            **how,
        )

    def completed(self, result: ImageResult, warnings: list[str]) -> bytes:
        """Encode a finished image."""
        index, entry = result.image_index, image_entry(self._plan, result)
        item = self.output[index] = completed_call(self._plan, self._ids[index], entry, result)
        self.results.append(result)
        self.warnings = list(dict.fromkeys([*self.warnings, *warnings]))
        head = self._generating(index) + self._call(index, "completed")
        return head + self._events.write("output_item.done", output_index=index, item=item)

    def image_failed(self, failed: ImageFailed) -> bytes | None:
        """Encode the failure of one image; the response goes on."""
        if not self._is_item(failed.image_index):
            return None
        index, error = failed.image_index, call_error(failed.code, told(failed))
        item = self.output[index] = call_of(self._plan, self._ids[index], "failed") | {"error": error}
        return self._opened() + self._events.write("output_item.done", output_index=index, item=item)

    def withheld(self, result: ImageResult, error: ModerationBlocked) -> bytes | None:
        """Encode that the safety filter blocked an image; a response with one image fails instead."""
        return self.image_failed(blocked_image(result, error)) if self._plan.request.num_images > 1 else None

    def so_far(self, error: DiffserveError) -> list[Json]:
        """Return the output of a response that fails with ``error``: unfinished images have failed."""
        ended, failed = ("completed", "failed"), {"status": "failed", "error": call_error(error.code, error.message)}
        return [item if item["status"] in ended else item | failed for item in self.output]

    def _opened(self) -> bytes:
        if self._events.is_open:
            return b""
        encoded = self._events.opened()
        for index, item in enumerate(self.output):
            encoded += self._events.write("output_item.added", output_index=index, item=item)
            encoded += self._call(index, "in_progress")
        return encoded

    def _is_item(self, index: int) -> bool:
        """Return whether an image is an output item; ``best_of`` generates more images than are returned."""
        return index < len(self._ids)

    def _generating(self, index: int) -> bytes:
        if index in self._begun:
            return b""
        self._begun.add(index)
        return self._opened() + self._call(index, "generating")

    def _call(self, index: int, kind: str, **fields: Any) -> bytes:
        return self._events.write(f"image_generation_call.{kind}", **self._at(index), **fields)

    def _at(self, index: int) -> Json:
        return {"item_id": self._ids[index], "output_index": index}
