"""Events of the images that a tick advanced or finished (no torch)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from diffserve.api.types import (
    Event,
    Finished,
    ImageResult,
    LatentArray,
    ModelInfo,
    Painted,
    Picture,
    Preview,
    Progress,
    Timings,
)
from diffserve.engine.image.result_cache import CachedImage
from diffserve.engine.image.task import PAINT_FROM, ImageTask, LiveRequest, TickOutcome

Digests = Callable[[LiveRequest], tuple[dict[str, str], dict[str, str]]]


class ImageOutputs:
    """Builds the events and results of images.

    Args:
        info: The model that results name.
        digests: Returns the digests of a request's adapters and of its learned words, both by name.

    Attributes:
        decode_s: Running mean of the seconds that decoding an image takes.
    """

    def __init__(self, info: ModelInfo, digests: Digests = lambda _: ({}, {})) -> None:
        self.info = info
        self._digests = digests
        self.decode_s = 0.0

    @staticmethod
    def step_events(task: ImageTask, outcome: TickOutcome) -> Iterator[Event]:
        """Yield ``Progress``, and ``Preview`` if one was rendered, for ``task`` and the images that follow it."""
        preview = outcome.previews.get(task)
        for waiter in (task, *task.followers):
            yield Progress(
                request_id=waiter.live.request_id,
                image_index=waiter.image_index,
                step_index=task.step_index,
                num_steps=task.table.num_steps,
            )
            if preview is not None and waiter.live.wants_preview(preview.num_steps):
                yield Preview(
                    request_id=waiter.live.request_id,
                    image_index=waiter.image_index,
                    step_index=preview.num_steps,
                    picture=Picture.from_array(preview.pixels),
                )

    def generated(self, task: ImageTask, image: CachedImage, decode_s: float) -> Painted:
        """Return the event of a generated image, which took ``decode_s`` to decode."""
        self.decode_s = decode_s if not self.decode_s else 0.8 * self.decode_s + 0.2 * decode_s
        task.clock.decode_s = decode_s
        return Painted(request_id=task.live.request_id, result=self._result(task, image, timings(task)))

    def reused(self, task: ImageTask, image: CachedImage, cached: Literal["hit", "shared"]) -> Painted:
        """Return the event of an image that was computed for another request, with timings of zero."""
        no_time = Timings(queue_s=0.0, encode_s=0.0, denoise_s=0.0, decode_s=0.0, step_s=0.0)
        return Painted(request_id=task.live.request_id, result=self._result(task, image, no_time, cached))

    @staticmethod
    def terminal(live: LiveRequest) -> Event:
        """Return ``Finished`` if the request has at least one image, else ``Failed`` with the first reason."""
        if live.num_painted or live.first_failure is None:
            return Finished(request_id=live.request_id, num_painted=live.num_painted, num_failed=live.num_failed)
        return live.first_failure.of(live.request_id)

    def _result(
        self, task: ImageTask, image: CachedImage, durations: Timings, cached: Literal["hit", "shared"] | None = None
    ) -> ImageResult:
        live, settings = task.live, task.settings
        lora_digests, word_digests = self._digests(live)
        pixels = restore_outside_mask(live.request.init_image, live.request.mask_image, image.pixels)
        interrupted_after = task.step_index if task.is_interrupted and task.row_index < settings.num_rows else 0
        interruption = f"interrupted after {interrupted_after} of {task.table.num_steps} steps: it is not finished."
        return ImageResult(
            request_id=live.request_id,
            image_index=task.image_index,
            seed=task.seed,
            picture=Picture.from_array(pixels),
            timings=durations,
            prompt=live.request.prompt,
            negative_prompt=live.request.negative_prompt if settings.guided.any() else "",
            num_evaluations=task.num_evaluations,
            model=self.info.model_id,
            model_digest=self.info.digest,
            warnings=(*live.warnings, interruption) if interrupted_after else live.warnings,
            interrupted_after=interrupted_after,
            latents=None if image.latents is None else LatentArray.from_array(image.latents),
            cached=cached,
            similarity=image.similarity,
            skipped_steps=image.skipped_steps,
            device_s=0.0 if cached else task.clock.device_s,
            lora_digests=lora_digests,
            word_digests=word_digests,
            refiner="" if settings.switch_row is None else self.info.refiner,
            **settings.recipe() | {"variation_seed": task.variation_seed},
        )


def restore_outside_mask(init: Picture | None, mask: Picture | None, generated: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return ``generated`` with the pixels of the init image where the mask is black.

    The autoencoder does not reproduce these pixels exactly. Arrays of another shape (latents that another process
    decodes) are returned unchanged.
    """
    if mask is None or init is None or generated.shape != init.array.shape:
        return generated
    return np.where(mask.array[..., np.newaxis] >= PAINT_FROM, generated, init.array)


def timings(task: ImageTask) -> Timings:
    """Return the seconds of each phase; time before the first step that is not encoding counts as queueing."""
    clock = task.clock
    started_s = clock.denoise_started_s or task.live.submitted_s
    denoise_s = clock.denoise_ended_s - started_s
    return Timings(
        queue_s=max(0.0, started_s - task.live.submitted_s - clock.prepare_s),
        encode_s=clock.prepare_s,
        denoise_s=denoise_s,
        decode_s=clock.decode_s,
        step_s=denoise_s / max(1, task.table.num_steps),
    )
