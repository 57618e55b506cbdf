"""The middle of every experiment: images that any painter paints are measured, and their records kept."""

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
    """Where records are kept, and the images that others are compared with."""

    def save(self, finished: FinishedImage) -> None:
        """Keep the image itself, if it will be asked for."""

    def load(self, cell: Cell, place: Place) -> StoredImage | None:
        """An image that was saved."""

    def records(self, cell: Cell) -> Mapping[Place, ImageRecord]:
        """What is known of a cell's images."""

    def add(self, cell: Cell, record: ImageRecord) -> None:
        """Keep a record. An image that was painted before its converged one gets a second, with its distance."""


async def call_here(function: Callable[..., T], *arguments: Any) -> T:
    """Call at once; beside an event loop that must not wait, use ``asyncio.to_thread`` instead."""
    return function(*arguments)


def complete(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing, as painting with an engine does; it needs no event loop."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    raise RuntimeError("it waits for something; run it on an event loop")


async def paint_measured(
    plan: SweepPlan,
    painter: Painter,
    measures: ImageMeasures,
    store: RecordStore,
    images: Iterable[PlannedImage],
    on_event: Callable[[PaintEvent], None],
    call: Callable[..., Awaitable[Any]] = call_here,
) -> None:
    """Paint ``images`` of ``plan`` with any painter, measure them, and keep the records in ``store``.

    ``on_event`` is told everything the painter says, of finished images after they were measured; ``call`` runs what
    takes long. Raises what the painter raises; what is in flight is then given up.
    """

    def measure(finished: FinishedImage) -> Iterator[tuple[Cell, ImageRecord]]:
        """The record of an image; and with a converged image those of images that were painted before it."""
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
                    for cell, record in await call(lambda one: list(measure(one)), event):
                        store.add(cell, record)
                on_event(event)
    finally:
        painter.close()
