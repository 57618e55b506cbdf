"""Who is let in: the count of what was accepted and is not done, kept where it can be asked without the engine.

A request is refused (429, with the time after which to come back) before its body is read, when as many wait as may,
or when its client has as much work here as can be done in ``max_backlog_s``, its largest request aside: that one was
let in whole, and keeps no small one out. Work is measured in the engine's unit: UNet rows of the native size for
pictures, texts for texts. How long it takes is learnt from the events that pass by: the pace of one engine, and so many
times that where several work side by side.

What is interactive and what is batch work are counted apart, and for batch work a part of the places is not there.

Clients share. Of the places one client may take seven for each that is left, so that there is always one for another.
And its time is reckoned as the engine will share it: with each other client for as long as that has work, too.

Clients are told apart by their key, where keys are asked for; else by address, and at one address by what they call
their key. Names are digests, made anew by every process. Such a key is not proof of anything, so it divides the share
of an address among at most ``MOST_KEYS`` at a time; nobody gets more by making some up. What proxies say of their
clients counts only where they are named in the configuration; what the page says of its visitors, where it lives in
this process.
"""

from __future__ import annotations

import hashlib
import ipaddress
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from starlette.requests import Request

from diffserve.api.embedding_types import Embedded
from diffserve.api.errors import DeadlineUnreachable, DiffserveError, QueueFull
from diffserve.api.pace import Pace
from diffserve.api.rewrite_types import RewriteDelta, RewriteFinished
from diffserve.api.sizes import row_cost
from diffserve.api.text_types import TextDelta, TextFinished
from diffserve.api.types import (
    Cancelled,
    Failed,
    Finished,
    GenerationRequest,
    ImageFailed,
    ModelInfo,
    Painted,
    Priority,
    Progress,
)
from diffserve.client.on_behalf import HEADER, Asker, asker_in
from diffserve.models.controlnets import WORK_SHARE
from diffserve.models.few_step import begin_with_loras
from diffserve.service.http.hosts import address_of
from diffserve.service.metrics import Metrics
from diffserve.settings.config import Settings
from diffserve.store.usage import Used
from schedulers import SAMPLERS, resolve_sampler

WAITING_PER_FREE_PLACE: Final = 7
BATCH_RESERVED_DIVISOR: Final = 4
"""One place of so many is not for batch work."""

LONGEST_RETRY_S: Final = 50.0
JITTER: Final = 0.2
"""Of the time after which to come back, up or down, so that those who were refused together do not return together."""

MAX_KEYS_PER_ADDRESS: Final = 8
BATCH: Final = "batch/"
"""What the names of batches' clients begin with: what is to be done for a batch keeps none of its key's own requests
out."""

IPV6_NETWORK_BITS: Final = 64
"""What one customer of a provider has is one client."""


Count = Callable[[str, Used], None]


class Admission:
    """The books of a server: ``clients``, and what of ``images``, of ``texts`` and of ``embeddings`` is inside."""

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        count: Count = lambda *_: None,
        num_engines: Callable[[], int] = lambda: 1,
    ) -> None:
        """``count`` is told what clients use, by the ids of their keys; ``num_engines`` says how many work now, each of
        which has the places and the pace of one.
        """
        self.clients = Clients(settings.serve.trusted_proxies)
        most_s = settings.serve.max_backlog_s
        waiting = settings.text.max_waiting
        options: dict[str, Any] = {"count": count, "num_engines": num_engines}
        self.images = Backlog("image", settings.engine.max_waiting, most_s, metrics, **options)
        self.texts = Backlog("text", waiting, most_s, metrics, **options)
        self.embeddings = Backlog("embedding", waiting, most_s, metrics, **options)
        each = (self.images, self.texts, self.embeddings)
        message = "What is still to do of what was let in: UNet rows of the native size, texts."
        metrics.watch("queue_cost", message, lambda: {(one.kind,): one.cost_left for one in each}, "kind")
        message = (
            "As much of it as one client may have here, its largest aside, at the pace of late; absent while unknown."
        )
        metrics.watch(
            "admission_cost_limit",
            message,
            lambda: {(one.kind,): limit for one in each if (limit := one.cost_limit) is not None},
            "kind",
        )
        message = "For how long the one has waited that waits longest, nothing being done for it; 0: nobody waits."
        metrics.watch("queue_age_seconds", message, lambda: {(one.kind,): one.age_s for one in each}, "kind")

    @property
    def has_waiting(self) -> bool:
        """Whether anybody waits who is no batch."""
        return any(one.has_waiting for one in (self.images, self.texts, self.embeddings))


class Ticket:
    """A request that was let in: what is still to do for it, by part (a picture, a text). ``tell`` counts.

    num_places  that it takes among those that wait
    has_begun   whether anything was done for it, so that it waits no more
    """

    def __init__(
        self,
        client: str,
        cost: float,
        num_parts: int,
        num_places: int,
        tell: Callable[[float], None],
        count: Count = lambda *_: None,
        priority: Priority = "interactive",
    ) -> None:
        self.client = client
        self._count = count
        self.priority = priority
        self.num_places = num_places
        self.has_begun = False
        self.cost_left = cost
        self._part_cost = cost / num_parts
        self._left = dict.fromkeys(range(num_parts), self._part_cost)
        self._tell = tell

    def advance(self, part: int, share: float) -> None:
        """``share`` of ``part`` is done, 1 for all of it."""
        if part in self._left:
            self.has_begun = True
            left = self._part_cost * (1.0 - share)
            done, self._left[part] = max(0.0, self._left[part] - left), left
            self._update_cost(done)

    def give_up(self, part: int | None = None) -> None:
        """No more is to be done for ``part``, or for any."""
        for gone in list(self._left) if part is None else [part]:
            self._left.pop(gone, None)
        self.has_begun = self.has_begun or not self._left
        self._update_cost(0.0)

    def count(self, event: object) -> None:
        """Write down what was used, as far as ``event`` tells."""
        match event:
            case Painted(result=result):
                evaluations = 0 if result.cached else result.num_evaluations
                self._used(Used(pictures=1, evaluations=evaluations + result.discarded_evaluations))
            case TextFinished(usage=usage) | RewriteFinished(usage=usage):
                self._used(Used(input_tokens=usage.prompt_tokens, output_tokens=usage.output_tokens))
            case Embedded(num_tokens=num_tokens):
                self._used(Used(input_tokens=num_tokens))

    def watch(self, event: object) -> None:
        """An event of the pictures, or of embeddings, or the error that ends them."""
        if isinstance(event, Progress):  # most of them, and nothing is used by it yet
            self.advance(event.image_index, event.step_index / event.num_steps)
            return
        self.count(event)
        match event:
            case Painted(result=result):
                self.advance(result.image_index, 1.0)
            case ImageFailed(image_index=index):
                self.give_up(index)
            case Embedded():
                self.advance(0, 1.0)
            case Finished() | Failed() | Cancelled() | DiffserveError():
                self.give_up()

    def watch_texts(self, part: int, event: object) -> None:
        """The same for ``part`` of the texts, or for prompts."""
        self.count(event)
        match event:
            case TextDelta() | RewriteDelta():
                self.advance(part, 0.0)
            case TextFinished() | RewriteFinished():
                self.advance(part, 1.0)
            case Failed() | Cancelled() | DiffserveError():
                self.give_up(part)

    def _used(self, used: Used) -> None:
        self._count(_key_of(self.client), used)

    def _update_cost(self, done: float) -> None:
        self.cost_left = sum(self._left.values())
        self._tell(done)


class Backlog:
    """What is inside of one kind ("image", "text" or "embedding"). ``clock`` in seconds."""

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
        """Seconds for which the one waits that waits longest; 0 where nobody does."""
        since = [since_s for ticket, since_s in self._tickets.items() if not ticket.has_begun]
        return max(0.0, self._clock() - min(since)) if since else 0.0

    @property
    def num_engines(self) -> int:
        """How many work side by side; those that are being started count as one."""
        return max(1, self._num_engines())

    @property
    def max_waiting(self) -> int:
        """Places of those that wait, at all engines."""
        return self._waiting_of_each * self.num_engines

    @property
    def cost_left(self) -> float:
        """Work that is still to do."""
        return sum(ticket.cost_left for ticket in self._tickets)

    @property
    def cost_limit(self) -> float | None:
        """Work that is done in ``max_backlog_s``; ``None`` while the pace is not known."""
        per_s = self.pace.per_s
        return None if per_s is None else per_s * self.num_engines * self.max_backlog_s

    @property
    def num_waiting(self) -> int:
        """Places taken by requests that nothing was done for yet."""
        return sum(ticket.num_places for ticket in self._tickets if not ticket.has_begun)

    @property
    def has_waiting(self) -> bool:
        """Whether nothing was done yet for a request that is of no batch."""
        return any(not ticket.has_begun and not ticket.client.startswith(BATCH) for ticket in self._tickets)

    @contextmanager
    def entered(
        self,
        client: str,
        cost: float,
        num_parts: int = 1,
        num_places: int = 1,
        *,
        priority: Priority = "interactive",
    ) -> Iterator[Ticket]:
        """A ticket for the length of the block. QueueFull where there is no room."""
        self.check(client, priority)
        ticket = Ticket(client, cost, num_parts, num_places, self._record_work, self._count, priority)
        self._count(_key_of(client), Used(requests=1))
        self._tickets[ticket] = self._clock()
        self._record_work(0.0)
        try:
            yield ticket
        finally:
            self._tickets.pop(ticket, None)
            self._record_work(0.0)

    def check(self, client: str, priority: Priority = "interactive") -> None:
        """QueueFull where a request of ``client`` would not be let in now."""
        refusal = self._refusal(client, priority)
        if refusal is not None:
            self._metrics.ended(self.kind, "rejected")
            raise refusal

    def lets_in(self, client: str, priority: Priority = "interactive") -> bool:
        """Whether a request of ``client`` would be let in now."""
        return self._refusal(client, priority) is None

    def wait_s(self, client: str, priority: Priority = "interactive") -> float | None:
        """Seconds of work that ``client`` has here beside its largest request, in fair shares with the others; None:
        not known yet. What is interactive does not wait for batch work.
        """
        left: dict[str, float] = {}
        before = [one for one in self._tickets if one.priority == "interactive" or priority == "batch"]
        for ticket in before:
            left[ticket.client] = left.get(ticket.client, 0.0) + ticket.cost_left
        largest = max((ticket.cost_left for ticket in before if ticket.client == client), default=0.0)
        own = left.pop(client, 0.0) - largest
        return self.pace.seconds(own + sum(min(own, cost) for cost in left.values()), self.num_engines)

    def check_deadline(self, cost: float, deadline_s: float | None, priority: Priority = "interactive") -> None:
        """DeadlineUnreachable where work of ``cost``, in turns with what is here, would be done later than in
        ``deadline_s``; nobody is refused while the pace is not known.
        """
        before = [one.cost_left for one in self._tickets if one.priority == "interactive" or priority == "batch"]
        predicted_s = self.pace.seconds(cost + sum(min(cost, left) for left in before))
        if deadline_s is not None and predicted_s is not None and predicted_s > deadline_s:
            self._metrics.ended(self.kind, "rejected")
            raise DeadlineUnreachable.of(deadline_s, predicted_s, self.pace.seconds(cost) or 0.0)

    def _refusal(self, client: str, priority: Priority) -> QueueFull | None:
        waiting = [one for one in self._tickets if not one.has_begun]
        own = sum(one.num_places for one in waiting if (one.client, one.priority) == (client, priority))
        num_waiting = self.num_waiting
        most = self.max_waiting
        num_free = most - num_waiting - (most // BATCH_RESERVED_DIVISOR if priority == "batch" else 0)
        wait_s = self.wait_s(client, priority)
        if own >= WAITING_PER_FREE_PLACE * num_free:
            message = f"{num_waiting} requests are waiting, which is all this server holds"
            if num_free > 0:
                message = f"{own} of your requests are waiting, and the {num_free} places left are for others"
            return _queue_full(message, self.pace.seconds(self.cost_left, self.num_engines))
        if wait_s is not None and wait_s >= self.max_backlog_s:
            most_s = f"at most {self.max_backlog_s:g} s may wait"
            message = f"your requests here, the largest aside, are {wait_s:.0f} s of work, and {most_s}"
            return _queue_full(message, wait_s)
        return None

    def _record_work(self, cost: float) -> None:
        self.pace.did(cost)
        num_busy = sum(ticket.cost_left > 0.0 for ticket in self._tickets)
        if num_busy:
            self.pace.begin(min(num_busy, self.num_engines))
        else:
            self.pace.rest()


def _key_of(client: str) -> str:
    """The id of the key by which ``client`` came in, "" where there was none."""
    kind, _, key_id = client.partition("/")
    return key_id if kind in ("key", "batch") else ""


def work_of(request: GenerationRequest, info: ModelInfo, unit: ModelInfo | None = None) -> float:
    """What painting ``request`` costs, in UNet rows of the native size of ``info``, or of the model ``unit``, as near
    as the steps asked for tell.
    """
    params, _ = begin_with_loras(request.diffusion)
    name, _ = resolve_sampler(params.sampler or info.default_sampler)
    num_steps = params.num_steps or info.default_num_steps
    scale = info.default_guidance_scale if params.guidance_scale is None else params.guidance_scale
    full, share = 1.0 / params.cache_interval, info.shallow_share or 1.0
    controls = 1.0 + sum(WORK_SHARE * (control.end - control.start) for control in params.controlnets)
    rows = num_steps * SAMPLERS[name].evaluations_per_step * (2 if scale > 1.0 else 1) * (full + (1.0 - full) * share)
    native_width_px, native_height_px = info.good_sizes[0]
    pixels = row_cost(info, request.width_px or native_width_px, request.height_px or native_height_px)
    row = 1.0 if unit is None else _size_of_row(info) / _size_of_row(unit)
    return request.num_painted * rows * controls * pixels * row


def _size_of_row(info: ModelInfo) -> float:
    """Of the native size: parameters times cells of the latents, to hold one model's beside another's."""
    width_px, height_px = info.good_sizes[0]
    return max(1, info.num_parameters) * width_px * height_px / info.vae_factor**2


def _queue_full(message: str, seconds: float | None) -> QueueFull:
    share = random.uniform(1.0 - JITTER, 1.0 + JITTER)
    retry_after_s = max(1.0, min(seconds or 1.0, LONGEST_RETRY_S) * share)
    return QueueFull(f"{message}; try again in about {retry_after_s:.0f} s.", retry_after_s=retry_after_s)


def share_of(request: Request) -> float:
    """How many times as much as others the key of ``request`` gets."""
    share: float = request.scope.get("state", {}).get("key_share", 1.0)
    return share


class Clients:
    """Names of those whose requests are inside. ``trusted_proxies``: addresses whose X-Forwarded-For is believed."""

    def __init__(self, trusted_proxies: Sequence[str] = ()) -> None:
        self._trusted = frozenset(trusted_proxies)
        self._salt = secrets.token_bytes(16)
        self._keys: dict[str, Counter[str]] = {}

    @contextmanager
    def known(self, request: Request) -> Iterator[str]:
        """The name of whoever sent ``request``, which is the same for as long as anything of theirs is inside."""
        state = request.scope.get("state", {})
        if known := state.get("client") or (f"key/{state['key_id']}" if state.get("key_id") else ""):
            yield known
            return
        asker = asker_in(request.headers.get(HEADER))
        address = self._digest(_network(self._address(request, asker)))
        key = self._digest(asker.key if asker else request.headers.get("authorization", ""))
        keys = self._keys.setdefault(address, Counter())
        if key not in keys and len(keys) >= MAX_KEYS_PER_ADDRESS:
            key = "others"
        keys[key] += 1
        try:
            yield f"{address}/{key}"
        finally:
            keys[key] -= 1
            if not keys[key]:
                del keys[key]
            if not keys and self._keys.get(address) is keys:
                del self._keys[address]

    def _address(self, request: Request, asker: Asker | None) -> str:
        """The nearest address that is not one of ours."""
        address = request.client.host if request.client is not None else ""
        options = ",".join(request.headers.getlist("x-forwarded-for")).split(",")
        if asker is not None:
            *options, address = (one.strip() for one in asker.addresses.split(","))
        while address in self._trusted and options and options[-1].strip():
            address = options.pop().strip()[:64]
        return address

    def _digest(self, text: str) -> str:
        return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8, key=self._salt).hexdigest()


def _network(address: str) -> str:
    """An IPv4 address as it is, the network of an IPv6 one."""
    parsed = address_of(address)
    if not isinstance(parsed, ipaddress.IPv6Address):
        return str(parsed or address)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed.packed, IPV6_NETWORK_BITS), strict=False))
