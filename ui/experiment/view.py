"""What a page shows of an experiment as it goes: status, grid, curves, files. Only what is new."""

from __future__ import annotations

import asyncio
import html
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import gradio as gr

from diffserve.client import ImageCapabilities
from diffserve.experiments import svg
from diffserve.experiments.charts import Chart, Names, over_seconds, over_steps
from diffserve.experiments.estimates import Measure
from diffserve.experiments.measure import thumbnail
from diffserve.experiments.plan import SweepPlan, canonical_sampler
from diffserve.experiments.summary import CellSummary, write_csv
from diffserve.media.images import decode_image
from ui.captions import seconds_text, status
from ui.events import shown_if
from ui.experiment import table
from ui.experiment.board import Board
from ui.experiment.run import GridRun
from ui.experiment.speed import TIMED_PICTURES, ServerSpeed
from ui.files import PageFiles
from ui.server import sentence

TELL_EVERY_S: Final = 1.0
"""A page is told at least so often, so that one that is gone is noticed."""

CURVES_EVERY_S: Final = 1.5
SECONDS_ARE: Final = "evaluations times the measured time of one alone"
THUMBNAIL_PX: Final = 256
MEASURES: Final = (Measure.EXACT, Measure.PSNR_DB)
UNMEASURED: Final = (
    "There is nothing to draw a curve from: compare with the converged picture, or write prompts that the checker of "
    "the embedded model knows."
)
PAIRED: Final = "prompt and seed has a picture of every sampler and step count, and a converged one beside them."
UNPAIRED: Final = f"There is nothing to draw a curve from: no {PAIRED}"
PENDING: Final = f"Curves appear once a {PAIRED}"


class Shown(NamedTuple):
    """New values of what an experiment changes, in the order of :class:`ui.experiment.layout.ExperimentOutputs`."""

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

    def __init__(self, run: GridRun, speed: ServerSpeed, names: dict[str, str]) -> None:
        self._run = run
        self._speed = speed
        self._names = names
        self._seen = -1
        self._num_drawn = 0
        self._told_s = self._drawn_s = self._start_s = time.monotonic()

    def beginning(self) -> Shown:
        """Empty squares; Run becomes Stop."""
        return Shown(
            self._status(), self._grid(), "", "",
            gr.update(value=None, visible=False), gr.update(value=None, visible=False),
            {**shown_if(False), "interactive": True}, shown_if(True),
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

    async def ending(self, files: PageFiles) -> Shown:
        """The curves of what is painted, the files, and how it ended; Stop becomes Run."""
        buttons = ({**shown_if(True), "interactive": True}, shown_if(False))
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
        return self._run.board.summaries(self._speed.alone)

    def _curves(self, pending: str = "") -> tuple[str, str]:
        """Both figures as HTML, with what must be known to read them; where there are none yet, ``pending`` or why."""
        summaries = self._summaries()
        if not summaries:
            return "", ""
        steps = over_steps(summaries, MEASURES, self._names)
        seconds = over_seconds(summaries, MEASURES, self._names)
        if not steps:
            why = (pending or UNPAIRED) if self._run.plan.references else UNMEASURED
            return f"<p class='note'>{why}</p>", ""
        sentences = (knee_sentence(seconds, self._names), self._seconds_text())
        notes = "".join(f"<p class='note'>{html.escape(text)}</p>" for text in sentences if text)
        return svg.figure(steps), svg.figure(seconds) + notes

    def _seconds_text(self) -> str:
        """Where the seconds of a picture come from."""
        timing = self._run.board.timing or self._speed.alone
        when = (
            f"medians of {TIMED_PICTURES} pictures painted alone after all others"
            if self._run.board.timing
            else f"medians of {TIMED_PICTURES} short pictures painted alone beforehand"
        )
        rest = f", and {_short_text(timing.rest_s)} for text, pixels and file" if timing.rest_s >= 0.001 else ""
        each = f"its UNet evaluations times {_short_text(timing.row_s)}{rest}"
        return f"Seconds are those of one picture alone: {each}; {when}."

    def _files(self, files: PageFiles) -> tuple[Path | None, Path | None]:
        """The table and the picture on disk; none where nothing was painted."""
        summaries, board = self._summaries(), self._run.board
        if not summaries:
            return None, None
        csv = files.write(table_of(summaries).encode(), "experiment.csv")
        return csv, files.write(sheet_of(summaries, board), "experiment.png")

    def _status(self) -> str:
        run, plan = self._run, self._run.plan
        if run.is_timing:
            return status("measuring how long one picture takes alone", share=1.0)
        text = (
            f"picture {run.board.num_painted} of {plan.num_images}, {seconds_text(run.seconds_left(self._speed))} left"
        )
        if run.is_waiting:
            text += "; the server's queue is full, the rest waits for room"
        return status(text, share=min(1.0, run.board.rows_done / plan.num_painted_rows))

    def _end_status(self) -> str:
        run, board = self._run, self._run.board
        kept = f"{board.num_painted} of {run.plan.num_images} pictures are painted"
        notes = [
            f"{self._names.get(cell.sampler, cell.sampler)}, {cell.num_steps} steps: {square.trouble}"
            for cell, square in board.squares.items()
            if square.trouble is not None
        ]
        if run.check.why_not is not None:
            notes.append(f"Prompt match is not measured: {run.check.why_not}")
        if run.error is not None:
            return status(f"{sentence(run.error)} {kept} and kept.", notes=notes, is_error=True)
        if run.is_stopped:
            return status(f"Stopped: {kept} and kept.", notes=notes)
        took = seconds_text(time.monotonic() - self._start_s)
        return status(f"Painted {board.num_painted} pictures in {took}.", notes=notes)


def knee_sentence(charts: Sequence[Chart], names: Names) -> str:
    """Beyond which cell time buys little, by the first measure whose front has a knee; empty where none has."""
    for chart in charts:
        if (best := chart.knee) is not None:
            cell, measure = best.summary.cell, chart.measure
            return (
                f"Dashed: what cannot be had both better and faster. Ringed, its knee: "
                f"{names.get(cell.sampler, cell.sampler)} with {cell.num_steps} steps; beyond {best.x:.2g} s and "
                f"{measure.write(best.value.value)} ({measure.title}) time buys less."
            )
    return ""


def work_text(plan: SweepPlan) -> str:
    """ "12 combinations of sampler and steps, 4 pictures each, and 4 converged ones"."""
    each = len(plan.places)
    pictures = "1 picture" if each == 1 else f"{each} pictures each"
    if len(plan.cells) > 1:
        pictures = f"{len(plan.cells)} combinations of sampler and steps, {pictures.removesuffix(' each')} each"
    converged = f", and {each} converged {'one' if each == 1 else 'ones'}" if plan.references else ""
    return f"{pictures}{converged}"


def _short_text(seconds: float) -> str:
    """ "67.6 ms", "1.4 s"."""
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.2g} s"


def names_of(plan: SweepPlan, image: ImageCapabilities) -> dict[str, str]:
    """From samplers as cells write them to their labels; a sigma schedule follows as it is."""
    labels = {choice.name: choice.label for choice in image.samplers}
    names = {}
    for text in dict.fromkeys(cell.sampler for cell in plan.cells):
        name, _, schedule = canonical_sampler(text).partition(" ")
        names[text] = f"{labels.get(name, name)} {schedule}".strip()
    return names


def address(file: Path) -> str:
    """Where a browser finds a file of this process, from the page."""
    return f"gradio_api/file={quote(str(file))}"


def table_of(summaries: Sequence[CellSummary]) -> str:
    """CSV, one line a square, with the names of ``diffserve sweep``; ``seconds_are`` says where seconds come from."""
    return write_csv([one for one in summaries if not one.cell.is_reference], seconds_are=SECONDS_ARE)


def sheet_of(summaries: Sequence[CellSummary], board: Board) -> bytes:
    """The grid and the curves below it, as PNG. Takes a second or two: call it in a thread."""
    from diffserve.experiments import plots

    looks = {cell: square.look for cell, square in board.squares.items() if square.look is not None}
    small = {cell: thumbnail(decode_image(look.read_bytes()).array, THUMBNAIL_PX) for cell, look in looks.items()}
    return plots.contact_sheet(summaries, board.plan.prompts[0], small)
