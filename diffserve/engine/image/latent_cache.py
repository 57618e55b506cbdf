"""The semantic cache: a picture begins from the latents of one that was painted for a similar prompt.

Similar is what the text encoder says: the cosine between two prompts' embeddings. What is kept is the finished latent,
without noise; whoever begins from it adds fresh noise of its own seed, as image-to-image does (SDEdit, Meng et al.
2022), and so may come with another sampler and another seed. How many steps that leaves out grows with the similarity.
(Approximate caching: Agarwal et al., "Approximate Caching for Efficiently Serving Text-to-Image Diffusion Models",
NSDI 2024, who keep noisy latents of one sampler instead.) No torch.
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
"""Shares of the steps that may be left out."""

DIGITS: Final = 4
"""Of a similarity: a product of long vectors rounds as it likes, and a prompt is as similar as 1 to itself."""

Embedding = NDArray[np.float32]
Latents = NDArray[np.float32]


class KeptLatents(NamedTuple):
    """A finished picture's latents (C, h, w) and the embedding (D,) of its prompt, of length 1."""

    embedding: Embedding
    latents: Latents

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, with the row of a matrix that the embedding is looked up in."""
        return 2 * self.embedding.nbytes + self.latents.nbytes


class Similar(NamedTuple):
    """What is nearest: its similarity to what was asked for, and its latents (C, h, w)."""

    similarity: float
    latents: Latents


class LatentCache:
    """At most ``max_bytes`` of latents and embeddings in memory; those go first that served nobody the longest.

    Latents are told apart by ``kin``, all that must be equal beside the prompt, and by their prompt: the first picture
    of a prompt stays until it is dropped, so what a request finds depends on what was painted, not on who reads it.
    Of texts, which may be long, only digests are kept.

    num_hits, num_misses  requests that found some as similar as they asked for, or not
    num_evicted           latents that were dropped
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_hits = 0
        self.num_misses = 0
        self.num_evicted = 0
        self._kept: OrderedDict[tuple[bytes, bytes], KeptLatents] = OrderedDict()
        self._embeddings: dict[bytes, _Embeddings] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, kin: Hashable, prompt: str, kept: KeptLatents) -> None:
        """Keep the latents of ``prompt``; those that take more than all there is room for are not."""
        self._put(_digest(kin), _digest(prompt), kept)

    def copy_to(self, other: LatentCache) -> None:
        """Put all that is kept here into ``other``, the longest unused first."""
        for (kin, prompt), kept in self._kept.items():
            other._put(kin, prompt, kept)

    def nearest(self, kin: Hashable, embedding: Embedding, threshold: float) -> Similar | None:
        """The most similar of ``kin``, of equally similar ones the oldest; ``None`` where none is as similar as
        ``threshold``.
        """
        found = self._nearest(_digest(kin), embedding, threshold)
        self.num_hits += found is not None
        self.num_misses += found is None
        return found

    @property
    def stats(self) -> CacheStats:
        """For the metrics."""
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
        self._kept.move_to_end((name, prompt))
        return Similar(similarity, self._kept[name, prompt].latents)

    def _put(self, kin: bytes, prompt: bytes, kept: KeptLatents) -> None:
        if kept.num_bytes > self.max_bytes or (kin, prompt) in self._kept:
            return
        self._kept[kin, prompt] = kept
        self._embeddings.setdefault(kin, _Embeddings(len(kept.embedding))).add(prompt, kept.embedding)
        self.num_bytes += kept.num_bytes
        while self.num_bytes > self.max_bytes:
            (old_kin, old_prompt), dropped = self._kept.popitem(last=False)
            self.num_bytes -= dropped.num_bytes
            self.num_evicted += 1
            self._embeddings[old_kin].drop(old_prompt)
            if not len(self._embeddings[old_kin]):
                del self._embeddings[old_kin]


class _Embeddings:
    """Embeddings of length 1 of one kin as one matrix (places, D), the oldest first; who has gone leaves zeros, which
    are like nothing, until the matrix is full or mostly empty.
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
    """Which of ``SKIPS`` a ``similarity`` of ``threshold`` or more earns: the least at the threshold, then one more
    with every fifth of the way from there to 1.
    """
    if similarity >= 1.0:
        return len(SKIPS) - 1
    return min(int(len(SKIPS) * (similarity - threshold) / (1.0 - threshold)), len(SKIPS) - 1)
