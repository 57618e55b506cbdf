"""Runs the plan of an experiment with the engines of a server, resumably, and writes its report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from diffserve.api.errors import InvalidRequest
from diffserve.experiments.analysis import Analysis
from diffserve.experiments.engine_generator import TIMED_STEPS, time_some, timed_cells
from diffserve.experiments.engines import EngineFacts
from diffserve.experiments.plan import TIMED_ROUNDS, Cell, Place, SweepPlan
from diffserve.experiments.provenance import machine
from diffserve.experiments.records import ImageRecord, SoloTime
from diffserve.experiments.report import RESULTS, records_of_looks, write_report
from diffserve.experiments.run import (
    ProgressCounter,
    SweepProgress,
    generate_on,
    images_of_looks,
    open_store,
    read_times,
    times_name,
)
from diffserve.experiments.served.engine import ServedEngine
from diffserve.experiments.served.messages import CellDone
from diffserve.experiments.store import IN_USE, Store, write_whole
from diffserve.experiments.summary import summarise
from diffserve.experiments.verdicts import compare_cells

CELLS: Final = "cells"
"""Folder of the thumbnails, one per cell."""

LOCK_S: Final = 60.0
"""How long the process of a killed server may hold the folder."""

TIMED_SOME: Final = (
    f"{TIMED_ROUNDS} images of about {TIMED_STEPS} steps with each guidance scale and setting, generated before all "
    "others, give the time of a UNet row; a cell's time is the median for its number of rows"
)


def run_served(
    engine: ServedEngine,
    plan: SweepPlan,
    folder: Path,
    on_progress: Callable[[SweepProgress, int], None],
    on_cell: Callable[[CellDone], None],
) -> None:
    """Run ``plan``, or the rest of it, and write the report into ``folder``.

    Args:
        engine: The engines of the server.
        plan: The plan, which the server has checked.
        folder: Output folder.
        on_progress: Called with the progress and the number of images on disk.
        on_cell: Called with each cell whose images are complete, also with those of an earlier run.

    Raises:
        InvalidRequest: The folder cannot be used.
        DiffserveError: An image could not be generated.
    """
    facts = {key: EngineFacts.of(engine, plan) for key in plan.engines}
    initial_machine = machine()
    with _opened(open_store(plan, facts, folder, results=RESULTS)) as store:
        times = read_times(store, plan)
        timed_rows = 0 if times else TIMED_ROUNDS * sum(cell.rows for cell in {*timed_cells(plan).values()})

        def tell(now: SweepProgress) -> None:
            on_progress(now, sum(len(store.records(cell)) for cell in plan.all_cells))

        counter = ProgressCounter(tell, timed_rows)
        if not times:
            times = time_some(engine.paint, plan, lambda cell: counter.add("timing", cell.rows))
            store.write_json(times_name(store, plan.all_cells), {cell.slug: solo for cell, solo in times.items()})
        cells = _FinishedCells(plan, store, times, on_cell)
        for cell in plan.all_cells:
            cells.add(cell)
        for images in images_of_looks(plan, store, lambda _: None):
            counter.expect(sum(image.cell.rows for image in images))
            [check] = [fact.check for fact in facts.values()]
            generate_on(engine, plan, store, check, images, partial(_count, counter, cells))
        counter.add("reporting")
        write_report(
            engine=engine, plan=plan, store=store, times=times, facts=facts, initial_machine=initial_machine,
            how_timed=TIMED_SOME,
        )  # fmt: skip


def _count(counter: ProgressCounter, cells: _FinishedCells, rows: float, finished: Cell | None) -> None:
    counter.add("painting", rows)
    if finished is not None:
        cells.add(finished)


@contextmanager
def _opened(store: Store) -> Iterator[Store]:
    """Lock the folder of ``store`` for the block; the process of a killed server may hold it for a moment."""
    until_s = time.monotonic() + LOCK_S
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(store)
                break
            except InvalidRequest as error:
                if error.code != IN_USE or time.monotonic() > until_s:
                    raise
                time.sleep(0.2)
        yield store


class _FinishedCells:
    """Cells with all images of a look: their summaries, comparisons and thumbnails."""

    def __init__(
        self, plan: SweepPlan, store: Store, times: Mapping[Cell, SoloTime], on_cell: Callable[[CellDone], None]
    ) -> None:
        self._plan = plan
        self._store = store
        self._times = times
        self._on_cell = on_cell
        self._comparisons = plan.comparisons
        self._records: dict[Cell, Mapping[Place, ImageRecord]] = {}

    def add(self, cell: Cell) -> None:
        """Announce ``cell`` if its images of the first look are complete."""
        records = records_of_looks(self._plan, self._store.records(cell))
        first = self._plan.places_until((self._plan.looks or (self._plan.num_seeds,))[0])
        if not all(place in records for place in first):
            return
        self._records[cell] = records
        thumbnail = records[first[0]].thumbnail
        if thumbnail is not None:
            folder = self._store.folder / CELLS
            folder.mkdir(exist_ok=True)
            write_whole(folder / f"{cell.slug}.png", thumbnail)
        analysis = Analysis(self._plan, self._records)
        pairs = [pair for pair in self._comparisons if cell in pair and {*pair} <= self._records.keys()]
        self._on_cell(
            CellDone(
                cell=summarise(analysis, cell, self._times[cell]),
                comparisons=tuple(compare_cells(analysis, pairs=pairs)),
            )
        )
