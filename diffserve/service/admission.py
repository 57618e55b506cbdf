"""Admission control: limits on queued work, globally and per client.

A request is refused (429 with Retry-After) before its body is read if too many requests wait, or if its client has
more unfinished work than fits in ``max_backlog_s``, not counting its largest request. Work is measured in UNet rows of
the native size for images and in texts for texts; its duration is estimated from the measured pace of the engines.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from diffserve.api.embedding_types import Embedded
from diffserve.api.errors import DeadlineUnreachable, DiffserveError, QueueFull
from diffserve.api.pace import Pace
from diffserve.api.prompt_schedule import num_parts
from diffserve.api.rewrite_types import RewriteDelta, RewriteFinished
from diffserve.api.sizes import enlarged_px, row_cost, step_cost
from diffserve.api.text_types import TextDelta, TextFinished
from diffserve.api.tiles import tiles_of
from diffserve.api.types import (
    FILTERS,
    Cancelled,
    DiffusionParams,
    Failed,
    Finished,
    GenerationRequest,
    ImageFailed,
    ImageFinished,
    ModelInfo,
    Priority,
    Progress,
)
from diffserve.api.upscale_types import Upscaled, upscale_work
from diffserve.media.upscaling import canonical_upscaler
from diffserve.models.learned_samplers import num_steps_of
from diffserve.models.profiles import begin_with_loras
from diffserve.models.references import ENCODING_ROWS
from diffserve.service.http.addresses import Clients
from diffserve.service.metrics import Metrics
from diffserve.service.quotas import Quotas
from diffserve.settings.config import Settings
from diffserve.store.usage import UsageCounts
from schedulers import SAMPLERS, resolve_sampler
from schedulers.learned import is_learned

WAITING_PER_FREE_PLACE: Final = 7
BATCH_RESERVED_DIVISOR: Final = 4
"""One of this many places is reserved for interactive work."""

LONGEST_RETRY_S: Final = 50.0
JITTER: Final = 0.2
"""Random relative change of Retry-After, so that clients that were refused together do not return together."""

BATCH: Final = "batch/"
"""Prefix of the client names of batches, so that batch work does not count against the key's other requests."""


Count = Callable[[str, UsageCounts], None]


class Admission:
    """Admission control of a server: its ``clients`` and the backlogs of images, texts and embeddings."""

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        count: Count = lambda *_: None,
        num_engines: Callable[[], int] = lambda: 1,
        quotas: Quotas | None = None,
    ) -> None:
        """Create the backlogs.

        Args:
            settings: Settings of the server.
            metrics: Receives the gauges of the backlogs.
            count: Called with the ID of a key and what it used.
            num_engines: Returns how many engines work; each has the slots and the pace of one.
            quotas: Daily quotas of keys, None if nothing is stored.
        """
        self._quotas = quotas
        self.clients = Clients(settings.serve.trusted_proxies)
        most_s = settings.serve.max_backlog_s
        waiting = settings.text.max_waiting
        options: dict[str, Any] = {"count": count, "num_engines": num_engines}
        self.images = Backlog("image", settings.engine.max_waiting, most_s, metrics, **options)
        self.texts = Backlog("text", waiting, most_s, metrics, **options)
        self.embeddings = Backlog("embedding", waiting, most_s, metrics, **options)
        each = (self.images, self.texts, self.embeddings)
        message = "Remaining work of accepted requests, in UNet rows of the native size or in texts."
        metrics.watch("queue_cost", message, lambda: {(item.kind,): item.cost_left for item in each}, "kind")
        message = (
            "Largest queue_cost of one client, without its largest request, at the recent throughput; "
            "absent while unknown."
        )
        metrics.watch(
            "admission_cost_limit",
            message,
            lambda: {(item.kind,): limit for item in each if (limit := item.cost_limit) is not None},
            "kind",
        )
        message = "Waiting time of the request that has waited longest; 0 if none waits."
        metrics.watch("queue_age_seconds", message, lambda: {(item.kind,): item.age_s for item in each}, "kind")

    async def check_quota(self, client: str, num_images: int) -> None:
        """Refuse a request for ``num_images`` images that exceeds a quota of the key of ``client``.

        Raises:
            QuotaExceeded: A quota of the key does not suffice today.
        """
        if self._quotas is not None:
            owner = _key_of(client)
            await self._quotas.check(owner, num_images, lambda: self.images.num_images_of(owner))

    @property
    def has_waiting(self) -> bool:
        """Whether a request that belongs to no batch waits."""
        return any(item.has_waiting for item in (self.images, self.texts, self.embeddings))


class Resumed:
    """Event of a request that continues from a stored state: its first progress is not new work."""


class Ticket:
    """Admitted request and the work that is left of it, by part (an image, a text).

    Attributes:
        num_slots: Places that it takes in the queue.
        has_begun: Whether work on it has begun, so that it no longer waits.
        num_images: Images that it will make and that are not counted as used yet.
    """

    def __init__(
        self,
        client: str,
        cost: float,
        num_parts: int,
        num_slots: int,
        tell: Callable[[float], None],
        count: Count = lambda *_: None,
        priority: Priority = "interactive",
        backlog: Backlog | None = None,
    ) -> None:
        self.client = client
        self._cost = cost
        self._backlog = backlog
        self._count = count
        self.priority = priority
        self.num_slots = num_slots
        self.has_begun = False
        self.num_images = 0
        self.cost_left = cost
        self._part_cost = cost / num_parts
        self._left = dict.fromkeys(range(num_parts), self._part_cost)
        self._resumed: set[int] = set()  # parts of which no progress is known since then
        self._tell = tell

    @property
    def progress(self) -> float:
        """Share of the work that is done, from 0 to 1."""
        return 1.0 - self.cost_left / self._cost if self._cost > 0.0 else 0.0

    @property
    def total_s(self) -> float | None:
        """Seconds that the whole work takes all engines at their recent pace; None while the pace is unknown."""
        return None if self._backlog is None else self._backlog.work_s(self._cost)

    @property
    def left_s(self) -> float | None:
        """Expected seconds until the end of the work, which shares the engines; None while their pace is unknown."""
        return None if self._backlog is None else self._backlog.left_s(self)

    def advance(self, part: int, share: float) -> None:
        """Record that ``share`` of ``part`` is done; 1 is all of it."""
        if part in self._left:
            self.has_begun = True
            left = self._part_cost * (1.0 - share)
            done, self._left[part] = max(0.0, self._left[part] - left), left
            self._update_cost(0.0 if part in self._resumed else done)
            self._resumed.discard(part)

    def give_up(self, part: int | None = None) -> None:
        """Drop the remaining work of ``part``, or of all parts."""
        for gone in list(self._left) if part is None else [part]:
            self._left.pop(gone, None)
        self.has_begun = self.has_begun or not self._left
        self._update_cost(0.0)

    def count(self, event: object) -> None:
        """Record the usage that ``event`` reports."""
        match event:
            case ImageFinished(result=result):
                evaluations = (0 if result.cached else result.num_evaluations) + result.discarded_evaluations
                device_s = (0.0 if result.cached else result.device_s) + result.discarded_device_s
                self._used(UsageCounts(pictures=1, evaluations=evaluations, device_s=device_s))
            case TextFinished(usage=usage) | RewriteFinished(usage=usage):
                self._used(UsageCounts(0, 0, 0, usage.prompt_tokens, usage.output_tokens, usage.device_s))
            case Embedded(num_tokens=num_tokens):
                self._used(UsageCounts(input_tokens=num_tokens))
            case Upscaled(device_s=device_s):
                self._used(UsageCounts(pictures=1, device_s=device_s))

    def watch(self, event: object) -> None:
        """Update the ticket from an event of images or embeddings, or from the error that ends them."""
        if isinstance(event, Progress):  # most events are of this type, and they report no usage
            self.advance(event.image_index, event.step_index / event.num_steps)
            return
        self.count(event)
        match event:
            case Resumed():
                self._resumed = set(self._left)
            case ImageFinished(result=result):
                self.advance(result.image_index, 1.0)
            case ImageFailed(image_index=index):
                self.give_up(index)
            case Embedded():
                self.advance(0, 1.0)
            case Finished() | Failed() | Cancelled() | DiffserveError():
                self.give_up()

    def watch_texts(self, part: int, event: object) -> None:
        """Update the ticket from an event of text or prompt number ``part``."""
        self.count(event)
        match event:
            case TextDelta() | RewriteDelta():
                self.advance(part, 0.0)
            case TextFinished() | RewriteFinished():
                self.advance(part, 1.0)
            case Failed() | Cancelled() | DiffserveError():
                self.give_up(part)

    def _used(self, used: UsageCounts) -> None:
        self.num_images = max(0, self.num_images - used.pictures)
        self._count(_key_of(self.client), used)

    def _update_cost(self, done: float) -> None:
        self.cost_left = sum(self._left.values())
        self._tell(done)


class Backlog:
    """Unfinished requests of one kind ("image", "text" or "embedding"); ``clock`` is in seconds."""

    def __init__(
        self,
        kind: str,
        max_waiting: int,
        max_backlog_s: float,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
        count: Count = lambda *_: None,
        num_engines: Callable[[], int] = lambda: 1,
    ) -> None:
        self.kind = kind
        self._waiting_of_each = max_waiting
        self._num_engines = num_engines
        self.max_backlog_s = max_backlog_s
        self.pace = Pace(clock)
        self._metrics = metrics
        self._count = count
        self._clock = clock
        self._tickets: dict[Ticket, float] = {}  # and since when

    @property
    def age_s(self) -> float:
        """Longest time for which a request has waited without any work on it, in seconds; 0 if none waits."""
        since = [since_s for ticket, since_s in self._tickets.items() if not ticket.has_begun]
        return max(0.0, self._clock() - min(since)) if since else 0.0

    @property
    def num_engines(self) -> int:
        """Number of engines that work in parallel; at least one, also while they start."""
        return max(1, self._num_engines())

    @property
    def max_waiting(self) -> int:
        """Number of places in the queues of all engines."""
        return self._waiting_of_each * self.num_engines

    @property
    def cost_left(self) -> float:
        """Unfinished work of all requests."""
        return sum(ticket.cost_left for ticket in self._tickets)

    @property
    def cost_limit(self) -> float | None:
        """Work that the engines do in ``max_backlog_s``; None while the pace is unknown."""
        per_s = self.pace.per_s
        return None if per_s is None else per_s * self.num_engines * self.max_backlog_s

    @property
    def num_waiting(self) -> int:
        """Places taken by requests on which no work was done yet."""
        return sum(ticket.num_slots for ticket in self._tickets if not ticket.has_begun)

    def num_images_of(self, owner: str) -> int:
        """Return how many images of the key ``owner`` are accepted and not finished."""
        return sum(ticket.num_images for ticket in self._tickets if _key_of(ticket.client) == owner)

    @property
    def has_waiting(self) -> bool:
        """Whether a request that belongs to no batch waits."""
        return any(not ticket.has_begun and not ticket.client.startswith(BATCH) for ticket in self._tickets)

    @contextmanager
    def entered(
        self,
        client: str,
        cost: float,
        num_parts: int = 1,
        num_slots: int = 1,
        *,
        priority: Priority = "interactive",
    ) -> Iterator[Ticket]:
        """Admit a request for the length of the block and yield its ticket. Raises QueueFull if there is no room."""
        self.check(client, priority)
        ticket = Ticket(client, cost, num_parts, num_slots, self._record_work, self._count, priority, self)
        self._count(_key_of(client), UsageCounts(requests=1))
        self._tickets[ticket] = self._clock()
        self._record_work(0.0)
        try:
            yield ticket
        finally:
            self._tickets.pop(ticket, None)
            self._record_work(0.0)

    def work_s(self, cost: float) -> float | None:
        """Return how many seconds work of this cost takes all engines; None while the pace is unknown."""
        return self.pace.seconds(cost, self.num_engines)

    def left_s(self, ticket: Ticket) -> float | None:
        """Estimate the seconds until the end of ``ticket``, which shares the engines with the other requests."""
        cost = ticket.cost_left
        cost_of_others = sum(min(cost, item.cost_left) for item in self._tickets if item is not ticket)
        shared_s, alone_s = self.pace.seconds(cost + cost_of_others, self.num_engines), self.pace.seconds(cost)
        return None if shared_s is None or alone_s is None else max(shared_s, alone_s)

    def check(self, client: str, priority: Priority = "interactive") -> None:
        """Raise QueueFull if a request of ``client`` would be refused now."""
        refusal = self._refusal(client, priority)
        if refusal is not None:
            self._metrics.ended(self.kind, "rejected")
            raise refusal

    def lets_in(self, client: str, priority: Priority = "interactive") -> bool:
        """Return whether a request of ``client`` would be admitted now."""
        return self._refusal(client, priority) is None

    def wait_s(self, client: str, priority: Priority = "interactive") -> float | None:
        """Estimate how many seconds of work ``client`` has here, not counting its largest request.

        Other clients share the engines fairly, and interactive work does not wait for batch work. Returns None while
        the pace is unknown.
        """
        left: dict[str, float] = {}
        before = [item for item in self._tickets if item.priority == "interactive" or priority == "batch"]
        for ticket in before:
            left[ticket.client] = left.get(ticket.client, 0.0) + ticket.cost_left
        largest = max((ticket.cost_left for ticket in before if ticket.client == client), default=0.0)
        client_cost = left.pop(client, 0.0) - largest
        return self.pace.seconds(client_cost + sum(min(client_cost, cost) for cost in left.values()), self.num_engines)

    def check_deadline(self, cost: float, deadline_s: float | None, priority: Priority = "interactive") -> None:
        """Refuse work that cannot be finished by its deadline while it shares the engines with the backlog.

        Raises:
            DeadlineUnreachable: The predicted time is longer than ``deadline_s``; never while the pace is unknown.
        """
        before = [item.cost_left for item in self._tickets if item.priority == "interactive" or priority == "batch"]
        predicted_s = self.pace.seconds(cost + sum(min(cost, left) for left in before))
        if deadline_s is not None and predicted_s is not None and predicted_s > deadline_s:
            self._metrics.ended(self.kind, "rejected")
            raise DeadlineUnreachable.of(deadline_s, predicted_s, self.pace.seconds(cost) or 0.0)

    def _refusal(self, client: str, priority: Priority) -> QueueFull | None:
        waiting = [item for item in self._tickets if not item.has_begun]
        num_client_places = sum(
            item.num_slots for item in waiting if (item.client, item.priority) == (client, priority)
        )
        num_waiting = self.num_waiting
        max_waiting = self.max_waiting
        num_free = max_waiting - num_waiting - (max_waiting // BATCH_RESERVED_DIVISOR if priority == "batch" else 0)
        wait_s = self.wait_s(client, priority)
        if num_client_places >= WAITING_PER_FREE_PLACE * num_free:
            message = f"{num_waiting} requests are waiting, which is the limit of this server"
            if num_free > 0:
                message = (
                    f"{num_client_places} of your requests are waiting, and the {num_free} free places are for other "
                    "clients"
                )
            return _queue_full(message, self.pace.seconds(self.cost_left, self.num_engines))
        if wait_s is not None and wait_s >= self.max_backlog_s:
            limit = f"at most {self.max_backlog_s:g} s are allowed per client"
            message = f"your queued requests, without the largest one, need {wait_s:.0f} s of work; {limit}"
            return _queue_full(message, wait_s)
        return None

    def _record_work(self, cost: float) -> None:
        self.pace.did(cost)
        num_busy = sum(ticket.cost_left > 0.0 for ticket in self._tickets)
        if num_busy:
            self.pace.begin(min(num_busy, self.num_engines))
        else:
            self.pace.pause()


def _key_of(client: str) -> str:
    """Return the key ID in a client's name; empty if it has no key."""
    kind, _, key_id = client.partition("/")
    return key_id if kind in ("key", "batch") else ""


def work_of(request: GenerationRequest, info: ModelInfo, unit: ModelInfo | None = None) -> float:
    """Estimate the cost of ``request`` in UNet rows of the native size of ``info``, or of the model ``unit``."""
    params, _ = begin_with_loras(request.diffusion)
    num_steps = num_steps_of(params, info)
    native_width_px, native_height_px = info.good_sizes[0]
    size = request.width_px or native_width_px, request.height_px or native_height_px
    prompts = request.image_prompts or (request.prompt,)
    work = num_steps * _evaluations_per_step(params.sampler, info) * _step_cost(params, info, size, prompts)
    second_px = request.hires_px or enlarged_px(params, *size)
    if second_px is not None:  # the second pass of hires fix
        second_steps = params.hires_steps or num_steps
        per_step = _evaluations_per_step(params.hires_sampler or params.sampler, info)
        is_tiled = tiles_of(params, info, *second_px, is_second=True) is not None
        second_prompts = prompts if params.hires_prompt is None else (params.hires_prompt,)
        step = _step_cost(params, info, second_px, second_prompts, is_second=True)
        work += params.second_strength(second_steps, is_tiled=is_tiled) * second_steps * per_step * step
        if canonical_upscaler(params.hires_upscaler) not in FILTERS:
            work += upscale_work(*size)
    row = 1.0 if unit is None else _size_of_row(info) / _size_of_row(unit)
    return (request.num_painted * work + ENCODING_ROWS * len(params.references)) * row


def _step_cost(
    params: DiffusionParams,
    info: ModelInfo,
    size: tuple[int, int],
    prompts: Sequence[str],
    *,
    is_second: bool = False,
) -> float:
    """Return the mean work of one evaluation of images of this size and ``prompts``, with all rows and tiles."""
    scale = info.default_guidance_scale if params.guidance_scale is None else params.guidance_scale
    parts = [num_parts(prompt) for prompt in prompts]
    num_rows = sum(count + (scale > 1.0 or count > 1) for count in parts) / len(parts)
    num_controls, num_references = (
        sum(adapter.end - adapter.start for adapter in adapters) for adapters in (params.controlnets, params.references)
    )
    full, shallow_share = 1.0 / params.cache_interval, info.shallow_share or 1.0
    tiles = tiles_of(params, info, *size, is_second=is_second)
    cost = row_cost(info, *size) if tiles is None else tiles.num_tiles * row_cost(info, *tiles.tile_px)
    share = full + (1.0 - full) * shallow_share
    return step_cost(share, num_controls, num_references=num_references, num_rows=num_rows, row_cost=cost)


def _evaluations_per_step(sampler: str | None, info: ModelInfo) -> int:
    if is_learned(sampler):
        return 1
    return SAMPLERS[resolve_sampler(sampler or info.default_sampler)[0]].evaluations_per_step


def _size_of_row(info: ModelInfo) -> float:
    """Return parameters times latent cells at the native size, to compare the rows of different models."""
    width_px, height_px = info.good_sizes[0]
    return max(1, info.num_parameters) * width_px * height_px / info.vae_factor**2


def _queue_full(message: str, seconds: float | None) -> QueueFull:
    share = random.uniform(1.0 - JITTER, 1.0 + JITTER)
    retry_after_s = max(1.0, min(seconds or 1.0, LONGEST_RETRY_S) * share)
    return QueueFull(f"{message}; try again in about {retry_after_s:.0f} s.", retry_after_s=retry_after_s)
