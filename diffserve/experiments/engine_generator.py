"""Generates the images of a plan with an engine and measures the time of each cell.

Cells share the engine's batches, so an image's latency also includes the rows of others. Therefore one image of each
cell is generated alone afterwards. ``TIMED_ROUNDS`` rounds over all cells spread other load evenly between them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from diffserve.api.types import (
    DiffusionParams,
    Event,
    Failed,
    GenerationRequest,
    ImageFinished,
    ImageResult,
    ModelInfo,
    Timings,
)
from diffserve.experiments.axes import request_fields
from diffserve.experiments.plan import TIMED_ROUNDS, Cell, Place, PlannedImage, SweepPlan
from diffserve.experiments.records import FinishedImage, GenerationEvent, RowsDone, SoloTime
from diffserve.settings.config import EngineConfig

if TYPE_CHECKING:
    from diffserve.engine import Engine
    from diffserve.engine.image.task import TickTrace
    from diffserve.runtime.model import MemoryEntry
    from diffserve.runtime.vae.vae import VAERunner

TIMED_STEPS = 16
"""Steps of the images that :func:`time_some` prefers: enough for a mean, and far fewer than a converged image has."""


class SweepModel(Protocol):
    """Properties of a model that a sweep uses."""

    @property
    def digest(self) -> str:
        """Digest of the weights."""

    def memory_report(self) -> Sequence[MemoryEntry]:
        """Sizes of the components; empty if unknown."""

    @property
    def vae(self) -> VAERunner:
        """Autoencoder, which measures the checker's own error."""


class SweepEngine(Protocol):
    """Engine interface of a sweep: an engine in this process, or the engines of a server."""

    @property
    def config(self) -> EngineConfig:
        """Limits on the images in flight."""

    @property
    def info(self) -> ModelInfo:
        """Description of the model and its device."""

    @property
    def model(self) -> SweepModel:
        """The model."""

    @property
    def is_deterministic(self) -> bool:
        """Whether an image's bytes are independent of the rest of the batch."""

    @property
    def last_tick(self) -> TickTrace | None:
        """Record of the latest tick; ``None`` if it computed nothing, or is unknown."""

    def submit(self, order: GenerationRequest) -> str:
        """Queue a request and return its id."""

    def tick(self) -> list[Event]:
        """Return what happened since the last call, after computing or waiting for it."""

    def cancel(self, request_id: str) -> Any:
        """Cancel a request."""

    def warm_up(self) -> Any:
        """Prepare the engine, so that its first images take no longer than others."""


class EngineGenerator:
    """Generates planned images with an engine that it has exclusive use of; events of other requests are dropped.

    The number of images in flight is limited by the engine's lanes and its waiting queue.
    """

    def __init__(self, engine: SweepEngine, plan: SweepPlan) -> None:
        self._engine = engine
        self._plan = plan
        self._flight: dict[str, PlannedImage] = {}
        self._used_s: defaultdict[str, float] = defaultdict(float)

    async def generate(self, images: Iterable[PlannedImage]) -> AsyncGenerator[GenerationEvent, None]:
        """Generate ``images`` and yield each finished image, and after each engine tick the rows that it ran.

        The generator never suspends. An image, and all images after it, start only after its converged image is
        finished, if that is among ``images``. The error of a failed image is raised.
        """
        from diffserve.engine.base_engine import raise_if_failed

        waiting = list(images)[::-1]
        references = {image for image in waiting if image.cell.is_reference}
        max_in_flight = min(self._engine.config.max_lanes, self._engine.config.max_waiting)
        while waiting or self._flight:
            while waiting and len(self._flight) < max_in_flight and self._reference_of(waiting[-1]) not in references:
                image = waiting.pop()
                request = request_for(self._plan, image.cell, image.place, return_latents=True)
                self._flight[self._engine.submit(request)] = image
            assert self._flight, "the next image waits for one that is not in flight"
            events = self._engine.tick()
            yield self._charge(self._engine.last_tick)
            for event in events:
                if isinstance(event, Failed):
                    raise_if_failed(event)
                if isinstance(event, ImageFinished) and event.request_id in self._flight:
                    finished = self._finish(event)
                    references.discard(finished.image)
                    if self._engine.last_tick is None:
                        yield RowsDone({finished.image: finished.image.cell.rows})
                    yield finished

    def close(self) -> None:
        """Cancel all images in flight and wait until their lanes are free."""
        for request_id in self._flight:
            self._engine.cancel(request_id)
        self._flight.clear()
        self._engine.tick()

    def _reference_of(self, image: PlannedImage) -> PlannedImage | None:
        reference = self._plan.reference_of(image.cell)
        return None if reference is None else PlannedImage(reference, *image.place)

    def _finish(self, event: ImageFinished) -> FinishedImage:
        image, result = self._flight.pop(event.request_id), event.result
        assert result.latents is not None, "a sweep requests latents"
        used_s = self._used_s.pop(event.request_id, result.device_s)
        return FinishedImage(
            image, result.pixels, result.seed, result.spacing, result.num_evaluations, result.latents.array, used_s
        )

    def _charge(self, trace: TickTrace | None) -> RowsDone:
        """Distribute a tick's wall time equally over the rows that ran in it."""
        if trace is None or not trace.num_rows:
            return RowsDone({})
        for request_id in trace.request_ids:
            self._used_s[request_id] += trace.wall_s / trace.num_rows
        return RowsDone(
            Counter(self._flight[request_id] for request_id in trace.request_ids if request_id in self._flight)
        )


def request_for(plan: SweepPlan, cell: Cell, place: Place, *, return_latents: bool = False) -> GenerationRequest:
    """Build the request for one image of a cell, at the model's native size unless the size is an axis."""
    settings, request = request_fields(cell.settings)
    diffusion = DiffusionParams(
        sampler=cell.sampler, num_steps=cell.num_steps, guidance_scale=cell.guidance_scale, **settings
    )
    return GenerationRequest(
        seed=plan.seed_of(place),
        diffusion=diffusion,
        return_latents=return_latents,
        **{"prompt": plan.prompts[place[0]], **request},
    )


def time_alone(
    engine: Engine,
    plan: SweepPlan,
    cells: Sequence[Cell],
    on_timed: Callable[[Cell], None],
    num_rounds: int = TIMED_ROUNDS,
) -> dict[Cell, SoloTime]:
    """Generate the first image of each of ``cells`` alone, in ``num_rounds`` rounds over them, and return its times.

    A warm-up image fills caches and is not timed. ``on_timed`` is called after each timed image.
    """
    place = plan.places[0]
    engine.generate(request_for(plan, min(cells, key=lambda cell: cell.rows), place))
    step_ms, image_s = defaultdict[Cell, list[float]](list), defaultdict[Cell, list[float]](list)
    for _ in range(num_rounds):
        for cell in cells:
            timings = engine.generate(request_for(plan, cell, place))[0].timings
            step_ms[cell].append(1000 * timings.step_s)
            image_s[cell].append(timings.denoise_s + timings.decode_s)
            on_timed(cell)
    return {cell: SoloTime(tuple(step_ms[cell]), tuple(image_s[cell])) for cell in cells}


def timed_cells(plan: SweepPlan) -> dict[Cell, Cell]:
    """Return for each cell the one whose time its own follows from: with equal settings, near ``TIMED_STEPS`` steps."""
    lines: defaultdict[tuple[object, ...], list[Cell]] = defaultdict(list)
    for cell in plan.cells:
        lines[cell.guidance_scale, cell.settings].append(cell)
    timed = {
        cell: min(line, key=lambda other: abs(other.rows - 2 * TIMED_STEPS)) for line in lines.values() for cell in line
    }
    return timed | {reference: timed[cell] for cell in plan.cells if (reference := plan.reference_of(cell)) is not None}


def time_some(
    paint: Callable[[GenerationRequest], ImageResult], plan: SweepPlan, on_timed: Callable[[Cell], None]
) -> dict[Cell, SoloTime]:
    """Time one image alone of each of ``timed_cells`` and return the times of all cells, in proportion to their rows.

    The first image fills caches and is not timed. ``on_timed`` is called after each timed image.
    """
    timed = timed_cells(plan)
    shown = dict.fromkeys(timed.values())
    paint(request_for(plan, next(iter(shown)), plan.places[0]))
    timings = defaultdict[Cell, list[Timings]](list)
    for _ in range(TIMED_ROUNDS):
        for cell in shown:
            timings[cell].append(paint(request_for(plan, cell, plan.places[0])).timings)
            on_timed(cell)
    return {cell: _scaled(timings[other], cell, other) for cell, other in timed.items()}


def _scaled(timings: Iterable[Timings], cell: Cell, timed: Cell) -> SoloTime:
    share = cell.rows / timed.rows
    each_step = share * timed.num_steps / cell.num_steps
    return SoloTime(
        tuple(1000 * each_step * timing.step_s for timing in timings),
        tuple(share * timing.denoise_s + timing.decode_s for timing in timings),
    )
