"""Who is let in: the count of what was accepted and is not done, kept where it can be asked without the engine.

A request is refused (429, with the time after which to come back) before its body is read, when as many wait as may,
or when its client has as much work here as can be done in ``max_backlog_s``, its largest request aside: that one was
let in whole, and keeps no small one out. Work is measured in the engine's unit: UNet rows of the native size for
pictures, texts for texts. How long it takes is learnt from the events that pass by.

Clients share. Of the places one client may take seven for each that is left, so that there is always one for another.
And its time is reckoned as the engine will share it: with each other client for as long as that has work, too.

Clients are told apart by address, and at one address by key; names are digests, made anew by every process. A key is
not proof of anything here, so it divides the share of an address among at most ``MOST_KEYS`` at a time; nobody gets
more by making some up. What proxies say of their clients counts only where they are named in the configuration; what
the page says of its visitors, where it lives in this process.
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
from typing import Final

from starlette.requests import Request

from diffserve.client.on_behalf import HEADER, Asker, asker_in
from diffserve.config import Settings
from diffserve.errors import DiffserveError, QueueFull
from diffserve.pace import Pace
from diffserve.rewrite_types import RewriteDelta, RewriteFinished
from diffserve.service.http.hosts import address_of
from diffserve.service.metrics import Metrics
from diffserve.sizes import row_cost
from diffserve.text_types import TextDelta, TextFinished
from diffserve.types import Cancelled, Failed, Finished, GenerationRequest, ImageFailed, ModelInfo, Painted, Progress
from schedulers import SAMPLERS, resolve_sampler

PLACES_PER_FREE_PLACE: Final = 7
LONGEST_RETRY_S: Final = 50.0
JITTER: Final = 0.2
"""Of the time after which to come back, up or down, so that those who were refused together do not return together."""

MOST_KEYS: Final = 8
IPV6_NETWORK_BITS: Final = 64
"""What one customer of a provider has is one client."""


class Admission:
    """The books of a server: ``clients``, and what of ``images`` and of ``texts`` is inside."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self.clients = Clients(settings.serve.trusted_proxies)
        most_s = settings.serve.max_backlog_s
        self.images = Backlog("image", settings.engine.max_waiting, most_s, metrics)
        self.texts = Backlog("text", settings.text.max_waiting, most_s, metrics)


class Ticket:
    """A request that was let in: what is still to do for it, by part (a picture, a text). ``tell`` counts.

    num_places  that it takes among those that wait
    has_begun   whether anything was done for it, so that it waits no more
    """

    def __init__(
        self, client: str, cost: float, num_parts: int, num_places: int, tell: Callable[[float], None]
    ) -> None:
        self.client = client
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
            self._sum_up(done)

    def give_up(self, part: int | None = None) -> None:
        """No more is to be done for ``part``, or for any."""
        for gone in list(self._left) if part is None else [part]:
            self._left.pop(gone, None)
        self.has_begun = self.has_begun or not self._left
        self._sum_up(0.0)

    def watch(self, event: object) -> None:
        """An event of the pictures, or the error that ends them."""
        match event:
            case Progress(image_index=index, step_index=done, num_steps=num_steps):
                self.advance(index, done / num_steps)
            case Painted(result=result):
                self.advance(result.image_index, 1.0)
            case ImageFailed(image_index=index):
                self.give_up(index)
            case Finished() | Failed() | Cancelled() | DiffserveError():
                self.give_up()

    def watch_texts(self, part: int, event: object) -> None:
        """The same for ``part`` of the texts, or for prompts."""
        match event:
            case TextDelta() | RewriteDelta():
                self.advance(part, 0.0)
            case TextFinished() | RewriteFinished():
                self.advance(part, 1.0)
            case Failed() | Cancelled() | DiffserveError():
                self.give_up(part)

    def _sum_up(self, done: float) -> None:
        self.cost_left = sum(self._left.values())
        self._tell(done)


class Backlog:
    """What is inside of one kind ("image" or "text"). ``clock`` in seconds."""

    def __init__(
        self,
        kind: str,
        max_waiting: int,
        max_backlog_s: float,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.kind = kind
        self.max_waiting = max_waiting
        self.max_backlog_s = max_backlog_s
        self.pace = Pace(clock)
        self._metrics = metrics
        self._tickets: set[Ticket] = set()

    @property
    def cost_left(self) -> float:
        """Work that is still to do."""
        return sum(ticket.cost_left for ticket in self._tickets)

    @property
    def num_waiting(self) -> int:
        """Places taken by requests that nothing was done for yet."""
        return sum(ticket.num_places for ticket in self._tickets if not ticket.has_begun)

    @contextmanager
    def entered(self, client: str, cost: float, num_parts: int = 1, num_places: int = 1) -> Iterator[Ticket]:
        """A ticket for the length of the block. QueueFull where there is no room."""
        self.check(client)
        ticket = Ticket(client, cost, num_parts, num_places, self._worked)
        self._tickets.add(ticket)
        self._worked(0.0)
        try:
            yield ticket
        finally:
            self._tickets.discard(ticket)
            self._worked(0.0)

    def check(self, client: str) -> None:
        """QueueFull where a request of ``client`` would not be let in now."""
        refusal = self._refusal(client)
        if refusal is not None:
            self._metrics.ended(self.kind, "rejected")
            raise refusal

    def wait_s(self, client: str) -> float | None:
        """Seconds of work that ``client`` has here beside its largest request, in fair shares with the others; None:
        not known yet."""
        left: dict[str, float] = {}
        for ticket in self._tickets:
            left[ticket.client] = left.get(ticket.client, 0.0) + ticket.cost_left
        largest = max((ticket.cost_left for ticket in self._tickets if ticket.client == client), default=0.0)
        own = left.pop(client, 0.0) - largest
        return self.pace.seconds(own + sum(min(own, cost) for cost in left.values()))

    def _refusal(self, client: str) -> QueueFull | None:
        own = sum(one.num_places for one in self._tickets if one.client == client and not one.has_begun)
        num_waiting = self.num_waiting
        num_free = self.max_waiting - num_waiting
        wait_s = self.wait_s(client)
        if own >= PLACES_PER_FREE_PLACE * num_free:
            said = f"{num_waiting} requests are waiting, which is all this server holds"
            if num_free > 0:
                said = f"{own} of your requests are waiting, and the {num_free} places left are for others"
            return _full(said, self.pace.seconds(self.cost_left))
        if wait_s is not None and wait_s >= self.max_backlog_s:
            most_s = f"at most {self.max_backlog_s:g} s may wait"
            said = f"your requests here, the largest aside, are {wait_s:.0f} s of work, and {most_s}"
            return _full(said, wait_s)
        return None

    def _worked(self, cost: float) -> None:
        self.pace.did(cost)
        if any(ticket.cost_left > 0.0 for ticket in self._tickets):
            self.pace.begin()
        else:
            self.pace.rest()


def work_of(request: GenerationRequest, info: ModelInfo) -> float:
    """What painting ``request`` costs, in UNet rows of the native size, as near as the steps asked for tell."""
    params = request.diffusion
    name, _ = resolve_sampler(params.sampler or info.default_sampler)
    num_steps = params.num_steps or info.default_num_steps
    scale = info.default_guidance_scale if params.guidance_scale is None else params.guidance_scale
    full, share = 1.0 / params.cache_interval, info.shallow_share or 1.0
    rows = num_steps * SAMPLERS[name].evaluations_per_step * (2 if scale > 1.0 else 1) * (full + (1.0 - full) * share)
    native_width_px, native_height_px = info.good_sizes[0]
    pixels = row_cost(info, request.width_px or native_width_px, request.height_px or native_height_px)
    return request.num_images * rows * pixels


def _full(said: str, seconds: float | None) -> QueueFull:
    share = random.uniform(1.0 - JITTER, 1.0 + JITTER)
    retry_after_s = max(1.0, min(seconds or 1.0, LONGEST_RETRY_S) * share)
    return QueueFull(f"{said}; try again in about {retry_after_s:.0f} s.", retry_after_s=retry_after_s)


class Clients:
    """Names of those whose requests are inside. ``trusted_proxies``: addresses whose X-Forwarded-For is believed."""

    def __init__(self, trusted_proxies: Sequence[str] = ()) -> None:
        self._trusted = frozenset(trusted_proxies)
        self._salt = secrets.token_bytes(16)
        self._keys: dict[str, Counter[str]] = {}

    @contextmanager
    def known(self, request: Request) -> Iterator[str]:
        """The name of whoever sent ``request``, which is the same for as long as anything of theirs is inside."""
        asker = asker_in(request.headers.get(HEADER))
        address = self._digest(_network(self._address(request, asker)))
        key = self._digest(asker.key if asker else request.headers.get("authorization", ""))
        keys = self._keys.setdefault(address, Counter())
        if key not in keys and len(keys) >= MOST_KEYS:
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
        told = ",".join(request.headers.getlist("x-forwarded-for")).split(",")
        if asker is not None:
            *told, address = (one.strip() for one in asker.addresses.split(","))
        while address in self._trusted and told and told[-1].strip():
            address = told.pop().strip()[:64]
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
