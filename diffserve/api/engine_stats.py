"""What the engine process tells the metrics: numbers only, never a word of anybody's. No torch.

Counters are since the engine's birth, so that rates can be taken; the rest is as of now.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from diffserve.api.text_types import TextStats

STEP_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Bounds by which steps are told apart, in seconds; the last kind is beyond them all."""

BATCH_ROWS: Final = (1, 2, 4, 8, 16, 32)
"""Bounds by which batches are, in rows; here too."""


class TenantPages(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant of the page pool: "unet", "text1", "text2" (text encoders), "llm", "llm_draft".

    held_pages     in use; a shared page counts once
    idle_pages     kept for whoever says the same again
    evicted_pages  given to somebody else meanwhile
    asked_tokens   tokens of the sequences opened
    found_tokens   of them, those whose keys and values were there already
    """

    tenant: str
    held_pages: int
    idle_pages: int
    evicted_pages: int
    asked_tokens: int
    found_tokens: int

    @property
    def hit_rate(self) -> float:
        """Share of the tokens asked for that were found, 0 when none were asked."""
        return self.found_tokens / self.asked_tokens if self.asked_tokens else 0.0


class PageStats(msgspec.Struct, frozen=True, kw_only=True):
    """The page pool: ``free + held + idle == num_pages``."""

    num_pages: int
    page_bytes: int
    free_pages: int
    tenants: tuple[TenantPages, ...]


class CacheStats(msgspec.Struct, frozen=True, kw_only=True):
    """A cache of pictures or of latents; all 0 where there is none.

    num_hits     images that found what they asked for
    num_misses   images that did not
    num_shared   images for which it was being painted for somebody else
    num_evicted  dropped for newer ones
    num_bytes    kept now
    """

    num_hits: int = 0
    num_misses: int = 0
    num_shared: int = 0
    num_evicted: int = 0
    num_bytes: int = 0


class StepStats(msgspec.Struct, frozen=True, kw_only=True):
    """Steps, which are ticks in which images got on, by the rows that they had.

    num_steps  by ``BATCH_ROWS``
    counts     of those that did nothing beside, by ``BATCH_ROWS`` and ``STEP_S``
    seconds    that these took, by ``BATCH_ROWS``
    """

    num_steps: tuple[int, ...] = (0,) * (len(BATCH_ROWS) + 1)
    counts: tuple[tuple[int, ...], ...] = ((0,) * (len(STEP_S) + 1),) * (len(BATCH_ROWS) + 1)
    seconds: tuple[float, ...] = (0.0,) * (len(BATCH_ROWS) + 1)


class StepTally:
    """Counts steps as they are done."""

    def __init__(self) -> None:
        self._num_steps = list(StepStats().num_steps)
        self._counts = [list(counts) for counts in StepStats().counts]
        self._seconds = list(StepStats().seconds)

    def add(self, num_rows: int, seconds: float | None) -> None:
        """One of ``num_rows``; ``seconds`` where nothing was done beside."""
        batch = bisect_left(BATCH_ROWS, num_rows)
        self._num_steps[batch] += 1
        if seconds is not None:
            self._counts[batch][bisect_left(STEP_S, seconds)] += 1
            self._seconds[batch] += seconds

    @property
    def stats(self) -> StepStats:
        """All that were added."""
        counts = tuple(map(tuple, self._counts))
        return StepStats(num_steps=tuple(self._num_steps), counts=counts, seconds=tuple(self._seconds))


class ImageStats(msgspec.Struct, frozen=True, kw_only=True):
    """The image side.

    num_running  images that hold a lane
    num_waiting  requests none of whose images has one
    num_steps    steps: ticks in which images got on
    num_rows     UNet rows that mattered, padding left out
    busy_s       seconds of work, encoding and decoding included
    results      the result cache: images with a seed
    latents      the semantic cache: images with a ``similarity_threshold``
    num_lanes    images that there is room for
    num_loras    sets of adapters that are kept in memory, and ``lora_bytes`` of them
    steps        by rows and by time
    """

    num_running: int
    num_waiting: int
    num_steps: int
    num_rows: int
    num_painted: int
    num_failed: int
    busy_s: float
    results: CacheStats = CacheStats()
    latents: CacheStats = CacheStats()
    num_lanes: int = 0
    num_loras: int = 0
    lora_bytes: int = 0
    steps: StepStats = StepStats()


class ModelStats(msgspec.Struct, frozen=True, kw_only=True):
    """One of the image models: what it has done since the engine began, over all times that it was loaded."""

    name: str
    is_loaded: bool
    images: ImageStats


class ShareStats(msgspec.Struct, frozen=True, kw_only=True):
    """How both sides share the time: ``share`` as configured, and the seconds each had while the other wanted some."""

    share: float
    image_s: float
    text_s: float

    @property
    def text_share(self) -> float:
        """What the texts got of the time that both wanted, 0 when there was none."""
        total_s = self.image_s + self.text_s
        return self.text_s / total_s if total_s else 0.0


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot. ``texts`` and ``pages`` are None where there is no language model, and no pool.

    num_live    requests accepted and not yet over, of all kinds
    num_wishes  images whose prompt is being rewritten
    images      of all models
    """

    num_live: int
    num_wishes: int
    images: ImageStats
    share: ShareStats
    models: tuple[ModelStats, ...] = ()
    texts: TextStats | None = None
    pages: PageStats | None = None


def sum_of(stats: Iterable[ImageStats]) -> ImageStats:
    """What several engines did, as one."""
    counted = list(stats)

    def caches(name: str) -> CacheStats:
        return CacheStats(**_sums([getattr(one, name) for one in counted], CacheStats.__struct_fields__))

    own = [name for name in ImageStats.__struct_fields__ if name not in ("results", "latents", "steps")]
    steps = _steps([one.steps for one in counted])
    return ImageStats(**_sums(counted, own), results=caches("results"), latents=caches("latents"), steps=steps)


def merged(stats: Sequence[EngineStats]) -> EngineStats:
    """What several engine processes did, as one; of one at least. Models and tenants of a name are added up."""
    texts = [one.texts for one in stats if one.texts is not None]
    pages = [one.pages for one in stats if one.pages is not None]
    return EngineStats(
        num_live=sum(one.num_live for one in stats),
        num_wishes=sum(one.num_wishes for one in stats),
        images=sum_of(one.images for one in stats),
        share=ShareStats(share=stats[0].share.share, **_sums([one.share for one in stats], ("image_s", "text_s"))),
        models=tuple(_models([model for one in stats for model in one.models])),
        texts=TextStats(**_sums(texts, TextStats.__struct_fields__)) if texts else None,
        pages=_pages(pages) if pages else None,
    )


def gone(stats: EngineStats) -> EngineStats:
    """What an engine did that is there no more: its counters, and of the rest nothing."""
    images, texts, pages = stats.images, stats.texts, stats.pages
    no_texts = {"num_running": 0, "num_waiting": 0}
    return replace(
        stats,
        num_live=0,
        num_wishes=0,
        images=_gone(images),
        models=tuple(replace(one, is_loaded=False, images=_gone(one.images)) for one in stats.models),
        texts=None if texts is None else replace(texts, **no_texts),
        pages=None if pages is None else _no_pages(pages),
    )


def _gone(images: ImageStats) -> ImageStats:
    caches = {name: replace(getattr(images, name), num_bytes=0) for name in ("results", "latents")}
    return replace(images, num_running=0, num_waiting=0, num_lanes=0, num_loras=0, lora_bytes=0, **caches)


def _no_pages(pages: PageStats) -> PageStats:
    tenants = tuple(replace(one, held_pages=0, idle_pages=0) for one in pages.tenants)
    return replace(pages, num_pages=0, free_pages=0, tenants=tenants)


def _models(models: Sequence[ModelStats]) -> Iterator[ModelStats]:
    for name in dict.fromkeys(one.name for one in models):
        own = [one for one in models if one.name == name]
        is_loaded = any(one.is_loaded for one in own)
        yield ModelStats(name=name, is_loaded=is_loaded, images=sum_of(one.images for one in own))


def _pages(pages: Sequence[PageStats]) -> PageStats:
    every = [tenant for one in pages for tenant in one.tenants]
    counts = [name for name in TenantPages.__struct_fields__ if name != "tenant"]
    tenants = tuple(
        TenantPages(tenant=name, **_sums([one for one in every if one.tenant == name], counts))
        for name in dict.fromkeys(one.tenant for one in every)
    )
    return PageStats(page_bytes=pages[0].page_bytes, tenants=tenants, **_sums(pages, ("num_pages", "free_pages")))


def _steps(stats: Sequence[StepStats]) -> StepStats:
    every = (StepStats(), *stats)

    def added(rows: Iterable[tuple[Any, ...]]) -> tuple[Any, ...]:
        return tuple(map(sum, zip(*rows, strict=True)))

    return StepStats(
        num_steps=added(one.num_steps for one in every),
        counts=tuple(map(added, zip(*(one.counts for one in every), strict=True))),
        seconds=added(one.seconds for one in every),
    )


def _sums(stats: Sequence[Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: sum(getattr(one, name) for one in stats) for name in names}
