"""Core loop of experiments: generates images with any painter, measures them, and stores the records."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

import msgspec

from diffserve.experiments.measure import ImageMeasures
from diffserve.experiments.painter import FinishedImage, Painter, PaintEvent
from diffserve.experiments.plan import Cell, Place, PlannedImage, SweepPlan
from diffserve.experiments.records import ImageRecord, StoredImage

T = TypeVar("T")


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


async def call_here(function: Callable[..., T], *arguments: Any) -> T:
    """Call ``function`` directly; use ``asyncio.to_thread`` instead if it must not block the event loop."""
    return function(*arguments)


def complete(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends and return its result, without an event loop."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    raise RuntimeError("the coroutine suspended; run it on an event loop")


async def paint_measured(
    plan: SweepPlan,
    painter: Painter,
    measures: ImageMeasures,
    store: RecordStore,
    images: Iterable[PlannedImage],
    on_event: Callable[[PaintEvent], None],
    call: Callable[..., Awaitable[Any]] = call_here,
) -> None:
    """Generate ``images`` with a painter, measure them, and add the records to ``store``.

    Errors of the painter propagate; images in flight are then canceled.

    Args:
        plan: The plan that the images belong to.
        painter: Generates the images.
        measures: Measures each finished image.
        store: Receives images and records.
        images: The images to generate.
        on_event: Called with every event of the painter; for finished images after they were measured.
        call: Runs the measuring, for example in a thread.
    """

    def measure(finished: FinishedImage) -> Iterator[tuple[Cell, ImageRecord]]:
        """Yield the record of an image, and updated records if it is the reference of earlier images."""
        cell, place = finished.image.cell, finished.image.place
        store.save(finished)
        reference = None if cell.is_reference else plan.reference_of(cell)
        yield cell, measures.measure(finished, None if reference is None else store.load(reference, place))
        converged = StoredImage(finished.pixels, finished.latents)
        for other in plan.cells if cell.is_reference else ():
            record = store.records(other).get(place)
            if record is not None and record.distance is None and plan.reference_of(other) == cell:
                earlier = store.load(other, place)
                distance = None if earlier is None else measures.distance(earlier, converged)
                yield other, msgspec.structs.replace(record, distance=distance)

    try:
        async with aclosing(painter.paint(images)) as events:
            async for event in events:
                if isinstance(event, FinishedImage):
                    for cell, record in await call(lambda finished: list(measure(finished)), event):
                        store.add(cell, record)
                on_event(event)
    finally:
        painter.close()
