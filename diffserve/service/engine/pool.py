"""Pool of engine replicas behind the ``Engines`` interface.

    requests --> Router --> replica 0: EngineClient <--> engine process on cuda:0
                       `--> replica 1: EngineClient <--> engine process on cuda:1

A replica is an engine process of this machine or, in ``diffserve.cluster``, an engine process on Ray. There is no queue
here: each request goes to a replica at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final, Generic, Protocol, TypeVar, cast

from msgspec.structs import replace

from diffserve.api.embedding_types import EmbeddingRequest
from diffserve.api.engine_stats import EngineStats, gone, merged
from diffserve.api.errors import DiffserveError, EngineUnavailable
from diffserve.api.rewrite_types import RewriteRequest
from diffserve.api.stage_types import EncodeRequest
from diffserve.api.text_types import LanguageModelInfo, TextAccepted, TextRequest
from diffserve.api.types import (
    Accepted,
    Asks,
    Captured,
    GenerationRequest,
    ModelInfo,
    Preview,
    Progress,
    Queued,
    ServedModel,
)
from diffserve.api.upscale_types import UpscaleRequest, upscale_work
from diffserve.service.admission import Ticket, work_of
from diffserve.service.engine.engines import END_OF_JOB, EngineHost, Job, OnCapture, Watch, capturing, refuse_unready
from diffserve.service.engine.router import ReplicaQueue, RoutedRequest, Router, route_needs
from diffserve.service.metrics import Metrics
from diffserve.settings.config import Settings

STATS_TIMEOUT_S: Final = 0.4
"""A replica that does not return its statistics in this time is counted with its last ones."""

ROWS_PER_TOKEN: Final = 1 / 16
"""Approximate cost of a text token in UNet rows; only the comparison of queues depends on it."""

CHARS_PER_TOKEN: Final = 4
REPEATABLE_EVENTS: Final = (Accepted, Queued, Progress, Preview, Captured, TextAccepted)
"""Events after which a request may still be restarted on another replica."""

E = TypeVar("E")
T = TypeVar("T")
log = logging.getLogger("diffserve.engine")


class Replica(EngineHost, Protocol):
    """A member of the pool: one engine at a time, restarted when it is lost.

    Attributes:
        name: Name in the log and in metrics.
    """

    name: str

    @property
    def is_expected(self) -> bool:
        """Whether the replica is started and its failure counts as one of the pool."""

    @property
    def engine_id(self) -> int | None:
        """Identity of the current engine process; changes with every restart."""

    def take(self, job: Job[Any]) -> None:
        """Start the request of ``job`` and feed it its events; raise EngineUnavailable if the engine is lost."""

    def cancel(self, request_id: str) -> None:
        """Cancel a request; ignored if it has ended."""


R = TypeVar("R", bound=Replica)


class Attempt(Job[Any]):
    """A request on one replica; ``job`` is what the client reads."""

    def __init__(
        self, job: Job[Any], request: RoutedRequest, replica: Replica, ticket: Ticket, on_event: Callable[..., None]
    ) -> None:
        super().__init__(cast(Asks[Any], request), job._cancel)
        self.job = job
        self.replica = replica
        self.is_movable = False
        self.num_losses = 0
        self._ticket = ticket
        self._on_event = on_event
        self._routed = request

    @property
    def cost_left(self) -> float:
        """Remaining work in UNet rows of the native size."""
        return self._ticket.cost_left

    def feed(self, event: Any) -> None:
        """Count the progress and pass ``event`` on to the pool."""
        if isinstance(self._routed, (TextRequest, RewriteRequest)):
            self._ticket.watch_texts(0, event)
        else:
            self._ticket.watch(event)
        if isinstance(event, Accepted) and isinstance(self._routed, GenerationRequest):
            self._routed = replace(self._routed, seed=event.seed)
        if isinstance(event, Captured) and isinstance(self._routed, GenerationRequest):
            self._routed = replace(self._routed, resume_from=event.data)
        self._on_event(self, event)

    def remaining_request(self) -> RoutedRequest | None:
        """Return the request with its seed, its last capture and the rest of its deadline; ``None`` after that."""
        deadline_s = self._routed.deadline_s
        if deadline_s is None:
            return self._routed
        left_s = deadline_s - (time.monotonic() - self._submitted_s)
        if left_s <= 0.0:
            return None
        if isinstance(self._routed, EncodeRequest):
            return replace(self._routed, generation=replace(self._routed.generation, deadline_s=left_s))
        return replace(self._routed, deadline_s=left_s)


class ReplicaPool(Generic[R]):
    """Replicas that work in parallel, as one: see ``Engines``.

    A request that is read as a whole (``is_whole``) and has only progress so far is restarted on another replica if its
    own is lost, with the seed that it had, so that the bytes are equal in deterministic mode on equal devices. Images
    continue from their last capture (``[serve] checkpoint_every_s``). Other requests end in EngineUnavailable.
    """

    def __init__(self, settings: Settings, replicas: Sequence[R], metrics: Metrics, *, max_attempts: int = 2) -> None:
        """Create a pool.

        Args:
            settings: Settings of the server.
            replicas: All possible replicas.
            metrics: Metrics that the replicas count in.
            max_attempts: Replicas that one request may occupy; it may be the reason that they are lost.
        """
        self.settings = settings
        self.replicas = list(replicas)
        self.metrics = metrics
        self.failed: asyncio.Future[DiffserveError] = asyncio.get_running_loop().create_future()
        self._max_attempts = max_attempts
        self._router = Router()
        self._attempts: dict[str, Attempt] = {}
        self._engine_ids: dict[str, int | None] = {}
        self._models: tuple[ServedModel, ...] = ()
        self._text_info: LanguageModelInfo | None = None
        self._stats: dict[str, tuple[int | None, EngineStats]] = {}
        self._past_stats: list[EngineStats] = []  # at most one: the counters of the engines that have stopped
        self._is_stopping = False
        for replica in self.replicas:
            self.watch_failure(replica)

    @property
    def info(self) -> ModelInfo | None:
        """Description of the first image model; ``None`` until the first replica is ready."""
        return next((model.info for model in self.models[:1]), None)

    @property
    def text_info(self) -> LanguageModelInfo | None:
        """Description of the language model; ``None`` until the first replica is ready, or without such a model."""
        infos = (replica.text_info for replica in self.replicas)
        self._text_info = next((info for info in infos if info is not None), self._text_info)
        return self._text_info

    @property
    def models(self) -> tuple[ServedModel, ...]:
        """Image models of all ready replicas, else the last known ones.

        A model is loaded if one replica has loaded it, and has a problem if all replicas report one.
        """
        models = [model for replica in self._ready or self.replicas for model in replica.models]
        if models:
            names = dict.fromkeys(model.name for model in models)
            self._models = tuple(_merge_models([model for model in models if model.name == name]) for name in names)
        return self._models

    @property
    def is_ready(self) -> bool:
        """Whether at least one replica is ready."""
        return bool(self._ready)

    @property
    def num_ready(self) -> int:
        """Number of replicas that are ready."""
        return len(self._ready)

    @property
    def retry_after_s(self) -> float:
        """Expected seconds until the first replica is ready, at least 1."""
        expected = [replica for replica in self.replicas if replica.is_expected and not replica.failed.done()]
        return min(replica.retry_after_s for replica in expected or self.replicas)

    @property
    def _ready(self) -> list[R]:
        return [replica for replica in self.replicas if replica.is_ready]

    @property
    def _running(self) -> list[R]:
        """Replicas that answer questions."""
        return self._ready

    def require_ready(self) -> None:
        """Raise EngineUnavailable, with the time for a retry, if no replica is ready."""
        refuse_unready(self)

    def queue_costs(self) -> defaultdict[str, float]:
        """Return the remaining work of every replica by its name, in UNet rows of the native size."""
        costs: defaultdict[str, float] = defaultdict(float)
        for attempt in self._attempts.values():
            costs[attempt.replica.name] += attempt.cost_left
        return costs

    def start(self) -> None:
        """Start and supervise all replicas."""
        for replica in self.replicas:
            replica.start()

    async def stop(self) -> None:
        """Stop all replicas; unfinished requests end in EngineUnavailable."""
        self._is_stopping = True
        await asyncio.gather(*(replica.stop() for replica in self.replicas))

    def submit(
        self,
        request: Asks[E],
        watch: Watch | None = None,
        *,
        is_whole: bool = False,
        on_capture: OnCapture | None = None,
    ) -> Job[E]:
        """Hand a request to a replica; see ``Engines``."""
        self.require_ready()
        if on_capture is not None or (is_whole and len(self.replicas) > 1):
            request = capturing(request, self.settings)
        job = Job(request, self.cancel, watch, is_whole=is_whole, on_capture=on_capture)
        self._send(job, cast(RoutedRequest, request), self._ready).is_movable = is_whole
        return job

    def cancel(self, request_id: str) -> None:
        """Cancel a request; its slot is free at the engine's next step. Ignored if it has ended."""
        attempt = self._attempts.pop(request_id, None)
        if attempt is not None:
            attempt.replica.cancel(request_id)

    def interrupt(self, request_id: str) -> None:
        """End an image request early with its unfinished images; ignored if it has ended."""
        attempt = self._attempts.get(request_id)
        if attempt is not None:
            attempt.job.was_interrupted = True
            attempt.is_movable = False
            attempt.replica.interrupt(request_id)

    def retry_load(self, name: str) -> None:
        """Read the files of a model that failed to load again, on all replicas that are ready.

        Raises:
            EngineUnavailable: No replica is ready.
        """
        self.require_ready()
        for replica in self._ready:
            replica.retry_load(name)

    async def num_requests(self) -> int:
        """Return the number of requests that the engines count; raise EngineUnavailable if no replica is ready."""
        return sum(await self._ask(lambda replica: replica.num_requests()))

    async def trace(self) -> list[list[str]]:
        """Return the recent UNet calls of one replica after the other; raise EngineUnavailable without a replica."""
        return [call for calls in await self._ask(lambda replica: replica.trace()) for call in calls]

    async def stats(self) -> EngineStats | None:
        """Return the sum of the statistics of all replicas, with the counters of engines that have stopped.

        Raises:
            EngineUnavailable: No replica is ready, or none answers.
        """
        self.require_ready()
        tasks = [asyncio.create_task(self._read_stats(replica)) for replica in self._running]
        done, late = await asyncio.wait(tasks, timeout=STATS_TIMEOUT_S)
        for task in late:
            task.cancel()
        if all(isinstance(task.exception(), EngineUnavailable) for task in done):
            raise EngineUnavailable("no engine returns its statistics.")
        running = {replica.name: replica.engine_id for replica in self._running}
        latest = [
            stats if running.get(name, -1) == engine_id else gone(stats)
            for name, (engine_id, stats) in self._stats.items()
        ]
        return merged([*latest, *self._past_stats]) if latest else None

    async def _read_stats(self, replica: R) -> None:
        engine_id = replica.engine_id
        stats = await replica.stats()
        if stats is None:
            return
        previous_id, previous = self._stats.get(replica.name, (engine_id, stats))
        if previous_id != engine_id:
            self._past_stats = [merged([*self._past_stats, gone(previous)])]
        self._stats[replica.name] = engine_id, stats

    async def _ask(self, question: Callable[[R], Awaitable[T]]) -> list[T]:
        """Return the answers of all running replicas that do not get lost meanwhile."""
        self.require_ready()
        answers = await asyncio.gather(*(question(replica) for replica in self._running), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, EngineUnavailable):
                raise answer
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    def _send(self, job: Job[Any], request: RoutedRequest, replicas: Sequence[R]) -> Attempt:
        """Hand ``request`` to the best of ``replicas``; raise EngineUnavailable if that one was just lost."""
        cost, num_parts = self._work_of(request)
        needs = route_needs(request, cost, "" if self.info is None else self.info.model_id)
        costs, queues = self.queue_costs(), {}
        for replica in replicas:
            if self._engine_ids.get(replica.name, -1) != replica.engine_id:  # a new process has nothing in its caches
                self._router.forget(replica.name)
                self._engine_ids[replica.name] = replica.engine_id
            loaded = frozenset(model.name for model in replica.models if model.is_loaded)
            queues[replica.name] = ReplicaQueue(costs[replica.name], loaded)
        name = self._router.choose(needs, queues)
        replica = next(replica for replica in replicas if replica.name == name)
        attempt = Attempt(job, request, replica, Ticket("", cost, num_parts, 1, lambda _: None), self._on_event)
        replica.take(attempt)
        self._router.record(name, needs)
        self._attempts[job.request_id] = attempt
        return attempt

    def _on_event(self, attempt: Attempt, event: Any) -> None:
        """Pass ``event`` on to the client's job unless the request is restarted on another replica."""
        if isinstance(event, END_OF_JOB) and self._attempts.get(attempt.request_id) is attempt:
            del self._attempts[attempt.request_id]
        if isinstance(event, EngineUnavailable) and attempt.is_movable and self._restart(attempt):
            return
        attempt.is_movable = attempt.is_movable and isinstance(event, REPEATABLE_EVENTS)
        attempt.job.feed(event)

    def _restart(self, lost_attempt: Attempt) -> bool:
        """Restart the request of ``lost_attempt`` on another replica; return whether that was possible."""
        other_replicas = [replica for replica in self._ready if replica is not lost_attempt.replica]
        request, num_losses = lost_attempt.remaining_request(), lost_attempt.num_losses + 1
        if self._is_stopping or not other_replicas or request is None or num_losses >= self._max_attempts:
            return False
        try:
            attempt = self._send(lost_attempt.job, request, other_replicas)
        except EngineUnavailable:
            return False
        attempt.is_movable, attempt.num_losses = True, num_losses
        reason = f"replica {lost_attempt.replica.name} was lost"
        extra = {"request_id": lost_attempt.request_id, "member": attempt.replica.name, "reason": reason}
        log.warning("request restarts on another replica", extra=extra)
        return True

    def _work_of(self, request: RoutedRequest) -> tuple[float, int]:
        """Return the cost of ``request`` in UNet rows of the native size, and its number of parts (images)."""
        match request:
            case GenerationRequest(num_painted=num_parts):
                infos = {model.name: model.info for model in self._models}
                info = infos.get(request.model) or self.info
                return 1.0 if info is None else work_of(request, info, self.info), num_parts
            case TextRequest(params=params):
                num_chars = len(request.prompt) + sum(len(message.content) for message in request.messages)
                num_tokens = (
                    num_chars / CHARS_PER_TOKEN + len(request.token_ids) + request.num_texts * params.max_tokens
                )
            case RewriteRequest():
                num_tokens = (1 + request.num_prompts) * len(request.wish) / CHARS_PER_TOKEN
            case EmbeddingRequest():
                num_tokens = sum(map(len, request.texts)) / CHARS_PER_TOKEN + sum(map(len, request.token_ids))
            case UpscaleRequest(image=image):
                return upscale_work(image.width_px, image.height_px), 1
            case _:  # one stage of an image
                num_tokens = 0.0
        return max(1.0, ROWS_PER_TOKEN * num_tokens), 1

    def watch_failure(self, replica: R) -> None:
        """Fail with ``replica`` if no other replica is left."""
        replica.failed.add_done_callback(partial(self._on_failure, replica))

    def _on_failure(self, replica: R, failed: asyncio.Future[DiffserveError]) -> None:
        if failed.cancelled():
            return
        reason = failed.result().message
        log.error("replica is not restarted any more", extra={"member": replica.name, "reason": reason})
        expected = [replica for replica in self.replicas if replica.is_expected]
        if expected and not self.failed.done() and all(replica.failed.done() for replica in expected):
            self.failed.set_result(expected[0].failed.result())


def _merge_models(models: Sequence[ServedModel]) -> ServedModel:
    """Return one model in place of the descriptions of the same model by several replicas."""
    usable = next((model for model in models if not model.problem), models[0])
    info = next((model.info for model in models if model.info is not None), None)
    return replace(usable, info=usable.info or info, is_loaded=any(model.is_loaded for model in models))
