"""``GET /metrics`` for Prometheus: what the answers showed, and what the engine says of itself when it is asked.

Times are taken from the events that end requests; everything else is a snapshot of the engine (``engine_stats``), asked
for at each scrape. An engine that does not answer within ``ASK_S`` is shown as it was last seen, with ``..._up`` at 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Final, TypeVar

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from diffserve import ipc
from diffserve.engine_stats import EngineStats, ImageStats, PageStats
from diffserve.errors import EngineUnavailable
from diffserve.rewrite_types import RewriteFinished
from diffserve.text_types import TextFinished, TextStats, TextTimings
from diffserve.types import Cancelled, Failed, Finished

ASK_S: Final = 0.5
TTFT_S: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
TPOT_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
ENTROPY_NATS: Final = (0.01, 0.03, 0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0)
LAG_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
Family = TypeVar("Family", GaugeMetricFamily, CounterMetricFamily)
OUTCOMES: Final = {Failed: "failed", Cancelled: "cancelled"}


class Metrics:
    """Counters and histograms of one server. ``observe`` is fed with every event that passes."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._snapshot = _Snapshot()
        self._registry.register(self._snapshot)
        self._requests = self._counter("requests", "Requests that are over, by kind and end.", "kind", "outcome")
        self._losses = self._counter("engine_losses", "Engines that were lost, and how.", "kind")
        self._fallbacks = self._counter("rewrite_fallbacks", "Prompts left as they were, and why.", "reason")
        self._ttft_s = self._histogram("text_ttft_seconds", "From submit to the first token.", TTFT_S)
        self._tpot_s = self._histogram("text_tpot_seconds", "Mean time of each later token of an answer.", TPOT_S)
        self._late_s = self._lag("event_loop_lag", "How late the event loop came to a timer.")
        self._blocked_s = self._lag("event_loop_blocked", "The same, without the time for which it had no core.")
        self._entropy = self._histogram("text_entropy_nats", "Mean entropy of the tokens of an answer.", ENTROPY_NATS)

    def observe(self, kind: str, event: ipc.AnyEvent) -> None:
        """Take note of an event of a request of ``kind``: "image", "text" or "rewrite"."""
        match event:
            case Finished():
                self._requests.labels(kind, "finished").inc()
            case TextFinished(results=results):
                self._said(kind, event.timings, [result.mean_entropy for result in results], event.usage.output_tokens)
            case RewriteFinished(rewrites=rewrites):
                self._said(kind, event.timings, [one.mean_entropy for one in rewrites], event.usage.output_tokens)
                for one in rewrites:
                    if one.fallback is not None:
                        self._fallbacks.labels(one.fallback).inc()
            case Failed() | Cancelled():
                self._requests.labels(kind, OUTCOMES[type(event)]).inc()

    def observe_loop(self, late_s: float, blocked_s: float) -> None:
        """Take note of a look at the event loop (see ``loop_lag``)."""
        self._late_s.observe(late_s)
        self._blocked_s.observe(blocked_s)

    def ended(self, kind: str, outcome: str) -> None:
        """A request of ``kind`` ended without an event: it was "rejected", "cancelled" from here, or "lost"."""
        self._requests.labels(kind, outcome).inc()

    def lost_engine(self, kind: str) -> None:
        """An engine is gone, by ``kind``: "device", "hang", "silence" or "crash"."""
        self._losses.labels(kind).inc()

    def render(self, stats: EngineStats | None) -> bytes:
        """The text that Prometheus reads; ``stats`` are the engine's, None when it did not answer."""
        self._snapshot.take(stats)
        return generate_latest(self._registry)

    def _said(self, kind: str, timings: TextTimings, entropies: list[float], output_tokens: int) -> None:
        self._requests.labels(kind, "finished").inc()
        self._ttft_s.labels(kind).observe(timings.ttft_s)
        if output_tokens > len(entropies):  # else there was no later token
            self._tpot_s.labels(kind).observe(timings.tpot_s)
        for entropy in entropies:
            self._entropy.labels(kind).observe(entropy)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"diffserve_{name}", text, labels, registry=self._registry)

    def _lag(self, name: str, text: str) -> Histogram:
        return Histogram(f"diffserve_{name}_seconds", text, buckets=LAG_S, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"diffserve_{name}", text, ("kind",), buckets=buckets, registry=self._registry)


def add_metrics(app: FastAPI, metrics: Metrics, ask: Callable[[], Awaitable[EngineStats | None]]) -> None:
    """Offer ``GET /metrics``; ``ask`` raises EngineUnavailable where there is no engine."""

    @app.get("/metrics", summary="Numbers for Prometheus", include_in_schema=False)
    async def answer() -> Response:
        try:
            async with asyncio.timeout(ASK_S):
                stats = await ask()
        except (TimeoutError, EngineUnavailable):
            stats = None
        return Response(metrics.render(stats), media_type=CONTENT_TYPE_LATEST)


class _Snapshot(Collector):
    """The engine's numbers as Prometheus' families; counters start anew with every engine."""

    def __init__(self) -> None:
        self._stats: EngineStats | None = None
        self._is_up = False

    def take(self, stats: EngineStats | None) -> None:
        """Show these from now on; the old ones again when there are none."""
        self._is_up = stats is not None
        self._stats = stats or self._stats

    def collect(self) -> Iterator[Metric]:
        """Every family, as Prometheus' client asks for them."""
        yield _gauge("up", "Whether the engine answered this scrape.", float(self._is_up))
        if self._stats is not None:
            yield from _queues(self._stats)
            yield from _work(self._stats)
            if self._stats.texts is not None:
                yield from _texts(self._stats.texts)
            if self._stats.pages is not None:
                yield from _pages(self._stats.pages)


def _queues(stats: EngineStats) -> Iterator[Metric]:
    queues = _family(GaugeMetricFamily, "queue", "Requests by kind: waiting, or being worked on.", "kind", "state")
    queues.add_metric(("image", "waiting"), stats.images.num_waiting)
    queues.add_metric(("image", "running"), stats.images.num_running)
    queues.add_metric(("wish", "waiting"), stats.num_wishes)
    if stats.texts is not None:
        queues.add_metric(("text", "waiting"), stats.texts.num_waiting)
        queues.add_metric(("text", "running"), stats.texts.num_running)
    yield queues
    yield _gauge("live_requests", "Requests accepted and not yet over.", stats.num_live)


def _work(stats: EngineStats) -> Iterator[Metric]:
    images, share = stats.images, stats.share
    yield _counter("unet_rows", "Rows of the UNet, padding left out.", images.num_rows)
    yield _counter("unet_steps", "Ticks in which images got on.", images.num_steps)
    painted = _family(CounterMetricFamily, "images", "Images that are over.", "outcome")
    painted.add_metric(("painted",), images.num_painted)
    painted.add_metric(("failed",), images.num_failed)
    yield painted
    yield from _caches(images)
    busy = _family(CounterMetricFamily, "busy_seconds", "Seconds of work.", "side")
    shared = _family(CounterMetricFamily, "shared_seconds", "Seconds of work while both sides wanted some.", "side")
    busy.add_metric(("images",), images.busy_s)
    busy.add_metric(("texts",), 0.0 if stats.texts is None else stats.texts.busy_s)
    shared.add_metric(("images",), share.image_s)
    shared.add_metric(("texts",), share.text_s)
    yield from (busy, shared)
    yield _gauge("text_time_share", "What texts are to get of the time that both sides want.", share.share)
    yield _gauge("text_time_share_taken", "What they got of it.", share.text_share)


def _caches(images: ImageStats) -> Iterator[Metric]:
    results, latents = images.results, images.latents
    found = _family(CounterMetricFamily, "image_cache", "Images with a seed, where there is a result cache.", "outcome")
    found.add_metric(("hit",), results.num_hits)
    found.add_metric(("shared",), results.num_shared)
    found.add_metric(("miss",), results.num_misses)
    begun = _family(CounterMetricFamily, "latent_cache", "Images with a similarity_threshold.", "outcome")
    begun.add_metric(("hit",), latents.num_hits)
    begun.add_metric(("miss",), latents.num_misses)
    kept = _family(GaugeMetricFamily, "cache_bytes", "Bytes of pictures or of latents that are kept.", "cache")
    evicted = _family(CounterMetricFamily, "cache_evictions", "Pictures or latents dropped for newer ones.", "cache")
    for name, stats in (("image", results), ("latent", latents)):
        kept.add_metric((name,), stats.num_bytes)
        evicted.add_metric((name,), stats.num_evicted)
    yield from (found, begun, kept, evicted)


def _texts(texts: TextStats) -> Iterator[Metric]:
    tokens = _family(CounterMetricFamily, "text_tokens", "Tokens of the language model.", "what")
    for what in ("prompt", "cached", "output", "computed", "draft", "accepted"):
        tokens.add_metric((what,), getattr(texts, f"{what}_tokens"))
    yield tokens
    yield _counter("text_preemptions", "Times that a text gave its pages back for an older one.", texts.preemptions)
    yield _gauge("text_tokens_per_second", "Tokens said per second of work.", texts.tokens_per_s)
    yield _gauge("text_prefix_hit_ratio", "Share of prompt tokens that had not to be computed.", texts.hit_rate)
    yield _gauge("text_speculative_acceptance_ratio", "Share of draft tokens that were right.", texts.acceptance)
    yield _gauge("text_entropy_mean_nats", "Nats per token said.", texts.mean_entropy)


def _pages(pages: PageStats) -> Iterator[Metric]:
    yield _gauge("pool_pages", "Pages of the pool.", pages.num_pages)
    yield _gauge("pool_page_bytes", "Bytes of a page.", pages.page_bytes)
    yield _gauge("pool_free_pages", "Pages that hold nothing.", pages.free_pages)
    held = _family(GaugeMetricFamily, "pages", "Pages by tenant: in use, or kept for later.", "tenant", "state")
    evicted = _family(CounterMetricFamily, "pages_evicted", "Pages given to somebody else.", "tenant")
    asked = _family(CounterMetricFamily, "prefix_tokens", "Tokens of the texts looked up.", "tenant", "what")
    ratio = _family(GaugeMetricFamily, "prefix_hit_ratio", "Share of tokens found.", "tenant")
    for one in pages.tenants:
        held.add_metric((one.tenant, "held"), one.held_pages)
        held.add_metric((one.tenant, "idle"), one.idle_pages)
        evicted.add_metric((one.tenant,), one.evicted_pages)
        asked.add_metric((one.tenant, "asked"), one.asked_tokens)
        asked.add_metric((one.tenant, "found"), one.found_tokens)
        ratio.add_metric((one.tenant,), one.hit_rate)
    yield from (held, evicted, asked, ratio)


def _family(cls: type[Family], name: str, text: str, *labels: str) -> Family:
    return cls(f"diffserve_{name}", text, labels=labels)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"diffserve_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"diffserve_{name}", text, value=value)
