"""How fast a server paints, measured with a few short pictures: what an experiment will take, before it is begun."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import Any, Final, NamedTuple

from diffserve.client import AsyncClient, CompletedImage, LostImage, Progress, StreamedImageFields
from diffserve.errors import DiffserveError
from diffserve.experiments.plan import Cell, SweepPlan
from diffserve.experiments.records import ImageRecord, SoloTime

PROBE_PROMPT: Final = "a star"
PROBE_SAMPLER: Final = "ddim"
PROBE_STEPS: Final = 6
PROBE_PICTURES: Final = 4
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
    """How a server paints one picture alone, and seconds of a UNet row of several together."""

    alone: Timing
    together_row_s: float

    def seconds(self, plan: SweepPlan) -> float:
        """How long the whole of ``plan`` takes, the timing at its end included."""
        together = plan.num_painted_rows * self.together_row_s + plan.num_images * self.alone.rest_s
        rows = TIMED_STEPS * plan.cells[0].rows / plan.cells[0].num_steps
        return together + TIMED_PICTURES * self.alone.seconds(rows)


class TimedRequest(NamedTuple):
    """A request that was watched.

    steps_s      seconds of every step but the first, which nobody saw begin
    rest_s       seconds before the first step and after the last
    evaluations  UNet rows of all its pictures
    num_steps    of each of them
    """

    steps_s: tuple[float, ...]
    rest_s: float
    evaluations: int
    num_steps: int


async def paint_timed(
    client: AsyncClient,
    prompt: str,
    *,
    model: str,
    sampler: str,
    steps: int,
    seed: int,
    n: int = 1,
    guidance: float | None = None,
) -> TimedRequest:
    """Paint and look at the clock. Raises what the client raises, and DiffserveError where a picture is lost."""
    fields = StreamedImageFields(
        sampler=sampler, num_inference_steps=steps, seed=seed, n=n, prompt_rewriter="off", partial_images=0
    )
    if guidance is not None:
        fields["guidance_scale"] = guidance
    if model:
        fields["model"] = model
    moments: list[StepTime] = [StepTime(time.perf_counter(), 0)]
    num_steps, evaluations = steps, 0
    async with client.generate_stream(prompt, **fields) as events:
        async for event in events:
            match event:
                case Progress(image_index=0, step=int(step), steps=int(num_steps)):
                    moments.append(StepTime(time.perf_counter(), step))
                case CompletedImage():
                    evaluations += event.usage.num_evaluations
                case LostImage():
                    raise DiffserveError(event.failure.message, code=event.failure.code)
    return _timed_request(moments, time.perf_counter(), num_steps, evaluations)


class StepTime(NamedTuple):
    """A clock in seconds, and steps that are done by then."""

    clock_s: float
    step: int


def _timed_request(told: Sequence[StepTime], end_s: float, num_steps: int, evaluations: int) -> TimedRequest:
    """From what was told, the start first, to the times."""
    if len(told) < 3:  # too few steps to be told of each: what lies between is spread evenly
        return TimedRequest(((end_s - told[0].clock_s) / num_steps,) * num_steps, 0.0, evaluations, num_steps)
    steps_s = each_step_s(told[1:])
    around_s = told[1].clock_s - told[0].clock_s + end_s - told[-1].clock_s
    return TimedRequest(steps_s, max(0.0, around_s - told[1].step * median(steps_s)), evaluations, num_steps)


def each_step_s(told: Sequence[StepTime]) -> tuple[float, ...]:
    """Seconds of every step after the first that was told; steps that were told at once share the time evenly."""
    each: list[float] = []
    for before, after in pairwise(told):
        num_steps = after.step - before.step
        each += [(after.clock_s - before.clock_s) / num_steps] * num_steps
    return tuple(each)


def timing_of(requests: Sequence[TimedRequest]) -> Timing:
    """Medians over all steps of pictures that were painted alike, so that a moment in which the machine did something
    else, or other people's pictures, weighs no more than the steps that it lasted."""
    step_s = median(second for one in requests for second in one.steps_s)
    rows_a_step = requests[0].evaluations / requests[0].num_steps
    return Timing(step_s / rows_a_step, median(one.rest_s for one in requests))


async def measure(client: AsyncClient, model: str) -> ServerSpeed:
    """A short picture by ``model`` alone, a few times, then several together. Raises what the client raises."""

    async def probe(n: int) -> TimedRequest:
        how: dict[str, Any] = {"model": model, "sampler": PROBE_SAMPLER, "steps": PROBE_STEPS, "seed": 0}
        return await paint_timed(client, PROBE_PROMPT, n=n, **how)

    alone = timing_of([await probe(1) for _ in range(TIMED_PICTURES)])
    return ServerSpeed(alone, timing_of([await probe(PROBE_PICTURES)]).row_s)


async def time_alone(client: AsyncClient, plan: SweepPlan, model: str) -> Timing:
    """Paint a picture of ``plan`` a few times, alone and with its guidance. Raises what the client raises."""
    steps, scale = min(TIMED_STEPS, plan.reference_steps or TIMED_STEPS), plan.guidance[0]
    how: dict[str, Any] = {"model": model, "sampler": PROBE_SAMPLER, "steps": steps, "seed": plan.first_seed}
    return timing_of([await paint_timed(client, plan.prompts[0], guidance=scale, **how) for _ in range(TIMED_PICTURES)])


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
