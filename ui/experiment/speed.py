"""How fast a server paints, measured with a few short pictures: what an experiment will take, before it is begun."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import Any, Final, NamedTuple

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


class Timing(NamedTuple):
    """One picture alone: seconds of a UNet row, and of all that is not a row (the text, pixels, the file, the way)."""

    row_s: float
    rest_s: float

    def seconds(self, evaluations: float) -> float:
        """Of a picture of so many UNet rows."""
        return evaluations * self.row_s + self.rest_s

    def of_cell(self, records: Sequence[ImageRecord], cell: Cell) -> SoloTime:
        """Of a picture such as ``records`` of ``cell``."""
        evaluations = fmean(record.evaluations for record in records)
        return SoloTime((1000 * self.row_s * evaluations / cell.num_steps,), (self.seconds(evaluations),))


class ServerSpeed(NamedTuple):
    """How a server paints one picture alone, and what a picture takes among others: they share calls of the UNet, and
    what is not a row of one goes on beside the rows of the others.
    """

    alone: Timing
    together: Timing

    def seconds(self, plan: SweepPlan) -> float:
        """How long the whole of ``plan`` takes, the timing at its end included."""
        together = plan.num_painted_rows * self.together.row_s + plan.num_images * self.together.rest_s
        rows = TIMED_STEPS * plan.cells[0].rows / plan.cells[0].num_steps
        return together + TIMED_PICTURES * self.alone.seconds(rows)


class StepTime(NamedTuple):
    """A clock in seconds, and steps that are done by then, of one of the pictures of a request."""

    clock_s: float
    step: int
    image_index: int = 0


class WatchedRequest(NamedTuple):
    """A request as it was told of.

    told         every step that was told, as it came
    evaluations  UNet rows of all its pictures
    num_steps    of each of them
    """

    start_s: float
    told: tuple[StepTime, ...]
    end_s: float
    evaluations: int
    num_steps: int


class TimedRequest(NamedTuple):
    """A picture that was watched alone.

    steps_s      seconds of every step but the first, which nobody saw begin
    rest_s       seconds before the first step and after the last
    evaluations  its UNet rows
    """

    steps_s: tuple[float, ...]
    rest_s: float
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
    """Paint and look at the clock. Raises what the client raises, and DiffserveError where a picture is lost."""
    fields = StreamedImageFields(
        sampler=sampler, num_inference_steps=steps, seed=seed, n=n, prompt_rewriter="off", partial_images=0
    )
    if guidance is not None:
        fields["guidance_scale"] = guidance
    if model:
        fields["model"] = model
    start_s, told = time.perf_counter(), list[StepTime]()
    num_steps, evaluations = steps, 0
    async with client.generate_stream(prompt, **fields) as events:
        async for event in events:
            match event:
                case Progress(image_index=int(index), step=int(step), steps=int(num_steps)):
                    told.append(StepTime(time.perf_counter(), step, index))
                case CompletedImage():
                    evaluations += event.usage.num_evaluations
                case LostImage():
                    raise DiffserveError(event.failure.message, code=event.failure.code)
    return WatchedRequest(start_s, tuple(told), time.perf_counter(), evaluations, num_steps)


def timed(one: WatchedRequest) -> TimedRequest:
    """From what was told of a picture alone to its times."""
    told, num_steps = one.told, one.num_steps
    if len(told) < 2:  # too few steps to be told of each: what lies between is spread evenly
        return TimedRequest(((one.end_s - one.start_s) / num_steps,) * num_steps, 0.0, one.evaluations, num_steps)
    steps_s = each_step_s(told)
    around_s = told[0].clock_s - one.start_s + one.end_s - told[-1].clock_s
    rest_s = max(0.0, around_s - told[0].step * median(steps_s))
    return TimedRequest(steps_s, rest_s, one.evaluations, num_steps)


def timing_together(request: WatchedRequest, num_images: int) -> Timing:
    """Of a picture among the others of ``request``, all of which must be looked at: a call of the UNet moves as many of
    them as the server sees fit, and any single one may wait for others for most of the time.
    """
    steps_of: dict[int, int] = {}
    at_s, until_there, is_going = request.start_s, 0, False
    for moment in request.told:
        is_going = is_going or moment.image_index in steps_of
        steps_of[moment.image_index] = moment.step
        if not is_going:  # those who begin together are told of one after the other
            at_s, until_there = moment.clock_s, sum(steps_of.values())
    whole_s = request.end_s - request.start_s
    num_steps = sum(steps_of.values()) - until_there
    if num_steps <= 0:
        return Timing(whole_s / request.evaluations, 0.0)
    step_s = (request.told[-1].clock_s - at_s) / num_steps
    row_s = step_s * request.num_steps * num_images / request.evaluations
    return Timing(row_s, max(0.0, whole_s - row_s * request.evaluations) / num_images)


def each_step_s(told: Sequence[StepTime]) -> tuple[float, ...]:
    """Seconds of every step after the first that was told; steps that were told at once share the time evenly."""
    each: list[float] = []
    for before, after in pairwise(told):
        num_steps = after.step - before.step
        each += [(after.clock_s - before.clock_s) / num_steps] * num_steps
    return tuple(each)


def timing_of(requests: Sequence[TimedRequest]) -> Timing:
    """Medians over all steps of pictures that were painted alike, so that a moment in which the machine did something
    else, or other people's pictures, weighs no more than the steps that it lasted.
    """
    step_s = median(second for one in requests for second in one.steps_s)
    rows_a_step = requests[0].evaluations / requests[0].num_steps
    return Timing(step_s / rows_a_step, median(one.rest_s for one in requests))


async def measure(client: AsyncClient, model: str) -> ServerSpeed:
    """A short picture by ``model`` alone, a few times, then several together. Raises what the client raises."""
    how: dict[str, Any] = {"model": model, "sampler": PROBE_SAMPLER, "seed": 0}
    alone = [timed(await watch(client, PROBE_PROMPT, steps=PROBE_STEPS, **how)) for _ in range(TIMED_PICTURES)]
    together = await watch(client, PROBE_PROMPT, steps=TOGETHER_STEPS, n=TOGETHER_PICTURES, **how)
    return ServerSpeed(timing_of(alone), timing_together(together, TOGETHER_PICTURES))


async def time_alone(client: AsyncClient, plan: SweepPlan, model: str) -> Timing:
    """Paint a picture of ``plan`` a few times, alone and with its guidance. Raises what the client raises."""
    steps, scale = min(TIMED_STEPS, plan.reference_steps or TIMED_STEPS), plan.guidance[0]
    how: dict[str, Any] = {"model": model, "sampler": PROBE_SAMPLER, "steps": steps, "seed": plan.first_seed}
    watched = [await watch(client, plan.prompts[0], guidance=scale, **how) for _ in range(TIMED_PICTURES)]
    return timing_of([timed(one) for one in watched])


class SpeedProbe:
    """Knows the speed of one server's models; measures it once, and again when that is long ago."""

    def __init__(self) -> None:
        self._speeds: dict[str, tuple[ServerSpeed, float]] = {}
        self._lock = asyncio.Lock()

    async def speed(self, client: AsyncClient, model: str = "") -> ServerSpeed:
        """That of ``model``, "" the server's own, measured now where it is not known. Raises what the client raises."""
        async with self._lock:
            if model not in self._speeds or time.monotonic() - self._speeds[model][1] > FRESH_S:
                self._speeds[model] = await measure(client, model), time.monotonic()
            return self._speeds[model][0]
