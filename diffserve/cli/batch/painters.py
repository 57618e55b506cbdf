"""Backends of a batch: an engine in this process, or requests to a server (``job_painter``: jobs of a server).

They take lines with API request fields and are called from several threads at once, so that the engine can batch
the lines.
"""

from __future__ import annotations

import base64
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import msgspec

from diffserve.api import types
from diffserve.api.errors import DiffserveError, EngineUnavailable, InvalidRequest, ModelNotFound, QueueFull
from diffserve.cli.batch.lines import Line
from diffserve.cli.remote import with_command_line_hints
from diffserve.client import Client, CompletedImage, ImageEvent, LostImage, Stream
from diffserve.client import Progress as ProgressEvent
from diffserve.media.provenance import Marks
from diffserve.models.upscalers import UpscalerFolders
from diffserve.service.images.inputs import image_bytes, read_repeated, read_start
from diffserve.service.images.openai_encoder import delivery_fields, image_entry, recipe
from diffserve.service.images.plan import ImagePlan, plan_images
from diffserve.service.images.schemas import EditBody, GenerateBody
from diffserve.service.models import refused_fields
from diffserve.service.safety import Safety
from diffserve.settings.config import ServeConfig

if TYPE_CHECKING:
    from diffserve.engine import Engine

LOADING_TIMEOUT_S: Final = 300.0
"""How long to retry while the server loads its models."""

NOT_RECIPE: Final = frozenset(
    {"b64_json", "image_index", "created_at", "seed", "variation_seed", "usage", "warnings", "revised_prompt"}
)

ReportProgress = Callable[[float], None]
"""Progress callback; receives the completed share of a line, 0 to 1."""


class PaintedFile(NamedTuple):
    """An encoded image of a line. ``place`` is its index in the request."""

    place: int
    data: bytes
    seed: int
    variation_seed: int | None
    recipe: dict[str, Any]
    warnings: tuple[str, ...]


class Stopped(Exception):  # noqa: N818 # a requested stop, not an error
    """The batch was stopped before this line was finished."""


class LinePainter(Protocol):
    """Generates the images of a line. Thread-safe."""

    def paint(self, line: Line, report_progress: ReportProgress) -> list[PaintedFile]:
        """Return all images of a line.

        Raises:
            DiffserveError: An image failed.
            Stopped: ``stop`` was called.
        """

    def stop(self) -> None:
        """Cancel all requests that are running."""


class ServerPainter:
    """Generates images with a server; retries while its queue is full or its models are loading."""

    def __init__(self, client: Client, model: str | None) -> None:
        self._client = client
        self._model = {} if model is None else {"model": model}
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._streams: set[Stream[ImageEvent]] = set()

    def paint(self, line: Line, report_progress: ReportProgress) -> list[PaintedFile]:
        """Return all images of a line, as described in ``LinePainter.paint``."""
        until_s = time.monotonic() + LOADING_TIMEOUT_S
        while True:
            try:
                return self._paint({**self._model, **line.fields}, report_progress)
            except QueueFull as full:
                self._wait(full.retry_after_s)
            except EngineUnavailable as error:
                if time.monotonic() > until_s:
                    raise
                self._wait(error.retry_after_s or 1.0)

    def stop(self) -> None:
        """Close all connections; the server cancels the work at its next step."""
        self._stopped.set()
        with self._lock:
            for stream in self._streams:
                stream.close()

    def _wait(self, seconds: float) -> None:
        if self._stopped.wait(max(0.1, seconds)):
            raise Stopped

    def _paint(self, fields: dict[str, Any], report_progress: ReportProgress) -> list[PaintedFile]:
        painted: list[PaintedFile] = []
        steps: dict[int, float] = {}
        count = fields.get("n", 1)
        with with_command_line_hints(), self._open(fields) as stream:
            for event in stream:
                match event:
                    case ProgressEvent(image_index=int(index), step=int(step), steps=int(num_steps)):
                        steps[index] = step / max(1, num_steps)
                        report_progress(sum(steps.values()) / max(count, fields.get("best_of", 1)))
                    case CompletedImage():
                        painted.append(received_file(event))
                    case LostImage():
                        raise DiffserveError(event.failure.message, code=event.failure.code)
                    case _:
                        pass
        if self._stopped.is_set():
            raise Stopped
        return sorted(painted)

    @contextmanager
    def _open(self, fields: dict[str, Any]) -> Iterator[Stream[ImageEvent]]:
        fields = dict(fields)
        prompt, image, mask = (fields.pop(name, None) for name in ("prompt", "image", "mask"))
        if image is None:
            stream = self._client.generate_stream(prompt, **fields)
        else:
            start = _image_bytes(image, "image")
            marked = None if mask is None else _image_bytes(mask, "mask")
            stream = self._client.edit_stream(prompt or "", start, marked, **fields)
        with self._lock:
            self._streams.add(stream)
        try:
            if self._stopped.is_set():
                raise Stopped
            with stream:
                yield stream
        finally:
            with self._lock:
                self._streams.discard(stream)


class LocalPainter:
    """Generates images with an engine in this process, which batches the lines of all threads."""

    def __init__(self, engine: Engine, config: ServeConfig, safety: Safety | None = None) -> None:
        """Create a painter on ``engine``.

        Args:
            engine: The engine.
            config: Watermark, metadata and output settings.
            safety: Filter for prompts and images; a line fails if it is blocked or the filter does not answer.
        """
        self._engine = engine
        self._config = config
        self._safety = safety
        self._marks = Marks.of(config)
        self._stopped = threading.Event()

    def paint(self, line: Line, report_progress: ReportProgress) -> list[PaintedFile]:
        """Return all images of a line, as described in ``LinePainter.paint``."""
        painting = self._plan(line.fields)
        with _filter_errors():
            if self._safety is not None:
                self._safety.check_texts(painting.request.texts)
        while not self._stopped.is_set():
            try:
                return self._follow(painting, report_progress)
            except QueueFull as full:
                self._stopped.wait(min(1.0, full.retry_after_s))
        raise Stopped

    def stop(self) -> None:
        """Cancel all lines at their next event."""
        self._stopped.set()

    def _plan(self, fields: Mapping[str, Any]) -> ImagePlan:
        kind: type[GenerateBody] = EditBody if "image" in fields else GenerateBody
        info = self._engine.info
        refused = refused_fields(info, keeps_latents=True)
        networks = UpscalerFolders(info.upscaler_dir).usable
        body = read_repeated(kind, msgspec.json.encode(fields), [info.model_id], lambda _: refused, networks)
        start = None
        if isinstance(body, EditBody):
            body, start = read_start(body)
        if body.model not in (None, info.model_id):
            message = f"model is {body.model!r}, but this batch runs {info.model_id!r}; omit model."
            raise ModelNotFound(message, param="model")
        painting = plan_images(
            body,
            info,
            self._config,
            f"batch-{uuid.uuid4().hex}",
            start=start,
            preview_every=0,
            marks=self._marks,
            safety=self._safety,
        )
        if painting.request.rewriting is not None:
            message = "prompt_rewriter needs a language model, which a batch does not load; use --server."
            raise InvalidRequest(message, param="prompt_rewriter")
        request = msgspec.structs.replace(painting.request, deadline_s=None)
        return msgspec.structs.replace(painting, request=request)

    def _follow(self, painting: ImagePlan, report_progress: ReportProgress) -> list[PaintedFile]:
        painted: list[PaintedFile] = []
        steps: dict[int, float] = {}
        warnings = painting.warnings
        events = self._engine.stream(painting.request)
        with closing(events):  # type: ignore[type-var] # declared as an iterator, but is a generator
            for event in events:
                if self._stopped.is_set():
                    raise Stopped
                match event:
                    case types.Accepted():
                        warnings += event.warnings
                    case types.Progress():
                        steps[event.image_index] = event.step_index / event.num_steps
                        report_progress(sum(steps.values()) / painting.request.num_painted)
                    case types.ImageFinished(result=result):
                        with _filter_errors():
                            painted.append(_encoded(painting, result, warnings))
                    case types.ImageFailed():
                        raise DiffserveError(event.message, code=event.code)
                    case types.Failed():
                        kind = InvalidRequest if event.param is not None else DiffserveError
                        raise kind(event.message, param=event.param, code=event.code)
                    case _:
                        pass
        return sorted(painted)


@contextmanager
def _filter_errors() -> Iterator[None]:
    """Convert an unavailable safety filter to an error of one line, because the next line restarts the filter."""
    try:
        yield
    except EngineUnavailable as error:
        raise DiffserveError(error.message, code=error.code) from None


def received_file(event: CompletedImage) -> PaintedFile:
    """Return an image that a server has generated."""
    details = {name: value for name, value in msgspec.to_builtins(event).items() if name not in NOT_RECIPE}
    return PaintedFile(event.image_index, event.file, event.seed, event.variation_seed, details, event.warnings)


def _encoded(painting: ImagePlan, result: types.ImageResult, warnings: tuple[str, ...]) -> PaintedFile:
    entry = image_entry(painting, result)
    details = {**delivery_fields(painting), **recipe(painting, result)}
    all_warnings = tuple(dict.fromkeys((*warnings, *result.warnings)))
    seeds = result.seed, result.variation_seed
    return PaintedFile(result.image_index, base64.b64decode(entry["b64_json"]), *seeds, details, all_warnings)


def _image_bytes(text: object, name: str) -> bytes:
    if not isinstance(text, str):
        raise InvalidRequest(f"the {name} must be a string; give a file name, base64 or a data URL.", param=name)
    return image_bytes(text, name)
