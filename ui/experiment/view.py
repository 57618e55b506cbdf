"""Updates of the Experiment tab: status, grid, curves, files; only changes are sent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import gradio as gr

from diffserve.client import ImageCapabilities
from diffserve.experiments.charts import Chart, over_seconds, over_steps
from diffserve.experiments.estimates import Measure
from diffserve.experiments.measure import thumbnail
from diffserve.experiments.plan import Cell, SweepPlan, canonical_sampler
from diffserve.experiments.series import Names, line_names, line_of
from diffserve.experiments.summary import CellSummary, write_csv
from diffserve.media.images import decode_image
from ui.captions import seconds_text, status
from ui.events import shown_if
from ui.experiment.board import SHOWN, Board, Square
from ui.experiment.run import GridRun
from ui.experiment.speed import TIMED_PICTURES, ServerSpeed
from ui.files import PageFiles
from ui.server import sentence

TELL_EVERY_S: Final = 1.0
"""Longest time between updates; sending one reveals that a page is closed."""

CURVES_EVERY_S: Final = 4.0
"""Shortest time between updates of the curves, which take about 0.2 s of a core."""

SECONDS_ARE: Final = "evaluations times the measured time of a single one"
THUMBNAIL_PX: Final = 256
MEASURES: Final = (Measure.EXACT, Measure.PSNR_DB)
UNMEASURED: Final = (
    "There is no data for a curve: compare with a reference image, or use prompts that the checker of "
    "the embedded model knows."
)
PAIRED: Final = "prompt and seed has an image for every sampler and step count, and a reference."
UNPAIRED: Final = f"There is no data for a curve: no {PAIRED}"
PENDING: Final = f"Curves appear once a {PAIRED}"


class Shown(NamedTuple):
    """New values of the components, in the order of ``ui.experiment.layout.ExperimentOutputs``."""

    status: Any = gr.skip()
    grid: Any = gr.skip()
    curves_over_steps: Any = gr.skip()
    curves_over_seconds: Any = gr.skip()
    csv: Any = gr.skip()
    png: Any = gr.skip()
    run: Any = gr.skip()
    stop: Any = gr.skip()


class View:
    """The state of a page that shows a run, to send only changes."""

    def __init__(self, run: GridRun, speed: ServerSpeed, names: dict[str, str]) -> None:
        self._run = run
        self._speed = speed
        self._names = names
        self._seen = -1
        self._num_drawn = 0
        self._told_s = self._drawn_s = self._start_s = time.monotonic()

    def beginning(self) -> Shown:
        """Return an empty grid, with Stop in place of Run."""
        return Shown(
            self._status(), self._grid(), "", "",
            gr.update(value=None, visible=False), gr.update(value=None, visible=False),
            {**shown_if(False), "interactive": True}, shown_if(True),
        )  # fmt: skip

    async def news(self) -> Shown | None:
        """Return what changed since the last call; None if nothing did and no update is due."""
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
        """Return curves, files and the final status, with Run in place of Stop."""
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
        return grid(self._run.board, self._names)

    def _summaries(self) -> tuple[CellSummary, ...]:
        return self._run.board.summaries(self._speed.alone)

    def _curves(self, pending: str = "") -> tuple[str, str]:
        """Return both charts as HTML with notes; without data, ``pending`` or the reason."""
        summaries = self._summaries()
        if not summaries:
            return "", ""
        steps = over_steps(summaries, MEASURES, self._names)
        seconds = over_seconds(summaries, MEASURES, self._names)
        if not steps:
            why = (pending or UNPAIRED) if self._run.plan.references else UNMEASURED
            return f"<p class='note'>{why}</p>", ""
        sentences = (knee_sentence(seconds, self._names), self._seconds_text())
        notes = "".join(f"<p class='note'>{escape(text)}</p>" for text in sentences if text)
        from diffserve.experiments.plots import figure_html

        return figure_html(steps), figure_html(seconds) + notes

    def _seconds_text(self) -> str:
        """Return how the seconds of an image were determined."""
        timing = self._run.board.timing or self._speed.alone
        when = (
            f"medians of {TIMED_PICTURES} images generated alone after all others"
            if self._run.board.timing
            else f"medians of {TIMED_PICTURES} short images generated alone beforehand"
        )
        rest_text = f", and {_short_text(timing.rest_s)} for text, pixels and file" if timing.rest_s >= 0.001 else ""
        each = f"its UNet evaluations times {_short_text(timing.row_s)}{rest_text}"
        return f"Seconds are those of one image alone: {each}; {when}."

    def _files(self, files: PageFiles) -> tuple[Path | None, Path | None]:
        """Write the table and the chart; return None for both if no image is done."""
        summaries, board = self._summaries(), self._run.board
        if not summaries:
            return None, None
        csv = files.write(table_of(summaries).encode(), "experiment.csv")
        return csv, files.write(sheet_of(summaries, board), "experiment.png")

    def _status(self) -> str:
        run, plan = self._run, self._run.plan
        if run.is_timing:
            return status("measuring how long one image takes alone", share=1.0)
        text = f"image {run.board.num_painted} of {plan.num_images}, {seconds_text(run.seconds_left(self._speed))} left"
        if run.is_waiting:
            text += "; the server's queue is full; the remaining images wait"
        return status(text, share=min(1.0, run.board.rows_done / plan.num_painted_rows))

    def _end_status(self) -> str:
        run, board = self._run, self._run.board
        count_text = f"{board.num_painted} of {run.plan.num_images} images are done"
        notes = [
            f"{self._names.get(cell.sampler, cell.sampler)}, {cell.num_steps} steps: {square.trouble}"
            for cell, square in board.squares.items()
            if square.trouble is not None
        ]
        if run.check.why_not is not None:
            notes.append(f"Prompt match is not measured: {run.check.why_not}")
        if run.error is not None:
            return status(f"{sentence(run.error)} {count_text} and kept.", notes=notes, is_error=True)
        if run.is_stopped:
            return status(f"Stopped: {count_text} and kept.", notes=notes)
        took = seconds_text(time.monotonic() - self._start_s)
        return status(f"Generated {board.num_painted} images in {took}.", notes=notes)


def knee_sentence(charts: Sequence[Chart], names: Names) -> str:
    """Describe the knee of the first chart that has one; empty if none has."""
    for chart in charts:
        if (best := chart.knee) is not None:
            cell, measure = best.summary.cell, chart.measure
            return (
                "Dashed: settings that no other beats in both quality and time (Pareto front). Circled, its knee: "
                f"{names.get(cell.sampler, cell.sampler)} with {cell.num_steps} steps; beyond {best.x:.2g} s and "
                f"{measure.write(best.value.value)} ({measure.title}) more time helps less."
            )
    return ""


def work_text(plan: SweepPlan) -> str:
    """Describe ``plan``, such as "12 combinations of sampler and steps, 4 images each, and 4 converged ones"."""
    each = len(plan.places)
    pictures = "1 image" if each == 1 else f"{each} images each"
    if len(plan.cells) > 1:
        pictures = f"{len(plan.cells)} combinations of sampler and steps, {pictures.removesuffix(' each')} each"
    converged = f", and {each} converged {'one' if each == 1 else 'ones'}" if plan.references else ""
    return f"{pictures}{converged}"


def _short_text(seconds: float) -> str:
    """Format a duration, such as "67.6 ms" or "1.4 s"."""
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.2g} s"


def names_of(plan: SweepPlan, image: ImageCapabilities) -> dict[str, str]:
    """Return the label of each sampler in ``plan``, followed by its sigma schedule."""
    labels = {choice.name: choice.label for choice in image.samplers}
    names = {}
    for text in dict.fromkeys(cell.sampler for cell in plan.cells):
        name, _, schedule = canonical_sampler(text).partition(" ")
        names[text] = f"{labels.get(name, name)} {schedule}".strip()
    return names


def address(file: Path) -> str:
    """Return the URL of a file, relative to the page."""
    return f"gradio_api/file={quote(str(file))}"


def table_of(summaries: Sequence[CellSummary]) -> str:
    """Return the results as CSV, in the format of ``diffserve sweep``."""
    return write_csv([summary for summary in summaries if not summary.cell.is_reference], seconds_are=SECONDS_ARE)


def sheet_of(summaries: Sequence[CellSummary], board: Board) -> bytes:
    """Return the grid and curves as PNG; this takes seconds, so call it in a thread."""
    from diffserve.experiments import plots

    looks = {cell: square.look for cell, square in board.squares.items() if square.look is not None}
    small = {cell: thumbnail(decode_image(look.read_bytes()).array, THUMBNAIL_PX) for cell, look in looks.items()}
    return plots.contact_sheet(summaries, board.plan.prompts[0], small)


def grid(board: Board, names: Mapping[str, str]) -> str:
    """Return the table as HTML; ``names`` has the labels of the samplers."""
    plan, num_hidden = board.plan, len(board.plan.places) - 1
    hidden_note = f"; {num_hidden} more for each, not shown" if num_hidden else ""
    caption = f"“{escape(plan.prompts[SHOWN[0]])}”, seed {plan.seed_of(SHOWN)}{hidden_note}"
    steps = dict.fromkeys(cell.num_steps for cell in plan.cells)
    heads = "".join(f'<th scope="col">{n}</th>' for n in steps)
    for reference in plan.references:
        heads += f'<th scope="col" class="converged">converged<small>DDIM {reference.num_steps}</small></th>'
    rows = []
    by_line = {(line_of(cell), cell.num_steps): cell for cell in plan.cells}
    for line, name in line_names(plan.cells, names).items():
        cells = (*(by_line.get((line, n)) for n in steps), *plan.references)
        squares = "".join("<td></td>" if cell is None else _square(board, cell, names) for cell in cells)
        rows.append(f'<tr><th scope="row">{escape(name)}</th>{squares}</tr>')
    return (
        f'<div class="exp-scroll" tabindex="0" role="region" aria-label="images by sampler and steps"><table>'
        f"<caption>{caption}</caption>"
        f'<thead><tr><th scope="col" class="corner">steps</th>{heads}</tr></thead><tbody>{"".join(rows)}</tbody>'
        "</table></div>"
    )


def _square(board: Board, cell: Cell, names: Mapping[str, str]) -> str:
    square = board.squares[cell]
    name = f"{names.get(cell.sampler, cell.sampler)}, {cell.num_steps} steps"
    if square.trouble is not None:
        return f'<td class="trouble" title="{escape(square.trouble)}">not generated</td>'
    share = sum(square.fractions.values()) / len(board.plan.places)
    bar = f'<div class="bar"><i style="width:{100 * share:.0f}%"></i></div>'
    return f"<td>{_look(square, name)}{bar}<small>{_worth(board, square)}</small></td>"


def _look(square: Square, name: str) -> str:
    if square.look is None:
        return '<div class="blank"></div>'
    source = escape(address(square.look))
    if not square.is_shown_whole:
        return f'<img class="preview" src="{source}" alt="{escape(name)}, in progress">'
    return f'<a href="{source}" target="_blank" rel="noopener"><img src="{source}" alt="{escape(name)}"></a>'


def _worth(board: Board, square: Square) -> str:
    """Return the measurements of a cell in a few characters."""
    records = list(square.records.values())
    hits = [record.parts.exact for record in records if record.parts is not None]
    if len(hits) == 1 and len(board.plan.places) == 1:
        parts = ["✓" if hits[0] else "✗"]
    else:
        parts = [f"{sum(hits)}/{len(hits)} ✓"] if hits else []
    distances = [record.distance for record in records if record.distance is not None]
    near = [distance.psnr_db for distance in distances if distance.psnr_db is not None]
    parts += [Measure.PSNR_DB.write(sum(near) / len(near))] if near else []
    return " · ".join(parts) or "&nbsp;"
