"""Result cache for equal requests, and latent cache for requests with similar prompts (no torch).

Two requests with seeds share an image if all fields that it depends on are equal: all except ``IGNORED_FIELDS``. With
the latent cache an image starts from the finished latents of a similar prompt and skips its first steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import numpy as np
from cachetools import LRUCache
from msgspec.structs import replace
from numpy.typing import NDArray

from diffserve.api.engine_stats import CacheStats
from diffserve.api.types import GenerationRequest, ModelInfo
from diffserve.engine.image.task import ImageTask
from diffserve.engine.records import Stage

IGNORED_FIELDS: Final[dict[str, Any]] = {
    "best_of": None,
    "capture_every_s": 0.0,
    "client": "",
    "deadline_s": None,
    "refuses_late": True,
    "model": "",  # its digest counts
    "num_images": 1,  # image i has a seed of its own
    "preview_every": 0,
    "priority": "interactive",
    "request_id": "",
    "resume_from": None,  # its images are those of the undisturbed request
    "encodings": None,  # derived from the prompts by this model
    "rewriting": None,  # the prompt is rewritten already
    "share": 1.0,
    "template": "",  # the prompt is resolved already
}
"""Request fields that change no byte of its images, with the values that they have in a key."""


class CachedImage(NamedTuple):
    """A decoded image with what a result says about it.

    Attributes:
        pixels: (height_px, width_px, 3) uint8.
        latents: (C, h, w) float32, if the request wants them.
        similarity: Similarity of the prompt whose latents it starts from; see ``ImageResult``.
        skipped_steps: Steps that it skips because of that.
    """

    pixels: NDArray[np.uint8]
    latents: NDArray[np.float32] | None
    similarity: float | None = None
    skipped_steps: int = 0

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays."""
        return self.pixels.nbytes + (0 if self.latents is None else self.latents.nbytes)


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


class SimilarLatents(NamedTuple):
    """The nearest cached latents (C, h, w) and their similarity to the query."""

    similarity: float
    latents: Latents


K = TypeVar("K", bound=Hashable)
Entry = TypeVar("Entry", bound=CachedImage | CachedLatents)


def key_of(request: GenerationRequest, seeds: tuple[int, int | None], info: ModelInfo, adapters: bytes = b"") -> bytes:
    """Return the SHA-256 of everything that an image of ``request`` depends on, the model and its precision included.

    Args:
        request: The request.
        seeds: The seeds of the image and of its variation.
        info: The model.
        adapters: Digests of the LoRAs, ControlNets and IP-Adapters, since a file of the same name may have changed.
    """
    seed, variation_seed = seeds
    diffusion = replace(request.diffusion, variation_seed=variation_seed)
    normalized = replace(request, seed=seed, diffusion=diffusion, **IGNORED_FIELDS)
    model = (info.digest, info.device, info.dtype)
    return hashlib.sha256(msgspec.msgpack.encode((model, normalized, adapters))).digest()


def image_key(task: ImageTask, info: ModelInfo) -> bytes:
    """Return ``key_of`` the image of ``task``, for its own prompt and seeds."""
    request, settings = task.live.request, task.settings
    if request.image_prompts:
        request = replace(request, prompt=task.prompt, image_prompts=())
    adapters = settings.lora_digest + settings.control_digest + settings.reference_digest
    networks = settings.sampler_digest.encode() + settings.upscaler_digest
    return key_of(request, (task.seed, task.variation_seed), info, adapters + networks)


class BytesCache(LRUCache[K, Entry]):
    """A least-recently-used cache of entries of at most ``maxsize`` bytes in total, with counters for the metrics.

    Attributes:
        num_hits: Images that found an entry.
        num_shared: Images that were being generated for another request.
        num_misses: Images that found none; those that need no entry are not counted.
        num_evicted: Entries that were dropped.
    """

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes, getsizeof=lambda entry: entry.num_bytes)
        self.num_hits = self.num_shared = self.num_misses = self.num_evicted = 0

    def put(self, key: K, entry: Entry) -> bool:
        """Add ``entry`` unless its key is present or it is larger than the cache; return whether it was added."""
        if entry.num_bytes > self.maxsize or key in self:
            return False
        self[key] = entry
        return True

    def popitem(self) -> tuple[K, Entry]:
        """Evict the least recently used entry."""
        self.num_evicted += 1
        return super().popitem()

    @property
    def stats(self) -> CacheStats:
        """Counters for the metrics."""
        return CacheStats(
            num_hits=self.num_hits,
            num_misses=self.num_misses,
            num_shared=self.num_shared,
            num_evicted=self.num_evicted,
            num_bytes=int(self.currsize),
        )


ResultCache = BytesCache[bytes, CachedImage]
"""Images by ``key_of`` their request."""


class SharedImages:
    """Images that are computed once for equal requests: cached ones, and ones that are being generated.

    Requests with a seed are equal if their keys are. The first image of a key is its *leader* and is generated; later
    ones *follow* it and get the same pixels.
    """

    def __init__(self, info: ModelInfo, max_bytes: int) -> None:
        self.results = ResultCache(max_bytes)
        self._info = info
        self._leaders: dict[bytes, ImageTask] = {}
        self._hits: list[tuple[ImageTask, CachedImage]] = []

    @property
    def hits(self) -> set[ImageTask]:
        """Images that are answered from the cache with the next tick."""
        return {task for task, _ in self._hits}

    @property
    def followers(self) -> set[ImageTask]:
        """Images that wait for an equal image."""
        return {task for leader in self._leaders.values() for task in leader.followers}

    def join(self, task: ImageTask) -> bool:
        """Return whether a new image is cached or being generated, and so need not be queued."""
        request = task.live.request
        draws_variation = request.diffusion.variation_strength > 0.0 and request.diffusion.variation_seed is None
        if self.results.maxsize == 0 or request.seed is None or draws_variation:
            return False
        key = image_key(task, self._info)
        image, leader = self.results.get(key), self._leaders.get(key)
        if image is not None:
            task.stage = Stage.DECODING
            self._hits.append((task, image))
            self.results.num_hits += 1
        elif leader is not None and leader.live.request.priority == "batch" and request.priority != "batch":
            self.results.num_misses += 1  # an interactive image does not wait for a batch image
        elif leader is not None:
            task.stage, task.leader = Stage.FOLLOWING, leader
            leader.followers.append(task)
            self.results.num_shared += 1
        else:
            task.key = key
            self._leaders[key] = task
            self.results.num_misses += 1
        return task.stage is not Stage.WAITING

    def take_hits(self) -> list[tuple[ImageTask, CachedImage]]:
        """Return the images that the cache answers, except for those that were cancelled meanwhile."""
        hits, self._hits = self._hits, []
        return [(task, image) for task, image in hits if task.stage is Stage.DECODING]

    @staticmethod
    def take_followers(task: ImageTask) -> list[ImageTask]:
        """Detach and return the images that follow ``task``."""
        followers, task.followers = task.followers, []
        for follower in followers:
            follower.leader = None
        return followers

    def put(self, task: ImageTask, image: CachedImage) -> None:
        """Cache the finished image of ``task``, if it has a key."""
        if task.key is not None:
            self.results.put(task.key, image)

    def stop_sharing(self, task: ImageTask) -> None:
        """Give up the key of ``task``, whose image will be unfinished: equal requests must not get it."""
        if task.key is not None:
            del self._leaders[task.key]
            task.key = None

    def release(self, task: ImageTask) -> None:
        """Forget ``task`` as the leader of its key."""
        if task.key is not None and self._leaders.get(task.key) is task:
            del self._leaders[task.key]

    def detach(self, task: ImageTask) -> tuple[ImageTask, ImageTask | None]:
        """Remove ``task`` without its followers.

        The first follower takes over a running computation with its slot and state: the two tasks change places in
        their requests. If the computation has not begun, the follower is queued instead.

        Returns:
            The task to release, and the follower to queue, if any.
        """
        if task.leader is not None:
            task.leader.followers.remove(task)
            task.leader = None
            return task, None
        if not task.followers:
            return task, None
        successor, *other_followers = self.take_followers(task)
        if task.slot is None:
            successor.stage, successor.key = Stage.WAITING, task.key
            task.key = None
            leader, leaving, queued = successor, task, successor
        else:
            task.live.tasks[task.image_index], successor.live.tasks[successor.image_index] = successor, task
            task.live, successor.live = successor.live, task.live
            task.image_index, successor.image_index = successor.image_index, task.image_index
            leader, leaving, queued = task, successor, None
        assert leader.key is not None
        self._leaders[leader.key] = leader
        leader.followers = other_followers
        for follower in other_followers:
            follower.leader = leader
        return leaving, queued


class LatentCache(BytesCache[tuple[bytes, bytes], CachedLatents]):
    """Latents by ``base_key``, which is everything except the prompt that must be equal, and by prompt.

    Texts are stored as digests. The first image of a prompt stays until it is evicted.
    """

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self._embeddings: dict[bytes, _Embeddings] = {}

    def put_latents(self, base_key: Hashable, prompt: str, entry: CachedLatents) -> None:
        """Cache the latents of ``prompt``, unless they are larger than the cache."""
        self.put((_digest(base_key), _digest(prompt)), entry)

    def put(self, key: tuple[bytes, bytes], entry: CachedLatents) -> bool:
        """Add ``entry`` and its embedding; return whether it was added."""
        is_added = super().put(key, entry)
        if is_added:
            self._embeddings.setdefault(key[0], _Embeddings(len(entry.embedding))).add(key[1], entry.embedding)
        return is_added

    def popitem(self) -> tuple[tuple[bytes, bytes], CachedLatents]:
        """Evict the least recently used latents and their embedding."""
        (base_key, prompt), dropped = super().popitem()
        self._embeddings[base_key].drop(prompt)
        if not len(self._embeddings[base_key]):
            del self._embeddings[base_key]
        return (base_key, prompt), dropped

    def nearest(self, base_key: Hashable, embedding: Embedding, threshold: float) -> SimilarLatents | None:
        """Return the most similar latents of ``base_key``, the oldest of equal ones; ``None`` below ``threshold``."""
        name, similar = _digest(base_key), None
        if name in self._embeddings:
            prompt, cosine = self._embeddings[name].nearest(embedding)
            similarity = min(1.0, round(cosine, DIGITS))
            if prompt is not None and similarity >= threshold:
                similar = SimilarLatents(similarity, self[name, prompt].latents)
        self.num_hits += similar is not None
        self.num_misses += similar is None
        return similar


class _Embeddings:
    """Matrix (places, D) of unit-length embeddings of one base_key, oldest first.

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
        """Return the prompt of the most similar embedding, and its cosine."""
        cosines = np.round(self._rows[: len(self._prompts)] @ embedding, DIGITS)
        place = int(cosines.argmax())
        return self._prompts[place], float(cosines[place])

    def _move(self) -> None:
        """Move the embeddings into a matrix of twice as many places as are needed."""
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
