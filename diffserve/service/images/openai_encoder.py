"""OpenAI's format of generated images: answers, and the events of a stream.

``partial_image`` and ``completed`` are OpenAI's events with additional fields; ``image_index`` is the image's place in
the request. ``progress`` (queue position, then steps) and ``image_failed`` are extensions that OpenAI's clients skip.
All names begin with ``image_generation.``, or with ``image_edit.`` for edits and variations.
"""

from __future__ import annotations

import base64
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import msgspec

from diffserve.api.errors import ModerationBlocked
from diffserve.api.types import Accepted, ImageFailed, ImageResult, Preview, Progress, Queued
from diffserve.media.infotext import write_infotext
from diffserve.service.http.errors import failure_message
from diffserve.service.http.streams import event as encode_event
from diffserve.service.images.image_store import new_name
from diffserve.service.images.plan import ImagePlan

PARTIAL: Final = "partial_image"
COMPLETED: Final = "completed"
PROGRESS: Final = "progress"
IMAGE_FAILED: Final = "image_failed"
PROGRESS_INTERVAL_S: Final = 0.1
"""Shortest time between two progress events of an image; the last step is always reported."""


def image_entry(plan: ImagePlan, result: ImageResult) -> dict[str, Any]:
    """Filter, watermark and encode an image, store it, and return its element of ``data``.

    ``revised_prompt`` is the text of the text encoder, null if that is the prompt of the body. ``similarity`` appears
    with ``similarity_threshold``, null if the image started from noise; ``score`` with ``best_of``. ``timings`` are
    seconds of the clock. Takes a while: call it in a thread.

    Raises:
        ModerationBlocked: The safety filter blocks the image.
    """
    width_px, height_px = plan.size.recorded_px
    file = plan.file(result, write_infotext(result, width_px=width_px, height_px=height_px))
    name = new_name(plan.image_format)
    url = {} if plan.urls is None else {"url": plan.urls.store(file, name)}
    history = plan.history
    history_id = {} if history is None else {"history_id": history.add(plan.request, plan.size, result, file, name)}
    similarity = {"similarity": result.similarity, "skipped_steps": result.skipped_steps}
    return url | {
        "b64_json": base64.b64encode(file).decode("ascii"),
        "revised_prompt": None if result.original_prompt is None and not result.template else result.prompt,
        "seed": result.seed,
        **({} if result.variation_seed is None else {"variation_seed": result.variation_seed}),
        "timings": timings(result),
        **({} if result.similarity_threshold is None else similarity),
        **({} if result.score is None else {"score": result.score}),
        **history_id,
    }


class EventEncoder(ABC):
    """Base class of encoders of a request's events; a method returns None if the protocol has no such event.

    ``partial`` and ``completed`` are called in threads if ``encodes_images``, the others on the event loop.
    """

    encodes_images = True

    def __init__(self, plan: ImagePlan) -> None:
        self._plan = plan
        self._num_partials: Counter[int] = Counter()
        self._last_progress_s: dict[int, float] = {}

    @abstractmethod
    def queued(self, event: Accepted | Queued) -> bytes | None:
        """Encode the queue position; the first event means that the engine accepted the request."""

    @abstractmethod
    def progressed(self, progress: Progress) -> bytes | None:
        """Encode the completed steps and the time left."""

    @abstractmethod
    def partial(self, preview: Preview) -> bytes | None:
        """Encode a preview."""

    @abstractmethod
    def completed(self, result: ImageResult, warnings: list[str]) -> bytes | None:
        """Encode a finished image. Raises ModerationBlocked if the safety filter blocks it."""

    @abstractmethod
    def image_failed(self, failed: ImageFailed) -> bytes | None:
        """Encode the failure of one image."""

    def withheld(self, result: ImageResult, error: ModerationBlocked) -> bytes | None:
        """Encode that the safety filter blocked an image; a request for one image fails instead."""
        if self._plan.request.num_images == 1:
            return None
        failed = ImageFailed(
            request_id=result.request_id, image_index=result.image_index, code=error.code, message=error.message
        )
        return self.image_failed(failed)

    def _is_progress_due(self, progress: Progress) -> bool:
        """Return whether to report ``progress``: the last step, or ``PROGRESS_INTERVAL_S`` after the last report."""
        now_s, index = time.monotonic(), progress.image_index
        is_last = progress.step_index == progress.num_steps
        if not is_last and now_s - self._last_progress_s.get(index, 0.0) < PROGRESS_INTERVAL_S:
            return False
        self._last_progress_s[index] = now_s
        return True

    def _encode_preview(self, preview: Preview) -> tuple[int, str, dict[str, Any]]:
        """Return the number of a preview of its image, its file in base64, and the fields that describe the file."""
        index, picture = preview.image_index, preview.picture
        number = self._num_partials[index]
        self._num_partials[index] += 1
        file = base64.b64encode(self._plan.preview_file(picture)).decode("ascii")
        return number, file, delivery_fields(self._plan) | {"size": f"{picture.width_px}x{picture.height_px}"}


class Collector(EventEncoder):
    """Collects the finished images of a request for an answer that is not streamed.

    ``encode`` returns the protocol's form of a finished image and is called in a thread; None: only results are wanted.
    """

    def __init__(self, plan: ImagePlan, encode: Callable[[ImageResult], dict[str, Any]] | None = None) -> None:
        super().__init__(plan)
        self._encode = encode
        self.encodes_images = encode is not None
        self._images: dict[int, tuple[ImageResult, dict[str, Any]]] = {}
        self._warnings = list(plan.warnings)
        self.failures: list[ImageFailed] = []

    @property
    def results(self) -> list[ImageResult]:
        """The results in the order of their images."""
        return [self._images[index][0] for index in sorted(self._images)]

    @property
    def entries(self) -> list[dict[str, Any]]:
        """The encoded images in order."""
        return [self._images[index][1] for index in sorted(self._images)]

    @property
    def warnings(self) -> list[str]:
        """Warnings of the plan, of the engine, of lost images, of the finished ones, and of their URLs."""
        of_results = (text for result, _ in self._images.values() for text in result.warnings)
        return list(dict.fromkeys([*self._warnings, *of_results, *self._plan.url_warnings]))

    def queued(self, event: Accepted | Queued) -> None:
        """Take the warnings of the engine."""
        if isinstance(event, Accepted):
            self._warnings += event.warnings

    def progressed(self, progress: Progress) -> None:
        """Ignore progress."""

    def partial(self, preview: Preview) -> None:
        """Ignore previews."""

    def completed(self, result: ImageResult, warnings: list[str]) -> None:
        """Encode and keep a finished image."""
        self._images[result.image_index] = result, {} if self._encode is None else self._encode(result)

    def image_failed(self, failed: ImageFailed) -> None:
        """Record a lost image."""
        self.failures.append(failed)
        self._warnings.append(f"image {failed.image_index} failed: {failure_message(failed)}")

    def withheld(self, result: ImageResult, error: ModerationBlocked) -> None:
        """Record a blocked image."""
        self._warnings.append(f"image {result.image_index} was withheld: {error.message}")


def encode_answer(plan: ImagePlan, images: Collector) -> bytes:
    """Return the body of a complete answer; takes a while with large images, so call it in a thread then."""
    return msgspec.json.encode(
        {
            "created": int(time.time()),
            "data": images.entries,
            **delivery_fields(plan),
            "safety_identifier": plan.safety_identifier,
            "usage": usage(plan, images.results),
            "warnings": images.warnings,
            **recipe(plan, images.results[0]),
        }
    )


def delivery_fields(plan: ImagePlan) -> dict[str, Any]:
    """Return OpenAI's fields that describe the format of the images."""
    return {
        "background": "opaque",
        "output_format": plan.image_format,
        "quality": plan.quality,
        "size": f"{plan.size.width_px}x{plan.size.height_px}",
    }


def recipe(plan: ImagePlan, result: ImageResult) -> dict[str, Any]:
    """Return the parameters that all images of the request share, taken from one of its results."""
    names = {"num_steps": "num_inference_steps"}
    fields = {names.get(name, name): value for name, value in result.recipe().items()}
    del fields["variation_seed"]  # which differs between images
    return {
        "id": plan.request.request_id,
        "model": result.model,
        "model_digest": result.model_digest,
        **fields,
        "loras": msgspec.to_builtins(result.loras),
        "controlnets": msgspec.to_builtins(result.controlnets),
        "references": msgspec.to_builtins(result.references),
        "micro_conditioning": msgspec.to_builtins(result.micro_conditioning),
        "refiner": result.refiner or None,
    }


def usage(plan: ImagePlan, results: list[ImageResult]) -> dict[str, Any]:
    """Return token counts in OpenAI's form, and device time in seconds.

    An image token is one cell of the generated latents' 8x8 grid. Images that ``best_of`` discarded are counted too.
    """
    counts = ((result.picture, 1 + result.num_discarded) for result in results)
    image_tokens = sum(count * (picture.width_px * picture.height_px // 64) for picture, count in counts)
    text_tokens = len(results[0].prompt.split())
    init = plan.request.init_image
    init_tokens = 0 if init is None else init.width_px * init.height_px // 64
    return {
        "input_tokens": text_tokens + init_tokens,
        "output_tokens": image_tokens,
        "total_tokens": text_tokens + init_tokens + image_tokens,
        "input_tokens_details": {"text_tokens": text_tokens, "image_tokens": init_tokens},
        "num_evaluations": sum(result.num_evaluations + result.discarded_evaluations for result in results),
        "num_cached": sum(result.cached is not None for result in results),
        **plan.spent(sum(result.device_s + result.discarded_device_s for result in results)),
    }


def timings(result: ImageResult) -> dict[str, float]:
    """Return the seconds that an image waited, was encoded, denoised and decoded."""
    return {name: round(seconds, 6) for name, seconds in msgspec.structs.asdict(result.timings).items()}


class OpenAIEncoder(EventEncoder):
    """Encodes the events of one request."""

    def __init__(self, plan: ImagePlan) -> None:
        super().__init__(plan)
        self._prefix = "image_generation" if plan.start is None else "image_edit"

    def queued(self, event: Accepted | Queued) -> bytes | None:
        """Encode the queue position and the seconds until all images are done; the first event has the seed."""
        left = {"seconds_left": event.seconds_left, "request_seconds_left": event.seconds_left}
        seed = {"seed": event.seed} if isinstance(event, Accepted) else {}
        return self._progress(step=0, queue_position=event.queue_position, **left, **seed)

    def progressed(self, progress: Progress) -> bytes | None:
        """Encode the completed steps and the seconds left; None if the last such event is too recent."""
        if not self._is_progress_due(progress):
            return None
        return self._progress(
            image_index=progress.image_index,
            step=progress.step_index,
            steps=progress.num_steps,
            seconds_left=progress.seconds_left,
            request_seconds_left=progress.request_seconds_left,
        )

    def partial(self, preview: Preview) -> bytes:
        """Encode a preview at its own size, in the format of the finished images."""
        number, file, fields = self._encode_preview(preview)
        return self._event(
            PARTIAL,
            b64_json=file,
            partial_image_index=number,
            **fields,
            image_index=preview.image_index,
            step=preview.step_index,
        )

    def completed(self, result: ImageResult, warnings: list[str]) -> bytes:
        """Encode a finished image with all fields of an answer that is not streamed."""
        plan, entry = self._plan, image_entry(self._plan, result)
        return self._event(
            COMPLETED,
            **entry,
            **delivery_fields(plan),
            safety_identifier=plan.safety_identifier,
            usage=usage(plan, [result]),
            image_index=result.image_index,
            warnings=[*warnings, *plan.url_warnings],
            **recipe(plan, result),
        )

    def image_failed(self, failed: ImageFailed) -> bytes:
        """Encode the failure of one image; its type is not "error", which ends the stream for OpenAI's clients."""
        failure = {"code": failed.code, "message": failure_message(failed)}
        return self._event(IMAGE_FAILED, image_index=failed.image_index, failure=failure)

    def _progress(self, **fields: Any) -> bytes | None:
        if not self._plan.has_progress:
            return None
        names = ("image_index", "step", "steps", "seconds_left", "request_seconds_left", "queue_position")
        return self._event(PROGRESS, **dict.fromkeys(names) | fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        kind = f"{self._prefix}.{kind}"
        head = {"type": kind, "created_at": int(time.time()), "id": self._plan.request.request_id}
        return encode_event(head | fields, kind)
