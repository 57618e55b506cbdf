"""Messages between the HTTP process and the engine process: msgpack frames over a private socket, without pickle.

A frame is the length of its body (4 bytes, big endian) and the body, one tagged :mod:`msgspec` struct. The HTTP process
sends commands, the engine process sends reports; every event is a report. Requests are validated again on arrival. This
module imports neither torch nor asyncio.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import msgspec

from diffserve.api.embedding_types import EmbeddingEvent, EmbeddingRequest
from diffserve.api.engine_stats import EngineStats
from diffserve.api.errors import InvalidRequest
from diffserve.api.rewrite_types import RewriteEvent, RewriteRequest
from diffserve.api.stage_types import DecodeRequest, DecodingEvent, EncodeRequest, EncodingEvent
from diffserve.api.text_types import LanguageModelInfo, TextEvent, TextRequest
from diffserve.api.types import Event, GenerationRequest, ModelInfo, ModelProfile, ServedModel
from diffserve.api.upscale_types import UpscaleEvent, UpscaleRequest
from diffserve.settings.config import EngineConfig, TextSettings

HEADER = struct.Struct(">I")
MAX_FRAME_BYTES = 256 * 1024 * 1024

AnyRequest = (
    GenerationRequest | TextRequest | RewriteRequest | EmbeddingRequest | UpscaleRequest | EncodeRequest | DecodeRequest
)
"""A request is a command by itself; the engine answers with its events, or with Rejected."""

AnyEvent = Event | TextEvent | RewriteEvent | EmbeddingEvent | UpscaleEvent | EncodingEvent | DecodingEvent


class Load(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first command: the models to load and the engine's configuration.

    Attributes:
        model: Loaded at once.
        models: Loaded when requests name them.
        hang_after_s, unload_after_s: See ``config.ServeConfig``.
    """

    model: ModelProfile
    engine: EngineConfig
    text: TextSettings
    hang_after_s: float
    models: tuple[ModelProfile, ...] = ()
    unload_after_s: float = 0.0


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Cancel a request at the next step. An unknown or finished id is ignored."""

    request_id: str


class Interrupt(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End a request early and return its unfinished images. An unknown or finished id is ignored."""

    request_id: str


class LookAgain(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Retry a model whose files could not be read at start. The engine answers with NewModels if that changes it."""

    name: str


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Liveness check. Answered at once by a Pong, also in the middle of a tick."""

    number: int


class ReadTrace(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ask which requests shared the recent UNet calls. Answered by a Trace with the same number."""

    number: int


class ReadStats(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ask for statistics. Answered at once by a Stats with the same number, also in the middle of a tick."""

    number: int


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The model is loaded and has generated a trial image.

    Attributes:
        info: The model.
        language: The language model, if there is one.
        models: All models that requests may name, the loaded one first.
    """

    info: ModelInfo
    language: LanguageModelInfo | None = None
    models: tuple[ServedModel, ...] = ()


class NewModels(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The models that requests may name have changed: one was loaded, was unloaded, or failed to load."""

    models: tuple[ServedModel, ...]


class LoadFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The model cannot be loaded; ``message`` is one line for the operator."""

    code: str
    message: str


class Rejected(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine refused a request with an error of :mod:`diffserve.api.errors`."""

    request_id: str
    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None
    predicted_s: float | None = None


class Pong(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to the Ping with the same number.

    Attributes:
        num_requests: Requests waiting or running.
        num_ticks: Completed ticks.
        tick_s: Duration of the running tick so far; 0 between ticks.
        patience_s: Duration above which a tick counts as hanging.
    """

    number: int
    num_requests: int
    num_ticks: int
    tick_s: float
    patience_s: float

    @property
    def hangs(self) -> bool:
        """Whether the running tick counts as hanging."""
        return self.tick_s > self.patience_s


class Building(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine compiles its UNet before it is ready, which takes at most ``timeout_s`` more seconds."""

    timeout_s: float


class Lost(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The last report: the engine exits because of ``reason``, and all its requests are lost."""

    reason: str


class Trace(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The request id of every row of each recent UNet call (a guided image has two rows)."""

    number: int
    unet_calls: list[list[str]]


class Stats(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The current statistics; ``None`` before the first tick."""

    number: int
    stats: EngineStats | None


Command = Load | AnyRequest | Cancel | Interrupt | LookAgain | Ping | ReadTrace | ReadStats
Report = Ready | NewModels | Building | LoadFailed | Lost | Rejected | Pong | Trace | Stats | AnyEvent

_encoder = msgspec.msgpack.Encoder()
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_reports: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


def frame(message: Command | Report) -> bytes:
    """Encode ``message`` as one frame.

    Raises:
        InvalidRequest: A number is too large for msgpack.
        ValueError: The frame would be longer than ``MAX_FRAME_BYTES``.
    """
    try:
        body = _encoder.encode(message)
    except OverflowError:
        raise InvalidRequest(f"a number is larger than {2**64 - 1}, which is too large.") from None
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(body)} bytes is longer than a frame may be ({MAX_FRAME_BYTES} bytes).")
    return HEADER.pack(len(body)) + body


def body_length(header: bytes | memoryview) -> int:
    """Return the body length in the 4-byte ``header`` of a frame.

    Raises:
        ValueError: It is larger than ``MAX_FRAME_BYTES``.
    """
    (num_bytes,) = HEADER.unpack(header)
    if num_bytes > MAX_FRAME_BYTES:
        raise ValueError(f"a frame announces {num_bytes} bytes; at most {MAX_FRAME_BYTES} are allowed.")
    return int(num_bytes)


class FrameReader:
    """Incremental parser that turns received bytes into the bodies of complete frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the bodies of the frames that ``data`` completes.

        Raises:
            ValueError: A frame is longer than ``MAX_FRAME_BYTES``.
        """
        self._buffer += data
        at, end = 0, len(self._buffer)
        with memoryview(self._buffer) as view:
            while (begin := at + HEADER.size) <= end:
                after = begin + body_length(view[at:begin])
                if after > end:
                    break
                yield bytes(view[begin:after])
                at = after
        del self._buffer[:at]

    @property
    def is_inside_frame(self) -> bool:
        """Whether the last frame is incomplete so far."""
        return bool(self._buffer)


def bodies(frames: bytes) -> Iterator[bytes]:
    """Yield the bodies of complete ``frames``.

    Raises:
        ValueError: The last frame is truncated.
    """
    reader = FrameReader()
    yield from reader.feed(frames)
    if reader.is_inside_frame:
        raise ValueError(f"a frame is cut short after {len(frames)} bytes.")


def decode_command(body: bytes) -> Command:
    """Decode the command in a frame's body."""
    return _commands.decode(body)


def decode_report(body: bytes) -> Report:
    """Decode the report in a frame's body."""
    return _reports.decode(body)


class EngineEnd:
    """The engine's end of the socket: one thread reads, any thread may write complete frames."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._write_lock = threading.Lock()

    def send(self, report: Report) -> None:
        """Write one report.

        Raises:
            OSError: The connection is closed.
        """
        data = frame(report)
        with self._write_lock:
            self._connection.sendall(data)

    def commands(self) -> Iterator[Command]:
        """Yield commands as they arrive, until the connection closes."""
        reader = FrameReader()
        while data := self._receive():
            yield from map(_commands.decode, reader.feed(data))

    def _receive(self) -> bytes:
        try:
            return self._connection.recv(1 << 20)
        except ConnectionError:
            return b""
