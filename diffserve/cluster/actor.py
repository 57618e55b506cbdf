"""The replica's side on Ray: an engine process behind the methods of a Ray Serve deployment.

Arguments and results are bytes, the msgpack frames of :mod:`diffserve.api.ipc`, so that data is checked when it is
decoded and never unpickled. If the caller closes a call, its request is cancelled at the engine's next step.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import sys
from collections.abc import AsyncIterator
from typing import Any, Final, cast

import msgspec

from diffserve.api import ipc
from diffserve.api.errors import DeadlineUnreachable, DiffserveError, EngineUnavailable, QueueFull
from diffserve.api.types import Asks, UNetPath
from diffserve.service.engine.client import EngineClient
from diffserve.service.engine.engines import END_OF_JOB, Job
from diffserve.settings.config import Settings

REPORT_EVERY_S: Final = 1.0
POLL_EVERY_S: Final = 0.05


class ReplicaActor:
    """The Ray Serve deployment class of a replica."""

    def __init__(self, settings: bytes) -> None:
        """Create the replica; ``settings`` are msgpack."""
        bind_grpc_to_loopback()
        self._settings = msgspec.msgpack.decode(settings, type=Settings)
        self._client: EngineClient | None = None

    async def live(self, paths: bytes = b"[]") -> AsyncIterator[bytes]:
        """Report the state of the engine for as long as the stream is read.

        Ray Serve counts the open stream as the request that needs this replica.

        Args:
            paths: UNet paths that the front has stored, as JSON; the engine uses them.

        Yields:
            Frames: Ready when an engine is ready, Lost when it is lost, Pong every second, LoadFailed at the end.
        """
        if self._client is None:
            self._client = EngineClient(self._settings)
            self._client.paths.store(msgspec.json.decode(paths, type=list[UNetPath]), overwrite=True)
            self._client.start()
        client = self._client
        models, reported_s = None, 0.0
        loop = asyncio.get_running_loop()
        while True:
            if client.failed.done():
                error = client.failed.result()
                yield ipc.frame(ipc.LoadFailed(code=error.code, message=error.message))
                return
            if client.is_ready and client.info is not None and models != client.models:
                models = client.models
                yield ipc.frame(ipc.Ready(info=client.info, language=client.text_info, models=models))
            elif not client.is_ready and models is not None:
                models = None
                yield ipc.frame(ipc.Lost(reason="its engine is being restarted"))
            elif client.is_ready and loop.time() - reported_s >= REPORT_EVERY_S:
                reported_s = loop.time()
                with contextlib.suppress(EngineUnavailable):
                    yield ipc.frame(_pong(await client.num_requests()))
            await asyncio.sleep(POLL_EVERY_S)

    async def work(self, submit: bytes) -> AsyncIterator[bytes]:
        """Run the request in the frame ``submit`` and yield the frames of its events, several at a time."""
        command = _command(submit)
        if not isinstance(command, Asks):
            raise ValueError(f"a {type(command).__name__} is not work.")
        relay = _Relay(cast(Asks[Any], command), self._engine().cancel)
        async with relay:
            try:
                self._engine().take(relay)
            except DiffserveError as error:
                relay.feed(error)
            while not relay.has_ended or relay.frames:
                await relay.has_frames.wait()
                relay.has_frames.clear()
                frames, relay.frames = relay.frames, []
                yield b"".join(frames)

    async def ask(self, question: bytes) -> bytes:
        """Answer Ping, ReadStats or ReadTrace with a frame; execute LookAgain or Interrupt, which have no answer."""
        client = self._engine()
        match _command(question):
            case ipc.Ping():
                return ipc.frame(_pong(await client.num_requests()))
            case ipc.ReadStats(number=number):
                return ipc.frame(ipc.Stats(number=number, stats=await client.stats()))
            case ipc.ReadTrace(number=number):
                return ipc.frame(ipc.Trace(number=number, unet_calls=await client.trace()))
            case ipc.LookAgain(name=name):
                client.retry_load(name)
                return b""
            case ipc.Interrupt(request_id=request_id):
                client.interrupt(request_id)
                return b""
            case command:
                raise ValueError(f"a {type(command).__name__} is not answered by a replica.")

    def _engine(self) -> EngineClient:
        """Return the engine client; the first call starts it, in the event loop of the calls."""
        if self._client is None:
            self._client = EngineClient(self._settings)
            self._client.start()
        return self._client

    async def __del__(self) -> None:
        """Ray Serve calls and awaits this when the replica goes."""
        if self._client is not None:
            await self._client.stop()


class _Relay(Job[Any]):
    """A job that stores its events as frames."""

    def __init__(self, request: Asks[Any], cancel: Any) -> None:
        super().__init__(request, cancel)
        self.frames: list[bytes] = []
        self.has_frames = asyncio.Event()
        self.has_ended = False

    def feed(self, event: Any) -> None:
        """Take the next event, or the error that ends the job."""
        is_error = isinstance(event, DiffserveError)
        self.frames.append(ipc.frame(_rejected(self.request_id, event) if is_error else event))
        self.has_ended = self.has_ended or isinstance(event, END_OF_JOB)
        self.has_frames.set()


def _rejected(request_id: str, error: DiffserveError) -> ipc.Rejected:
    return ipc.Rejected(
        request_id=request_id,
        code=error.code,
        message=error.message,
        param=error.param,
        retry_after_s=error.retry_after_s if isinstance(error, (QueueFull, DeadlineUnreachable)) else None,
        predicted_s=error.predicted_s if isinstance(error, DeadlineUnreachable) else None,
    )


def _command(frame: bytes) -> ipc.Command:
    (body,) = ipc.bodies(frame)
    return ipc.decode_command(body)


def _pong(num_requests: int) -> ipc.Pong:
    return ipc.Pong(number=0, num_requests=num_requests, num_ticks=0, tick_s=0.0, patience_s=0.0)


def bind_grpc_to_loopback() -> None:
    """Make Ray Serve open its gRPC port of this process on the loopback only, if Ray is on the loopback.

    Ray Serve 2.60 opens the port on all addresses of the machine, without a setting, after this class is created. The
    calls here do not use it.
    """
    module = sys.modules.get("ray.serve._private.replica")
    opens = getattr(module, "add_port_to_grpc_server", None)
    if module is not None and opens is not None and is_on_loopback():
        module.add_port_to_grpc_server = lambda server, _: opens(server, "127.0.0.1:0")  # type: ignore[attr-defined]


def is_on_loopback() -> bool:
    """Return whether the Ray of this process is reachable from this machine only."""
    import ray.util

    return ipaddress.ip_address(ray.util.get_node_ip_address()).is_loopback
