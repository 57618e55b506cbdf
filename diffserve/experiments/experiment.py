"""The middle of every experiment: images that any painter paints are measured, and their records kept."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
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
        ...

    def load(self, cell: Cell, place: Place) -> StoredImage | None:
        """An image that was saved."""
        ...

    def records(self, cell: Cell) -> Mapping[Place, ImageRecord]:
        """What is known of a cell's images."""
        ...

    def add(self, cell: Cell, record: ImageRecord) -> None:
        """Keep a record. An image that was painted before its converged one gets a second, with its distance."""
        ...


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


class Experiment:
    """Paints images of a plan with any painter, measures them, and keeps the records in ``store``.

    on_event  is told everything the painter says, of finished images after they were measured
    call      runs what takes long
    """

    def __init__(
        self,
        plan: SweepPlan,
        painter: Painter,
        measures: ImageMeasures,
        store: RecordStore,
        on_event: Callable[[PaintEvent], None],
        call: Callable[..., Awaitable[Any]] = call_here,
    ) -> None:
        self._plan, self._painter, self._measures, self._store = plan, painter, measures, store
        self._on_event = on_event
        self._call = call

    async def paint(self, images: Iterable[PlannedImage]) -> None:
        """Paint and measure ``images``. Raises what the painter raises; what is in flight is then given up."""
        try:
            async with aclosing(self._painter.paint(images)) as events:
                async for event in events:
                    if isinstance(event, FinishedImage):
                        for cell, record in await self._call(self._measure, event):
                            self._store.add(cell, record)
                    self._on_event(event)
        finally:
            self._painter.close()

    def _measure(self, finished: FinishedImage) -> list[tuple[Cell, ImageRecord]]:
        """The record of an image; and with a converged image those of images that were painted before it."""
        cell, place = finished.image.cell, finished.image.place
        self._store.save(finished)
        if not cell.is_reference:
            reference = self._plan.reference_of(cell)
            converged = None if reference is None else self._store.load(reference, place)
            return [(cell, self._measures.measure(finished, converged))]
        converged = StoredImage(finished.pixels, finished.latents)
        return [(cell, self._measures.measure(finished, None)), *self._compare(cell, place, converged)]

    def _compare(self, reference: Cell, place: Place, converged: StoredImage) -> list[tuple[Cell, ImageRecord]]:
        found = []
        for cell in self._plan.cells:
            record = self._store.records(cell).get(place)
            if record is not None and record.distance is None and self._plan.reference_of(cell) == reference:
                earlier = self._store.load(cell, place)
                distance = None if earlier is None else self._measures.distance(earlier, converged)
                found.append((cell, msgspec.structs.replace(record, distance=distance)))
        return found
