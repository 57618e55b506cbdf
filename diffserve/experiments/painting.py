"""Paint the jobs of a sweep through the engine: many cells in flight at once, each image charged for what it used."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from diffserve.experiments.plan import Cell, Job, SweepPlan
from diffserve.types import DiffusionParams, Failed, GenerationRequest, ImageResult, Painted

if TYPE_CHECKING:
    from diffserve.engine import Engine
    from diffserve.engine.image.task import TickTrace


class PaintedJob(NamedTuple):
    """A finished picture; ``engine_s`` is its share of the engine's time."""

    job: Job
    result: ImageResult
    engine_s: float


class Painter:
    """Feeds an engine, which is its own for as long as it runs: other requests' events would be lost.

    As many images are in flight as the engine has lanes (or places to wait, if fewer). When jobs are given up in the
    middle (an interrupt, an error), :meth:`close` cancels what is still being painted.
    """

    def __init__(self, engine: Engine, plan: SweepPlan) -> None:
        self._engine = engine
        self._plan = plan
        self._flight: dict[str, Job] = {}
        self._used_s: defaultdict[str, float] = defaultdict(float)

    def paint(self, jobs: Iterable[Job], can_start: Callable[[Job], bool]) -> Iterator[PaintedJob | int]:
        """Every picture as it is finished; and between them, after each tick, the number of UNet rows that it ran.

        Jobs start in their order; one for which ``can_start`` is not yet true holds up those behind it. Raises the
        error of an image that failed.
        """
        from diffserve.engine.delivery import raise_if_failed

        most = min(self._engine.config.max_lanes, self._engine.config.max_waiting)
        waiting = iter(jobs)
        head = next(waiting, None)
        while head is not None or self._flight:
            while head is not None and len(self._flight) < most and can_start(head):
                self._start(head)
                head = next(waiting, None)
            assert self._flight, "the next job waits for one that is not being painted"
            events = self._engine.tick()
            trace = self._engine.last_tick
            yield self._charge(trace)
            for event in events:
                if isinstance(event, Failed):
                    raise_if_failed(event)
                if isinstance(event, Painted) and event.request_id in self._flight:
                    yield self._finish(event)

    @property
    def in_flight(self) -> tuple[Job, ...]:
        """What is being painted now."""
        return tuple(self._flight.values())

    def close(self) -> None:
        """Give up what is in flight; the engine's lanes are free when this returns."""
        for request_id in self._flight:
            self._engine.cancel(request_id)
        self._flight.clear()
        self._engine.tick()

    def _start(self, job: Job) -> None:
        request = request_for(self._plan, job.cell, job.place, return_latents=True)
        self._flight[self._engine.submit(request)] = job

    def _finish(self, event: Painted) -> PaintedJob:
        job = self._flight.pop(event.request_id)
        return PaintedJob(job, event.result, self._used_s.pop(event.request_id, 0.0))

    def _charge(self, trace: TickTrace | None) -> int:
        """Divide a tick's whole wall time among the rows that ran in it."""
        if trace is None or not trace.num_rows:
            return 0
        for request_id in trace.request_ids:
            self._used_s[request_id] += trace.wall_s / trace.num_rows
        return trace.num_rows


def request_for(
    plan: SweepPlan, cell: Cell, place: tuple[int, int], *, return_latents: bool = False
) -> GenerationRequest:
    """The request for one picture of a cell, at the model's native size."""
    how = DiffusionParams(
        sampler=cell.sampler,
        num_steps=cell.num_steps,
        guidance_scale=cell.guidance_scale,
    )
    return GenerationRequest(
        prompt=plan.prompts[place[0]], seed=plan.seed_of(place), diffusion=how, return_latents=return_latents
    )
