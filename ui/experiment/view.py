"""What a page shows of an experiment as it goes: status, grid, curves, files. Only what is new."""

from __future__ import annotations

import asyncio
import html
import time
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import gradio as gr

from diffserve.client import ImageCapabilities
from diffserve.experiments.plan import canonical_sampler
from diffserve.experiments.summary import CellSummary
from ui.captions import seconds_text, status
from ui.experiment import charts, curves, export, table
from ui.experiment.pace import TIMED_PICTURES, Pace
from ui.experiment.plan import GridPlan
from ui.experiment.run import GridRun
from ui.files import Files
from ui.server import sentence

TELL_EVERY_S: Final = 1.0
"""A page is told at least so often, so that one that is gone is noticed."""

CURVES_EVERY_S: Final = 1.5
UNMEASURED: Final = (
    "There is nothing to draw a curve from: compare with the converged picture, or write prompts that the checker of "
    "the embedded model knows."
)
UNPAIRED: Final = (
    "There is nothing to draw a curve from: no prompt and seed has a picture of every sampler and step count, and a "
    "converged one beside them."
)
PENDING: Final = (
    "Curves appear once a prompt and seed has a picture of every sampler and step count, and a converged one beside "
    "them."
)


class Shown(NamedTuple):
    """New values of what an experiment changes, in the order of :class:`ui.experiment.layout.Showing`."""

    status: Any = gr.skip()
    grid: Any = gr.skip()
    curves_over_steps: Any = gr.skip()
    curves_over_seconds: Any = gr.skip()
    csv: Any = gr.skip()
    png: Any = gr.skip()
    run: Any = gr.skip()
    stop: Any = gr.skip()


class View:
    """What a page shows of a run; only what is new."""

    def __init__(self, run: GridRun, pace: Pace, names: dict[str, str]) -> None:
        self._run = run
        self._pace = pace
        self._names = names
        self._seen = -1
        self._num_drawn = 0
        self._told_s = self._drawn_s = self._start_s = time.monotonic()

    def beginning(self) -> Shown:
        """Empty squares; Run becomes Stop."""
        return Shown(
            self._status(), self._grid(), "", "",
            gr.update(value=None, visible=False), gr.update(value=None, visible=False),
            gr.update(visible=False, interactive=True), gr.update(visible=True),
        )  # fmt: skip

    async def news(self) -> Shown | None:
        """What changed since the last time; ``None`` where nothing did and nothing need be said."""
        board, now_s = self._run.board, time.monotonic()
        is_new = board.version != self._seen
        if not is_new and now_s - self._told_s < TELL_EVERY_S:
            return None
        self._seen, self._told_s = board.version, now_s
        shown = Shown(self._status(), self._grid() if is_new else gr.skip())
        if board.num_painted == self._num_drawn or now_s - self._drawn_s < CURVES_EVERY_S:
            return shown
        self._num_drawn, self._drawn_s = board.num_painted, now_s
        steps, seconds = await asyncio.to_thread(self._curves, PENDING)
        return shown._replace(curves_over_steps=steps, curves_over_seconds=seconds)

    async def ending(self, files: Files) -> Shown:
        """The curves of what is painted, the files, and how it ended; Stop becomes Run."""
        buttons = (gr.update(visible=True, interactive=True), gr.update(visible=False))
        try:
            steps, seconds = await asyncio.to_thread(self._curves)
            csv, png = await asyncio.to_thread(self._files, files)
        except OSError as error:
            text = status(sentence(error), is_error=True)
            return Shown(text, self._grid(), run=buttons[0], stop=buttons[1])
        csv_update, png_update = (gr.update(value=file, visible=file is not None) for file in (csv, png))
        return Shown(self._end_status(), self._grid(), steps, seconds, csv_update, png_update, *buttons)

    def _grid(self) -> str:
        return table.grid(self._run.board, self._names, address)

    def _summaries(self) -> tuple[CellSummary, ...]:
        return self._run.board.summaries(self._pace.alone)

    def _curves(self, pending: str = "") -> tuple[str, str]:
        """Both figures as HTML, with what must be known to read them; where there are none yet, ``pending`` or why."""
        summaries = self._summaries()
        if not summaries:
            return "", ""
        over_steps = curves.over_steps(summaries, self._names)
        over_seconds = curves.over_seconds(summaries, self._names)
        if not over_steps:
            why = (pending or UNPAIRED) if self._run.plan.has_converged else UNMEASURED
            return f"<p class='note'>{why}</p>", ""
        lines = [self._names.get(name, name) for name in curves.samplers_of(summaries)]
        knee = curves.knee_sentence(summaries, self._names)
        notes = "".join(f"<p class='note'>{html.escape(text)}</p>" for text in (knee, self._seconds_text()) if text)
        return charts.figure(over_steps, lines), charts.figure(over_seconds, lines) + notes

    def _seconds_text(self) -> str:
        """Where the seconds of a picture come from."""
        timing = self._run.board.timing or self._pace.alone
        when = (
            f"medians of {TIMED_PICTURES} pictures painted alone after all others"
            if self._run.board.timing
            else f"medians of {TIMED_PICTURES} short pictures painted alone beforehand"
        )
        rest = f", and {_short_text(timing.rest_s)} for text, pixels and file" if timing.rest_s >= 0.001 else ""
        each = f"its UNet evaluations times {_short_text(timing.row_s)}{rest}"
        return f"Seconds are those of one picture alone: {each}; {when}."

    def _files(self, files: Files) -> tuple[Path | None, Path | None]:
        """The table and the picture on disk; none where nothing was painted."""
        summaries, board = self._summaries(), self._run.board
        if not summaries:
            return None, None
        csv = files.write(export.table(summaries).encode(), "experiment.csv")
        return csv, files.write(export.picture(summaries, board), "experiment.png")

    def _status(self) -> str:
        run, plan = self._run, self._run.plan
        if run.is_timing:
            return status("measuring how long one picture takes alone", share=1.0)
        text = (
            f"picture {run.board.num_painted} of {plan.num_pictures}, {seconds_text(run.seconds_left(self._pace))} left"
        )
        if run.is_waiting:
            text += "; the server's queue is full, the rest waits for room"
        return status(text, share=min(1.0, run.board.rows_done / plan.rows_together))

    def _end_status(self) -> str:
        run, board = self._run, self._run.board
        kept = f"{board.num_painted} of {run.plan.num_pictures} pictures are painted"
        notes = tuple(_troubles(run, self._names))
        if run.error is not None:
            return status(f"{sentence(run.error)} {kept} and kept.", notes=notes, is_error=True)
        if run.is_stopped:
            return status(f"Stopped: {kept} and kept.", notes=notes)
        took = seconds_text(time.monotonic() - self._start_s)
        return status(f"Painted {board.num_painted} pictures in {took}.", notes=notes)


def _troubles(run: GridRun, names: dict[str, str]) -> list[str]:
    """Why squares are empty, and why a measure is missing."""
    found = [
        f"{names.get(cell.sampler, cell.sampler)}, {cell.num_steps} steps: {square.trouble}"
        for cell, square in run.board.squares.items()
        if square.trouble is not None
    ]
    return found if run.why_not_exact is None else [*found, f"Prompt match is not measured: {run.why_not_exact}"]


def work_text(plan: GridPlan) -> str:
    """ "12 combinations of sampler and steps, 4 pictures each, and 4 converged ones"."""
    each = len(plan.sweep.places)
    pictures = "1 picture" if each == 1 else f"{each} pictures each"
    if len(plan.cells) > 1:
        pictures = f"{len(plan.cells)} combinations of sampler and steps, {pictures.removesuffix(' each')} each"
    converged = f", and {each} converged {'one' if each == 1 else 'ones'}" if plan.has_converged else ""
    return f"{pictures}{converged}"


def _short_text(seconds: float) -> str:
    """ "67.6 ms", "1.4 s"."""
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.2g} s"


def names_of(plan: GridPlan, image: ImageCapabilities) -> dict[str, str]:
    """From samplers as cells write them to their labels; a sigma schedule follows as it is."""
    labels = {choice.name: choice.label for choice in image.samplers}
    names = {}
    for text in plan.samplers:
        name, _, schedule = canonical_sampler(text).partition(" ")
        names[text] = f"{labels.get(name, name)} {schedule}".strip()
    return names


def address(file: Path) -> str:
    """Where a browser finds a file of this process, from the page."""
    return f"gradio_api/file={quote(str(file))}"
