"""Which pictures of a best-of are kept: each is scored once, beside the steps, in a thread of its own. No torch."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from diffserve.api.bounds import check
from diffserve.api.errors import InvalidRequest
from diffserve.api.types import CHECKER, GenerationRequest, ImageResult
from diffserve.world.checker import SceneSpec, grade, judge, read_picture
from diffserve.world.picture_reading import MAX_SIDE_PX
from diffserve.world.prompt_reading import parse_prompt

ANYTHING: Final = SceneSpec(())
"""Asked of pictures whose prompt the checker cannot read: that they be clear."""


class Scorer(Protocol):
    """Says how good pictures are, in one thread."""

    def begin(self) -> None:
        """Called there once, before anybody paints."""

    def score(self, prompt: str, pixels: NDArray[np.uint8]) -> float:
        """The higher the better, of one picture (height, width, 3)."""


class CheckerScorer:
    """The embedded world's exact checker: 1 for a picture in which all is as its prompt says, less for others."""

    def begin(self) -> None:
        """There is nothing to prepare."""

    def score(self, prompt: str, pixels: NDArray[np.uint8]) -> float:
        """See ``world.checker.grade``."""
        try:
            spec = parse_prompt(prompt)
        except InvalidRequest:
            spec = ANYTHING
        return grade(judge(read_picture(pixels), spec), spec)


class PictureScores:
    """``scorer``: None where there is none; then nothing may be asked for."""

    def __init__(self, scorer: Scorer | None) -> None:
        self._scorer = scorer
        if scorer is not None and not isinstance(scorer, CheckerScorer):
            self._thread.submit(scorer.begin).result()

    def check(self, request: GenerationRequest, width_px: int, height_px: int) -> tuple[str, ...]:
        """Warnings for a request that has pictures chosen from. Raises InvalidRequest where nobody can choose."""
        if request.best_of is None:
            return ()
        said = f"best_of is {request.best_of}; "
        none = "no scorer is loaded to choose by: leave it out, or set model.scorer to the directory of a CLIP model."
        check(self._scorer is not None, said + none, "best_of")
        if not isinstance(self._scorer, CheckerScorer):
            return ()
        large = f"the {CHECKER} reads pictures of at most {MAX_SIDE_PX} px a side, not {width_px}x{height_px}."
        check(max(width_px, height_px) <= MAX_SIDE_PX, said + large, "best_of")
        try:
            parse_prompt(request.prompt)
        except InvalidRequest as error:
            return (f"the pictures were chosen by how clear they are alone: {error.message}",)
        return ()

    def ask(self, result: ImageResult) -> Future[float]:
        """The score of ``result``'s picture for its prompt, when it is known."""
        assert self._scorer is not None
        return self._thread.submit(self._scorer.score, result.prompt, result.pixels)

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        from diffserve.runtime.threads import pool_of_threads  # beside torch, and a scheduler needs none

        return pool_of_threads(1, "scorer")


def refuse_best_of(request: GenerationRequest, width_px: int, height_px: int) -> tuple[str, ...]:
    """Where pictures are decoded by another process, nobody sees them all: InvalidRequest for whoever wants that."""
    said = f"best_of is {request.best_of}; where stages of a picture stand apart none is chosen: leave it out."
    check(request.best_of is None, said, "best_of")
    return ()
