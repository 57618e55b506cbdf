"""The engines of a server as the engine of a sweep, through a socket."""

from __future__ import annotations

import socket
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from diffserve.api.types import Event, Failed, GenerationRequest, ImageFinished, ImageResult, ModelInfo
from diffserve.experiments.served.messages import Begin, FromProcess, NotPainted, Paint, Painted, ToProcess
from diffserve.processes import frame_of, read_frame
from diffserve.settings.config import EngineConfig

if TYPE_CHECKING:
    from diffserve.engine.image.task import TickTrace
    from diffserve.runtime.model import MemoryEntry
    from diffserve.runtime.vae.vae import VAERunner


class ServerGoneError(Exception):
    """The server closed the connection."""


class Connection:
    """The end of the socket pair that the process holds."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._decoder: msgspec.msgpack.Decoder[ToProcess] = msgspec.msgpack.Decoder(ToProcess)

    def send(self, message: FromProcess) -> None:
        """Send a message.

        Raises:
            ServerGoneError: There is no server.
        """
        try:
            self._connection.sendall(frame_of(msgspec.msgpack.encode(message)))
        except OSError:
            raise ServerGoneError from None

    def receive(self) -> ToProcess:
        """Wait for a message.

        Raises:
            ServerGoneError: There is no server.
        """
        try:
            frame = read_frame(self._connection)
        except OSError:
            frame = None
        if frame is None:
            raise ServerGoneError
        return self._decoder.decode(frame)


class ServedModel:
    """The model of a server: the digest that the server states, and its autoencoder, read on first use."""

    def __init__(self, begin: Begin) -> None:
        self.digest = begin.info.digest
        self._begin = begin

    def memory_report(self) -> list[MemoryEntry]:
        """Return nothing: the server does not state the sizes of its components."""
        return []

    @cached_property
    def vae(self) -> VAERunner:
        """The autoencoder, from the model's files."""
        from diffserve.runtime.model import load_model

        profile = self._begin.profile
        return load_model(profile.path, dtype=profile.dtype, device=profile.device, profile=profile).vae


class ServedEngine:
    """Sends requests to a server and receives their images; see ``SweepEngine``."""

    def __init__(self, connection: Connection, begin: Begin) -> None:
        self.config = EngineConfig(max_lanes=begin.max_in_flight)
        self.info: ModelInfo = begin.info
        self.is_deterministic = begin.is_deterministic
        self.model = ServedModel(begin)
        self.last_tick: TickTrace | None = None
        self._connection = connection
        self._in_flight: set[str] = set()

    def submit(self, order: GenerationRequest) -> str:
        """Send a request and return its id."""
        self._in_flight.add(order.request_id)
        self._connection.send(Paint(request=order))
        return order.request_id

    def tick(self) -> list[Event]:
        """Wait for the end of a request; empty without requests in flight."""
        while self._in_flight:
            message = self._connection.receive()
            match message:
                case Painted(result=result) if result.request_id in self._in_flight:
                    self._in_flight.discard(result.request_id)
                    return [ImageFinished(request_id=result.request_id, result=result)]
                case NotPainted(request_id=request_id) if request_id in self._in_flight:
                    self._in_flight.discard(request_id)
                    failure = Failed(
                        request_id=request_id, code=message.code, message=message.message, param=message.param
                    )
                    return [failure]
        return []

    def cancel(self, request_id: str) -> None:
        """Ignore the image of a request."""
        self._in_flight.discard(request_id)

    def warm_up(self) -> None:
        """Do nothing: the server prepares its engines."""

    def paint(self, request: GenerationRequest) -> ImageResult:
        """Return the image of a request while no other is in flight.

        Raises:
            DiffserveError: The server could not generate it.
        """
        from diffserve.engine.base_engine import raise_if_failed

        self.submit(request)
        [event] = self.tick()
        if isinstance(event, Failed):
            raise_if_failed(event)
        assert isinstance(event, ImageFinished)
        return event.result
