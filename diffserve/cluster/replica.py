"""A replica: an engine process, kept alive as ``serve`` keeps it, that answers frames with frames.

Nothing but bytes goes in and comes out, the same msgpack frames that the engine process is spoken to with
(:mod:`diffserve.api.ipc`): what somebody asks for is checked when it is decoded, and never unpickled. A call that its
caller leaves cancels what it asked for at the engine's next step.
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
from diffserve.service.engine.engines import LAST, Job
from diffserve.settings.config import Settings

TELL_EVERY_S: Final = 1.0
LOOK_EVERY_S: Final = 0.05


class EngineReplica:
    """What Ray Serve makes one of for each replica."""

    def __init__(self, settings: bytes) -> None:
        """``settings``: as msgpack."""
        listen_no_further_than_ray()
        self._settings = msgspec.msgpack.decode(settings, type=Settings)
        self._client: EngineClient | None = None

    async def live(self, paths: bytes = b"[]") -> AsyncIterator[bytes]:
        """Frames of how it stands, for as long as anybody reads: Ready when an engine is up, Lost when it is gone,
        LoadFailed at the end of all, and every second a Pong.

        Whoever wants this replica to be there keeps this open: it is what Ray Serve counts.

        ``paths``: the UNet paths that the front has stored, as JSON; the engine follows them.
        """
        if self._client is None:
            self._client = EngineClient(self._settings)
            self._client.paths.store(msgspec.json.decode(paths, type=list[UNetPath]), overwrite=True)
            self._client.start()
        client = self._client
        models, told_s = None, 0.0
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
            elif client.is_ready and loop.time() - told_s >= TELL_EVERY_S:
                told_s = loop.time()
                with contextlib.suppress(EngineUnavailable):
                    yield ipc.frame(_pong(await client.num_requests()))
            await asyncio.sleep(LOOK_EVERY_S)

    async def work(self, submit: bytes) -> AsyncIterator[bytes]:
        """Frames of the events of the request in the frame ``submit``, several at a time where they came together."""
        command = _command(submit)
        if not isinstance(command, ipc.Submit):
            raise ValueError(f"a {type(command).__name__} is not work.")
        relay = _Relay(cast(Asks[Any], command.request), self._engine().cancel)
        async with relay:
            try:
                self._engine().take(relay)
            except DiffserveError as error:
                relay.feed(error)
            while not relay.is_over or relay.frames:
                await relay.has_some.wait()
                relay.has_some.clear()
                frames, relay.frames = relay.frames, []
                yield b"".join(frames)

    async def ask(self, question: bytes) -> bytes:
        """Answer Ping, ReadStats or ReadTrace by a frame; obey LookAgain and Interrupt, which have no answer."""
        client = self._engine()
        match _command(question):
            case ipc.Ping():
                return ipc.frame(_pong(await client.num_requests()))
            case ipc.ReadStats(number=number):
                return ipc.frame(ipc.Stats(number=number, stats=await client.stats()))
            case ipc.ReadTrace(number=number):
                return ipc.frame(ipc.Trace(number=number, unet_calls=await client.trace()))
            case ipc.LookAgain(name=name):
                client.look_again(name)
                return b""
            case ipc.Interrupt(request_id=request_id):
                client.interrupt(request_id)
                return b""
            case other:
                raise ValueError(f"a {type(other).__name__} is not answered by a replica.")

    def _engine(self) -> EngineClient:
        """Started by the first call, on the loop that calls run on."""
        if self._client is None:
            self._client = EngineClient(self._settings)
            self._client.start()
        return self._client

    async def __del__(self) -> None:
        """Ray Serve calls and awaits this when the replica goes."""
        if self._client is not None:
            await self._client.stop()


class _Relay(Job[Any]):
    """A job whose events are frames that somebody else reads."""

    def __init__(self, request: Asks[Any], cancel: Any) -> None:
        super().__init__(request, cancel)
        self.frames: list[bytes] = []
        self.has_some = asyncio.Event()
        self.is_over = False

    def feed(self, event: Any) -> None:
        """The next event, or the error that ends the job."""
        is_error = isinstance(event, DiffserveError)
        self.frames.append(ipc.frame(_rejected(self.request_id, event) if is_error else event))
        self.is_over = self.is_over or is_error or isinstance(event, LAST)
        self.has_some.set()


def _rejected(request_id: str, error: DiffserveError) -> ipc.Rejected:
    is_late = isinstance(error, DeadlineUnreachable)
    return ipc.Rejected(
        request_id=request_id,
        code=error.code,
        message=error.message,
        param=error.param,
        retry_after_s=error.retry_after_s if isinstance(error, (QueueFull, DeadlineUnreachable)) else None,
        predicted_s=cast(DeadlineUnreachable, error).predicted_s if is_late else None,
    )


def _command(frame: bytes) -> ipc.Command:
    (body,) = ipc.bodies(frame)
    return ipc.decode_command(body)


def _pong(num_requests: int) -> ipc.Pong:
    return ipc.Pong(number=0, num_requests=num_requests, num_ticks=0, tick_s=0.0, patience_s=0.0)


def listen_no_further_than_ray() -> None:
    """Ray Serve 2.60 opens a port in every replica, for calls that do not go by actors (none of ours do), on all
    addresses of the machine, and no setting says otherwise. It is opened after the replica's own part is made: at the
    loopback, where Ray is at the loopback.
    """
    module = sys.modules.get("ray.serve._private.replica")
    opens = getattr(module, "add_port_to_grpc_server", None)
    if module is not None and opens is not None and is_on_loopback():
        module.add_port_to_grpc_server = lambda server, _: opens(server, "127.0.0.1:0")  # type: ignore[attr-defined]


def is_on_loopback() -> bool:
    """Whether the Ray of this process is in this machine alone."""
    import ray.util

    return ipaddress.ip_address(ray.util.get_node_ip_address()).is_loopback
