"""From what a tick achieved to the events the caller sees, with truthful timings. No torch."""

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
from diffserve.engine.image.result_cache import Kept
from diffserve.engine.image.task import PAINT_FROM, ImageTask, LiveRequest, TickOutcome

Digests = Callable[[LiveRequest], tuple[dict[str, str], dict[str, str]]]


class ImageOutputs:
    """Writes the events. ``info`` names the model in results; ``decode_s``: a running mean of what a picture takes.
    ``digests``: of a request's adapters and of its learnt words, by name.
    """

    def __init__(self, info: ModelInfo, digests: Digests = lambda _: ({}, {})) -> None:
        self.info = info
        self._digests = digests
        self.decode_s = 0.0

    @staticmethod
    def stepped(task: ImageTask, outcome: TickOutcome) -> Iterator[Event]:
        """A step of ``task`` is done: Progress, and Preview when one was rendered, for all who wait for the picture."""
        shown = outcome.previews.get(task)
        for one in (task, *task.followers):
            yield Progress(
                request_id=one.live.request_id,
                image_index=one.image_index,
                step_index=task.step_index,
                num_steps=task.table.num_steps,
            )
            if shown is not None and one.live.wants_preview(shown.num_steps):
                yield Preview(
                    request_id=one.live.request_id,
                    image_index=one.image_index,
                    step_index=shown.num_steps,
                    picture=Picture.from_array(shown.pixels),
                )

    def painted(self, task: ImageTask, kept: Kept, decode_s: float) -> Painted:
        """The image is a picture, which took ``decode_s`` to decode."""
        self.decode_s = decode_s if not self.decode_s else 0.8 * self.decode_s + 0.2 * decode_s
        task.clock.decode_s = decode_s
        return Painted(request_id=task.live.request_id, result=self._result(task, kept, timings(task)))

    def known(self, task: ImageTask, kept: Kept, cached: Literal["hit", "shared"]) -> Painted:
        """The image is a picture that was not painted for it: nothing was computed, and no time went into it."""
        nothing = Timings(queue_s=0.0, encode_s=0.0, denoise_s=0.0, decode_s=0.0, step_s=0.0)
        return Painted(request_id=task.live.request_id, result=self._result(task, kept, nothing, cached))

    @staticmethod
    def terminal(live: LiveRequest) -> Event:
        """The request is over: Finished when at least one image is painted, else Failed with the first reason."""
        if live.num_painted or live.first_failure is None:
            return Finished(request_id=live.request_id, num_painted=live.num_painted, num_failed=live.num_failed)
        return live.first_failure.of(live.request_id)

    def _result(
        self, task: ImageTask, kept: Kept, took: Timings, cached: Literal["hit", "shared"] | None = None
    ) -> ImageResult:
        live, settings = task.live, task.settings
        lora_digests, word_digests = self._digests(live)
        pixels = kept_outside_mask(live.request.init_image, live.request.mask_image, kept.picture)
        interrupted_after = task.step_index if task.is_interrupted and task.row_index < settings.num_rows else 0
        interruption = f"interrupted after {interrupted_after} of {task.table.num_steps} steps: it is not finished."
        return ImageResult(
            request_id=live.request_id,
            image_index=task.image_index,
            seed=task.seed,
            picture=Picture.from_array(pixels),
            timings=took,
            prompt=live.request.prompt,
            negative_prompt=live.request.negative_prompt if settings.guided.any() else "",
            num_evaluations=task.num_evaluations,
            model=self.info.model_id,
            model_digest=self.info.digest,
            warnings=(*live.warnings, interruption) if interrupted_after else live.warnings,
            interrupted_after=interrupted_after,
            latents=None if kept.latents is None else LatentArray.from_array(kept.latents),
            cached=cached,
            similarity=kept.similarity,
            skipped_steps=kept.skipped_steps,
            device_s=0.0 if cached else task.clock.device_s,
            lora_digests=lora_digests,
            word_digests=word_digests,
            refiner="" if settings.switch_row is None else self.info.refiner,
            **settings.recipe() | {"variation_seed": task.variation_seed},
        )


def kept_outside_mask(init: Picture | None, mask: Picture | None, painted: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """``painted`` where the mask is white, and the init image's own pixels where it is black: an autoencoder gives none
    of them back as they were. What is not a picture yet, since it is decoded elsewhere, is left as it is.
    """
    if mask is None or init is None or painted.shape != init.array.shape:
        return painted
    return np.where(mask.array[..., np.newaxis] >= PAINT_FROM, painted, init.array)


def timings(task: ImageTask) -> Timings:
    """Where the time went: all that was neither encoding, denoising nor decoding before the first step is queueing."""
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
