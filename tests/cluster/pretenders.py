"""Simulated replicas without Ray: they need a moment to start and to generate, and can be killed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from benchmarks.noop_engine import STATS, info_of
from diffserve.api import ipc
from diffserve.api.stage_types import EncodeRequest, TextsEncoded
from diffserve.api.tensor_values import Encodings
from diffserve.api.types import Accepted, Finished, GenerationRequest, Progress, ServedModel
from diffserve.settings.config import Settings

BROKEN = "nowhere"
"""A path of a model that does not load."""


class PretendReplica:
    """A simulated replica.

    Attributes:
        settings: Settings that the replica uses.
        inside: Ids of the requests in progress.
        painted: Ids of the finished requests, with their seeds.
        is_held: Whether a reader of ``live`` is connected.
        is_silent: Whether work produces no events, not even an error.
    """

    def __init__(self, settings: Settings, *, start_s: float = 0.0, paint_s: float = 0.0) -> None:
        self.settings = settings
        self.inside: set[str] = set()
        self.painted: list[tuple[str, int]] = []
        self.is_held = False
        self.num_strangers = 0
        self.is_silent = False
        self._start_s = start_s
        self._paint_s = paint_s
        self._dies = asyncio.Event()

    def kill(self) -> None:
        """Fail all readers; the replica starts again when it is connected again."""
        self._dies.set()
        self._dies = asyncio.Event()

    async def renew(self, settings: Settings) -> None:
        """Use ``settings`` from now on."""
        assert not self.is_held
        assert not self.inside
        self.settings = settings

    async def stream(self, method: str, *arguments: bytes) -> AsyncGenerator[bytes, None]:
        """Open the stream ``live`` or ``work``."""
        async with contextlib.aclosing(self._live() if method == "live" else self._work(*arguments)) as frames:
            async for frame in frames:
                yield frame

    async def ask(self, question: bytes) -> bytes:
        """Answer a query about queue, numbers or calls."""
        (body,) = ipc.bodies(question)
        match ipc.decode_command(body):
            case ipc.Ping(number=number):
                inside = len(self.inside) + self.num_strangers
                return ipc.frame(ipc.Pong(number=number, num_requests=inside, num_ticks=0, tick_s=0.0, patience_s=0.0))
            case ipc.ReadStats(number=number):
                return ipc.frame(ipc.Stats(number=number, stats=STATS))
            case _:
                raise ValueError("nobody asks that here")

    async def _live(self) -> AsyncGenerator[bytes, None]:
        self.is_held, dies = True, self._dies
        try:
            await self._moment(self._start_s, dies)
            profile = self.settings.model
            if profile.path == BROKEN:
                yield ipc.frame(ipc.LoadFailed(code="model_load_error", message="there is no such model"))
                return
            info = info_of(profile)
            served = ServedModel(name=profile.model_id, info=info, is_loaded=True)
            yield ipc.frame(ipc.Ready(info=info, models=(served,)))
            while True:
                pong = ipc.Pong(number=0, num_requests=len(self.inside), num_ticks=0, tick_s=0.0, patience_s=0.0)
                yield ipc.frame(pong)
                await self._moment(0.05, dies)
        finally:
            self.is_held = False

    async def _work(self, submit: bytes) -> AsyncGenerator[bytes, None]:
        dies = self._dies
        (body,) = ipc.bodies(submit)
        command = ipc.decode_command(body)
        if isinstance(command, EncodeRequest):
            yield ipc.frame(_encoded(command))
            return
        assert isinstance(command, GenerationRequest)
        request_id, seed = command.request_id, command.seed
        self.inside.add(request_id)
        try:
            if self.is_silent:
                await asyncio.Event().wait()
            yield ipc.frame(Accepted(request_id=request_id, seed=seed or 77, num_images=1, queue_position=0))
            yield ipc.frame(Progress(request_id=request_id, image_index=0, step_index=1, num_steps=2))
            await self._moment(self._paint_s, dies)
            self.painted.append((request_id, seed or 77))
            yield ipc.frame(Finished(request_id=request_id, num_painted=1, num_failed=0))
        finally:
            self.inside.discard(request_id)

    async def _moment(self, seconds: float, dies: asyncio.Event) -> None:
        """Wait; raise RuntimeError if the replica is killed meanwhile."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(dies.wait(), seconds or 0.001)
            raise RuntimeError("killed")


def _encoded(request: EncodeRequest) -> TextsEncoded:
    return TextsEncoded(
        request_id=request.request_id,
        prompt=request.generation.prompt,
        encodings=Encodings(base={}),
        encode_s=0.0,
        rewriting_s=0.0,
        waited_s=0.0,
    )
