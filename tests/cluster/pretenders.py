"""Replicas of nothing, as a front calls them: they take a moment to start and to paint, and are killed, without Ray."""

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
    """One that may be there.

    settings  it is made with
    inside    ids of the requests that it paints; ``painted``: of those that it has painted, with the seed
    is_held   whether somebody reads ``live``
    is_silent whether work says nothing, not even that it is lost
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
        """Everything that reads of it is told so; it starts anew when it is held again."""
        self._dies.set()
        self._dies = asyncio.Event()

    async def renew(self, settings: Settings) -> None:
        """Be made with ``settings`` from now on."""
        assert not self.is_held
        assert not self.inside
        self.settings = settings

    async def stream(self, method: str, *arguments: bytes) -> AsyncGenerator[bytes, None]:
        """``live`` or ``work``."""
        async with contextlib.aclosing(self._live() if method == "live" else self._work(*arguments)) as frames:
            async for frame in frames:
                yield frame

    async def ask(self, question: bytes) -> bytes:
        """Of its books, numbers and calls."""
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
        assert isinstance(command, ipc.Submit)
        if isinstance(command.request, EncodeRequest):
            yield ipc.frame(_encoded(command.request))
            return
        assert isinstance(command.request, GenerationRequest)
        request_id, seed = command.request.request_id, command.request.seed
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
        """RuntimeError where it is killed meanwhile."""
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
