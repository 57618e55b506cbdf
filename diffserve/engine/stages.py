"""Separate stages of image generation: processes that only encode texts or only decode latents.

The denoising stage is an ``Engine`` that reads ``GenerationRequest.encodings`` and returns latents. Encodings and
latents travel as values (``diffserve.api.stage_types``), so that any process of a stage can continue with them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import RLock
from typing import Any, ClassVar, Final, Generic, TypeVar

import torch

from diffserve.api.embedding_types import EmbeddingRequest
from diffserve.api.errors import DeadlineExceeded, QueueFull
from diffserve.api.stage_types import DecodeRequest, PictureDecoded, TextsEncoded
from diffserve.api.tensor_values import Encodings
from diffserve.api.types import GenerationRequest, LatentArray, Picture
from diffserve.api.upscale_types import UpscaleRequest
from diffserve.engine.base_engine import failure_of
from diffserve.engine.image.engine import Engine
from diffserve.engine.image.engines import ImageEngines
from diffserve.engine.image.outputs import restore_outside_mask
from diffserve.engine.image.task import LiveRequest, texts_of
from diffserve.runtime.kv import PoolBusy
from diffserve.runtime.low_rank import LoRASet
from diffserve.runtime.text.encoding import AS_TRAINED, TextReading
from diffserve.runtime.text.transferred_encodings import EncodingTable, to_value

HOLLOW: Final = {
    "all": frozenset[str](),
    "encode": frozenset({"unet", "vae"}),
    "denoise": frozenset({"text"}),
    "decode": frozenset({"text", "unet"}),
}
"""Parts of the model that a process of each stage does not load. The denoising stage keeps the VAE, which encodes init
images with the draws of the image's own seed."""

R = TypeVar("R", GenerationRequest, DecodeRequest, EmbeddingRequest, UpscaleRequest)


@dataclass(eq=False)
class QueuedRequest(Generic[R]):
    """Queued request with its arrival time, deadline and pending adapter load."""

    request: R
    since_s: float
    until_s: float
    lora_loading: Future[LoRASet] | None = None


class RequestQueue(Generic[R]):
    """Queue of requests that are not processed by an ``ImageEngine``. ``submit`` and ``cancel`` are thread-safe.

    Attributes:
        doing: Description of the work, for messages.
        goal: State that requests wait for, for messages.
        entry: Class of queued requests.
    """

    doing: ClassVar[str]
    goal: ClassVar[str]
    entry: ClassVar[type[QueuedRequest[Any]]] = QueuedRequest

    def __init__(self, images: ImageEngines, max_waiting: int, clock: Callable[[], float]) -> None:
        self._images = images
        self._max_waiting = max_waiting
        self._clock = clock
        self._lock = RLock()
        self._waiting: dict[str, Any] = {}

    @property
    def has_work(self) -> bool:
        """Return whether a tick would make progress; False while all required models load."""
        now_s = self._clock()
        return any(
            queued.until_s <= now_s or not self._images.is_loading(queued.request.model) for queued in self._entries()
        )

    def submit(self, request: R) -> None:
        """Queue a request and start loading its model. Raises QueueFull, and the errors of :meth:`check`."""
        self.check(request)
        with self._lock:
            if len(self._waiting) >= self._max_waiting:
                raise QueueFull(f"{len(self._waiting)} requests wait for {self.doing}; try again later.")
            now_s = self._clock()
            queued = self.entry(request, now_s, now_s + (request.deadline_s or math.inf))
            self._waiting[request.request_id] = queued
        self._begin(queued)

    def cancel(self, request_id: str) -> bool:
        """Remove a request; return False if it is unknown."""
        with self._lock:
            return self._waiting.pop(request_id, None) is not None

    def fail_all(self) -> None:
        """Remove all requests; the caller has reported their failure."""
        with self._lock:
            self._waiting.clear()

    def check(self, request: R, *, num_ahead: int = 0) -> None:
        """Raise the known errors of ``request``."""
        self._images.request_engine(request.model)

    def _begin(self, queued: QueuedRequest[R]) -> None:  # optional hook
        """Start background loading for a request; the default loads nothing."""

    def _entries(self) -> list[Any]:
        with self._lock:
            return list(self._waiting.values())

    def _expire(self) -> list[Any]:
        now_s = self._clock()
        late = [queued for queued in self._entries() if queued.until_s <= now_s]
        return self._fail(late, DeadlineExceeded(f"the deadline passed before {self.goal}.", param="deadline_s"))

    def _fail(self, failed: Sequence[QueuedRequest[R]], error: Exception) -> list[Any]:
        """Remove ``failed`` and return their failures, without those of requests that were cancelled meanwhile."""
        if not failed:
            return []
        reason = failure_of(error, self.doing)
        request_ids = [queued.request.request_id for queued in failed]
        return [reason.of(request_id) for request_id in request_ids if self.cancel(request_id)]


class StageQueue(RequestQueue[R], ABC):
    """Queue of one stage, processed one by one: interactive requests first, then by arrival."""

    goal = "the image was finished"

    def tick(self) -> list[Any]:
        """Process the next request and return the events."""
        events: list[Any] = self._expire()
        now_s = self._clock()
        for queued in sorted(self._entries(), key=lambda each: (each.request.priority == "batch", each.since_s)):
            if queued.lora_loading is not None and not queued.lora_loading.done():
                continue
            try:
                engine = self._images.request_engine(queued.request.model)
                done = None if engine is None else self._do(engine, queued, now_s)
            except PoolBusy:  # texts of the language model have the pages
                break
            except Exception as error:
                failures: list[Any] = self._fail([queued], error)
                if failures:
                    return [*events, *failures]
                continue
            if done is not None and self.cancel(queued.request.request_id):
                return [*events, done]
        return events

    @abstractmethod
    def _do(self, engine: Engine, queued: QueuedRequest[R], started_s: float) -> Any:
        """Return the event that ends the request; raise PoolBusy if it must wait."""


class EncodingStage(StageQueue[GenerationRequest]):
    """Encodes the texts of requests; takes rewritten requests like ``ImageEngines``."""

    doing = "encoding texts"

    def check(self, request: GenerationRequest, *, num_ahead: int = 0) -> None:
        """Raise the errors that generating the image would raise; as in ``ImageEngines``."""
        engine = self._images.request_engine(request.model)
        if engine is not None:
            engine.admit(request)

    def _begin(self, queued: QueuedRequest[GenerationRequest]) -> None:
        engine = self._images.request_engine(queued.request.model)
        settings = None if engine is None else engine.admit(queued.request).settings
        if engine is not None and settings is not None and settings.loras:
            queued.lora_loading = engine.runners.loras.begin(settings.loras, settings.lora_digest)

    def _do(self, engine: Engine, queued: QueuedRequest[GenerationRequest], started_s: float) -> TextsEncoded:
        request, live = queued.request, engine.admit(queued.request)
        settings = live.settings
        loras = engine.runners.loras.take(settings.loras, queued.lora_loading) if settings.loras else None
        encodings = encode(engine, live, TextReading(loras, settings.clip_skip))
        ended_s = self._clock()
        return TextsEncoded(
            request_id=request.request_id,
            prompt=request.prompt,
            encodings=encodings,
            encode_s=ended_s - started_s,
            waited_s=ended_s - queued.since_s,
        )


def encode(engine: Engine, live: LiveRequest, reading: TextReading) -> Encodings:
    """Compute all text encodings of ``live``. Raises PoolBusy, and InvalidRequest."""
    runner, settings = engine.runners, live.settings
    all_pairs = (texts_of(live.request, task.image_index, task.settings) for task in live.tasks)
    pairs = tuple(dict.fromkeys(pair for of_image in all_pairs for pair in of_image))
    if len(pairs) > 1:
        pairs = (*pairs, ("", None))  # the padding of shorter texts
    base: EncodingTable = {}
    for pair in pairs:
        base |= runner.conditioner.export_encodings(*pair, reading)
    prompts = [text or "" for pair in pairs for text in pair]
    if settings.controlnets:  # they take embeddings
        base |= engine.model.text.export_encodings(prompts, reading)
    if settings.similarity_threshold is not None:
        base |= engine.model.text.export_encodings([task.prompt for task in live.tasks], AS_TRAINED)
    refiner: EncodingTable = {}
    if settings.switch_row is not None and runner.refiner is not None:
        for pair in pairs:
            refiner |= runner.refiner.conditioner.export_encodings(*pair, TextReading(clip_skip=settings.clip_skip))
    parts = [{name: to_value(tensor) for name, tensor in part.items()} for part in (base, refiner)]
    return Encodings(base=parts[0], refiner=parts[1])


class DecodingStage(StageQueue[DecodeRequest]):
    """Decodes finished latents, each image in a separate call, as deterministic engines do."""

    doing = "decoding this image"

    def _do(self, engine: Engine, queued: QueuedRequest[DecodeRequest], started_s: float) -> PictureDecoded:
        request = queued.request
        with torch.inference_mode():
            latents = torch.from_numpy(request.latents.array.copy()).to(engine.model.device)
            decoded = engine.runners.decoder.pictures(latents[None]).picture(0)
        picture = Picture.from_array(restore_outside_mask(request.init_image, request.mask_image, decoded))
        ended_s = self._clock()
        return PictureDecoded(
            request_id=request.request_id,
            picture=picture,
            decode_s=ended_s - started_s,
            waited_s=ended_s - queued.since_s,
        )


def trial_latents(engine: Engine) -> DecodeRequest:
    """Return a request to decode a gray image of the model's native size, for a test before the first request."""
    width_px, height_px = engine.info.good_sizes[0]
    factor = engine.info.vae_factor
    shape = (engine.info.latent_channels, height_px // factor, width_px // factor)
    return DecodeRequest(request_id="trial", latents=LatentArray.from_array(torch.zeros(shape).numpy()))
