"""Exact result cache: an image that is cached, or is being generated, is not computed again (no torch).

Two requests with seeds share an image if all fields that it depends on are equal. These are not listed: every field of
a request counts except those in ``IGNORED_FIELDS``.
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
from diffserve.engine.image.task import ImageTask
from diffserve.engine.records import Stage

IGNORED_FIELDS: Final[dict[str, Any]] = {
    "best_of": None,
    "client": "",
    "deadline_s": None,
    "refuses_late": True,
    "model": "",  # its digest counts
    "num_images": 1,  # image i has a seed of its own
    "preview_every": 0,
    "priority": "interactive",
    "request_id": "",
    "encodings": None,  # derived from the prompts by this model
    "rewriting": None,  # the prompt is rewritten already
    "share": 1.0,
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


def key_of(request: GenerationRequest, seeds: tuple[int, int | None], info: ModelInfo, adapters: bytes = b"") -> bytes:
    """Return the SHA-256 of everything that an image of ``request`` depends on, the model and its precision included.

    Args:
        request: The request.
        seeds: The seeds of the image and of its variation.
        info: The model.
        adapters: Digests of the LoRAs and ControlNets, since a file of the same name may have changed.
    """
    seed, variation_seed = seeds
    diffusion = replace(request.diffusion, variation_seed=variation_seed)
    normalized = replace(request, seed=seed, diffusion=diffusion, **IGNORED_FIELDS)
    model = (info.digest, info.device, info.dtype)
    return hashlib.sha256(msgspec.msgpack.encode((model, normalized, adapters))).digest()


class ResultCache:
    """A least-recently-used cache of images of at most ``max_bytes``.

    Attributes:
        num_hits: Images that were cached.
        num_shared: Images that were being generated for another request.
        num_misses: Images that had to be generated; those of requests without a seed are not counted.
        num_evicted: Images that were dropped.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_hits = 0
        self.num_shared = 0
        self.num_misses = 0
        self.num_evicted = 0
        self.num_bytes = 0
        self._images: OrderedDict[bytes, CachedImage] = OrderedDict()

    def get(self, key: bytes) -> CachedImage | None:
        """Return the image of ``key``, or ``None``, and mark it as the most recently used."""
        image = self._images.get(key)
        if image is not None:
            self._images.move_to_end(key)
        return image

    def put(self, key: bytes, image: CachedImage) -> None:
        """Cache an image, unless it is larger than the whole cache."""
        if image.num_bytes > self.max_bytes or key in self._images:
            return
        self._images[key] = image
        self.num_bytes += image.num_bytes
        while self.num_bytes > self.max_bytes:
            _, dropped = self._images.popitem(last=False)
            self.num_bytes -= dropped.num_bytes
            self.num_evicted += 1

    @property
    def stats(self) -> CacheStats:
        """Counters for the metrics."""
        return CacheStats(
            num_hits=self.num_hits,
            num_misses=self.num_misses,
            num_shared=self.num_shared,
            num_evicted=self.num_evicted,
            num_bytes=self.num_bytes,
        )


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
        if self.results.max_bytes == 0 or request.seed is None or draws_variation:
            return False
        settings = task.settings
        seeds = task.seed, task.variation_seed
        key = key_of(request, seeds, self._info, settings.lora_digest + settings.control_digest)
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
        heir, *other_followers = self.take_followers(task)
        if task.slot is None:
            heir.stage, heir.key = Stage.WAITING, task.key
            task.key = None
            leader, leaver, queued = heir, task, heir
        else:
            task.live.tasks[task.image_index], heir.live.tasks[heir.image_index] = heir, task
            task.live, heir.live = heir.live, task.live
            task.image_index, heir.image_index = heir.image_index, task.image_index
            leader, leaver, queued = task, heir, None
        assert leader.key is not None
        self._leaders[leader.key] = leader
        leader.followers = other_followers
        for follower in other_followers:
            follower.leader = leader
        return leaver, queued
