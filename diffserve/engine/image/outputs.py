"""Events and results of images, and the choice of the best candidates by their scores (no torch)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Final, Literal, NamedTuple, Protocol

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from diffserve.api.bounds import check
from diffserve.api.errors import DiffserveError, InvalidRequest
from diffserve.api.types import (
    CHECKER,
    Event,
    Finished,
    GenerationRequest,
    ImageFailed,
    ImageFinished,
    ImageResult,
    LatentArray,
    ModelInfo,
    Picture,
    Preview,
    Progress,
    Timings,
)
from diffserve.engine.image.caches import CachedImage
from diffserve.engine.image.task import PAINT_FROM, ImageTask, LiveRequest, TickOutcome
from diffserve.engine.records import FailureReason
from diffserve.world.checker import SceneSpec, grade, judge, read_picture
from diffserve.world.picture_reading import MAX_SIDE_PX
from diffserve.world.prompt_reading import parse_prompt


class AdapterDigests(NamedTuple):
    """SHA-256 of the files of a request's LoRAs, textual inversions and IP-Adapters, by name."""

    lora_digests: dict[str, str]
    word_digests: dict[str, str]
    reference_digests: dict[str, str]


Digests = Callable[[LiveRequest], AdapterDigests]
NO_DIGESTS: Final = AdapterDigests({}, {}, {})


class ImageOutputs:
    """Builds the events and results of images.

    Args:
        info: The model that results name.
        digests: Returns the digests of a request's adapters and learned words.

    Attributes:
        decode_s: Running mean of the seconds that decoding an image takes.
    """

    def __init__(self, info: ModelInfo, digests: Digests = lambda _: NO_DIGESTS) -> None:
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
                step_index=task.steps_done,
                num_steps=task.total_steps,
            )
            if preview is not None and waiter.live.wants_preview(preview.num_steps):
                yield Preview(
                    request_id=waiter.live.request_id,
                    image_index=waiter.image_index,
                    step_index=preview.num_steps,
                    picture=Picture.from_array(preview.pixels),
                )

    def generated(self, task: ImageTask, image: CachedImage, decode_s: float) -> ImageFinished:
        """Return the event of a generated image, which took ``decode_s`` to decode."""
        self.decode_s = decode_s if not self.decode_s else 0.8 * self.decode_s + 0.2 * decode_s
        task.clock.decode_s = decode_s
        return ImageFinished(request_id=task.live.request_id, result=self._result(task, image, timings(task)))

    def reused(self, task: ImageTask, image: CachedImage, cached: Literal["hit", "shared"]) -> ImageFinished:
        """Return the event of an image that was computed for another request, with timings of zero."""
        no_time = Timings(queue_s=0.0, encode_s=0.0, denoise_s=0.0, decode_s=0.0, step_s=0.0)
        return ImageFinished(request_id=task.live.request_id, result=self._result(task, image, no_time, cached))

    @staticmethod
    def terminal(live: LiveRequest) -> Event:
        """Return ``Finished`` if the request has at least one image, else ``Failed`` with the first reason."""
        if live.num_painted or live.first_failure is None:
            return Finished(request_id=live.request_id, num_painted=live.num_painted, num_failed=live.num_failed)
        return live.first_failure.of(live.request_id)

    def _result(
        self, task: ImageTask, image: CachedImage, durations: Timings, cached: Literal["hit", "shared"] | None = None
    ) -> ImageResult:
        live, settings = task.live, task.initial_settings
        pixels = restore_outside_mask(live.request.init_image, live.request.mask_image, image.pixels)
        is_unfinished = task.is_interrupted and task.steps_done < task.total_steps
        interrupted_after = task.steps_done if is_unfinished else 0
        interruption = f"interrupted after {interrupted_after} of {task.total_steps} steps; the image is unfinished."
        return ImageResult(
            request_id=live.request_id,
            image_index=task.image_index,
            seed=task.seed,
            picture=Picture.from_array(pixels),
            timings=durations,
            prompt=task.prompt,
            template=live.request.template,
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
            **self._digests(live)._asdict(),
            sampler_digest=settings.sampler_digest,
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
        step_s=denoise_s / max(1, task.total_steps),
    )


EMPTY_SCENE: Final = SceneSpec(())
"""Scene for prompts that the checker cannot parse: images are graded by how clear they are."""


class Scorer(Protocol):
    """Scores images; called in a single thread."""

    def begin(self) -> None:
        """Prepare; called once in the scorer's thread, before any image is generated."""

    def score(self, prompt: str, pixels: NDArray[np.uint8]) -> float:
        """Return the score of an image (height, width, 3) for ``prompt``; higher is better."""


class CheckerScorer:
    """Exact checker of the embedded model: 1 if an image shows what its prompt describes, else less."""

    def begin(self) -> None:
        """Do nothing: the checker needs no preparation."""

    def score(self, prompt: str, pixels: NDArray[np.uint8]) -> float:
        """Return the grade of ``pixels`` (height, width, 3) for ``prompt``, at most 1."""
        try:
            spec = parse_prompt(prompt)
        except InvalidRequest:
            spec = EMPTY_SCENE
        return grade(judge(read_picture(pixels), spec), spec)


class ImageScores:
    """Scores of best-of images.

    Args:
        scorer: Computes the scores; without one, requests with ``best_of`` are invalid.
    """

    def __init__(self, scorer: Scorer | None) -> None:
        self._scorer = scorer
        self._pending: dict[ImageTask, tuple[ImageResult, Future[float]]] = {}
        if scorer is not None and not isinstance(scorer, CheckerScorer):
            self._thread.submit(scorer.begin).result()

    def check(self, request: GenerationRequest, width_px: int, height_px: int) -> tuple[str, ...]:
        """Return warnings for a request with ``best_of``; raise ``InvalidRequest`` if its images cannot be scored."""
        if request.best_of is None:
            return ()
        value = f"best_of is {request.best_of}; "
        no_scorer = "no scorer is loaded: leave it out, or set model.scorer to the directory of a CLIP model."
        check(self._scorer is not None, value + no_scorer, "best_of")
        if not isinstance(self._scorer, CheckerScorer):
            return ()
        large = f"the {CHECKER} reads images of at most {MAX_SIDE_PX} px per side, not {width_px}x{height_px}."
        check(max(width_px, height_px) <= MAX_SIDE_PX, value + large, "best_of")
        try:
            parse_prompt(request.prompt)
        except InvalidRequest as error:
            return (f"the images were chosen by clarity only: {error.message}",)
        return ()

    @property
    def pending(self) -> set[ImageTask]:
        """Images without a score yet."""
        return set(self._pending)

    def start(self, task: ImageTask, result: ImageResult) -> None:
        """Score the image of ``task``."""
        assert self._scorer is not None
        score = self._thread.submit(self._scorer.score, result.prompt, result.pixels)
        self._pending[task] = result, score

    def take_finished(self) -> list[tuple[ImageTask, ImageResult | FailureReason]]:
        """Return the images that were scored, with their scores or the error of the scorer."""
        finished: list[tuple[ImageTask, ImageResult | FailureReason]] = []
        for task, (result, score) in tuple(self._pending.items()):
            if not score.done():
                continue
            try:
                finished.append((task, replace(result, score=score.result())))
            except Exception as error:  # an error of the scorer fails this image only
                message = f"the image could not be scored: {type(error).__name__}: {error}"
                finished.append((task, FailureReason(DiffserveError.default_code, message)))
        return finished

    def drop(self, task: ImageTask) -> None:
        """Forget the score of ``task``."""
        self._pending.pop(task, None)

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        from diffserve.runtime.threads import pool_of_threads  # imports torch, which the scheduler does not need

        return pool_of_threads(1, "scorer")


def select_best(live: LiveRequest) -> Iterator[Event]:
    """Yield the best candidates of ``live`` in the order of their scores, and a failure for each missing image."""
    num_images = live.request.num_images
    ranked = sorted(live.candidates, key=lambda result: (-(result.score or 0.0), result.image_index))
    discarded = ranked[num_images:]
    totals = {
        "num_discarded": len(discarded),
        "discarded_evaluations": sum(result.num_evaluations for result in discarded),
        "discarded_device_s": sum(result.device_s for result in discarded),
    }
    for rank, candidate in enumerate(ranked[:num_images]):
        result = replace(candidate, image_index=rank, **({} if rank else totals))
        yield ImageFinished(request_id=live.request_id, result=result)
    live.num_painted = min(len(ranked), num_images)
    live.num_failed = num_images - live.num_painted
    failure = live.first_failure
    for rank in range(live.num_painted, num_images if failure else 0):
        assert failure is not None
        yield ImageFailed(request_id=live.request_id, image_index=rank, code=failure.code, message=failure.message)


def refuse_best_of(request: GenerationRequest, width_px: int, height_px: int) -> tuple[str, ...]:
    """Raise ``InvalidRequest`` for ``best_of`` where another process decodes the images, which scores none."""
    message = f"best_of is {request.best_of}; "
    message += "it is not supported where another process decodes the images (engine.stage): leave it out."
    check(request.best_of is None, message, "best_of")
    return ()
