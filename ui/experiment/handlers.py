"""Form and events of the Experiment tab: conversion to a plan, estimate, run, stop, leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Final, NamedTuple

import gradio as gr

from diffserve.api.errors import DiffserveError, EngineUnavailable, InvalidRequest
from diffserve.client import ImageCapabilities
from diffserve.experiments.axes import numbers, quote, whole_numbers
from diffserve.experiments.measure import PromptCheck
from diffserve.experiments.plan import MAX_SAMPLER_CHARS, REFERENCE_STEPS, SweepPlan
from ui.captions import EARLY, seconds_text, status
from ui.experiment.run import GridRun
from ui.experiment.speed import SpeedProbe
from ui.experiment.view import Shown, View, names_of, work_text
from ui.server import Server, sentence
from ui.visitors import ask_for_visitor

NOT_YET: Final = "The duration is known once the server has loaded its models."

MAX_PICTURES: Final = 400
"""Largest experiment of the page; ``diffserve sweep`` has no such limit."""

MAX_FORM_CHARS: Final = 100_000
"""Limit for all prompts together."""

FORM_WORDS: Final = {"num_steps": "steps", "guidance_scale": "guidance"}
"""Form labels of the field names in messages."""


class ExperimentForm(NamedTuple):
    """Values of the experiment form.

    Attributes:
        samplers: Sampler names.
        steps: Step counts, separated by commas.
        prompts: One prompt per line.
        num_seeds: Images of each prompt, with the seeds first_seed, first_seed + 1, and so on.
        first_seed: The first seed.
        guidance_scale: A number or text with a number; empty uses the model's default.
        has_converged: Whether to compare images with a reference of the same seed.
        model: Name of the model; empty uses the server's default.
    """

    samplers: Sequence[str]
    steps: str
    prompts: str
    num_seeds: float | None = 1
    first_seed: float | None = 0
    guidance_scale: str | float | None = None
    has_converged: bool = True
    model: str | None = None


def read_form(form: ExperimentForm, image: ImageCapabilities) -> SweepPlan:
    """Return the plan of ``form`` for the model ``image``; this is slow, so call it in a thread.

    Raises:
        InvalidRequest: The form is invalid.
    """
    steps = tuple(dict.fromkeys(whole_numbers(form.steps, "steps")))
    max_steps = image.train_timesteps
    if max(steps) > max_steps:
        raise InvalidRequest(
            f"steps has {max(steps)}; the model was trained with {max_steps} timesteps, so "
            f"{max_steps} steps is the maximum.",
            param="steps",
        )
    prompts = _prompts(form.prompts)
    with _in_words_of_the_form():
        plan = SweepPlan(
            samplers=_samplers(form.samplers),
            steps=steps,
            guidance=(_guidance(form.guidance_scale, image.default_guidance_scale),),
            prompts=prompts,
            num_seeds=_integer(form.num_seeds, "images of each prompt", 1),
            first_seed=_integer(form.first_seed, "first seed", 0),
            reference_steps=min(REFERENCE_STEPS, max_steps) if form.has_converged else None,
        )
    if plan.num_images > MAX_PICTURES:
        raise InvalidRequest(
            f"that is {plan.num_images} images, and the page generates at most {MAX_PICTURES}; choose fewer prompts, "
            "seeds, samplers or step counts, or use diffserve sweep, which can be interrupted.",
            param="prompts",
        )
    return plan


@contextmanager
def _in_words_of_the_form() -> Iterator[None]:
    """Rename fields in error messages as the form labels them."""
    try:
        yield
    except InvalidRequest as error:
        name, is_first, predicate = error.message.partition(" ")
        raise InvalidRequest(FORM_WORDS.get(name, name) + is_first + predicate, param=error.param) from error


def _samplers(names: Sequence[str]) -> tuple[str, ...]:
    """Check the sampler names and remove duplicates."""
    if not names:
        raise InvalidRequest("no sampler is chosen; choose at least one.", param="samplers")
    if not all(isinstance(name, str) and len(name) <= MAX_SAMPLER_CHARS for name in names):
        raise InvalidRequest(
            f"a chosen sampler is not a name of at most {MAX_SAMPLER_CHARS} characters; choose from the list.",
            param="samplers",
        )
    return tuple(dict.fromkeys(names))


def _prompts(text: str) -> tuple[str, ...]:
    """Split ``text`` into its nonempty lines and check their number."""
    if len(text) > MAX_FORM_CHARS:
        raise InvalidRequest(
            f"the prompts have {len(text)} characters; at most {MAX_FORM_CHARS} are allowed.", param="prompts"
        )
    prompts = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not prompts:
        raise InvalidRequest("there is no prompt; write at least one, one per line.", param="prompts")
    if len(prompts) > MAX_PICTURES:
        raise InvalidRequest(
            f"there are {len(prompts)} prompts, and the page generates at most {MAX_PICTURES} images; write fewer.",
            param="prompts",
        )
    return prompts


def _guidance(value: str | float | None, default: float) -> float:
    text = "" if value is None else str(value).strip()
    if not text:
        return default
    scales = numbers(text, "guidance")
    if len(scales) > 1:
        raise InvalidRequest(
            f"guidance is {quote(text)}; the page compares at a single scale; give one number.", param="guidance"
        )
    return scales[0]


def _integer(value: float | None, name: str, default: int) -> int:
    if value is None:
        return default
    if value != value or value != int(value):
        raise InvalidRequest(f"{name} is {value:g}; give a whole number.")
    return int(value)


class ExperimentHandlers:
    """Events of the tab; runs are stored by gradio session."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._probe = SpeedProbe()
        self._runs: dict[str, set[GridRun]] = {}

    async def estimate(
        self,
        samplers: list[str],
        steps: str,
        prompts: str,
        num_seeds: float | None,
        first_seed: float | None,
        guidance: str | None,
        has_converged: bool,
        model: str | None,
    ) -> str:
        """Return the size and duration of the experiment as HTML, or why it is invalid."""
        form = ExperimentForm(samplers, steps, prompts, num_seeds, first_seed, guidance, has_converged, model)
        try:
            plan, check = await asyncio.to_thread(_read, form, await self._image(model))
            speed = await self._probe.speed(self._server.client, model or "")
        except EngineUnavailable:
            return status(NOT_YET)
        except DiffserveError as error:
            return status(sentence(error), is_error=True)
        notes = () if check.why_not is None else (f"Prompt match will not be measured: {check.why_not}",)
        return status(f"{work_text(plan)}: about {seconds_text(speed.seconds(plan))}.", notes=notes)

    async def run(
        self,
        samplers: list[str],
        steps: str,
        prompts: str,
        num_seeds: float | None,
        first_seed: float | None,
        guidance: str | None,
        has_converged: bool,
        model: str | None,
        request: gr.Request,
    ) -> AsyncIterator[Shown]:
        """Run the experiment and stream the grid, then curves and files; closing this generator stops it."""
        form = ExperimentForm(samplers, steps, prompts, num_seeds, first_seed, guidance, has_converged, model)
        try:
            if not await self._server.client.is_ready():
                yield Shown(status=status(EARLY), run=gr.update(interactive=False))
                await self._server.wait_for_models()
            image = await self._image(model)
            plan, check = await asyncio.to_thread(_read, form, image)
            yield Shown(status=status("Measuring the speed of the server."), run=gr.update(interactive=False))
            speed = await self._probe.speed(self._server.client, model or "")
            folder = self._server.files.new_folder()
        except (DiffserveError, OSError) as error:
            yield Shown(status=status(sentence(error), is_error=True), run=gr.update(interactive=True))
            return
        run = GridRun(self._server.client, plan, check, folder, model or "")
        view = View(run, speed, names_of(plan, image))
        session = request.session_hash or ""
        mine = self._runs.setdefault(session, set())
        mine.add(run)
        try:
            yield view.beginning()
            ask_for_visitor(request)  # here, because each step of this generator runs in its own context
            async with aclosing(run.watch()) as moments:
                async for _ in moments:
                    if (shown := await view.news()) is not None:
                        yield shown
            yield await view.ending(self._server.files)
        finally:
            mine.discard(run)
            if not mine and self._runs.get(session) is mine:
                del self._runs[session]
            run.board.tidy()
            self._server.files.keep(folder)

    async def stop(self, request: gr.Request) -> None:
        """Stop the experiments of this page and keep their finished images."""
        for run in self._runs.get(request.session_hash or "", ()):
            run.stop()

    async def leave(self, request: gr.Request) -> None:
        """Stop the experiments of a closed page."""
        for run in self._runs.pop(request.session_hash or "", ()):
            run.stop()

    async def _image(self, model: str | None) -> ImageCapabilities:
        return (await self._server.models()).image_of(model)


def _read(form: ExperimentForm, image: ImageCapabilities) -> tuple[SweepPlan, PromptCheck]:
    """Return the plan of ``form`` and the checker for its prompts.

    Raises:
        InvalidRequest: The form is invalid.
    """
    plan = read_form(form, image)
    return plan, PromptCheck(image.family, plan.prompts)
