"""What the HTTP process and the engine process say to each other: msgpack frames over one private socket, no pickle.

A frame is the length of its body (4 bytes, big endian) and the body: one tagged :mod:`msgspec` struct. The HTTP process
sends commands, the engine process sends reports, and every event (of images, texts and rewritten prompts) is a report.
A request is built again, hence checked again, on the engine's side. Neither torch nor asyncio is imported here.
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
from diffserve.settings.config import EngineConfig, TextSettings

HEADER = struct.Struct(">I")
MAX_FRAME_BYTES = 256 * 1024 * 1024

AnyRequest = GenerationRequest | TextRequest | RewriteRequest | EmbeddingRequest | EncodeRequest | DecodeRequest
AnyEvent = Event | TextEvent | RewriteEvent | EmbeddingEvent | EncodingEvent | DecodingEvent


class Load(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first command: which models to load and how to batch. ``models`` beside ``model`` are loaded when they are
    asked for; ``hang_after_s``, ``unload_after_s``: see ``config.ServeConfig``."""

    model: ModelProfile
    engine: EngineConfig
    text: TextSettings
    hang_after_s: float
    models: tuple[ModelProfile, ...] = ()
    unload_after_s: float = 0.0


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Paint, continue, rewrite, embed, encode or decode this; answered by its events or Rejected."""

    request: AnyRequest


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Give a request up; it takes effect at the next step. An unknown or finished id is ignored."""

    request_id: str


class Interrupt(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End a request early: images that are being painted come unfinished. An unknown or finished id is ignored."""

    request_id: str


class LookAgain(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Somebody asks for a model whose files could not be read when the engine began. NewModels answers, if any."""

    name: str


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Are you there? Answered by a Pong at once, also in the middle of a tick."""

    number: int


class ReadTrace(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Which requests shared the recent UNet calls? Answered by a Trace with the same number."""

    number: int


class ReadStats(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How is it going? Answered by a Stats with the same number at once, also in the middle of a tick."""

    number: int


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The model is loaded and has painted a trial image. ``language``: the language model beside it, if any;
    ``models``: all that requests may name, this one first."""

    info: ModelInfo
    language: LanguageModelInfo | None = None
    models: tuple[ServedModel, ...] = ()


class NewModels(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Something has changed about the models that requests may name: one was loaded or unloaded, or could not be."""

    models: tuple[ServedModel, ...]


class LoadFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The model cannot be loaded; ``message`` is one line for the person who started the server."""

    code: str
    message: str


class Rejected(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine did not take a request: an error of :mod:`diffserve.api.errors`, flattened."""

    request_id: str
    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None
    predicted_s: float | None = None


class Pong(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to the Ping of the same number.

    num_requests  are waiting or being painted
    num_ticks     ticks that ended
    tick_s        seconds that the running one has taken, 0 between two
    patience_s    seconds that it may take
    """

    number: int
    num_requests: int
    num_ticks: int
    tick_s: float
    patience_s: float

    @property
    def hangs(self) -> bool:
        """Whether the running tick will not end any more."""
        return self.tick_s > self.patience_s


class Building(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine compiles its UNet before it can be ready, which takes at most ``timeout_s`` seconds more."""

    timeout_s: float


class Lost(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine's last word: it ends because of ``reason``, and nothing that it holds will be finished."""

    reason: str


class Trace(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Per recent UNet call, the request id of every row (a guided image has two)."""

    number: int
    unet_calls: list[list[str]]


class Stats(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The numbers as of a moment ago; ``None`` before the first tick."""

    number: int
    stats: EngineStats | None


Command = Load | Submit | Cancel | Interrupt | LookAgain | Ping | ReadTrace | ReadStats
Report = Ready | NewModels | Building | LoadFailed | Lost | Rejected | Pong | Trace | Stats | AnyEvent

_encoder = msgspec.msgpack.Encoder()
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_reports: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


def frame(message: Command | Report) -> bytes:
    """``message`` as one frame. InvalidRequest where it holds a number that no frame can."""
    try:
        body = _encoder.encode(message)
    except OverflowError:
        raise InvalidRequest(f"a number is larger than {2**64 - 1}; that is too large.") from None
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(body)} bytes is longer than a frame may be ({MAX_FRAME_BYTES} bytes).")
    return HEADER.pack(len(body)) + body


def body_length(header: bytes | memoryview) -> int:
    """The length that a frame's 4-byte ``header`` announces; ValueError where it is longer than any frame may be."""
    (num_bytes,) = HEADER.unpack(header)
    if num_bytes > MAX_FRAME_BYTES:
        raise ValueError(f"a frame announces {num_bytes} bytes; at most {MAX_FRAME_BYTES} are taken.")
    return int(num_bytes)


def bodies(frames: bytes) -> Iterator[bytes]:
    """The bodies of whole ``frames``, one after the other; ValueError where the last is cut short."""
    at = 0
    while at < len(frames):
        begin = at + HEADER.size
        at = begin + body_length(frames[at:begin]) if begin <= len(frames) else begin
        if at > len(frames):
            raise ValueError(f"a frame is cut short after {len(frames)} bytes.")
        yield frames[begin:at]


class FrameReader:
    """Bytes as they come, given out as the bodies of whole frames."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The bodies of the frames that ``data`` completes. ValueError where one is longer than any may be."""
        self._rest += data
        at, end = 0, len(self._rest)
        with memoryview(self._rest) as view:
            while (begin := at + HEADER.size) <= end:
                after = begin + body_length(view[at:begin])
                if after > end:
                    break
                yield bytes(view[begin:after])
                at = after
        del self._rest[:at]


def decode_command(body: bytes) -> Command:
    """The command in a frame's body."""
    return _commands.decode(body)


def decode_report(body: bytes) -> Report:
    """The report in a frame's body."""
    return _reports.decode(body)


class EngineEnd:
    """The engine's end of the socket: blocking reads for one thread, whole-frame writes for any."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._write_lock = threading.Lock()

    def send(self, report: Report) -> None:
        """Write one report; OSError where the other side is gone."""
        data = frame(report)
        with self._write_lock:
            self._connection.sendall(data)

    def commands(self) -> Iterator[Command]:
        """Every command as it arrives, until the other side closes or dies."""
        while (header := self._read(HEADER.size)) is not None:
            body = self._read(body_length(header))
            if body is None:
                return
            yield _commands.decode(body)

    def _read(self, num_bytes: int) -> bytes | None:
        received = bytearray()
        while len(received) < num_bytes:
            try:
                part = self._connection.recv(min(num_bytes - len(received), 1 << 20))
            except ConnectionError:
                return None
            if not part:
                return None
            received += part
        return bytes(received)
