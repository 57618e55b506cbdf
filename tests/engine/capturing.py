"""Helpers of tests that capture the state of images and continue from it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from diffserve.api.types import Captured, GenerationRequest, ImageFinished, ImageResult
from diffserve.engine import Engine

ALWAYS = 1e-9
"""Interval at which every step is captured, unless the capture before it is not finished."""


def captures_of(engine: Engine, request: GenerationRequest) -> tuple[list[bytes], list[ImageResult]]:
    """Return the captures of ``request`` and its images, with time for each capture to be finished."""
    engine.submit(replace(request, capture_every_s=ALWAYS))
    captures, results = [], []
    while engine.has_work:
        for event in engine.tick():
            if isinstance(event, Captured):
                captures.append(event.data)
            elif isinstance(event, ImageFinished):
                results.append(event.result)
        time.sleep(0.002)
    return captures, results


def content(result: ImageResult) -> tuple[Any, ...]:
    """Return what a resumed image must share with an undisturbed one."""
    assert result.latents is not None
    settings = result.seed, result.variation_seed, result.num_evaluations, result.skipped_steps, result.warnings
    return result.latents.data, result.picture.data, *settings


def spread(captures: list[bytes], number: int) -> list[bytes]:
    """Return about ``number`` of ``captures``, the first and the last included."""
    step = max(1, (len(captures) - 1) // (number - 1))
    return [*captures[:-1:step], captures[-1]]


def resume(engine: Engine, request: GenerationRequest, capture: bytes) -> tuple[list[ImageResult], int]:
    """Return the images that continue from ``capture``, and the UNet rows that were run for them."""
    before = sum(tick.num_rows for tick in engine.trace)
    results = engine.generate(replace(request, request_id=f"{request.request_id}-again", resume_from=capture))
    engine.check_integrity()
    return results, sum(tick.num_rows for tick in engine.trace) - before


def check_resumes(open_engine: Callable[[], Engine], request: GenerationRequest, number: int = 3) -> None:
    """Check that ``request`` continues from several of its captures, each by a new engine, with the same bytes."""
    [expected] = open_engine().generate(replace(request, request_id="undisturbed"))
    captures, [watched] = captures_of(open_engine(), request)
    assert content(watched) == content(expected)
    rows_left = []
    for capture in spread(captures, number):
        [result], num_rows = resume(open_engine(), request, capture)
        assert content(result) == content(expected)
        rows_left.append(num_rows)
    assert rows_left == sorted(rows_left, reverse=True)
    assert rows_left[0] < expected.num_evaluations
    assert len(set(rows_left)) > 1 or len(captures) == 1
