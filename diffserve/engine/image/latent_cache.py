"""The semantic cache: a picture begins from the latents of one that was painted for a similar prompt.

Similar is what the text encoder says: the cosine between two prompts' embeddings. What is kept is the finished latent,
without noise; whoever begins from it adds fresh noise of its own seed, as image-to-image does (SDEdit, Meng et al.
2022), and so may come with another sampler, another number of steps and another seed. How many steps that leaves out
grows with the similarity. (Approximate caching: Agarwal et al., "Approximate Caching for Efficiently Serving
Text-to-Image Diffusion Models", NSDI 2024, who keep noisy latents of one sampler instead.) No torch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diffserve.engine_stats import CacheStats

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
        """Memory that it takes."""
        return self.embedding.nbytes + self.latents.nbytes


class Similar(NamedTuple):
    """What is nearest: its similarity to what was asked for, and its latents (C, h, w)."""

    similarity: float
    latents: Latents


class LatentCache:
    """At most ``max_bytes`` of latents and embeddings in memory; those go first that served nobody the longest.

    Latents are told apart by ``kin``, all that must be equal beside the prompt, and by their prompt: the first picture
    of a prompt stays until it is dropped, so what a request finds depends on what was painted, not on who reads it.

    num_hits, num_misses  requests that found some as similar as they asked for, or not
    num_evicted           latents that were dropped
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_hits = 0
        self.num_misses = 0
        self.num_evicted = 0
        self._kept: OrderedDict[tuple[Hashable, str], KeptLatents] = OrderedDict()
        self._prompts: dict[Hashable, list[str]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, kin: Hashable, prompt: str, kept: KeptLatents) -> None:
        """Keep the latents of ``prompt``; those that take more than all there is room for are not."""
        if kept.num_bytes > self.max_bytes or (kin, prompt) in self._kept:
            return
        self._kept[kin, prompt] = kept
        self._prompts.setdefault(kin, []).append(prompt)
        self.num_bytes += kept.num_bytes
        while self.num_bytes > self.max_bytes:
            (old_kin, old_prompt), dropped = self._kept.popitem(last=False)
            self.num_bytes -= dropped.num_bytes
            self.num_evicted += 1
            self._prompts[old_kin].remove(old_prompt)
            if not self._prompts[old_kin]:
                del self._prompts[old_kin]

    def copy_to(self, other: LatentCache) -> None:
        """Put all that is kept here into ``other``, the longest unused first."""
        for (kin, prompt), kept in self._kept.items():
            other.put(kin, prompt, kept)

    def nearest(self, kin: Hashable, embedding: Embedding, threshold: float) -> Similar | None:
        """The most similar of ``kin``, of equally similar ones the oldest; ``None`` where none is as similar as
        ``threshold``."""
        found = self._nearest(kin, embedding, threshold)
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

    def _nearest(self, kin: Hashable, embedding: Embedding, threshold: float) -> Similar | None:
        prompts = self._prompts.get(kin)
        if not prompts:
            return None
        cosines = np.round(np.stack([self._kept[kin, prompt].embedding for prompt in prompts]) @ embedding, DIGITS)
        place = int(cosines.argmax())
        similarity = min(1.0, round(float(cosines[place]), DIGITS))
        if similarity < threshold:
            return None
        self._kept.move_to_end((kin, prompts[place]))
        return Similar(similarity, self._kept[kin, prompts[place]].latents)


def skip_of(similarity: float, threshold: float) -> int:
    """Which of ``SKIPS`` a ``similarity`` of ``threshold`` or more earns: the least at the threshold, then one more
    with every fifth of the way from there to 1."""
    if similarity >= 1.0:
        return len(SKIPS) - 1
    return min(int(len(SKIPS) * (similarity - threshold) / (1.0 - threshold)), len(SKIPS) - 1)
