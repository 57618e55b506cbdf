"""What the engine process tells the metrics: numbers only, never a word of anybody's. No torch.

Counters are since the engine's birth, so that rates can be taken; the rest is as of now.
"""

from __future__ import annotations

import msgspec

from diffserve.text_types import TextStats


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


class ImageStats(msgspec.Struct, frozen=True, kw_only=True):
    """The image side.

    num_running  images that hold a lane
    num_waiting  requests none of whose images has one
    num_steps    steps: ticks in which images got on
    num_rows     UNet rows that mattered, padding left out
    busy_s       seconds of work, encoding and decoding included
    results      the result cache: images with a seed
    latents      the semantic cache: images with a ``similarity_threshold``
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
    """

    num_live: int
    num_wishes: int
    images: ImageStats
    share: ShareStats
    texts: TextStats | None = None
    pages: PageStats | None = None
