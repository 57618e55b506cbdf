"""Events of the Experiment tab: estimate, run, stop, leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Final

import gradio as gr

from diffserve.api.errors import DiffserveError, EngineUnavailable
from diffserve.client import ImageCapabilities
from diffserve.experiments.measure import PromptCheck
from diffserve.experiments.plan import SweepPlan
from ui.captions import EARLY, seconds_text, status
from ui.experiment.form import ExperimentForm, read_form
from ui.experiment.run import GridRun
from ui.experiment.speed import SpeedProbe
from ui.experiment.view import Shown, View, names_of, work_text
from ui.server import Server, sentence
from ui.visitors import ask_for_visitor

NOT_YET: Final = "The duration is known once the server has loaded its models."


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
