"""The replicas of a cluster as one, behind the front: see :class:`~diffserve.service.engine.engines.Engines`.

A request goes where the router sends it (:mod:`diffserve.service.engine.router`). Where its replica is lost, one whose
answer is told whole, and of which nothing came but progress, begins anew at another, with the seed that it had. What
was sent where is known here, for the router and the scaler; what is inside a replica its own books say.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from msgspec.structs import replace

from diffserve.api import ipc
from diffserve.api.engine_stats import EngineStats, merged
from diffserve.api.errors import DiffserveError, EngineUnavailable
from diffserve.api.text_types import LanguageModelInfo
from diffserve.api.types import Accepted, Asks, GenerationRequest, ModelInfo, ServedModel
from diffserve.cluster.config import ClusterConfig
from diffserve.cluster.scaling import Scaler
from diffserve.cluster.seat import Calls, Seat
from diffserve.service.admission import work_of
from diffserve.service.engine.engines import LAST, Job, Watch, refuse_unready
from diffserve.service.engine.fleet import MAY_COME_TWICE
from diffserve.service.engine.router import Routed, Router, needs_of
from diffserve.service.metrics import Metrics
from diffserve.settings.config import Settings
from diffserve.store.unet_paths import UNetPathFile

SCALE_EVERY_S: Final = 0.5
MOST_LOST: Final = 3
"""Replicas that one request may lose: it may be the reason."""

E = TypeVar("E")
T = TypeVar("T")
log = logging.getLogger("diffserve.cluster")


class _Try(Job[Any]):
    """A request at one replica; ``job`` is what its client reads."""

    def __init__(
        self, job: Job[Any], request: Asks[Any], seat: Seat, engines: RayEngines, may_move: bool, num_lost: int
    ) -> None:
        super().__init__(request, engines.cancel)
        self.num_lost = num_lost
        self.job = job
        self.seat = seat
        self.may_move = may_move
        self.begun_s = asyncio.get_running_loop().time()
        self._engines = engines

    def feed(self, event: Any) -> None:
        """Nobody reads here: the engines hear of it."""
        if isinstance(event, Accepted) and isinstance(self.request, GenerationRequest):
            self.request = replace(self.request, seed=event.seed)
        self._engines.heard(self, event)


class RayEngines:
    """The replicas as one. ``calls`` has one entry for each that there may be, by name."""

    def __init__(
        self, settings: Settings, cluster: ClusterConfig, calls: Mapping[str, Calls], metrics: Metrics | None = None
    ) -> None:
        self.settings = settings
        self.metrics = metrics or Metrics()
        self.failed: asyncio.Future[DiffserveError] = asyncio.get_running_loop().create_future()
        paths = UNetPathFile(Path(settings.serve.data_dir).expanduser())
        self.seats = [Seat(name, one, self.metrics, paths) for name, one in calls.items()]
        self._cluster = cluster
        self._scaler = Scaler(cluster)
        self._router = Router()
        self._tries: dict[str, _Try] = {}
        self._known: tuple[ServedModel, ...] = ()
        self._known_text: LanguageModelInfo | None = None
        self._was_wanted = False
        self._scaling: asyncio.Task[None] | None = None
        watch_seats(self.metrics, self.seats)
        for seat in self.seats:
            self.watch(seat)

    @property
    def info(self) -> ModelInfo | None:
        """The first model; ``None`` until the first replica was up."""
        return next((one.info for one in self.models[:1]), None)

    @property
    def text_info(self) -> LanguageModelInfo | None:
        """The language model; ``None`` until the first replica was up, and where there is none."""
        self._known_text = next((seat.text_info for seat in self.seats if seat.text_info), self._known_text)
        return self._known_text

    @property
    def models(self) -> tuple[ServedModel, ...]:
        """Every image model that requests may name, as a replica that is up tells them; else the last one that was."""
        told = [seat.models for seat in self.seats if seat.is_ready]
        if told:
            loaded = {one.name for models in told for one in models if one.is_loaded}
            self._known = tuple(replace(one, is_loaded=one.name in loaded) for one in told[0])
        return self._known

    @property
    def is_ready(self) -> bool:
        """Whether a replica is."""
        return bool(self._ready)

    @property
    def num_ready(self) -> int:
        """How many replicas are."""
        return len(self._ready)

    @property
    def retry_after_s(self) -> float:
        """While there is no replica: seconds until the first should be there, 1 at least."""
        held = [seat for seat in self.seats if seat.is_held] or self.seats
        return min(seat.retry_after_s for seat in held)

    def require_ready(self) -> None:
        """EngineUnavailable, with when to come back, unless a request handed over now would be painted; where there is
        no replica, one is started, or kept that is leaving.
        """
        if not self.is_ready:
            self._was_wanted = True
            for seat in [one for one in self.seats if one.is_leaving and not one.is_changing][:1]:
                seat.hold()
        refuse_unready(self)

    def start(self) -> None:
        """Hold as many replicas as there are to be at least, and one to begin with; then as many as the work asks."""
        for seat in self.seats[: max(1, self._cluster.replicas.min)]:
            seat.hold()
        self._scaling = asyncio.create_task(self._scale(), name="replicas")

    async def stop(self) -> None:
        """Let go of all; whatever they still hold ends in EngineUnavailable."""
        if self._scaling is not None:
            self._scaling.cancel()
            await asyncio.gather(self._scaling, return_exceptions=True)
        for one in self._tries.values():
            one.may_move = False
        await asyncio.gather(*(seat.let_go() for seat in self.seats))

    def submit(self, request: Asks[E], watch: Watch | None = None, *, is_whole: bool = False) -> Job[E]:
        """Hand ``request`` to a replica; see ``Engines``."""
        self.require_ready()
        job = Job(request, self.cancel, watch, is_whole=is_whole)
        self._send(job, request, self._ready, may_move=is_whole)
        return job

    def cancel(self, request_id: str) -> None:
        """Give a request up, if it is not over; its place is free at its engine's next step."""
        one = self._tries.pop(request_id, None)
        if one is not None:
            one.seat.cancel(request_id)

    def interrupt(self, request_id: str) -> None:
        """End a request for images early, if it is not over, with the unfinished pictures."""
        attempt = self._tries.get(request_id)
        if attempt is not None:
            attempt.job.was_interrupted = True
            attempt.may_move = False
            attempt.seat.send(ipc.Interrupt(request_id=request_id))

    def heard(self, one: _Try, event: Any) -> None:
        """Pass on what has become of ``one``, unless it begins anew."""
        if isinstance(event, (*LAST, DiffserveError)) and self._tries.get(one.request_id) is one:
            del self._tries[one.request_id]
        if isinstance(event, EngineUnavailable) and one.may_move and self._move(one):
            return
        one.may_move = one.may_move and isinstance(event, MAY_COME_TWICE)
        one.job.feed(event)

    def watch(self, seat: Seat) -> None:
        """Hear of it where ``seat`` is given up."""
        seat.failed.add_done_callback(self._gave_up)

    def scale_by(self, cluster: ClusterConfig) -> None:
        """Have as many replicas from now on as ``cluster`` says; there may not be more than before."""
        self._cluster, self._scaler = cluster, Scaler(cluster)

    def look_again(self, name: str) -> None:
        """Have the files of a model looked at again that could not be read. EngineUnavailable without a replica."""
        self.require_ready()
        for seat in self._ready:
            seat.look_again(name)

    async def num_requests(self) -> int:
        """How many requests are in the replicas, by their own books. EngineUnavailable without one."""
        return sum(await self._ask(Seat.num_requests))

    async def trace(self) -> list[list[str]]:
        """Per recent UNet call, the request id of every row, replica by replica. EngineUnavailable without one."""
        return [call for calls in await self._ask(Seat.trace) for call in calls]

    async def stats(self) -> EngineStats | None:
        """The numbers of all replicas that are up, as one. EngineUnavailable without one."""
        known = [one for one in await self._ask(Seat.stats) if one is not None]
        return merged(known) if known else None

    async def _ask(self, question: Callable[[Seat], Awaitable[T]]) -> list[T]:
        """What all replicas say that are there, also those that are leaving, and stay until they have.
        EngineUnavailable without one.
        """
        self.require_ready()
        there = [seat for seat in self.seats if seat.ready is not None]
        told = await asyncio.gather(*(question(seat) for seat in there), return_exceptions=True)
        for one in told:
            if isinstance(one, BaseException) and not isinstance(one, EngineUnavailable):
                raise one
        return [one for one in told if not isinstance(one, BaseException)]

    @property
    def _ready(self) -> list[Seat]:
        return [seat for seat in self.seats if seat.is_ready]

    def _send(
        self, job: Job[Any], request: Asks[Any], seats: Sequence[Seat], *, may_move: bool, num_lost: int = 0
    ) -> None:
        cost = self._cost_of(request)
        needs = needs_of(cast(Routed, request), cost, "" if self.info is None else self.info.model_id)
        by_name = {seat.name: seat for seat in seats}
        for seat in seats:
            if seat.is_new():
                self._router.forget(seat.name)
        seat = by_name[self._router.choose(needs, {name: one.queue for name, one in by_name.items()})]
        one = _Try(job, request, seat, self, may_move, num_lost)
        seat.take(one, cost)
        self._router.sent(seat.name, needs)
        self._tries[one.request_id] = one

    def _move(self, one: _Try) -> bool:
        """Have the request of ``one``, whose replica is lost, begin anew elsewhere; False where it cannot."""
        others = [seat for seat in self._ready if seat is not one.seat]
        request = one.request
        deadline_s = getattr(request, "deadline_s", None)
        if deadline_s is not None:
            left_s = deadline_s - (asyncio.get_running_loop().time() - one.begun_s)
            if left_s <= 0.0:
                return False
            request = replace(request, deadline_s=left_s)  # type: ignore[type-var]
        num_lost = one.num_lost + 1
        if not others or num_lost >= MOST_LOST:
            return False
        self._send(one.job, request, others, may_move=True, num_lost=num_lost)
        log.warning("request begins anew", extra={"request_id": one.request_id, "reason": f"{one.seat.name} was lost"})
        return True

    def _cost_of(self, request: object) -> float:
        info = self.info
        if not isinstance(request, GenerationRequest) or info is None:
            return 1.0
        infos = {one.name: one.info for one in self._known}
        return work_of(request, infos.get(request.model) or info, info)

    async def _scale(self) -> None:
        """Scale now and then, whatever goes wrong once."""
        while True:
            try:
                await self._scale_once()
            except Exception:
                log.exception("scaling failed; it is tried again")
            await asyncio.sleep(SCALE_EVERY_S)

    async def _scale_once(self) -> None:
        """Hold as many as the work asks for, and let those go that are done."""
        free = [seat for seat in self.seats if not seat.is_changing]
        held = [seat for seat in free if seat.is_held and not seat.is_leaving]
        num_held = len(held) + len(self.seats) - len(free)
        start_s = max(seat.start_s for seat in self.seats)
        cost = sum(seat.cost for seat in self.seats)
        if self._was_wanted and not num_held:
            cost = max(cost, 1.0)
        self._was_wanted = False
        now_s = asyncio.get_running_loop().time()
        is_starting = bool(held) and not any(seat.is_ready for seat in held)
        wanted = self._scaler.wanted(cost, num_held, start_s=start_s, now_s=now_s, is_starting=is_starting)
        idle = [seat for seat in free if not seat.is_held or seat.is_leaving]
        for seat in sorted(idle, key=lambda one: not one.is_leaving)[: max(0, wanted - num_held)]:
            log.info("replica wanted", extra={"replica": seat.name})
            seat.hold()
        if wanted < num_held and held:
            min(held, key=lambda seat: (seat.is_ready, seat.cost)).leave()
        for seat in free:
            if seat.is_leaving and not seat.jobs:
                log.info("replica let go", extra={"replica": seat.name})
                with contextlib.suppress(Exception):
                    await seat.let_go()

    def _gave_up(self, _: object) -> None:
        held = [seat for seat in self.seats if seat.is_held and not seat.is_changing]
        if held and not self.failed.done() and all(seat.failed.done() for seat in held):
            self.failed.set_result(held[0].failed.result())


def watch_seats(metrics: Metrics, seats: Sequence[Seat]) -> None:
    """Tell in ``metrics`` how ``seats`` stand, and no others."""

    def each(look: Callable[[Seat], float]) -> Callable[[], dict[tuple[str, ...], float]]:
        return lambda: {(seat.name,): float(look(seat)) for seat in seats}

    said = "What each replica has still to do, in UNet rows of the native size."
    metrics.watch("replica_queue_cost", said, each(lambda seat: seat.cost), "replica")
    said = "Whether a replica would do what it is given now."
    metrics.watch("replica_up", said, each(lambda seat: seat.is_ready), "replica")
    said = "Seconds that a replica took to start."
    metrics.watch("replica_start_seconds", said, each(lambda seat: seat.start_s), "replica")
