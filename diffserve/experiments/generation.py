"""Core loop of sweeps, gates and experiments: generates images, measures them, and stores the records."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from diffserve.experiments.measure import ImageMeasures
from diffserve.experiments.plan import Cell, Place, PlannedImage, SweepPlan
from diffserve.experiments.records import FinishedImage, GenerationEvent, ImageRecord, StoredImage

T = TypeVar("T")


class ImageGenerator(Protocol):
    """Generates the images of a plan concurrently, started in the given order."""

    def generate(self, images: Iterable[PlannedImage]) -> AsyncGenerator[GenerationEvent, None]:
        """Generate ``images`` and yield events; an error that stops all images is raised."""

    def close(self) -> None:
        """Cancel images in progress; events of finished images may still follow."""


class RecordStore(Protocol):
    """Storage of records and of the images that others are compared with."""

    def save(self, finished: FinishedImage) -> None:
        """Store the image if it is needed later for comparisons."""

    def load(self, cell: Cell, place: Place) -> StoredImage | None:
        """Return a saved image, or ``None`` if there is none."""

    def records(self, cell: Cell) -> Mapping[Place, ImageRecord]:
        """Return the records of a cell by place."""

    def add(self, cell: Cell, record: ImageRecord) -> None:
        """Add a record, or replace one that was made before its converged image existed."""


def complete(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends and return its result, without an event loop."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    raise RuntimeError("the coroutine suspended; run it on an event loop")


async def generate_measured(
    plan: SweepPlan,
    generator: ImageGenerator,
    measures: ImageMeasures,
    store: RecordStore,
    images: Iterable[PlannedImage],
    on_event: Callable[[GenerationEvent], None],
) -> None:
    """Generate ``images``, measure them, and add the records to ``store``.

    Errors of the generator propagate; images in flight are then canceled.

    Args:
        plan: The plan that the images belong to.
        generator: Generates the images.
        measures: Measures each finished image.
        store: Receives images and records.
        images: The images to generate.
        on_event: Called with every event of the generator; for finished images after they were measured.
    """

    def load_reference(cell: Cell, place: Place) -> StoredImage | None:
        reference_cell = plan.reference_of(cell)
        return None if reference_cell is None else store.load(reference_cell, place)

    try:
        async with aclosing(generator.generate(images)) as events:
            async for event in events:
                if isinstance(event, FinishedImage):
                    cell, place = event.image.cell, event.image.place
                    store.save(event)
                    store.add(cell, measures.measure(event, load_reference(cell, place)))
                on_event(event)
    finally:
        generator.close()
