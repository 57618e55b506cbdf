"""Who paints a batch: an engine in this process, or a server. Both take the fields of the API, in several threads at
once, so that an engine batches what comes from all of them."""

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
from diffserve.cli.remote import in_words_of_a_shell
from diffserve.client import Client, CompletedImage, ImageEvent, LostImage, Stream
from diffserve.client import Progress as Moment
from diffserve.media.provenance import Marks
from diffserve.service.images.answers import delivery, image_entry, recipe
from diffserve.service.images.edit_schemas import EditBody
from diffserve.service.images.edits import read_start
from diffserve.service.images.painting import CheckedImages, plan_painting
from diffserve.service.images.pictures_in import picture_bytes
from diffserve.service.images.repeating import read_repeated
from diffserve.service.images.schemas import GenerateBody
from diffserve.service.models import refused_fields
from diffserve.service.safety import Safety
from diffserve.settings.config import ServeConfig

if TYPE_CHECKING:
    from diffserve.engine import Engine

PATIENCE_S: Final = 300.0
"""For so long a server may load its models."""

NOT_RECIPE: Final = frozenset(
    {"b64_json", "image_index", "created_at", "seed", "variation_seed", "usage", "warnings", "revised_prompt"}
)

Tell = Callable[[float], None]
"""Is told how much of a line is done, 0 to 1."""


class PaintedFile(NamedTuple):
    """A picture of a line."""

    place: int
    data: bytes
    seed: int
    variation_seed: int | None
    recipe: dict[str, Any]
    warnings: tuple[str, ...]


class Stopped(Exception):  # noqa: N818 # no mistake: somebody wanted it to end
    """The batch ends before this line is painted."""


class LinePainter(Protocol):
    """Paints a line, in any thread."""

    def paint(self, fields: Mapping[str, Any], tell: Tell) -> list[PaintedFile]:
        """All pictures of a request. Raises DiffserveError where one is missing, and Stopped."""

    def stop(self) -> None:
        """End what is painted."""


class ServerPainter:
    """Through the API of a server, which is asked again while it is full, or loads its models."""

    def __init__(self, client: Client, model: str | None) -> None:
        self._client = client
        self._model = {} if model is None else {"model": model}
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._streams: set[Stream[ImageEvent]] = set()

    def paint(self, fields: Mapping[str, Any], tell: Tell) -> list[PaintedFile]:
        """See :class:`LinePainter`."""
        until_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                return self._paint({**self._model, **fields}, tell)
            except QueueFull as full:
                self._wait(full.retry_after_s)
            except EngineUnavailable as error:
                if time.monotonic() > until_s:
                    raise
                self._wait(error.retry_after_s or 1.0)

    def stop(self) -> None:
        """Hang up: the server ends the work at its next step."""
        self._stopped.set()
        with self._lock:
            for stream in self._streams:
                stream.close()

    def _wait(self, seconds: float) -> None:
        if self._stopped.wait(max(0.1, seconds)):
            raise Stopped

    def _paint(self, fields: dict[str, Any], tell: Tell) -> list[PaintedFile]:
        painted: list[PaintedFile] = []
        steps: dict[int, float] = {}
        count = fields.get("n", 1)
        with in_words_of_a_shell(), self._open(fields) as stream:
            for event in stream:
                match event:
                    case Moment(image_index=int(index), step=int(step), steps=int(most)):
                        steps[index] = step / max(1, most)
                        tell(sum(steps.values()) / max(count, fields.get("best_of", 1)))
                    case CompletedImage():
                        painted.append(_received(event))
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
            files = [None if one is None else _file(one, name) for one, name in ((image, "image"), (mask, "mask"))]
            stream = self._client.edit_stream(prompt or "", files[0] or b"", files[1], **fields)
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
    """In this process: the lines of all threads meet in the engine's ticks."""

    def __init__(self, engine: Engine, config: ServeConfig, safety: Safety | None = None) -> None:
        """``safety`` judges prompts and pictures; a line that it blocks, or gives no answer to, fails."""
        self._engine = engine
        self._config = config
        self._safety = safety
        self._marks = Marks.of(config)
        self._stopped = threading.Event()

    def paint(self, fields: Mapping[str, Any], tell: Tell) -> list[PaintedFile]:
        """See :class:`LinePainter`."""
        painting = self._plan(fields)
        with _judged():
            if self._safety is not None:
                self._safety.check_texts(painting.request.texts)
        while not self._stopped.is_set():
            try:
                return self._follow(painting, tell)
            except QueueFull as full:
                self._stopped.wait(min(1.0, full.retry_after_s))
        raise Stopped

    def stop(self) -> None:
        """Every line gives up at its next event."""
        self._stopped.set()

    def _plan(self, fields: Mapping[str, Any]) -> CheckedImages:
        kind: type[GenerateBody] = EditBody if "image" in fields else GenerateBody
        info = self._engine.info
        refused = refused_fields(info, keeps_latents=True)
        body = read_repeated(kind, msgspec.json.encode(fields), [info.model_id], lambda _: refused)
        start = None
        if isinstance(body, EditBody):
            body, start = read_start(body)
        if body.model not in (None, info.model_id):
            said = f"the model is {body.model!r}, and {info.model_id!r} paints this batch; leave it out."
            raise ModelNotFound(said, param="model")
        painting = plan_painting(body, info, self._config, f"batch-{uuid.uuid4().hex}", start=start)
        if painting.request.rewriting is not None:
            said = "prompt_rewriter asks for a language model, which a batch does not load; have a server paint it."
            raise InvalidRequest(said, param="prompt_rewriter")
        request = msgspec.structs.replace(painting.request, deadline_s=None, preview_every=0)
        return msgspec.structs.replace(painting, request=request, marks=self._marks, safety=self._safety)

    def _follow(self, painting: CheckedImages, tell: Tell) -> list[PaintedFile]:
        painted: list[PaintedFile] = []
        steps: dict[int, float] = {}
        warnings = painting.warnings
        events = self._engine.stream(painting.request)
        with closing(events):  # type: ignore[type-var] # a generator, whatever it is declared as
            for event in events:
                if self._stopped.is_set():
                    raise Stopped
                match event:
                    case types.Accepted():
                        warnings += event.warnings
                    case types.Progress():
                        steps[event.image_index] = event.step_index / event.num_steps
                        tell(sum(steps.values()) / painting.request.num_painted)
                    case types.Painted(result=result):
                        with _judged():
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
def _judged() -> Iterator[None]:
    """What the filter gave no answer to fails alone: the next line has another one loaded."""
    try:
        yield
    except EngineUnavailable as error:
        raise DiffserveError(error.message, code=error.code) from None


def _received(event: CompletedImage) -> PaintedFile:
    told = {name: value for name, value in msgspec.to_builtins(event).items() if name not in NOT_RECIPE}
    return PaintedFile(event.image_index, event.file, event.seed, event.variation_seed, told, event.warnings)


def _encoded(painting: CheckedImages, result: types.ImageResult, warnings: tuple[str, ...]) -> PaintedFile:
    entry = image_entry(painting, result)
    told = {**delivery(painting), **recipe(painting, result)}
    said = tuple(dict.fromkeys((*warnings, *result.warnings)))
    seeds = result.seed, result.variation_seed
    return PaintedFile(result.image_index, base64.b64decode(entry["b64_json"]), *seeds, told, said)


def _file(text: object, name: str) -> bytes:
    if not isinstance(text, str):
        raise InvalidRequest(f"the {name} is no text; give a file's name, base64 or a data URL.", param=name)
    return picture_bytes(text, name)
