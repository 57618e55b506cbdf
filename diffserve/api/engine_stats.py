"""Statistics of the engine process, sent to the metrics endpoint. Numbers only, no text of clients.

Counters start when the engine starts; the other values are current. This module does not import torch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar

import msgspec
from msgspec.structs import replace

from diffserve.api.text_types import TextStats

AnyT = TypeVar("AnyT")
STEP_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Upper bounds of the step duration buckets in seconds; one more bucket is unbounded."""

BATCH_ROWS: Final = (1, 2, 4, 8, 16, 32)
"""Upper bounds of the batch size buckets in rows; one more bucket is unbounded."""


class TenantPages(msgspec.Struct, frozen=True, kw_only=True):
    """Page usage of one tenant of the page pool: "unet", "text1", "text2" (text encoders), "llm" or "llm_draft".

    Attributes:
        held_pages: Pages in use; a shared page counts once.
        idle_pages: Pages not in use that are kept as a prefix cache.
        evicted_pages: Cached pages that were reused for other content.
        asked_tokens: Tokens of all sequences opened.
        found_tokens: Tokens of these whose keys and values were cached.
    """

    tenant: str
    held_pages: int
    idle_pages: int
    evicted_pages: int
    asked_tokens: int
    found_tokens: int

    @property
    def hit_rate(self) -> float:
        """Share of looked-up tokens that were cached; 0 if there were none."""
        return self.found_tokens / self.asked_tokens if self.asked_tokens else 0.0


class PageStats(msgspec.Struct, frozen=True, kw_only=True):
    """Page pool usage: ``free + held + idle == num_pages``."""

    num_pages: int
    page_bytes: int
    free_pages: int
    tenants: tuple[TenantPages, ...]


class CacheStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of an image or latent cache; all 0 if the cache is off.

    Attributes:
        num_hits: Images served from the cache.
        num_misses: Images not in the cache.
        num_shared: Images that shared the result of an equal request in progress.
        num_evicted: Entries evicted to make room.
        num_bytes: Current size.
    """

    num_hits: int = 0
    num_misses: int = 0
    num_shared: int = 0
    num_evicted: int = 0
    num_bytes: int = 0


class StepStats(msgspec.Struct, frozen=True, kw_only=True):
    """Histogram of denoising steps (ticks in which images advanced), by batch size and duration.

    Attributes:
        num_steps: All steps, by ``BATCH_ROWS``.
        counts: Steps without other work in the tick, by ``BATCH_ROWS`` and ``STEP_S``.
        seconds: Total duration of the steps in ``counts``, by ``BATCH_ROWS``.
    """

    num_steps: tuple[int, ...] = (0,) * (len(BATCH_ROWS) + 1)
    counts: tuple[tuple[int, ...], ...] = ((0,) * (len(STEP_S) + 1),) * (len(BATCH_ROWS) + 1)
    seconds: tuple[float, ...] = (0.0,) * (len(BATCH_ROWS) + 1)


class StepTally:
    """Counter that accumulates :class:`StepStats`."""

    def __init__(self) -> None:
        self._num_steps = list(StepStats().num_steps)
        self._counts = [list(counts) for counts in StepStats().counts]
        self._seconds = list(StepStats().seconds)

    def add(self, num_rows: int, seconds: float | None) -> None:
        """Add a step of ``num_rows`` rows; ``seconds`` is ``None`` if the tick did other work, too."""
        batch = bisect_left(BATCH_ROWS, num_rows)
        self._num_steps[batch] += 1
        if seconds is not None:
            self._counts[batch][bisect_left(STEP_S, seconds)] += 1
            self._seconds[batch] += seconds

    @property
    def stats(self) -> StepStats:
        """The statistics of all steps added so far."""
        counts = tuple(map(tuple, self._counts))
        return StepStats(num_steps=tuple(self._num_steps), counts=counts, seconds=tuple(self._seconds))


class ImageStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of image generation.

    Attributes:
        num_running: Images that hold a lane.
        num_waiting: Requests without a lane.
        num_steps: Ticks in which images advanced.
        num_rows: UNet rows without padding.
        busy_s: Seconds of work, including encoding and decoding.
        results: The result cache (images with a seed).
        latents: The latent cache (images with a ``similarity_threshold``).
        num_lanes: Number of lanes.
        num_loras, lora_bytes: Sets of LoRAs in memory, and their size.
        steps: Steps by batch size and duration.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_steps: int = 0
    num_rows: int = 0
    num_painted: int = 0
    num_failed: int = 0
    busy_s: float = 0.0
    results: CacheStats = CacheStats()
    latents: CacheStats = CacheStats()
    num_lanes: int = 0
    num_loras: int = 0
    lora_bytes: int = 0
    steps: StepStats = StepStats()


class ModelStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of one image model since the engine started, over all times that it was loaded."""

    name: str
    is_loaded: bool
    images: ImageStats


class ShareStats(msgspec.Struct, frozen=True, kw_only=True):
    """Time sharing: the configured ``share`` of texts, and the seconds of images and texts while both had work."""

    share: float
    image_s: float
    text_s: float

    @property
    def text_share(self) -> float:
        """Share of the texts in the time in which both had work; 0 if there was none."""
        total_s = self.image_s + self.text_s
        return self.text_s / total_s if total_s else 0.0


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Snapshot of the statistics of an engine process.

    Attributes:
        num_live: Requests of all kinds that are accepted and not finished.
        num_wishes: Images whose prompt is being rewritten.
        images: Sum over all models.
        texts: ``None`` without a language model.
        pages: ``None`` without a page pool.
    """

    num_live: int
    num_wishes: int
    images: ImageStats
    share: ShareStats
    models: tuple[ModelStats, ...] = ()
    texts: TextStats | None = None
    pages: PageStats | None = None


def sum_of(stats: Iterable[ImageStats]) -> ImageStats:
    """Return the sum of the image statistics of several engines, zeros if there are none."""
    return _sum([ImageStats(), *stats])


def merged(stats: Sequence[EngineStats]) -> EngineStats:
    """Return the sum of the statistics of one or more engine processes.

    Models and tenants with the same name are added up.
    """
    texts = [engine.texts for engine in stats if engine.texts is not None]
    pages = [engine.pages for engine in stats if engine.pages is not None]
    return EngineStats(
        num_live=sum(engine.num_live for engine in stats),
        num_wishes=sum(engine.num_wishes for engine in stats),
        images=sum_of(engine.images for engine in stats),
        share=replace(_sum([engine.share for engine in stats]), share=stats[0].share.share),
        models=tuple(_sum_models([model for engine in stats for model in engine.models])),
        texts=_sum(texts) if texts else None,
        pages=_sum_pages(pages) if pages else None,
    )


def gone(stats: EngineStats) -> EngineStats:
    """Return the statistics of an engine that has stopped: its counters, and zero for all current values."""
    images, texts, pages = stats.images, stats.texts, stats.pages
    return replace(
        stats,
        num_live=0,
        num_wishes=0,
        images=_stopped_images(images),
        models=tuple(replace(model, is_loaded=False, images=_stopped_images(model.images)) for model in stats.models),
        texts=None if texts is None else replace(texts, num_running=0, num_waiting=0),
        pages=None if pages is None else _stopped_pages(pages),
    )


def _stopped_images(images: ImageStats) -> ImageStats:
    caches = {name: replace(getattr(images, name), num_bytes=0) for name in ("results", "latents")}
    return replace(images, num_running=0, num_waiting=0, num_lanes=0, num_loras=0, lora_bytes=0, **caches)


def _stopped_pages(pages: PageStats) -> PageStats:
    tenants = tuple(replace(tenant, held_pages=0, idle_pages=0) for tenant in pages.tenants)
    return replace(pages, num_pages=0, free_pages=0, tenants=tenants)


def _sum_models(models: Sequence[ModelStats]) -> Iterator[ModelStats]:
    for name in dict.fromkeys(model.name for model in models):
        same_name = [model for model in models if model.name == name]
        is_loaded = any(model.is_loaded for model in same_name)
        yield ModelStats(name=name, is_loaded=is_loaded, images=sum_of(model.images for model in same_name))


def _sum_pages(pools: Sequence[PageStats]) -> PageStats:
    tenants: dict[str, list[TenantPages]] = {}
    for tenant in (tenant for pool in pools for tenant in pool.tenants):
        tenants.setdefault(tenant.tenant, []).append(tenant)
    return PageStats(
        num_pages=sum(pool.num_pages for pool in pools),
        page_bytes=pools[0].page_bytes,
        free_pages=sum(pool.free_pages for pool in pools),
        tenants=tuple(map(_sum, tenants.values())),
    )


def _sum(values: Sequence[AnyT]) -> AnyT:
    """Return the sum of numbers, of tuples by position, or of structs by field; of strings the first."""
    first: Any = values[0]
    if isinstance(first, msgspec.Struct):
        totals = {name: _sum([getattr(value, name) for value in values]) for name in first.__struct_fields__}
        return replace(first, **totals)  # type: ignore[return-value]  # of the type of ``first``
    if isinstance(first, tuple):
        return tuple(map(_sum, zip(*values, strict=True)))  # type: ignore[return-value]
    return first if isinstance(first, str) else sum(values)  # type: ignore[arg-type, return-value]
