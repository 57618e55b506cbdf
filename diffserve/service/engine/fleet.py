"""Several engines in one machine behind one front, each on a device of its own.

    requests --> Router --> member 0: EngineClient <--> engine process on cuda:0
                       `--> member 1: EngineClient <--> engine process on cuda:1

A member that is lost is restarted while the others go on. What it held ends in an error that may be tried again, as
with one engine; but a request whose answer is told whole, and of which nothing came but progress, is given to another
member, once. The bytes are the same in deterministic mode on devices of one kind: seeds are told before anything is
painted, and the second time that seed is asked for.

There is no queue here: a request is handed to a member at once, whose engine does the rest.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar, cast

from msgspec.structs import replace

from diffserve.api.embedding_types import EmbeddingRequest
from diffserve.api.engine_stats import EngineStats, gone, merged
from diffserve.api.errors import DiffserveError, EngineUnavailable
from diffserve.api.rewrite_types import RewriteRequest
from diffserve.api.text_types import LanguageModelInfo, TextAccepted, TextRequest
from diffserve.api.types import Accepted, Asks, GenerationRequest, ModelInfo, Preview, Progress, Queued, ServedModel
from diffserve.service.admission import Ticket, work_of
from diffserve.service.engine.client import EngineClient, watch_engines
from diffserve.service.engine.engines import LAST, Engines, Job, Watch, refuse_unready
from diffserve.service.engine.router import MemberQueue, Routed, Router, needs_of
from diffserve.service.metrics import Metrics
from diffserve.settings.config import Settings, num_cores

ANSWER_S: Final = 0.4
"""A member that has not told its numbers by then is counted with the last ones."""

ROWS_PER_TOKEN: Final = 1 / 16
"""What a token of a text weighs beside a UNet row, roughly: enough that one queue can be held against another."""

CHARS_PER_TOKEN: Final = 4
MAY_COME_TWICE: Final = (Accepted, Queued, Progress, Preview, TextAccepted)
"""Events after which a request may still begin anew."""

E = TypeVar("E")
T = TypeVar("T")
log = logging.getLogger("diffserve.engine")


class EngineMember:
    """One of the engines.

    name    as the log and the metrics call it: "0", "1", ...
    device  that it works on
    client  which keeps it alive
    legs    what it was given and is not over
    """

    def __init__(self, name: str, settings: Settings, metrics: Metrics) -> None:
        self.name = name
        self.device = settings.model.device
        self.client = EngineClient(settings, metrics=metrics, member=name)
        self.legs: set[_Leg] = set()
        self._pid: int | None = None
        self._now: EngineStats | None = None
        self._now_pid: int | None = None
        self._before: EngineStats | None = None

    @property
    def queue(self) -> MemberQueue:
        """How it stands, for the router."""
        loaded = frozenset(one.name for one in self.client.models if one.is_loaded)
        return MemberQueue(sum(leg.ticket.cost_left for leg in self.legs), loaded)

    @property
    def stats(self) -> list[EngineStats]:
        """What it did as far as it is known, over all its processes."""
        now = self._now
        return [one for one in (self._before, now if now is None or self.client.is_ready else gone(now)) if one]

    def is_new(self) -> bool:
        """Whether its process is another than when this was last asked."""
        pid, self._pid = self._pid, self.client.pid
        return pid != self._pid

    async def ask_stats(self) -> None:
        """Note its numbers, those of a process that is gone as well. EngineUnavailable where it is."""
        pid = self.client.pid
        stats = await self.client.stats()
        if self._now is not None and pid != self._now_pid:
            self._before = merged([one for one in (self._before, gone(self._now)) if one])
        self._now, self._now_pid = stats, pid


class _Leg(Job[Any]):
    """A request at one member; ``job`` is what its client reads."""

    def __init__(
        self, job: Job[Any], request: Routed, ticket: Ticket, member: EngineMember, fleet: EngineFleet
    ) -> None:
        super().__init__(cast(Asks[Any], request), fleet.cancel)
        self.job = job
        self.asked = request
        self.ticket = ticket
        self.member = member
        self.may_move = False
        self._fleet = fleet
        self._begun_s = time.monotonic()

    def feed(self, event: Any) -> None:
        """Nobody reads here: the fleet hears of it."""
        if isinstance(self.asked, (TextRequest, RewriteRequest)):
            self.ticket.watch_texts(0, event)
        else:
            self.ticket.watch(event)
        if isinstance(event, Accepted) and isinstance(self.asked, GenerationRequest):
            self.asked = replace(self.asked, seed=event.seed)
        self._fleet.heard(self, event)

    def anew(self) -> Routed | None:
        """The request as another member should have it; ``None`` where its time is over."""
        if self.asked.deadline_s is None:
            return self.asked
        left_s = self.asked.deadline_s - (time.monotonic() - self._begun_s)
        return replace(self.asked, deadline_s=left_s) if left_s > 0.0 else None


class EngineFleet:
    """The members as one: see ``Engines``."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.failed: asyncio.Future[DiffserveError] = asyncio.get_running_loop().create_future()
        each = enumerate(settings_of_each(settings))
        self.members = [EngineMember(str(number), one, self.metrics) for number, one in each]
        self._router = Router()
        self._legs: dict[str, _Leg] = {}
        self._is_leaving = False
        self._add_metrics()
        for member in self.members:
            member.client.failed.add_done_callback(partial(self._gave_up, member))

    def _add_metrics(self) -> None:
        def each(look: Callable[[EngineMember], float]) -> Callable[[], dict[tuple[str, ...], float]]:
            return lambda: {(member.name, member.device): float(look(member)) for member in self.members}

        watch_engines(self.metrics, [member.client for member in self.members])
        labels, said = ("member", "device"), "What each engine has still to do, in UNet rows of the native size."
        self.metrics.watch("engine_queue_cost", said, each(lambda member: member.queue.cost), *labels)
        said = "Whether an engine would do what it is given now."
        self.metrics.watch("engine_up", said, each(lambda member: member.client.is_ready), *labels)

    @property
    def info(self) -> ModelInfo | None:
        """The first model; ``None`` until the first engine is up."""
        return next((one.client.info for one in self.members if one.client.info is not None), None)

    @property
    def text_info(self) -> LanguageModelInfo | None:
        """The language model beside it; ``None`` until then, and where there is none."""
        return next((one.client.text_info for one in self.members if one.client.text_info is not None), None)

    @property
    def models(self) -> tuple[ServedModel, ...]:
        """Every image model that requests may name; each is loaded where one member has it, and has a problem where all
        say so.
        """
        every = [one for member in self._ready or self.members for one in member.client.models]
        names = dict.fromkeys(one.name for one in every)
        return tuple(_as_one([one for one in every if one.name == name]) for name in names)

    @property
    def is_ready(self) -> bool:
        """Whether a member is."""
        return bool(self._ready)

    @property
    def num_ready(self) -> int:
        """How many members are."""
        return len(self._ready)

    @property
    def retry_after_s(self) -> float:
        """While there is no engine: seconds until the first of them should be there, 1 at least."""
        waits = [one.client.retry_after_s for one in self.members if not one.client.failed.done()]
        return min(waits, default=1.0)

    def require_ready(self) -> None:
        """EngineUnavailable, with when to come back, unless a request handed over now would be painted."""
        refuse_unready(self)

    def start(self) -> None:
        """Start all members and watch over them."""
        for member in self.members:
            member.client.start()

    async def stop(self) -> None:
        """End all members; whatever they still hold ends in EngineUnavailable."""
        self._is_leaving = True
        await asyncio.gather(*(member.client.stop() for member in self.members))

    def submit(self, request: Asks[E], watch: Watch | None = None, *, is_whole: bool = False) -> Job[E]:
        """Hand ``request`` to a member; see ``Engines``."""
        self.require_ready()
        job = Job(request, self.cancel, watch, is_whole=is_whole)
        leg = self._send(job, cast(Routed, request), self._ready)
        leg.may_move = is_whole
        return job

    def cancel(self, request_id: str) -> None:
        """Give a request up, if it is not over; its place is free at its engine's next step."""
        leg = self._legs.get(request_id)
        if leg is not None:
            self._over(leg)
            leg.member.client.cancel(request_id)

    def interrupt(self, request_id: str) -> None:
        """End a request for images early, if it is not over, with the unfinished pictures."""
        leg = self._legs.get(request_id)
        if leg is not None:
            leg.job.was_interrupted = True
            leg.may_move = False
            leg.member.client.interrupt(request_id)

    def heard(self, leg: _Leg, event: Any) -> None:
        """Pass on what has become of ``leg``, unless it begins anew."""
        if isinstance(event, (*LAST, DiffserveError)):
            self._over(leg)
        if isinstance(event, EngineUnavailable) and leg.may_move and self._move(leg):
            return
        leg.may_move = leg.may_move and isinstance(event, MAY_COME_TWICE)
        leg.job.feed(event)

    def look_again(self, name: str) -> None:
        """Have the files of a model looked at again that could not be read. EngineUnavailable without an engine."""
        self.require_ready()
        for member in self._ready:
            member.client.look_again(name)

    async def num_requests(self) -> int:
        """How many requests are in the engines, by their own books. EngineUnavailable without an engine."""
        return sum(await self._ask(lambda client: client.num_requests()))

    async def trace(self) -> list[list[str]]:
        """Per recent UNet call, the request id of every row, member by member. EngineUnavailable without an engine."""
        return [call for calls in await self._ask(lambda client: client.trace()) for call in calls]

    async def stats(self) -> EngineStats | None:
        """The numbers of all members, as one; of those that do not answer at once, the last ones."""
        self.require_ready()
        asking = [asyncio.create_task(member.ask_stats()) for member in self._ready]
        done, late = await asyncio.wait(asking, timeout=ANSWER_S)
        for task in late:
            task.cancel()
        if all(isinstance(task.exception(), EngineUnavailable) for task in done):
            raise EngineUnavailable("no engine tells its numbers.")
        known = [stats for member in self.members for stats in member.stats]
        return merged(known) if known else None

    async def _ask(self, question: Callable[[EngineClient], Awaitable[T]]) -> list[T]:
        """What all members say that are there, and stay until they have. EngineUnavailable without an engine."""
        self.require_ready()
        told = await asyncio.gather(*(question(one.client) for one in self._ready), return_exceptions=True)
        for one in told:
            if isinstance(one, BaseException) and not isinstance(one, EngineUnavailable):
                raise one
        return [one for one in told if not isinstance(one, BaseException)]

    @property
    def _ready(self) -> list[EngineMember]:
        return [member for member in self.members if member.client.is_ready]

    def _send(self, job: Job[Any], request: Routed, members: Sequence[EngineMember]) -> _Leg:
        """Hand ``request`` to one of ``members``, who are ready. EngineUnavailable where that one is not after all."""
        cost, num_parts = self._work_of(request)
        needs = needs_of(request, cost, "" if self.info is None else self.info.model_id)
        for member in members:
            if member.is_new():
                self._router.forget(member.name)
        by_name = {member.name: member for member in members}
        member = by_name[self._router.choose(needs, {name: one.queue for name, one in by_name.items()})]
        leg = _Leg(job, request, Ticket("", cost, num_parts, 1, lambda _: None), member, self)
        member.client.take(leg)
        self._router.sent(member.name, needs)
        self._legs[leg.request_id] = leg
        member.legs.add(leg)
        return leg

    def _over(self, leg: _Leg) -> None:
        leg.member.legs.discard(leg)
        if self._legs.get(leg.request_id) is leg:
            del self._legs[leg.request_id]

    def _move(self, leg: _Leg) -> bool:
        """Have the request of ``leg``, whose engine is lost, begin anew elsewhere; False where it cannot."""
        others = [member for member in self._ready if member is not leg.member]
        request = leg.anew()
        if self._is_leaving or not others or request is None:
            return False
        try:
            new = self._send(leg.job, request, others)
        except EngineUnavailable:
            return False
        facts = {"request_id": leg.request_id, "member": new.member.name}
        log.warning("request begins anew", extra=facts | {"reason": f"member {leg.member.name} was lost"})
        return True

    def _work_of(self, request: Routed) -> tuple[float, int]:
        """What ``request`` costs, and of how many parts."""
        match request:
            case GenerationRequest(num_painted=num_parts):
                infos = {one.name: one.info for one in self.models}
                info = infos.get(request.model) or self.info
                return 1.0 if info is None else work_of(request, info, self.info), num_parts
            case TextRequest(params=params):
                said = len(request.prompt) + sum(len(one.content) for one in request.messages)
                num_tokens = said / CHARS_PER_TOKEN + len(request.token_ids) + request.num_texts * params.max_tokens
            case RewriteRequest():
                num_tokens = (1 + request.num_prompts) * len(request.wish) / CHARS_PER_TOKEN
            case EmbeddingRequest():
                num_tokens = sum(map(len, request.texts)) / CHARS_PER_TOKEN + sum(map(len, request.token_ids))
        return max(1.0, ROWS_PER_TOKEN * num_tokens), 1

    def _gave_up(self, member: EngineMember, failed: asyncio.Future[DiffserveError]) -> None:
        log.error("no further engine is started", extra={"member": member.name, "reason": failed.result().message})
        if all(one.client.failed.done() for one in self.members) and not self.failed.done():
            self.failed.set_result(self.members[0].client.failed.result())


def _as_one(models: Sequence[ServedModel]) -> ServedModel:
    """A model that several have, as one."""
    best = next((one for one in models if not one.problem), models[0])
    known = next((one.info for one in models if one.info is not None), None)
    return replace(best, info=best.info or known, is_loaded=any(one.is_loaded for one in models))


def open_engines(settings: Settings) -> Engines:
    """One engine, or several where ``[serve] devices`` names several. Within a running event loop."""
    each = settings_of_each(settings)
    return EngineFleet(settings) if len(each) > 1 else EngineClient(each[0])


def settings_of_each(settings: Settings) -> list[Settings]:
    """What each engine is started with: ``settings`` themselves where no devices are named."""
    devices = settings.serve.devices
    if not devices:
        return [settings]
    num_threads = _threads_of_each(settings)
    return [
        replace(
            settings,
            model=replace(settings.model, device=device),
            models=tuple(replace(one, device=device) for one in settings.models),
            engine=replace(settings.engine, threads=num_threads) if device == "cpu" else settings.engine,
        )
        for device in devices
    ]


def told_of_devices(settings: Settings) -> str:
    """Which engines there will be, for the person who starts them; "" where there is one."""
    each = settings_of_each(settings)
    threads = [{None: "", 1: ", 1 thread"}.get(one.engine.threads, f", {one.engine.threads} threads") for one in each]
    devices = [f"{one.model.device}{told}" for one, told in zip(each, threads, strict=True)]
    return f"{len(each)} engines: {'; '.join(devices)}" if len(each) > 1 else ""


def _threads_of_each(settings: Settings) -> int | None:
    """Threads of every engine on the processor: as configured, or the cores divided among them where there are
    several.
    """
    num_sharing = settings.serve.devices.count("cpu")
    if settings.engine.threads is not None or num_sharing < 2:
        return settings.engine.threads
    return max(1, num_cores() // num_sharing)
