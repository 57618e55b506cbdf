"""Paint with an engine: many cells in flight at once, each image charged for what it used; then each cell alone.

While many cells share the engine, an image's own clock also counts the rows of others. So after all images are painted,
one image of each cell is painted alone, in ``TIMED_ROUNDS`` rounds that visit every cell, so that whatever else the
machine does in the meantime falls on all cells alike.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from diffserve.api.types import DiffusionParams, Failed, GenerationRequest, Painted
from diffserve.experiments.painter import FinishedImage, PaintEvent, RowsDone
from diffserve.experiments.plan import TIMED_ROUNDS, Cell, Place, PlannedImage, SweepPlan
from diffserve.experiments.records import SoloTime

if TYPE_CHECKING:
    from diffserve.engine import Engine
    from diffserve.engine.image.task import TickTrace


class EnginePainter:
    """Feeds an engine, which is its own for as long as it runs: other requests' events would be lost.

    As many images are in flight as the engine has lanes (or places to wait, if fewer).
    """

    def __init__(self, engine: Engine, plan: SweepPlan) -> None:
        self._engine = engine
        self._plan = plan
        self._flight: dict[str, PlannedImage] = {}
        self._used_s: defaultdict[str, float] = defaultdict(float)

    async def paint(self, images: Iterable[PlannedImage]) -> AsyncGenerator[PaintEvent, None]:
        """Every image as it is finished, and after each tick the rows that it ran; nothing is waited for.

        An image starts when its converged one is finished, if that is among ``images``, and those behind it wait too.
        Raises the error of an image that failed.
        """
        from diffserve.engine.delivery import raise_if_failed

        waiting = list(images)[::-1]
        references = {image for image in waiting if image.cell.is_reference}
        most = min(self._engine.config.max_lanes, self._engine.config.max_waiting)
        while waiting or self._flight:
            while waiting and len(self._flight) < most and self._reference_of(waiting[-1]) not in references:
                self._start(waiting.pop())
            assert self._flight, "the next image waits for one that is not being painted"
            events = self._engine.tick()
            yield self._charge(self._engine.last_tick)
            for event in events:
                if isinstance(event, Failed):
                    raise_if_failed(event)
                if isinstance(event, Painted) and event.request_id in self._flight:
                    finished = self._finish(event)
                    references.discard(finished.image)
                    yield finished

    @property
    def in_flight(self) -> tuple[PlannedImage, ...]:
        """What is being painted now."""
        return tuple(self._flight.values())

    def close(self) -> None:
        """Give up what is in flight; the engine's lanes are free when this returns."""
        for request_id in self._flight:
            self._engine.cancel(request_id)
        self._flight.clear()
        self._engine.tick()

    def _reference_of(self, image: PlannedImage) -> PlannedImage | None:
        reference = None if image.cell.is_reference else self._plan.reference_of(image.cell)
        return None if reference is None else PlannedImage(reference, *image.place)

    def _start(self, image: PlannedImage) -> None:
        request = request_for(self._plan, image.cell, image.place, return_latents=True)
        self._flight[self._engine.submit(request)] = image

    def _finish(self, event: Painted) -> FinishedImage:
        image, result = self._flight.pop(event.request_id), event.result
        assert result.latents is not None, "a sweep asks for latents"
        used_s = self._used_s.pop(event.request_id, 0.0)
        return FinishedImage(
            image, result.pixels, result.seed, result.spacing, result.num_evaluations, result.latents.array, used_s
        )

    def _charge(self, trace: TickTrace | None) -> RowsDone:
        """Divide a tick's whole wall time among the rows that ran in it."""
        if trace is None or not trace.num_rows:
            return RowsDone({})
        for request_id in trace.request_ids:
            self._used_s[request_id] += trace.wall_s / trace.num_rows
        return RowsDone(Counter(self._flight[one] for one in trace.request_ids if one in self._flight))


def request_for(plan: SweepPlan, cell: Cell, place: Place, *, return_latents: bool = False) -> GenerationRequest:
    """The request for one image of a cell, at the model's native size."""
    how = DiffusionParams(sampler=cell.sampler, num_steps=cell.num_steps, guidance_scale=cell.guidance_scale)
    return GenerationRequest(
        prompt=plan.prompts[place[0]], seed=plan.seed_of(place), diffusion=how, return_latents=return_latents
    )


def time_alone(engine: Engine, plan: SweepPlan) -> Iterator[tuple[Cell, SoloTime]]:
    """Paint the first image of every cell alone, round after round; each cell with what this round measured.

    A first image, which finds buckets and fills caches, is not counted.
    """
    place = plan.places[0]
    engine.generate(request_for(plan, min(plan.all_cells, key=lambda cell: cell.rows), place))
    for _ in range(TIMED_ROUNDS):
        for cell in plan.all_cells:
            timings = engine.generate(request_for(plan, cell, place))[0].timings
            yield cell, SoloTime((1000 * timings.step_s,), (timings.denoise_s + timings.decode_s,))


def merge_rounds(rounds: Sequence[SoloTime]) -> SoloTime:
    """The rounds of one cell as one."""
    return SoloTime(sum((one.step_ms for one in rounds), ()), sum((one.image_s for one in rounds), ()))
