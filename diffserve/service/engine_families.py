"""Prometheus metric families of the engine's statistics (``engine_stats``), by model where possible."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Final, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from diffserve.api.engine_stats import BATCH_ROWS, STEP_S, EngineStats, ImageStats, ModelStats, PageStats, StepStats
from diffserve.api.text_types import TextStats

Family = TypeVar("Family", GaugeMetricFamily, CounterMetricFamily, HistogramMetricFamily)
BEYOND: Final = "+Inf"


class Snapshot(Collector):
    """Collector of the engine's latest statistics; counters restart with every engine."""

    def __init__(self) -> None:
        self._stats: EngineStats | None = None
        self._is_up = False

    def take(self, stats: EngineStats | None) -> None:
        """Replace the statistics; None keeps the old ones and reports the engine as down."""
        self._is_up = stats is not None
        self._stats = stats or self._stats

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family."""
        yield gauge("up", "Whether the engine answered this scrape.", float(self._is_up))
        if self._stats is not None:
            yield from _queues(self._stats)
            yield from _work(self._stats)
            yield from _models(self._stats.models)
            if self._stats.texts is not None:
                yield from _texts(self._stats.texts)
            if self._stats.pages is not None:
                yield from _pages(self._stats.pages)


def _queues(stats: EngineStats) -> Iterator[Metric]:
    running = family(GaugeMetricFamily, "requests_running", "Images and texts in progress.", "kind")
    waiting = family(GaugeMetricFamily, "requests_waiting", "Requests that were not started yet.", "kind")
    running.add_metric(("image",), stats.images.num_running)
    waiting.add_metric(("image",), stats.images.num_waiting)
    waiting.add_metric(("wish",), stats.num_wishes)
    if stats.texts is not None:
        running.add_metric(("text",), stats.texts.num_running)
        waiting.add_metric(("text",), stats.texts.num_waiting)
    yield from (running, waiting)
    yield gauge("live_requests", "Requests that were accepted and are not finished.", stats.num_live)


def _work(stats: EngineStats) -> Iterator[Metric]:
    share = stats.share
    yield from _caches(stats.images)
    busy = family(CounterMetricFamily, "busy_seconds", "Busy time of the engine, for images or texts.", "side")
    shared = family(CounterMetricFamily, "shared_seconds", "Busy time while both images and texts had work.", "side")
    busy.add_metric(("images",), stats.images.busy_s)
    busy.add_metric(("texts",), 0.0 if stats.texts is None else stats.texts.busy_s)
    shared.add_metric(("images",), share.image_s)
    shared.add_metric(("texts",), share.text_s)
    yield from (busy, shared)
    yield gauge(
        "text_time_share", "Target share of texts in the busy time while both images and texts have work.", share.share
    )
    yield gauge(
        "text_time_share_taken",
        "Actual share of texts in the busy time while both images and texts had work.",
        share.text_share,
    )


def _models(models: Sequence[ModelStats]) -> Iterator[Metric]:
    loaded = family(GaugeMetricFamily, "model_loaded", "Whether an image model is in memory.", "model")
    slots = family(GaugeMetricFamily, "batch_slots", "Batch slots for images in progress.", "model", "state")
    loras = family(GaugeMetricFamily, "lora_sets", "LoRA combinations in memory.", "model")
    lora_bytes = family(GaugeMetricFamily, "lora_bytes", "Bytes of LoRA weights in memory.", "model")
    painted = family(CounterMetricFamily, "images", "Finished and failed images.", "model", "outcome")
    rows = family(CounterMetricFamily, "unet_rows", "Batch rows computed by the UNet, without padding.", "model")
    steps = family(CounterMetricFamily, "steps", "Engine ticks that ran a denoising step.", "model")
    busy = family(CounterMetricFamily, "model_busy_seconds", "Busy time of the engine, by model.", "model")
    seconds = family(
        HistogramMetricFamily, "denoise_step_seconds", "Duration of ticks that only denoise, by batch size.",
        "model", "batch_bucket",
    )  # fmt: skip
    batches = family(HistogramMetricFamily, "batch_size", "Batch rows per denoising step.", "model")
    for item in models:
        images = item.images
        loaded.add_metric((item.name,), float(item.is_loaded))
        slots.add_metric((item.name, "used"), images.num_running)
        slots.add_metric((item.name, "free"), max(0, images.num_lanes - images.num_running))
        loras.add_metric((item.name,), images.num_loras)
        lora_bytes.add_metric((item.name,), images.lora_bytes)
        painted.add_metric((item.name, "painted"), images.num_painted)
        painted.add_metric((item.name, "failed"), images.num_failed)
        rows.add_metric((item.name,), images.num_rows)
        steps.add_metric((item.name,), images.num_steps)
        busy.add_metric((item.name,), images.busy_s)
        batches.add_metric((item.name,), _buckets(BATCH_ROWS, images.steps.num_steps), images.num_rows)
        _add_steps(seconds, item.name, images.steps)
    yield from (loaded, slots, loras, lora_bytes, painted, rows, steps, busy, seconds, batches)


def _add_steps(histogram: HistogramMetricFamily, model: str, steps: StepStats) -> None:
    for most_rows, counts, seconds in zip((*BATCH_ROWS, BEYOND), steps.counts, steps.seconds, strict=True):
        if any(counts):
            histogram.add_metric((model, str(most_rows)), _buckets(STEP_S, counts), seconds)


def _buckets(bounds: Sequence[float], counts: Iterable[int]) -> list[tuple[str, float]]:
    """Return cumulative bucket counts in Prometheus' format."""
    return [(str(bound), float(sum_)) for bound, sum_ in zip((*bounds, BEYOND), accumulate(counts), strict=True)]


def _caches(images: ImageStats) -> Iterator[Metric]:
    requests = family(CounterMetricFamily, "cache_requests", "Cache lookups, by result.", "cache", "result")
    bytes_ = family(GaugeMetricFamily, "cache_bytes", "Bytes of images or latents in the cache.", "cache")
    evicted = family(CounterMetricFamily, "cache_evictions", "Images or latents evicted from the cache.", "cache")
    for name, stats in (("image", images.results), ("latent", images.latents)):
        requests.add_metric((name, "hit"), stats.num_hits)
        requests.add_metric((name, "miss"), stats.num_misses)
        bytes_.add_metric((name,), stats.num_bytes)
        evicted.add_metric((name,), stats.num_evicted)
    requests.add_metric(("image", "shared"), images.results.num_shared)
    yield from (requests, bytes_, evicted)


def _texts(texts: TextStats) -> Iterator[Metric]:
    tokens = family(CounterMetricFamily, "llm_tokens", "Tokens processed by the language model, by type.", "type")
    kinds = {"input": "prompt", "output": "output", "cached": "cached", "computed": "computed", "draft": "draft"}
    for kind, name in (kinds | {"accepted": "accepted"}).items():
        tokens.add_metric((kind,), getattr(texts, f"{name}_tokens"))
    yield tokens
    yield counter(
        "llm_preemptions", "Texts that were preempted to free KV cache pages for an older text.", texts.preemptions
    )
    yield gauge("llm_tokens_per_second", "Generated tokens per second of busy time.", texts.tokens_per_s)
    yield gauge("llm_prefix_hit_ratio", "Share of prompt tokens read from the prefix cache.", texts.hit_rate)
    yield gauge("llm_speculative_acceptance_ratio", "Share of draft tokens that were accepted.", texts.acceptance)
    yield gauge("llm_entropy_mean_nats", "Mean entropy per generated token, in nats.", texts.mean_entropy)


def _pages(pages: PageStats) -> Iterator[Metric]:
    yield gauge("pool_pages", "Pages of the KV cache pool.", pages.num_pages)
    yield gauge("pool_page_bytes", "Bytes per page.", pages.page_bytes)
    yield gauge("pool_free_pages", "Free pages.", pages.free_pages)
    held_pages = sum(item.held_pages for item in pages.tenants)
    yield gauge("kv_cache_usage_ratio", "Share of pages in use.", held_pages / max(1, pages.num_pages))
    in_use = family(
        GaugeMetricFamily, "pages", "Pages by tenant: in use (held) or cached for reuse (idle).", "tenant", "state"
    )
    evicted = family(CounterMetricFamily, "pages_evicted", "Pages evicted for another request.", "tenant")
    requests = family(
        CounterMetricFamily,
        "prefix_tokens",
        "Tokens looked up in the prefix cache (asked) and found in it (found).",
        "tenant",
        "what",
    )
    ratio = family(
        GaugeMetricFamily, "prefix_hit_ratio", "Share of looked-up tokens found in the prefix cache.", "tenant"
    )
    for item in pages.tenants:
        in_use.add_metric((item.tenant, "held"), item.held_pages)
        in_use.add_metric((item.tenant, "idle"), item.idle_pages)
        evicted.add_metric((item.tenant,), item.evicted_pages)
        requests.add_metric((item.tenant, "asked"), item.asked_tokens)
        requests.add_metric((item.tenant, "found"), item.found_tokens)
        ratio.add_metric((item.tenant,), item.hit_rate)
    yield from (in_use, evicted, requests, ratio)


def family(kind: type[Family], name: str, text: str, *labels: str) -> Family:
    """Create an empty metric family; ``name`` is without "diffserve_"."""
    return kind(f"diffserve_{name}", text, labels=labels)


def gauge(name: str, text: str, value: float) -> Metric:
    """Create a gauge with one value."""
    return GaugeMetricFamily(f"diffserve_{name}", text, value=value)


def counter(name: str, text: str, value: float) -> Metric:
    """Create a counter with one value."""
    return CounterMetricFamily(f"diffserve_{name}", text, value=value)
