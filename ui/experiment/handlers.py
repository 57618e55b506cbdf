"""Form and events of the Experiment tab: conversion to a request, estimate, run, follow, stop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import gradio as gr

from diffserve.api.errors import DiffserveError, EngineUnavailable, InvalidRequest
from diffserve.client import ExperimentFields, ImageCapabilities
from diffserve.experiments.measure import PromptCheck
from ui.captions import EARLY, seconds_text, status
from ui.experiment.grid import AXIS_LABELS, MAIN_LABELS, SAMPLER, STEPS, Arrangement
from ui.experiment.view import Shown, View, work_text
from ui.server import Server, sentence
from ui.visitors import ask_for_visitor

NOT_YET: Final = "The duration is known once the server has loaded its models."
GONE: Final = "The experiment of this page is not on the server any more."
SHOW_EVERY_S: Final = 0.25
"""Shortest time between two updates while cells come quickly, as after a reload."""

MAX_FORM_CHARS: Final = 100_000
"""Limit for all prompts together."""


FORM_WORDS: Final = {
    "num_seeds": "seeds",
    "first_seed": "first seed",
    "reference_steps": "reference steps",
    "num_steps": "number of steps",
    "axes": "further axis",
}
"""Form labels of the field names in messages."""


class ExperimentForm(NamedTuple):
    """Values of the experiment form.

    Attributes:
        samplers: Sampler names.
        steps: Step counts, separated by commas, also as ranges.
        prompts: One prompt per line.
        num_seeds: Images of each prompt, with the seeds first_seed, first_seed + 1, and so on.
        first_seed: The first seed.
        guidance: A number or text with numbers; empty uses the model's default.
        reference_steps: DDIM steps of the images that all others are compared with.
        model: Name of the model; empty uses the server's default.
        axis: Name of a further request field whose values are compared; empty: none.
        axis_values: Its values, separated by commas, also as ranges.
        x: Name of the request field of the columns.
        x_values: Its values, unless the form has a list of its own for them.
        y: Name of the request field of the rows.
        y_values: Its values, unless the form has a list of its own for them.
    """

    samplers: Sequence[str]
    steps: str
    prompts: str
    num_seeds: float | None = 1
    first_seed: float | None = 0
    guidance: str | float | None = None
    reference_steps: float | None = 200
    model: str | None = None
    axis: str | None = None
    axis_values: str | None = None
    x: str | None = STEPS
    x_values: str | None = None
    y: str | None = SAMPLER
    y_values: str | None = None

    @property
    def arrangement(self) -> Arrangement:
        """The fields of columns and rows."""
        return Arrangement((self.x or "").strip() or STEPS, (self.y or "").strip() or SAMPLER)


def read_form(form: ExperimentForm) -> ExperimentFields:
    """Return the fields of the request; the server checks their values.

    Raises:
        InvalidRequest: A field is empty or is no whole number.
    """
    if not form.samplers:
        raise InvalidRequest("no sampler is chosen; choose at least one.", param="samplers")
    if not all(isinstance(name, str) for name in form.samplers):
        raise InvalidRequest("a chosen sampler is not a name; choose from the list.", param="samplers")
    if len(form.prompts) > MAX_FORM_CHARS:
        message = f"the prompts have {len(form.prompts)} characters; at most {MAX_FORM_CHARS} are allowed."
        raise InvalidRequest(message, param="prompts")
    prompts = [line.strip() for line in form.prompts.splitlines() if line.strip()]
    if not prompts:
        raise InvalidRequest("there is no prompt; write at least one, one per line.", param="prompts")
    fields = ExperimentFields(
        samplers=list(dict.fromkeys(form.samplers)),
        steps=form.steps,
        prompts=prompts,
        num_seeds=_integer(form.num_seeds, "images of each prompt", 1),
        first_seed=_integer(form.first_seed, "first seed", 0),
        reference_steps=_integer(form.reference_steps, "reference steps", 200),
    )
    guidance = "" if form.guidance is None else str(form.guidance).strip()
    if guidance:
        fields["guidance"] = guidance
    axes = _axes(form)
    if axes:
        fields["axes"] = axes
    if form.model:
        fields["model"] = form.model
    return fields


def _axes(form: ExperimentForm) -> dict[str, str]:
    """Return the values of the axes that have no list of their own in the form. Raises InvalidRequest."""
    columns, rows = form.arrangement
    if columns == rows:
        what = (MAIN_LABELS | AXIS_LABELS).get(columns, columns)
        raise InvalidRequest(f"X and Y are both {what}; choose two different fields.", param="axes")
    axes: dict[str, str] = {}
    axis_texts = ((columns, form.x_values), (rows, form.y_values), ((form.axis or "").strip(), form.axis_values))
    for name, text in axis_texts:
        if not name or name in MAIN_LABELS:
            continue
        label, values = (AXIS_LABELS.get(name, name), (text or "").strip())
        if not values:
            raise InvalidRequest(f"the axis {label} has no values; write at least one, such as 0, 0.5.", param="axes")
        if name in axes:
            raise InvalidRequest(f"the axis {label} is chosen twice; choose another field.", param="axes")
        axes[name] = values
    return axes


def _integer(value: float | None, name: str, default: int) -> int:
    if value is None:
        return default
    if value != value or value != int(value):
        raise InvalidRequest(f"{name} is {value:g}; give a whole number.")
    return int(value)


def message_of(error: DiffserveError | OSError) -> str:
    """Return the message of ``error`` with the labels of the form."""
    if isinstance(error, InvalidRequest):
        name, space, predicate = error.message.partition(" ")
        error = InvalidRequest(FORM_WORDS.get(name, name) + space + predicate, param=error.param)
    return sentence(error)


class ExperimentHandlers:
    """Events of the tab. The experiments run on the server, so that a reloaded page finds them again by their ID."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def estimate(
        self,
        samplers: list[str],
        steps: str,
        prompts: str,
        num_seeds: float | None,
        first_seed: float | None,
        guidance: str | None,
        reference_steps: float | None,
        model: str | None,
        axis: str | None,
        axis_values: str | None,
        x: str | None,
        x_values: str | None,
        y: str | None,
        y_values: str | None,
        request: gr.Request,
    ) -> str:
        """Return the size and duration of the experiment as HTML, or why it is invalid."""
        values = (samplers, steps, prompts, num_seeds, first_seed, guidance, reference_steps, model)
        form = ExperimentForm(*values, axis, axis_values, x, x_values, y, y_values)
        ask_for_visitor(request)
        try:
            fields = read_form(form)
            planned = await self._server.client.plan_experiment(**fields)
            image = await self._image(model)
        except EngineUnavailable:
            return status(NOT_YET)
        except DiffserveError as error:
            return status(message_of(error), is_error=True)
        check = PromptCheck(image.family, planned.plan["prompts"])
        notes = [] if check.why_not is None else [f"Prompt match will not be measured: {check.why_not}"]
        seconds = planned.estimated_seconds
        duration = "" if seconds is None else f": about {seconds_text(seconds)}"
        return status(f"{work_text(planned)}{duration}.", notes=notes)

    async def run(
        self,
        samplers: list[str],
        steps: str,
        prompts: str,
        num_seeds: float | None,
        first_seed: float | None,
        guidance: str | None,
        reference_steps: float | None,
        model: str | None,
        axis: str | None,
        axis_values: str | None,
        x: str | None,
        x_values: str | None,
        y: str | None,
        y_values: str | None,
        request: gr.Request,
    ) -> AsyncIterator[Shown]:
        """Start the experiment and stream the grid, then curves and files."""
        values = (samplers, steps, prompts, num_seeds, first_seed, guidance, reference_steps, model)
        form = ExperimentForm(*values, axis, axis_values, x, x_values, y, y_values)
        ask_for_visitor(request)
        try:
            if not await self._server.client.is_ready():
                yield Shown(status=status(EARLY), run=gr.update(interactive=False))
                await self._server.wait_for_models()
            experiment = await self._server.client.begin_experiment(**read_form(form))
        except DiffserveError as error:
            yield Shown(status=status(message_of(error), is_error=True), run=gr.update(interactive=True))
            return
        yield Shown(current=experiment.id)
        async for shown in self.follow(experiment.id, x, y, request):
            yield shown

    async def follow(
        self, current: str | None, x: str | None, y: str | None, request: gr.Request
    ) -> AsyncIterator[Shown]:
        """Stream the experiment with the ID ``current``, from its beginning; no change without one.

        Args:
            current: ID of the experiment.
            x: Request field of the columns.
            y: Request field of the rows.
            request: The request of the page.
        """
        if not current:
            yield Shown()  # gradio would clear the components after a generator without a value
            return
        files = self._server.files
        try:
            ask_for_visitor(request)  # here, because each step of this generator runs in its own context
            client = self._server.client
            experiment = await client.experiment(current)
            image = (await self._server.wait_for_models()).image_of(experiment.model)
            view = View(experiment, image, client, files, Arrangement(x or STEPS, y or SAMPLER))
            stream = client.experiment_events(current)
        except (DiffserveError, OSError) as error:
            is_gone = isinstance(error, DiffserveError) and error.code == "experiment_not_found"
            message = GONE if is_gone else message_of(error)
            yield Shown(status=status(message, is_error=True), current="" if is_gone else gr.skip())
            return
        shown_s = -SHOW_EVERY_S
        try:
            yield view.beginning()
            async with stream as events:
                async for event in events:
                    await view.take(event)
                    if not view.is_over and time.monotonic() - shown_s >= SHOW_EVERY_S:
                        shown_s = time.monotonic()
                        yield await view.news()
            yield await view.ending()
        except (DiffserveError, OSError) as error:
            yield view.failure(error)
        finally:
            await asyncio.to_thread(files.keep, view.folder)

    async def compare(self, names: Any) -> Any:
        """Show the two checked images of the grid below a slider; nothing unless ``names`` are two files."""
        files = [Path(name) for name in names if isinstance(name, str)] if isinstance(names, list) else []
        if len(files) != 2 or not all(self._server.files.contains(file) for file in files):
            return gr.update(visible=False)
        return gr.update(value=tuple(map(str, files)), visible=True)

    async def stop(self, current: str | None, request: gr.Request) -> None:
        """Cancel the experiment of this page; its finished cells are kept."""
        ask_for_visitor(request)
        try:
            if current:
                await self._server.client.cancel_experiment(current)
        except DiffserveError:
            return  # it is over, or the server is gone, which ``follow`` reports

    async def _image(self, model: str | None) -> ImageCapabilities:
        return (await self._server.models()).image_of(model)
