"""Captures the images of requests between two steps, and continues captured images with the same bytes."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

import msgspec
import torch
from msgspec.structs import replace

from diffserve.api.types import Captured, GenerationRequest, ModelInfo
from diffserve.engine.image.batch import LatentPool
from diffserve.engine.image.caches import image_key
from diffserve.engine.image.capture_format import (
    VERSION,
    CaptureError,
    ImageCapture,
    PendingImage,
    RequestCapture,
    decode_capture,
    describe_model,
    encode_capture,
    kind_of_device,
)
from diffserve.engine.image.task import GroupKey, ImageTask, LiveRequest, TickOutcome, TickPlan
from diffserve.engine.records import Stage
from diffserve.runtime.text.transferred_encodings import to_tensor
from diffserve.runtime.threads import pool_of_threads
from diffserve.runtime.transfer import fetch

logger = logging.getLogger(__name__)


def digest_of(task: ImageTask, info: ModelInfo) -> bytes:
    """Return the SHA-256 of everything that the image of ``task`` depends on, with the defaults of this engine."""
    key = image_key(task, replace(info, device=kind_of_device(info)))
    recipe = task.live.settings.recipe() | {"variation_seed": None}  # the seed of this image is in the key
    return hashlib.sha256(key + msgspec.msgpack.encode(recipe)).digest()


def admit_resumed(
    request: GenerationRequest, info: ModelInfo, admit: Callable[[GenerationRequest], LiveRequest]
) -> LiveRequest:
    """Admit ``request`` by ``admit``, with images that continue from ``request.resume_from``.

    Seeds that the request does not give are those of the capture. Images that cannot continue start at their first
    step, and the reason is logged.
    """
    data, request = request.resume_from or b"", replace(request, resume_from=None)
    try:
        capture = decode_capture(data, info)
    except CaptureError as reason:
        log_refusal(request.request_id, reason)
        return admit(request)
    seed = capture.seed if request.seed is None else request.seed
    diffusion = request.diffusion
    if capture.variation_seed is not None and diffusion.variation_seed is None:
        diffusion = replace(diffusion, variation_seed=capture.variation_seed)
    live = admit(replace(request, seed=seed, diffusion=diffusion))
    for task in live.tasks:
        image = capture.images.get(task.image_index)
        if image is not None and image.key == digest_of(task, info):
            task.resume(image)
        elif image is not None:
            log_refusal(request.request_id, CaptureError(f"image {task.image_index} is of another request"))
    return live


def log_refusal(request_id: str, reason: CaptureError) -> None:
    """Log why images of a request start at their first step."""
    logger.warning("a captured state is not used: %s", reason, extra={"request_id": request_id})


class Captures:
    """Captures the images of requests with ``capture_every_s``, and restores captured images.

    Between two steps only copies to main memory are started; a thread serializes them. Each request has at most one
    capture in progress.

    Args:
        pool: Latents and histories of the images.
        info: The model.
    """

    def __init__(self, pool: LatentPool, info: ModelInfo) -> None:
        self.pool = pool
        self.info = info
        self._encoding: dict[str, Future[bytes]] = {}

    def capture_due(self, live_requests: Mapping[str, LiveRequest], now_s: float) -> list[Captured]:
        """Begin the captures that are due, and return those that are finished.

        Args:
            live_requests: All requests that are not over, by id.
            now_s: A reading of the engine's clock.
        """
        events = []
        for request_id, encoding in tuple(self._encoding.items()):
            if encoding.done():
                del self._encoding[request_id]
                if (error := encoding.exception()) is not None:
                    logger.warning("images were not captured", extra={"request_id": request_id}, exc_info=error)
                elif request_id in live_requests:
                    events.append(Captured(request_id=request_id, data=encoding.result()))
        for request_id, live in live_requests.items():
            every_s = live.request.capture_every_s
            if not every_s or request_id in self._encoding or not live.has_started:
                continue
            if live.captured_s is None or (now_s - live.captured_s >= every_s and self._begin(live)):
                live.captured_s = now_s
        return events

    def keep_finished(self, plan: TickPlan, outcome: TickOutcome) -> None:
        """Keep the final latents of images that ``plan`` finishes, for later captures of their requests."""
        for task in () if plan.is_partial else plan.rows:
            is_captured = task.live.request.capture_every_s > 0.0 and len(task.live.tasks) > 1
            if is_captured and task.is_last_row and task.settings.second is None and task not in outcome.failures:
                task.final_capture = self._of(task, num_further_rows=1)

    def restore(self, task: ImageTask, group: GroupKey) -> None:
        """Continue a prepared image, whose calls are those of ``group``, from its capture.

        Raises:
            CaptureError: The calls of the image were compiled, and those of ``group`` are not.
        """
        capture, state = task.resume_from, task.loaded_state
        assert capture is not None
        task.resume_from = None
        if capture.latents is None or capture.history is None:
            return
        if capture.is_compiled and not group.is_compiled and capture.row_index < task.settings.num_rows:
            raise CaptureError("its UNet calls were compiled, and here they are not")
        assert task.slot is not None
        device = self.pool.device
        self.pool.open(task.slot, to_tensor(capture.latents, device), to_tensor(capture.history, device))
        for stream, (generator, next_draw) in zip(state.streams, capture.streams, strict=True):
            stream.next_draw = next_draw
            if generator:
                stream.rng.set_state(torch.frombuffer(bytearray(generator), dtype=torch.uint8))
        state.features = {(part, view): to_tensor(value, device) for part, view, value in capture.features}

    def _begin(self, live: LiveRequest) -> bool:
        """Begin a capture of ``live``; return whether there was anything to capture."""
        images = {task.image_index: self._of_any_stage(task.leader or task) for task in live.tasks}
        pending = {index: image for index, image in images.items() if image is not None}
        if not pending:
            return False
        capture = RequestCapture(
            version=VERSION,
            model=describe_model(self.info),
            seed=live.seed,
            variation_seed=live.settings.variation_seed,
            images={},
        )
        self._encoding[live.request_id] = self._thread.submit(_encode, capture, pending)
        return True

    def _of_any_stage(self, task: ImageTask) -> PendingImage | None:
        """Return the state of an image; ``None`` if there is none to continue from."""
        match task.stage:
            case _ if task.is_interrupted:
                return None
            case _ if task.resume_from is not None:  # not prepared yet
                return PendingImage(task.resume_from)
            case Stage.DENOISING | Stage.DECODING | Stage.ENLARGING if task.slot is not None:
                return self._of(task) if task.row_index or task.is_second else None
            case Stage.DONE | Stage.SCORING:
                return task.final_capture
            case _:
                return None

    def _of(self, task: ImageTask, num_further_rows: int = 0) -> PendingImage:
        """Start copies of the state of ``task``, after ``num_further_rows`` rows that it does not count yet."""
        row_index = task.row_index + num_further_rows
        if task.capture_key is None:
            task.capture_key = digest_of(task, self.info)
        state = task.state
        streams = () if state is None else state.streams
        capture = ImageCapture(
            key=task.capture_key,
            row_index=row_index,
            num_evaluations=task.num_evaluations + (task.settings.rows_at[task.row_index] if num_further_rows else 0),
            is_compiled=task.group is not None and task.group.is_compiled,
            similarity=task.similarity,
            skipped_steps=task.initial_settings.skipped_steps,
            first_pass=task.first_pass,
            streams=tuple(
                (stream.rng.get_state().numpy().tobytes() if stream.next_draw is None else b"", stream.next_draw)
                for stream in streams
            ),
        )
        if state is None or task.slot is None or not row_index:
            return PendingImage(capture)
        has_features = row_index < task.settings.num_rows and not task.settings.full_at[row_index]
        features = state.features if has_features else {}
        return PendingImage(
            capture,
            fetch(self.pool.latent(state.shape, task.slot).clone()),
            fetch(self.pool.history(state.shape, task.slot).clone()),
            tuple((part, view, fetch(tensor)) for (part, view), tensor in features.items()),
        )

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return pool_of_threads(1, "captures", 1)


def _encode(capture: RequestCapture, pending: Mapping[int, PendingImage]) -> bytes:
    """Serialize ``capture`` with the images of ``pending``."""
    images = {index: image.read() for index, image in pending.items()}
    present = {index: image for index, image in images.items() if image is not None}
    return encode_capture(replace(capture, images=present))
