"""Updates of the Experiment tab: status, grid, curves, files; only changes are sent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final, NamedTuple

import gradio as gr
import msgspec

from diffserve.api.errors import DiffserveError
from diffserve.client import (
    AsyncClient,
    CellFinished,
    ExperimentAdvanced,
    ExperimentEnded,
    ExperimentEvent,
    ImageCapabilities,
    PlannedExperiment,
    StoredExperiment,
)
from diffserve.experiments.charts import Chart, over_seconds, over_steps
from diffserve.experiments.estimates import Measure
from diffserve.experiments.plan import Cell, SweepPlan, canonical_sampler
from diffserve.experiments.series import steps_text
from diffserve.experiments.summary import CellSummary, write_csv
from ui.captions import status
from ui.events import shown_if
from ui.experiment.grid import AXIS_LABELS, STEPS_BY_SAMPLER, Arrangement, grid
from ui.files import PageFiles
from ui.server import sentence

CURVES_EVERY_S: Final = 4.0
"""Shortest time between updates of the curves, which take about 0.2 s of a core."""

SECONDS_ARE: Final = "in proportion to UNet rows, from images timed alone"
MEASURES: Final = (Measure.EXACT, Measure.PSNR_DB)
PENDING: Final = "Curves appear once a sampler and step count is finished."
NO_CURVE: Final = "There is no data for a curve: no sampler and step count is finished."
SECONDS_NOTE: Final = (
    "Seconds are those of one image alone: its UNet rows times the time of a row, and decoding; medians of images "
    "generated alone before all others."
)
WAITING: Final = "waiting for its turn"
PHASES: Final = {"timing": "measuring how long one image takes alone", "reporting": "writing the report"}
FILES: Final = {"csv": "cells.csv", "png": "overview.png", "report": "report.html"}
"""Files of the report by the component that offers them."""


class Shown(NamedTuple):
    """New values of the components, in the order of ``ui.experiment.layout.ExperimentOutputs``."""

    status: Any = gr.skip()
    grid: Any = gr.skip()
    curves_over_steps: Any = gr.skip()
    curves_over_seconds: Any = gr.skip()
    csv: Any = gr.skip()
    png: Any = gr.skip()
    report: Any = gr.skip()
    run: Any = gr.skip()
    stop: Any = gr.skip()
    current: Any = gr.skip()


class View:
    """The state of a page that shows an experiment, to send only changes.

    Attributes:
        folder: The folder of its images.
        is_over: Whether the last event was taken.
    """

    def __init__(
        self,
        experiment: StoredExperiment,
        image: ImageCapabilities,
        client: AsyncClient,
        files: PageFiles,
        arrangement: Arrangement = STEPS_BY_SAMPLER,
    ) -> None:
        self.plan = msgspec.convert(experiment.plan, SweepPlan)
        self.folder = files.new_folder()
        self._arrangement = arrangement
        self._client = client
        self._files = files
        self._names = names_of(self.plan, image)
        self._experiment = experiment
        self._now: ExperimentAdvanced | None = None
        self._cells: dict[Cell, CellSummary] = {}
        self._looks: dict[Cell, Path] = {}
        self._is_new = False
        self._num_drawn = 0
        self._drawn_s = time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether the experiment is over."""
        return self._experiment.is_over

    def beginning(self) -> Shown:
        """Return an empty grid, with Stop in place of Run."""
        no_files = dict.fromkeys(FILES, gr.update(value=None, visible=False))
        buttons = {"run": {**shown_if(False), "interactive": True}, "stop": shown_if(True)}
        return Shown(self._status(), self._grid(), "", "")._replace(**no_files, **buttons)

    async def take(self, event: ExperimentEvent) -> None:
        """Record an event; the image of a finished cell is fetched.

        Raises:
            DiffserveError: The image cannot be fetched.
            OSError: It cannot be stored.
        """
        if isinstance(event, ExperimentAdvanced):
            self._now = event
        elif isinstance(event, ExperimentEnded):
            self._experiment = event.experiment
            for ended in event.experiment.cells:
                summary = _summary_of(ended)
                self._cells[summary.cell] = summary
        elif isinstance(event, CellFinished):
            summary = _summary_of(event.cell)
            self._cells[summary.cell] = summary
            self._is_new = True
            if summary.cell not in self._looks:
                name = event.cell.image.rpartition("/")[2]
                data = await self._client.experiment_file(self._experiment.id, name)
                look = self.folder / f"{summary.cell.slug}.png"
                await asyncio.to_thread(look.write_bytes, data)
                self._looks[summary.cell] = look

    async def news(self) -> Shown:
        """Return what changed since the last call."""
        shown = Shown(self._status(), self._grid() if self._is_new else gr.skip())
        self._is_new = False
        if len(self._cells) == self._num_drawn or time.monotonic() - self._drawn_s < CURVES_EVERY_S:
            return shown
        self._num_drawn, self._drawn_s = len(self._cells), time.monotonic()
        steps, seconds = await asyncio.to_thread(self._curves, PENDING)
        return shown._replace(curves_over_steps=steps, curves_over_seconds=seconds)

    async def ending(self) -> Shown:
        """Return curves, files and the final status, with Run in place of Stop.

        Raises:
            DiffserveError: A file cannot be fetched.
            OSError: A file cannot be stored.
        """
        steps, seconds = await asyncio.to_thread(self._curves)
        files = await self._downloads()
        seconds += findings_list(self._experiment.findings)
        return Shown(self._end_status(), self._grid(), steps, seconds)._replace(**files, **_BUTTONS)

    def failure(self, error: DiffserveError | OSError) -> Shown:
        """Return the message of ``error``, with Run in place of Stop."""
        return Shown(status(sentence(error), is_error=True), self._grid())._replace(**_BUTTONS)

    def _grid(self) -> str:
        return grid(self.plan, self._cells, self._looks, self._names, self._arrangement)

    def _curves(self, missing: str = NO_CURVE) -> tuple[str, str]:
        """Return both charts as HTML with notes; without data, ``missing``."""
        summaries = [self._cells[cell] for cell in self.plan.all_cells if cell in self._cells]
        steps = over_steps(summaries, MEASURES, self._names)
        if not steps:
            return f"<p class='note'>{missing}</p>", ""
        seconds = over_seconds(summaries, MEASURES, self._names)
        sentences = (knee_sentence(seconds), SECONDS_NOTE)
        notes = "".join(f"<p class='note'>{escape(text)}</p>" for text in sentences if text)
        from diffserve.experiments.plots import figure_html

        return figure_html(steps), figure_html(seconds) + notes

    async def _downloads(self) -> dict[str, Any]:
        """Return updates with the report's files; of an experiment without a report, with a table of its cells."""
        data = {
            name: await self._client.experiment_file(self._experiment.id, file)
            for name, file in FILES.items()
            if file in self._experiment.files
        }
        compared = [summary for cell, summary in self._cells.items() if not cell.is_reference]
        if not data and compared:
            data["csv"] = write_csv(compared, seconds_are=SECONDS_ARE).encode()
        updates = {}
        for name, file in FILES.items():
            path = None
            if name in data:
                path = await asyncio.to_thread(self._files.write, data[name], f"experiment{Path(file).suffix}")
            updates[name] = gr.update(value=path, visible=path is not None)
        return updates

    def _status(self) -> str:
        progress = None if self._now is None else self._now.progress
        if progress is None:
            return status(WAITING)
        share = progress.rows_done / max(1, progress.num_rows)
        if progress.phase in PHASES:
            return status(PHASES[progress.phase], share=share)
        text = f"image {progress.images_done} of {self._experiment.num_images}"
        return status(text, share=share, seconds_left=progress.seconds_left)

    def _end_status(self) -> str:
        experiment = self._experiment
        num_images = sum(summary.num_images for summary in self._cells.values())
        done = f"{num_images} of {experiment.num_images} images are in finished cells and kept"
        if experiment.error is not None:
            return status(f"{sentence(DiffserveError(experiment.error.message))} {done}.", is_error=True)
        if experiment.status == "cancelled":
            return status(f"Stopped: {done}.")
        return status(f"Generated {num_images} images.")


_BUTTONS: Final = {"run": {**shown_if(True), "interactive": True}, "stop": shown_if(False)}
"""Updates of Run and Stop while no experiment runs."""


def _summary_of(cell: msgspec.Struct) -> CellSummary:
    return msgspec.convert(msgspec.to_builtins(cell), CellSummary)


def findings_list(findings: Sequence[Mapping[str, Any]]) -> str:
    """Return the claims of the report with their verdicts and evidence as HTML; empty without any."""
    items = "".join(
        f"<details><summary>{escape(finding['claim'])}: <b>{escape(finding['verdict'])}</b></summary>"
        f"<p class='note'>{escape(' '.join(finding['evidence']))}</p></details>"
        for finding in findings
    )
    return f"<div class='findings'>{items}</div>" if items else ""


def knee_sentence(charts: Sequence[Chart]) -> str:
    """Describe the knee of the first chart that has one; empty if none has."""
    for chart in charts:
        if (best := chart.knee) is not None:
            measure = chart.measure
            return (
                "Dashed: settings that no other beats in both quality and time (Pareto front). Circled, its knee: "
                f"{best.name} with {steps_text(best.summary.cell.num_steps)}; beyond {best.x:.2g} s and "
                f"{measure.write(best.value.value)} ({measure.title}) more time helps less."
            )
    return ""


def work_text(planned: PlannedExperiment) -> str:
    """Describe an experiment, such as "12 combinations of sampler and steps, 4 images each, and 4 converged ones"."""
    each = len(planned.plan["prompts"]) * planned.plan["num_seeds"]
    num_converged = planned.num_images - each * planned.num_cells
    pictures = "1 image" if each == 1 else f"{each} images each"
    if planned.num_cells > 1:
        axes = ["sampler", "steps"]
        axes += ["guidance"] if len(planned.plan.get("guidance", ())) > 1 else []
        axes += [AXIS_LABELS.get(name, name).lower() for name in planned.plan.get("axes", {})]
        what = f"{', '.join(axes[:-1])} and {axes[-1]}"
        pictures = f"{planned.num_cells} combinations of {what}, {pictures.removesuffix(' each')} each"
    return f"{pictures}, and {num_converged} converged {'one' if num_converged == 1 else 'ones'}"


def names_of(plan: SweepPlan, image: ImageCapabilities) -> dict[str, str]:
    """Return the label of each sampler in ``plan``, followed by its sigma schedule."""
    labels = {choice.name: choice.label for choice in image.samplers}
    names = {}
    for text in dict.fromkeys(cell.sampler for cell in plan.cells):
        name, _, schedule = (text if text in plan.learned else canonical_sampler(text)).partition(" ")
        names[text] = f"{labels.get(name, name)} {schedule}".strip()
    return names
