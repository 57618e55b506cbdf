"""Best-of: scores images in a background thread, and selects the best ones of a request (no torch)."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Final, Protocol

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from diffserve.api.bounds import check
from diffserve.api.errors import DiffserveError, InvalidRequest
from diffserve.api.types import CHECKER, Event, GenerationRequest, ImageFailed, ImageResult, Painted
from diffserve.engine.image.task import ImageTask, LiveRequest
from diffserve.engine.records import FailureReason
from diffserve.world.checker import SceneSpec, grade, judge, read_picture
from diffserve.world.picture_reading import MAX_SIDE_PX
from diffserve.world.prompt_reading import parse_prompt

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
        no_scorer = (
            "no scorer is loaded to choose by: leave it out, or set model.scorer to the directory of a CLIP model."
        )
        check(self._scorer is not None, value + no_scorer, "best_of")
        if not isinstance(self._scorer, CheckerScorer):
            return ()
        large = f"the {CHECKER} reads images of at most {MAX_SIDE_PX} px a side, not {width_px}x{height_px}."
        check(max(width_px, height_px) <= MAX_SIDE_PX, value + large, "best_of")
        try:
            parse_prompt(request.prompt)
        except InvalidRequest as error:
            return (f"the images were chosen by clarity alone: {error.message}",)
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
        yield Painted(request_id=live.request_id, result=result)
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
