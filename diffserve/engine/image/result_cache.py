"""The exact result cache: a picture that is known, or is being painted, is not painted again.

Two requests with a seed of their own get one painting where all that a picture depends on is equal. What that is, is
not listed: everything in a request counts, but the few fields named in ``NOT_OF_THE_PICTURE``.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from diffserve.api.engine_stats import CacheStats
from diffserve.api.types import GenerationRequest, ModelInfo

NOT_OF_THE_PICTURE: Final[dict[str, Any]] = {
    "best_of": None,
    "client": "",
    "deadline_s": None,
    "refuses_late": True,
    "model": "",  # its digest counts
    "num_images": 1,  # image i is the picture that its own seeds give alone
    "preview_every": 0,
    "priority": "interactive",
    "request_id": "",
    "encodings": None,  # of its texts, by this model
    "rewriting": None,  # by now the prompt is the one that is painted
    "share": 1.0,
}
"""Fields of a request that change no byte of its pictures, and what they are for a key."""


class Kept(NamedTuple):
    """A picture (height_px, width_px, 3) uint8, as decoded, its latents (C, h, w) where they were asked for, and how
    similar the prompt was that it began from, without how many steps (see ``ImageResult``).
    """

    picture: NDArray[np.uint8]
    latents: NDArray[np.float32] | None
    similarity: float | None = None
    skipped_steps: int = 0

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return self.picture.nbytes + (0 if self.latents is None else self.latents.nbytes)


def key_of(request: GenerationRequest, seeds: tuple[int, int | None], info: ModelInfo, adapters: bytes = b"") -> bytes:
    """SHA-256 of all that the picture of ``request`` with ``seeds``, its own and that of its variation, depends on, the
    model and its precision included, and ``adapters``, for another file may have the name of a LoRA or a ControlNet by
    now.
    """
    seed, variation_seed = seeds
    diffusion = replace(request.diffusion, variation_seed=variation_seed)
    alone = replace(request, seed=seed, diffusion=diffusion, **NOT_OF_THE_PICTURE)
    painter = (info.digest, info.device, info.dtype)
    return hashlib.sha256(msgspec.msgpack.encode((painter, alone, adapters))).digest()


class ResultCache:
    """At most ``max_bytes`` of pictures in memory; those go first that were not asked for the longest.

    num_hits    pictures that were known
    num_shared  pictures that were being painted for somebody else
    num_misses  pictures that had to be painted; those without a seed of their own are not counted
    num_evicted pictures that were dropped
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_hits = 0
        self.num_shared = 0
        self.num_misses = 0
        self.num_evicted = 0
        self._kept: OrderedDict[bytes, Kept] = OrderedDict()

    def get(self, key: bytes) -> Kept | None:
        """The picture of ``key``, which is now the latest that was asked for."""
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
        return kept

    def put(self, key: bytes, kept: Kept) -> None:
        """Keep a picture; one that takes more than all there is room for is not."""
        if kept.num_bytes > self.max_bytes or key in self._kept:
            return
        self._kept[key] = kept
        self.num_bytes += kept.num_bytes
        while self.num_bytes > self.max_bytes:
            _, dropped = self._kept.popitem(last=False)
            self.num_bytes -= dropped.num_bytes
            self.num_evicted += 1

    @property
    def stats(self) -> CacheStats:
        """For the metrics."""
        return CacheStats(
            num_hits=self.num_hits,
            num_misses=self.num_misses,
            num_shared=self.num_shared,
            num_evicted=self.num_evicted,
            num_bytes=self.num_bytes,
        )
