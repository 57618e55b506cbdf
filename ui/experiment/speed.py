"""Speed of a server, measured with a few short requests, to estimate the duration of an experiment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import Any, Final, NamedTuple

from cachetools import TTLCache

from diffserve.api.errors import DiffserveError
from diffserve.client import AsyncClient, CompletedImage, LostImage, Progress, StreamedImageFields
from diffserve.experiments.plan import Cell, SweepPlan
from diffserve.experiments.records import ImageRecord, SoloTime

PROBE_PROMPT: Final = "a star"
PROBE_SAMPLER: Final = "ddim"
PROBE_STEPS: Final = 6
TOGETHER_STEPS: Final = 4
TOGETHER_PICTURES: Final = 8
TIMED_STEPS: Final = 16
TIMED_PICTURES: Final = 3
FRESH_S: Final = 900.0
MAX_MODELS: Final = 1000


class Timing(NamedTuple):
    """Time of an image: seconds per UNet row, and seconds for text, decoding, file and transfer."""

    row_s: float
    rest_s: float

    def seconds(self, evaluations: float) -> float:
        """Return the seconds of an image with ``evaluations`` UNet rows."""
        return evaluations * self.row_s + self.rest_s

    def of_cell(self, records: Sequence[ImageRecord], cell: Cell) -> SoloTime:
        """Return the times of an average image in ``records`` of ``cell``."""
        evaluations = fmean(record.evaluations for record in records)
        return SoloTime((1000 * self.row_s * evaluations / cell.num_steps,), (self.seconds(evaluations),))


class ServerSpeed(NamedTuple):
    """Times of an image alone, and of one that shares UNet calls with others."""

    alone: Timing
    together: Timing

    def seconds(self, plan: SweepPlan) -> float:
        """Return the duration of ``plan``, including the final timing."""
        together = plan.num_painted_rows * self.together.row_s + plan.num_images * self.together.rest_s
        rows = TIMED_STEPS * plan.cells[0].rows / plan.cells[0].num_steps
        return together + TIMED_PICTURES * self.alone.seconds(rows)


class StepTime(NamedTuple):
    """Time at which an image of a request had finished ``step`` steps."""

    clock_s: float
    step: int
    image_index: int = 0


class WatchedRequest(NamedTuple):
    """Request with the times of its events.

    Attributes:
        start_s: When it was sent.
        steps: All step events in order of arrival.
        end_s: When it ended.
        evaluations: UNet rows of all its images.
        num_steps: Steps of each image.
    """

    start_s: float
    steps: tuple[StepTime, ...]
    end_s: float
    evaluations: int
    num_steps: int


async def watch(
    client: AsyncClient,
    prompt: str,
    *,
    model: str,
    sampler: str,
    steps: int,
    seed: int,
    n: int = 1,
    guidance: float | None = None,
) -> WatchedRequest:
    """Run a request and record the times of its events.

    Raises:
        DiffserveError: The client failed, or an image was lost.
    """
    fields = StreamedImageFields(
        sampler=sampler, num_inference_steps=steps, seed=seed, n=n, prompt_rewriter="off", partial_images=0
    )
    if guidance is not None:
        fields["guidance_scale"] = guidance
    if model:
        fields["model"] = model
    start_s, step_times = time.perf_counter(), list[StepTime]()
    num_steps, evaluations = steps, 0
    async with client.generate_stream(prompt, **fields) as events:
        async for event in events:
            match event:
                case Progress(image_index=int(index), step=int(step), steps=int(num_steps)):
                    step_times.append(StepTime(time.perf_counter(), step, index))
                case CompletedImage():
                    evaluations += event.usage.num_evaluations
                case LostImage():
                    raise DiffserveError(event.failure.message, code=event.failure.code)
    return WatchedRequest(start_s, tuple(step_times), time.perf_counter(), evaluations, num_steps)


def timing_together(request: WatchedRequest, num_images: int) -> Timing:
    """Return the time of an image among the others of ``request``.

    All images must be counted: a UNet call advances as many of them as the server chooses, so a single one may wait.
    """
    steps_of: dict[int, int] = {}
    at_s, until_there, is_going = request.start_s, 0, False
    for moment in request.steps:
        is_going = is_going or moment.image_index in steps_of
        steps_of[moment.image_index] = moment.step
        if not is_going:  # the first events of all images arrive one after the other
            at_s, until_there = moment.clock_s, sum(steps_of.values())
    whole_s = request.end_s - request.start_s
    num_steps = sum(steps_of.values()) - until_there
    if num_steps <= 0:
        return Timing(whole_s / request.evaluations, 0.0)
    step_s = (request.steps[-1].clock_s - at_s) / num_steps
    row_s = step_s * request.num_steps * num_images / request.evaluations
    return Timing(row_s, max(0.0, whole_s - row_s * request.evaluations) / num_images)


def each_step_s(steps: Sequence[StepTime]) -> tuple[float, ...]:
    """Return the seconds of every step after the first event; steps of one event share its time evenly."""
    each: list[float] = []
    for before, after in pairwise(steps):
        num_steps = after.step - before.step
        each += [(after.clock_s - before.clock_s) / num_steps] * num_steps
    return tuple(each)


def timing_alone(requests: Sequence[WatchedRequest]) -> Timing:
    """Return the median times of similar images that ran alone.

    Medians over all steps limit the weight of short disturbances by other work.
    """
    steps_s: list[float] = []
    rests_s: list[float] = []
    for request in requests:
        steps = request.steps
        if len(steps) < 2:  # too few events: spread the time evenly
            steps_s += [(request.end_s - request.start_s) / request.num_steps] * request.num_steps
            rests_s.append(0.0)
            continue
        later_steps_s = each_step_s(steps)
        around_s = steps[0].clock_s - request.start_s + request.end_s - steps[-1].clock_s
        rests_s.append(max(0.0, around_s - steps[0].step * median(later_steps_s)))
        steps_s += later_steps_s
    rows_a_step = requests[0].evaluations / requests[0].num_steps
    return Timing(median(steps_s) / rows_a_step, median(rests_s))


async def measure(client: AsyncClient, model: str) -> ServerSpeed:
    """Measure a short image of ``model`` several times alone, then several images together.

    Raises:
        DiffserveError: The client failed.
    """
    how: dict[str, Any] = {"model": model, "sampler": PROBE_SAMPLER, "seed": 0}
    alone = [await watch(client, PROBE_PROMPT, steps=PROBE_STEPS, **how) for _ in range(TIMED_PICTURES)]
    together = await watch(client, PROBE_PROMPT, steps=TOGETHER_STEPS, n=TOGETHER_PICTURES, **how)
    return ServerSpeed(timing_alone(alone), timing_together(together, TOGETHER_PICTURES))


async def time_alone(client: AsyncClient, plan: SweepPlan, model: str) -> Timing:
    """Measure an image of ``plan`` several times alone.

    Raises:
        DiffserveError: The client failed.
    """
    steps, scale = min(TIMED_STEPS, plan.reference_steps or TIMED_STEPS), plan.guidance[0]
    how: dict[str, Any] = {"model": model, "sampler": PROBE_SAMPLER, "steps": steps, "seed": plan.first_seed}
    watched = [await watch(client, plan.prompts[0], guidance=scale, **how) for _ in range(TIMED_PICTURES)]
    return timing_alone(watched)


class SpeedProbe:
    """Cache of the measured speed of each model; old measurements are repeated."""

    def __init__(self) -> None:
        self._speeds: TTLCache[str, ServerSpeed] = TTLCache(MAX_MODELS, FRESH_S)
        self._lock = asyncio.Lock()

    async def speed(self, client: AsyncClient, model: str = "") -> ServerSpeed:
        """Return the speed of ``model``, or of the default model if empty.

        Raises:
            DiffserveError: The client failed.
        """
        async with self._lock:
            if (speed := self._speeds.get(model)) is None:
                speed = self._speeds[model] = await measure(client, model)
            return speed
