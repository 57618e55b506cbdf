"""``GET /metrics`` for Prometheus: measurements of responses and statistics of the engine.

The engine's statistics are read at each scrape; an engine that does not answer within ``ASK_S`` keeps its last
values, with ``..._up`` at 0. Labels never contain text from clients.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import PlainTextResponse, Response

from diffserve.api import ipc
from diffserve.api.embedding_types import Embedded
from diffserve.api.engine_stats import EngineStats
from diffserve.api.errors import NOT_FINITE, EngineUnavailable, InsufficientMemory, NumericalError
from diffserve.api.rewrite_types import RewriteFinished
from diffserve.api.stage_types import PictureDecoded, TextsEncoded
from diffserve.api.text_types import TextFinished, TextTimings
from diffserve.api.types import Cancelled, Failed, Finished, ImageFailed, ImageFinished, ImageResult, Progress
from diffserve.api.upscale_types import Upscaled
from diffserve.service.engine_families import Snapshot, family
from diffserve.service.telemetry import GenAiMetrics, Traces
from diffserve.service.threads import LISTINGS
from diffserve.store.batches import Batches
from diffserve.store.database import Database
from diffserve.store.deliveries import Deliveries
from diffserve.store.errors import StoreError
from diffserve.store.jobs import Jobs
from diffserve.version import __version__

ASK_S: Final = 0.5
SECONDS: Final = tuple(0.01 * 2**k for k in range(14))
"""0.01 to 81.92, as OpenTelemetry has them."""

TTFT_S: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
TPOT_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
ENTROPY_NATS: Final = (0.01, 0.03, 0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0)
LAG_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
COMMIT_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
WASTES: Final = ("cancelled", "deadline", "failed", "lost")
OUTCOMES: Final = {Failed: "failed", Cancelled: "cancelled"}
LOSSES: Final = ("device", "hang", "silence", "crash")
HUNG_UP: Final = "client_closed_request"
REJECTED: Final = {
    "queue_full": "queue_full",
    "rate_limit_exceeded": "rate_limit",
    "deadline_exceeded": "deadline",
    "engine_unavailable": "unready",
    "draining": "draining",
    "no_room": "disk",
    "insufficient_memory": "memory",
}
"""Reasons for refusing a request, by the code of its error."""

Numbers = Mapping[tuple[str, ...], float]
"""Numbers by the values of the labels."""

Look = Callable[[], Numbers]


class Metrics:
    """Counters and histograms of one server; ``observe`` receives every event.

    Attributes:
        traces: Receives the events too, if set.
        genai: Receives the events too, if set.
    """

    def __init__(self) -> None:
        self.traces: Traces | None = None
        self.genai: GenAiMetrics | None = None
        self._registry = CollectorRegistry(auto_describe=False)
        self._snapshot = Snapshot()
        self._watched = _Watched()
        self._registry.register(self._snapshot)
        self._registry.register(self._watched)
        self._add_answers()
        self._add_images()
        self._requests = self._counter(
            "engine_requests", "Requests sent to the engine, by kind and outcome.", "kind", "outcome"
        )
        self._restarts = self._counter("engine_restarts", "Engine restarts, by reason.", "reason")
        self._fallbacks = self._counter("rewrite_fallbacks", "Prompts that were not rewritten, by reason.", "reason")
        of_texts = "llm_time_to_first_token_seconds", "Time from submission to the first token."
        self._ttft_s = self._histogram(*of_texts, TTFT_S, "kind")
        of_texts = "llm_time_per_output_token_seconds", "Mean time per output token after the first."
        self._tpot_s = self._histogram(*of_texts, TPOT_S, "kind")
        self._late_s = self._histogram("event_loop_lag_seconds", "Delay of event loop timers.", LAG_S)
        description = "Delay of event loop timers, without the time in which the thread had no CPU core."
        self._blocked_s = self._histogram("event_loop_blocked_seconds", description, LAG_S)
        description = "Mean entropy per token of a generated text."
        self._entropy = self._histogram("llm_entropy_nats", description, ENTROPY_NATS, "kind")
        description = "Duration of a remote pipeline stage, from sending the input to receiving the output."
        self._stage_s = self._histogram("stage_seconds", description, SECONDS, "stage")
        self._stage_bytes = self._counter(
            "stage_bytes", "Bytes of conditioning, latents and images received from remote stages.", "stage"
        )
        for reason in LOSSES:  # reports zero counts from the start, so that rates can be computed
            self._restarts.labels(reason)
        for kind in ("text", "rewrite"):
            self._ttft_s.labels(kind)
            self._tpot_s.labels(kind)
        self.watch(
            "build_info",
            "Versions of diffserve, torch and diffusers, as labels; always 1.",
            _versions,
            "version",
            "torch",
            "diffusers",
        )

    def observe(self, kind: str, event: ipc.AnyEvent) -> None:
        """Record an event of a request of ``kind``: "image", "text", "rewrite", "embedding" or "upscale"."""
        if self.traces is not None:
            self.traces.observe(event)
        if isinstance(event, Progress):  # most events are of this type, and none of them is counted
            return
        if self.genai is not None:
            self.genai.observe(kind, event)
        match event:
            case ImageFinished(result=result):
                self._count_image(result)
            case ImageFailed():
                self._lost_image(event)
            case Finished() | Embedded() | Upscaled() | TextsEncoded() | PictureDecoded():
                self._requests.labels(kind, "finished").inc()
            case TextFinished(results=results):
                self._finish_text(
                    kind, event.timings, [result.mean_entropy for result in results], event.usage.output_tokens
                )
            case RewriteFinished(rewrites=rewrites):
                self._finish_text(
                    kind, event.timings, [item.mean_entropy for item in rewrites], event.usage.output_tokens
                )
                for item in rewrites:
                    if item.fallback is not None:
                        self._fallbacks.labels(item.fallback).inc()
            case Failed() | Cancelled():
                self._requests.labels(kind, OUTCOMES[type(event)]).inc()
                if isinstance(event, Failed) and event.code == NumericalError.default_code:
                    self._nonfinite.labels("text").inc()

    def observe_loop(self, late_s: float, blocked_s: float) -> None:
        """Record a measurement of event loop lag (see ``watch_loop``)."""
        self._late_s.observe(late_s)
        self._blocked_s.observe(blocked_s)

    def observe_first_preview(self, seconds: float) -> None:
        """Record the time from submission to a request's first preview."""
        self._preview_s.observe(seconds)

    def answered(self, endpoint: str, status: int, code: str, seconds: float) -> None:
        """Record a response.

        Args:
            endpoint: Template of the route.
            status: HTTP status; 0 if there was no response.
            code: Error code or ""; a stream may fail after its status was sent.
            seconds: Duration.
        """
        reason = REJECTED.get(code) if status >= 400 else None
        if status == 499 or code in (HUNG_UP, "cancelled") or status == 0:
            outcome = "cancelled"
        elif reason is not None:
            outcome = "rejected"
            self._rejected.labels(reason).inc()
        elif status >= 500 or (code and status < 400):
            outcome = "server_error"
        else:
            outcome = "client_error" if status >= 400 else "success"
        if code == HUNG_UP or status == 0:
            self._disconnects.labels("answering" if 0 < status < 400 else "waiting").inc()
        self._answers.labels(endpoint, str(status), outcome).inc()
        self._answer_s.labels(endpoint).observe(seconds)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count a client that reads events for the length of the block."""
        with self._streams.track_inprogress():
            yield

    def observe_commit(self, seconds: float) -> None:
        """Record the duration of a commit of the store."""
        self._commit_s.observe(seconds)

    def did_stage(self, stage: str, seconds: float, num_bytes: int) -> None:
        """Record a remote stage of an image: seconds and bytes received."""
        self._stage_s.labels(stage).observe(seconds)
        self._stage_bytes.labels(stage).inc(num_bytes)

    def encoded(self, seconds: float) -> None:
        """Record the duration of encoding and signing an image."""
        self._image_encode_s.observe(seconds)

    def judged(self, stage: str, decision: str) -> None:
        """Record a decision about a "prompt" or "picture": "allowed", "blocked" or "unavailable"."""
        self._safety.labels(stage, decision).inc()

    def wasted(self, reason: str, num_steps: int) -> None:
        """Record steps that led to no image: "cancelled", "deadline", "failed" or "lost"."""
        self._wasted.labels(reason).inc(num_steps)

    def ended(self, kind: str, outcome: str) -> None:
        """Record a request that ended without an event: "rejected", "cancelled" or "lost"."""
        self._requests.labels(kind, outcome).inc()

    def lost_engine(self, kind: str) -> None:
        """Record the loss of an engine: "device", "hang", "silence" or "crash"."""
        self._restarts.labels(kind).inc()

    def watch(self, name: str, text: str, look: Look, *labels: str) -> None:
        """Report at each scrape what ``look`` returns: numbers by label values. The last ``look`` is used."""
        self._watched.looks[name] = (text, labels, look)

    def query(self, name: str, text: str, look: Look, *labels: str) -> None:
        """Report what ``look`` reads from the database, as ``watch`` does; it is called in a thread."""
        self._watched.queries[name] = (text, labels, look)

    async def ask_database(self) -> None:
        """Read what the next ``render`` reports of the database; nothing if it does not answer."""
        self._watched.answers = await LISTINGS.run(self._watched.ask)

    def render(self, stats: EngineStats | None) -> bytes:
        """Return the text for Prometheus; ``stats`` is None if the engine did not answer."""
        self._snapshot.take(stats)
        return generate_latest(self._registry)

    def _add_answers(self) -> None:
        self._answers = self._counter(
            "requests", "HTTP responses, by route and status.", "endpoint", "status", "outcome"
        )
        self._answer_s = self._histogram(
            "request_duration_seconds",
            "Time from the request headers to the last byte of the response.",
            SECONDS,
            "endpoint",
        )
        self._rejected = self._counter("requests_rejected", "Rejected requests, by reason.", "reason")
        self._disconnects = self._counter("client_disconnects", "Client disconnects, by phase of the request.", "phase")
        self._streams = Gauge("diffserve_sse_clients", "Clients connected to an event stream.", registry=self._registry)
        for reason in REJECTED.values():
            self._rejected.labels(reason)
        for phase in ("waiting", "answering"):
            self._disconnects.labels(phase)

    def _add_images(self) -> None:
        self._pixels = self._counter("pixels", "Pixels of the generated images.", "model")
        self._queue_s = self._histogram(
            "queue_wait_seconds", "Time from submission to the start of processing.", SECONDS, "model"
        )
        description = "Time from submission to the first preview, for requests with previews."
        self._preview_s = self._histogram("time_to_first_preview_seconds", description, SECONDS)
        self._encode_s = self._histogram(
            "text_encode_seconds", "Duration of text encoding of an image.", SECONDS, "model"
        )
        self._denoise_s = self._histogram(
            "denoise_seconds", "Duration of all denoising steps of an image.", SECONDS, "model"
        )
        self._decode_s = self._histogram(
            "vae_decode_seconds", "Duration of decoding the latents of an image.", SECONDS, "model"
        )
        self._oom = self._counter("oom", "Images that failed because of insufficient memory.")
        description = (
            "Denoising steps of images that were not delivered; steps shared by equal requests count once per request."
        )
        self._wasted = self._counter("steps_wasted", description, "reason")
        self._safety = self._counter("safety", "Decisions of the safety filter.", "stage", "decision")
        for reason in WASTES:
            self._wasted.labels(reason)
        for stage in ("prompt", "picture"):
            for decision in ("allowed", "blocked", "unavailable"):
                self._safety.labels(stage, decision)
        self._commit_s = self._histogram("db_commit_seconds", "Duration of database commits.", COMMIT_S)
        description = "Images and texts that failed because of non-finite numbers, by stage."
        self._nonfinite = self._counter("nonfinite", description, "stage")
        for stage in (*NOT_FINITE, "text"):
            self._nonfinite.labels(stage)
        self._image_encode_s = self._histogram(
            "image_encode_seconds", "Duration of encoding a finished image as a file.", COMMIT_S
        )

    def _count_image(self, result: ImageResult) -> None:
        if result.cached is not None:
            return
        timings, model = result.timings, result.model
        self._pixels.labels(model).inc(result.picture.width_px * result.picture.height_px)
        self._queue_s.labels(model).observe(timings.queue_s)
        self._encode_s.labels(model).observe(timings.encode_s)
        self._denoise_s.labels(model).observe(timings.denoise_s)
        self._decode_s.labels(model).observe(timings.decode_s)

    def _lost_image(self, failed: ImageFailed) -> None:
        if failed.code == InsufficientMemory.default_code:
            self._oom.inc()
        elif failed.code == NumericalError.default_code:
            stages = (stage for stage, description in NOT_FINITE.items() if failed.message.startswith(description))
            self._nonfinite.labels(next(stages, "denoise")).inc()

    def _finish_text(self, kind: str, timings: TextTimings, entropies: list[float], output_tokens: int) -> None:
        self._requests.labels(kind, "finished").inc()
        self._ttft_s.labels(kind).observe(timings.ttft_s)
        if output_tokens > len(entropies):  # else there was no later token
            self._tpot_s.labels(kind).observe(timings.tpot_s)
        for entropy in entropies:
            self._entropy.labels(kind).observe(entropy)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"diffserve_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"diffserve_{name}", text, labels, buckets=buckets, registry=self._registry)


def add_metrics(app: FastAPI, metrics: Metrics, ask: Callable[[], Awaitable[EngineStats | None]]) -> None:
    """Add ``GET /metrics``; ``ask`` raises EngineUnavailable if there is no engine."""
    turns = asyncio.Lock()

    @app.get("/metrics", summary="Metrics in Prometheus format", response_class=PlainTextResponse)
    async def answer() -> Response:
        try:
            async with asyncio.timeout(ASK_S):
                stats = await ask()
        except (TimeoutError, EngineUnavailable):
            stats = None
        async with turns:  # rendering for many readers must not block the loop: one at a time, with a pause in between
            await asyncio.sleep(0)
            await metrics.ask_database()
            return Response(metrics.render(stats), media_type=CONTENT_TYPE_LATEST)


def watch_store(metrics: Metrics, database: Database, batches: Batches) -> None:
    """Report commit times, the write-ahead log and unfinished batches."""
    database.tell_commit = metrics.observe_commit
    description = "Size of the database's write-ahead log."
    metrics.watch("db_wal_bytes", description, lambda: {(): float(database.wal_bytes)})

    def by_status() -> Numbers:
        return {(status,): float(count) for status, count in batches.backlog().by_status.items()}

    metrics.query("batches", "Unfinished batches, by status.", by_status, "status")
    lines = "Unprocessed lines of unfinished batches."
    metrics.query("batch_lines_left", lines, lambda: {(): float(batches.backlog().lines_left)})
    age = "Age of the oldest unfinished batch; 0 if there is none."
    metrics.query("oldest_batch_age_seconds", age, lambda: {(): batches.backlog().oldest_age_s})


def watch_jobs(metrics: Metrics, jobs: Jobs, deliveries: Deliveries) -> None:
    """Report unfinished jobs, and events and results that wait to be sent."""

    def unfinished() -> Numbers:
        return {(status,): float(count) for status, count in jobs.num_unfinished().items()}

    metrics.query("jobs", "Unfinished jobs, by status.", unfinished, "status")
    waiting = "Webhook events and results of jobs that were not accepted yet."
    metrics.query("deliveries_waiting", waiting, lambda: {(): float(deliveries.num_waiting())})


class _Watched(Collector):
    """Collector of numbers that are read at each scrape; ``answers`` has those of the database by metric."""

    def __init__(self) -> None:
        self.looks: dict[str, tuple[str, tuple[str, ...], Look]] = {}
        self.queries: dict[str, tuple[str, tuple[str, ...], Look]] = {}
        self.answers: dict[str, Numbers] = {}

    def ask(self) -> dict[str, Numbers]:
        """Return the numbers of all queries; none if the database cannot be read."""
        try:
            return {name: look() for name, (_, _, look) in self.queries.items()}
        except StoreError:
            return {}

    def collect(self) -> Iterator[Metric]:
        """Yield every watched metric."""
        for name, (text, labels, look) in self.looks.items():
            yield _gauges(name, text, labels, look())
        for name, (text, labels, _) in self.queries.items():
            yield _gauges(name, text, labels, self.answers.get(name, {}))


def _gauges(name: str, text: str, labels: Sequence[str], numbers: Numbers) -> Metric:
    gauges = family(GaugeMetricFamily, name, text, *labels)
    for values, number in numbers.items():
        gauges.add_metric(values, number)
    return gauges


@cache
def _versions() -> dict[tuple[str, ...], float]:
    def of(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return ""

    return {(__version__, of("torch"), of("diffusers")): 1.0}
