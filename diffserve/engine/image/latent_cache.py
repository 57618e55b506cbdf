"""Latent cache: an image starts from the finished latents of a similar prompt and skips its first steps (no torch).

Similarity is the cosine of prompt embeddings. Cached latents have no noise; the new image adds its own, as in SDEdit
(Meng et al. 2022), so sampler and seed may differ. Compare Agarwal et al., "Approximate Caching for Efficiently Serving
Text-to-Image Diffusion Models", NSDI 2024, who cache noisy latents of one sampler.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Hashable
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diffserve.api.engine_stats import CacheStats

SKIPS: Final = (0.1, 0.2, 0.3, 0.4, 0.5)
"""Fractions of the steps that may be skipped."""

DIGITS: Final = 4
"""Decimal digits of a similarity, so that rounding does not keep a prompt from being equal to itself."""

Embedding = NDArray[np.float32]
Latents = NDArray[np.float32]


class CachedLatents(NamedTuple):
    """Latents (C, h, w) of a finished image and the normalized embedding (D,) of its prompt."""

    embedding: Embedding
    latents: Latents

    @property
    def num_bytes(self) -> int:
        """Memory of both, including the row of the embedding in the lookup matrix."""
        return 2 * self.embedding.nbytes + self.latents.nbytes


class Similar(NamedTuple):
    """The nearest cached latents (C, h, w) and their similarity to the query."""

    similarity: float
    latents: Latents


class LatentCache:
    """Least-recently-used cache of latents and embeddings of at most ``max_bytes``.

    The key is ``kin``, everything except the prompt that must be equal, and the prompt; texts are stored as digests.
    The first image of a prompt stays until it is evicted.

    Attributes:
        num_hits: Number of requests with similar latents in the cache.
        num_misses: Number of requests without.
        num_evicted: Number of latents that were dropped.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_hits = 0
        self.num_misses = 0
        self.num_evicted = 0
        self._entries: OrderedDict[tuple[bytes, bytes], CachedLatents] = OrderedDict()
        self._embeddings: dict[bytes, _Embeddings] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, kin: Hashable, prompt: str, entry: CachedLatents) -> None:
        """Cache the latents of ``prompt``, unless they are larger than the cache."""
        self._put(_digest(kin), _digest(prompt), entry)

    def copy_to(self, other: LatentCache) -> None:
        """Put all entries into ``other``, the least recently used first."""
        for (kin, prompt), entry in self._entries.items():
            other._put(kin, prompt, entry)

    def nearest(self, kin: Hashable, embedding: Embedding, threshold: float) -> Similar | None:
        """Return the most similar latents of ``kin``, the oldest of equal ones, or ``None`` below ``threshold``."""
        similar = self._nearest(_digest(kin), embedding, threshold)
        self.num_hits += similar is not None
        self.num_misses += similar is None
        return similar

    @property
    def stats(self) -> CacheStats:
        """Counters for the metrics."""
        return CacheStats(
            num_hits=self.num_hits,
            num_misses=self.num_misses,
            num_evicted=self.num_evicted,
            num_bytes=self.num_bytes,
        )

    def _nearest(self, name: bytes, embedding: Embedding, threshold: float) -> Similar | None:
        if name not in self._embeddings:
            return None
        prompt, cosine = self._embeddings[name].nearest(embedding)
        similarity = min(1.0, round(cosine, DIGITS))
        if prompt is None or similarity < threshold:
            return None
        self._entries.move_to_end((name, prompt))
        return Similar(similarity, self._entries[name, prompt].latents)

    def _put(self, kin: bytes, prompt: bytes, entry: CachedLatents) -> None:
        if entry.num_bytes > self.max_bytes or (kin, prompt) in self._entries:
            return
        self._entries[kin, prompt] = entry
        self._embeddings.setdefault(kin, _Embeddings(len(entry.embedding))).add(prompt, entry.embedding)
        self.num_bytes += entry.num_bytes
        while self.num_bytes > self.max_bytes:
            (old_kin, old_prompt), dropped = self._entries.popitem(last=False)
            self.num_bytes -= dropped.num_bytes
            self.num_evicted += 1
            self._embeddings[old_kin].drop(old_prompt)
            if not len(self._embeddings[old_kin]):
                del self._embeddings[old_kin]


class _Embeddings:
    """Matrix (places, D) of unit-length embeddings of one kin, oldest first.

    Removed embeddings become zero rows, which match nothing, until the matrix is full or mostly empty.
    """

    def __init__(self, num_dimensions: int) -> None:
        self._rows = np.zeros((0, num_dimensions), np.float32)
        self._prompts: list[bytes | None] = []
        self._places: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._places)

    def add(self, prompt: bytes, embedding: Embedding) -> None:
        if len(self._prompts) == len(self._rows):
            self._move()
        self._rows[len(self._prompts)] = embedding
        self._places[prompt] = len(self._prompts)
        self._prompts.append(prompt)

    def drop(self, prompt: bytes) -> None:
        place = self._places.pop(prompt)
        self._rows[place] = 0.0
        self._prompts[place] = None
        if 4 * len(self) < len(self._rows):
            self._move()

    def nearest(self, embedding: Embedding) -> tuple[bytes | None, float]:
        """Whose is most similar, and how similar."""
        cosines = np.round(self._rows[: len(self._prompts)] @ embedding, DIGITS)
        place = int(cosines.argmax())
        return self._prompts[place], float(cosines[place])

    def _move(self) -> None:
        """Into a matrix of twice as many places as are needed."""
        rows = np.zeros((2 * len(self) + 1, self._rows.shape[1]), np.float32)
        rows[: len(self)] = self._rows[list(self._places.values())]
        self._rows, self._prompts = rows, list(self._places)
        self._places = {prompt: place for place, prompt in enumerate(self._places)}


def _digest(what: Hashable) -> bytes:
    return hashlib.sha256(repr(what).encode("utf-8", "surrogatepass")).digest()


def skip_of(similarity: float, threshold: float) -> int:
    """Return the index into ``SKIPS`` for a ``similarity`` of at least ``threshold``.

    It is the least at the threshold, and grows by one with every fifth of the way from there to 1.
    """
    if similarity >= 1.0:
        return len(SKIPS) - 1
    return min(int(len(SKIPS) * (similarity - threshold) / (1.0 - threshold)), len(SKIPS) - 1)
