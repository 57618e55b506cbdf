"""``/v1/experiments``: sweeps of samplers, steps and other settings, which run when no interactive request waits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import quote

import msgspec
from fastapi import FastAPI, Query
from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from diffserve.api.errors import InvalidRequest
from diffserve.api.fields import MAX_SEED
from diffserve.api.types import ModelInfo
from diffserve.experiments.findings import Finding
from diffserve.experiments.measure import PromptCheck
from diffserve.experiments.plan import MAX_PICTURES, MAX_PROMPTS, REFERENCE_STEPS, SweepPlan
from diffserve.experiments.plan_reading import DEFAULT_MAX_IMAGES, plan_warnings, read_plan
from diffserve.experiments.report import JSON, PAGE
from diffserve.experiments.run import state_power
from diffserve.experiments.served.messages import CellDone
from diffserve.experiments.served.run import CELLS, NO_AXES
from diffserve.experiments.summary import CellSummary
from diffserve.experiments.verdicts import Comparison
from diffserve.models.learned_samplers import LearnedSamplers
from diffserve.models.templates import Wildcards
from diffserve.service.admission import BATCH
from diffserve.service.endpoint import ServiceContext
from diffserve.service.http.bodies import Body, show
from diffserve.service.http.errors import HttpError
from diffserve.service.http.routing import After, Order, error_responses
from diffserve.service.http.streams import Events, EventStreamResponse, event, send_file
from diffserve.service.lifecycle import Draining, interruption, read_body
from diffserve.service.models import find_model
from diffserve.service.safety import Safety
from diffserve.service.stored.experiment_forecast import ExperimentForecast
from diffserve.service.stored.experiment_runner import CELLS_FILE, ExperimentRunner
from diffserve.service.stored.files import list_response
from diffserve.service.stored.owners import Owners
from diffserve.service.threads import ANSWERS, FILES, LISTINGS
from diffserve.store.database import PageSelection
from diffserve.store.experiments import Experiment, Experiments

TIMES: Final = ("in_progress", "finalizing", "completed", "failed", "cancelling", "cancelled")
MAX_TEXT_CHARS: Final = 10_000
LOOK_EVERY_S: Final = 0.2
"""How often a stream looks for news."""

TELL_EVERY_S: Final = 1.0
"""Longest time between two events of progress."""

CELL: Final = "experiment.cell"
PROGRESS: Final = "experiment.progress"
"""Types of events; the last one is ``experiment.`` and the status."""

STREAM_S: Final = 24 * 3600.0
FIELD_NAMES: Final = {
    "seeds": "num_seeds",
    "seed": "first_seed",
    "axis": "axes",
    "prompt": "prompts",
    "guidance_scale": "guidance",
    "num_inference_steps": "steps",
}
"""Names of the body's fields for those of plans and requests in errors."""

MEDIA_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".json": "application/json",
    ".csv": "text/csv; charset=utf-8",
    ".md": "text/markdown; charset=utf-8",
    ".png": "image/png",
}
PAGE_POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; sandbox allow-scripts"
)
"""A report is one file without outside parts; in a sandbox its scripts reach neither cookies nor the API."""

AxisValues = (
    Annotated[str, Field(max_length=MAX_TEXT_CHARS)]
    | Annotated[list[Annotated[str, Field(max_length=100)] | int | float], Field(max_length=100)]
)


class ExperimentBody(Body):
    """The body of ``POST /v1/experiments``: the plan of a sweep."""

    model_config = ConfigDict(title="CreateExperimentRequest")

    samplers: Annotated[AxisValues, Field(description='Samplers, such as "ddim, DPM++ 2M Karras".')] | None = None
    steps: Annotated[AxisValues | int, Field(description='Step counts, also as ranges: "4,8,10-50 (+10)".')] | None = (
        None
    )
    guidance: (
        Annotated[AxisValues | float, Field(description="Guidance scales; default: that of the model.")] | None
    ) = None
    axes: (
        Annotated[
            dict[Annotated[str, Field(max_length=100)], AxisValues],
            Field(
                max_length=20,
                description='Values of further fields, such as {"eta": "0,0.5"}, {"lora:ink": [1]} or '
                '{"prompt": "a {red|blue} fox"}.',
            ),
        ]
        | None
    ) = None
    prompts: Annotated[int, Field(ge=1)] | Annotated[list[str], Field(max_length=MAX_PROMPTS)] = Field(
        default=8, description="Prompts, or a number of held-out captions of the embedded model."
    )
    num_seeds: Annotated[int, Field(ge=1, description="Images of each prompt and cell.")] | None = None
    first_seed: Annotated[int, Field(ge=0, le=MAX_SEED)] = 0
    reference_steps: (
        Annotated[int, Field(ge=1, description=f"DDIM steps of the converged images; default {REFERENCE_STEPS}.")]
        | None
    ) = None
    until_decided: Annotated[
        bool, Field(description="Double the seeds of cells with open verdicts, up to max_images.")
    ] = False
    max_images: Annotated[int, Field(ge=1, description="Images of a cell at the last look.")] = DEFAULT_MAX_IMAGES
    detect: (
        Annotated[str, Field(max_length=200, description='Differences of interest, such as "exact=5,psnr_db=0.5".')]
        | None
    ) = None
    model: Annotated[str, Field(max_length=256)] | None = None
    plan_only: Annotated[bool, Field(description="Return size, duration and power, and run nothing.")] = False

    def plan(self, info: ModelInfo) -> SweepPlan:
        """Return the plan for the model ``info``; slow for many prompts, so call it in a thread.

        Raises:
            InvalidRequest: A value is malformed or not allowed.
        """
        guidance, steps = ([each] if isinstance(each, float | int) else each for each in (self.guidance, self.steps))
        main = {"samplers": self.samplers, "steps": steps, "guidance": guidance}
        try:
            plan = read_plan(
                [*((name, values) for name, values in main.items() if values is not None), *(self.axes or {}).items()],
                prompts=self.prompts,
                guidance=info.default_guidance_scale,
                num_seeds=self.num_seeds,
                first_seed=self.first_seed,
                reference_steps=self.reference_steps or min(REFERENCE_STEPS, info.train_timesteps),
                until_decided=self.until_decided,
                max_images=self.max_images,
                detect=self.detect,
                learned_steps=LearnedSamplers.of(info).steps_of,
                wildcards=Wildcards(info.wildcard_dir),
            )
            plan.check(info)
        except InvalidRequest as error:
            raise _in_words_of_the_body(error) from None
        if plan.engines != (NO_AXES,):
            message = "model and precision cannot be axes of an experiment on a server; use diffserve sweep for them."
            raise InvalidRequest(message, param="axes")
        if plan.num_images > MAX_PICTURES:
            message = (
                f"the experiment has {plan.num_images:,} images; at most {MAX_PICTURES:,} are allowed: choose fewer "
                "values, prompts or seeds."
            )
            raise InvalidRequest(message, param="prompts", code="too_many_images")
        return plan


def _in_words_of_the_body(error: InvalidRequest) -> InvalidRequest:
    """Return ``error`` with the body's name of its field."""
    param = error.param or ""
    name, message = FIELD_NAMES.get(param, param), error.message
    if message.startswith(f"{param} "):
        message = name + message.removeprefix(param)
    return InvalidRequest(message, param=name or None, code=error.code)


def _warnings(plan: SweepPlan, info: ModelInfo) -> list[str]:
    """Return warnings about cells without a comparison and about prompts that cannot be checked."""
    why_not = PromptCheck(info.family, plan.all_prompts).why_not
    unchecked = [] if why_not is None else [f"Exact prompt match is not measured: {why_not}"]
    return [*plan_warnings(plan), *unchecked]


class ExperimentRoutes:
    """Routes of ``experiments``, which ``runner`` runs; ``safety`` judges prompts, if there is a filter."""

    def __init__(
        self,
        app: FastAPI,
        experiments: Experiments,
        owners: Owners,
        runner: ExperimentRunner,
        context: ServiceContext,
        safety: Safety | None,
    ) -> None:
        self._experiments = experiments
        self._owners = owners
        self._runner = runner
        self._engine = context.engine
        self._gate = context.gate
        self._safety = safety
        self._warm_models: set[str] = set()  # whose engines have run images for an estimate
        path = "/v1/experiments/{experiment_id}"
        app.get("/v1/experiments", summary="List experiments")(self.list_experiments)
        app.get(path, summary="Describe an experiment with its finished cells")(self.retrieve)
        stream: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
        app.get(f"{path}/events", summary="Finished cells and progress as they come", responses=stream)(self.events)
        cancel = app.post(f"{path}/cancel", summary="Cancel an experiment", responses=error_responses(409))
        cancel(self.cancel)
        app.delete(path, summary="Delete an experiment", responses=error_responses(409))(self.delete)
        content: dict[str, Any] = {"content": {kind: {} for kind in MEDIA_TYPES.values()}, "description": "The file."}
        app.get(
            f"{path}/files/{{name}}", summary="Download a file of a report", responses={200: content},
            response_class=Response,
        )(self.file)  # fmt: skip

    async def create(self, request: Request) -> Response:
        """Create an experiment, or with ``plan_only`` describe it.

        Every cell is checked first; a wrong value is refused before anything is generated.
        """
        with self._gate.inside():
            owner = self._owners.of(request)
            body = await read_body(request, ExperimentBody)
            self._engine.require_ready()
            info = find_model(body.model, self._engine.models)
            plan = await ANSWERS.run(body.plan, info)
            if self._safety is not None:
                await ANSWERS.run(self._check_prompts, self._safety, plan)
            warnings = [*body.warnings, *await ANSWERS.run(_warnings, plan, info)]
            forecast = ExperimentForecast(self._engine, plan, info, f"{BATCH}{owner}")
            seconds = await forecast.seconds(warms_up=info.model_id not in self._warm_models)
            self._warm_models.add(info.model_id)
            if body.plan_only:
                power = await ANSWERS.run(state_power, plan, None)
                return JSONResponse(plan_object(plan, info.model_id, seconds, power) | {"warnings": warnings})
            rows = await LISTINGS.run(
                self._experiments.add, owner, info.model_id, msgspec.to_builtins(plan), plan.num_images, seconds
            )
        self._runner.wake()
        return JSONResponse(self._object(rows) | {"warnings": warnings})

    @staticmethod
    def _check_prompts(safety: Safety, plan: SweepPlan) -> None:
        for prompt in plan.all_prompts:
            safety.check_texts({"prompt": prompt})

    async def list_experiments(
        self,
        request: Request,
        after: After = "",
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Order = "desc",
    ) -> Response:
        """List the experiments of the key, page by page, without their plans and cells."""
        selection = PageSelection(limit, after, order)
        return list_response(
            await LISTINGS.run(self._experiments.page, self._owners.of(request), selection), self._listed
        )

    async def retrieve(self, request: Request, experiment_id: str) -> Response:
        """Return the state of an experiment with its finished cells and verdicts."""
        experiment = await self._experiment_of(request, experiment_id)
        return Response(await FILES.run(self._encoded, experiment), media_type="application/json")

    async def events(self, request: Request, experiment_id: str) -> Response:
        """Stream the finished cells, first those that there are already, then the progress, at last the result.

        A client that reconnects gets the finished cells again.
        """
        experiment = await self._experiment_of(request, experiment_id)
        with ExitStack() as stack:
            stack.enter_context(self._engine.metrics.reading())
            interrupted = stack.enter_context(interruption(request))
            events = self._stream(experiment)
            return await EventStreamResponse(events, interrupted, stack.pop_all(), limit_s=STREAM_S).opened()

    async def _stream(self, experiment: Experiment) -> Events:
        loop = asyncio.get_running_loop()
        sent: dict[str, CellDone] = {}
        version, sent_s, status = -1, -TELL_EVERY_S, ""
        while not experiment.is_over:
            live = self._runner.live.get(experiment.id)
            if live is not None and live.version != version:
                version = live.version
                for name, cell in list(live.cells.items()):
                    if sent.get(name) is not cell:
                        sent[name] = cell
                        yield _cell_event(cell_object(experiment, cell.cell), cell.comparisons)
            if loop.time() - sent_s >= TELL_EVERY_S or status != experiment.status:
                sent_s, status = loop.time(), experiment.status
                yield event({"type": PROGRESS, **self._listed(experiment)}, PROGRESS)
            if self._runner.is_stopping:
                raise Draining("the server is shutting down; the experiment continues when it is back.")
            await asyncio.sleep(LOOK_EVERY_S)
            row = await LISTINGS.run(self._experiments.get, experiment.id)
            if row is None:
                raise _not_found(experiment.id)
            experiment = row
        name, result = f"experiment.{experiment.status}", await FILES.run(self._complete_object, experiment)
        for each in result["cells"] if not sent else ():
            yield _cell_event(each, ())
        yield event({"type": name, "experiment": result}, name)

    async def cancel(self, request: Request, experiment_id: str) -> Response:
        """Cancel an experiment; finished cells are kept. The call can be repeated while it ends."""
        experiment = await self._experiment_of(request, experiment_id)
        moved = await LISTINGS.run(
            self._experiments.move, experiment.id, "cancelling", of=("validating", "in_progress", "finalizing")
        )
        if moved is None or moved.status not in ("cancelling", "cancelled"):
            message = f"{experiment.id} is {'deleted' if moved is None else moved.status}; there is nothing to cancel."
            raise HttpError(409, message, code="experiment_over")
        self._runner.stop(experiment.id)
        return JSONResponse(self._object(moved))

    async def delete(self, request: Request, experiment_id: str) -> Response:
        """Delete a finished experiment with its files."""
        experiment = await self._experiment_of(request, experiment_id)
        if not experiment.is_over:
            message = f"{experiment.id} is {experiment.status}; cancel it first."
            raise HttpError(409, message, code="experiment_running")
        await FILES.run(self._experiments.delete, experiment)
        return JSONResponse({"id": experiment.id, "object": "experiment", "deleted": True})

    async def file(self, request: Request, experiment_id: str, name: str) -> Response:
        """Download a file of the report, or the thumbnail of a cell."""
        experiment = await self._experiment_of(request, experiment_id)
        path = (await FILES.run(self._files, experiment)).get(name)
        try:
            if path is None:
                raise FileNotFoundError
            opened = await FILES.run(path.open, "rb")
        except FileNotFoundError:
            raise HttpError(404, f"{experiment.id} has no file {show(name)}.", code="file_not_found") from None
        headers = {"Cache-Control": "private, no-cache", "Content-Disposition": f'inline; filename="{path.name}"'}
        if path.suffix == ".html":
            headers["Content-Security-Policy"] = PAGE_POLICY
        return send_file(opened, path.stat().st_size, MEDIA_TYPES[path.suffix], headers)

    async def _experiment_of(self, request: Request, name: str) -> Experiment:
        owner = self._owners.of(request)
        experiment = await LISTINGS.run(self._experiments.get, name)
        if experiment is None or experiment.owner != owner:
            raise _not_found(name)
        return experiment

    def _files(self, experiment: Experiment) -> dict[str, Path]:
        """Return the paths of the report's files and of the thumbnails by name: nothing else can be downloaded."""
        folder = self._experiments.path(experiment.id)
        places = [folder, folder / CELLS]
        files = [file for place in places if place.is_dir() for file in place.iterdir() if file.name != CELLS_FILE]
        return {file.name: file for file in files if file.suffix in MEDIA_TYPES and not file.name.startswith(".")}

    def _object(self, experiment: Experiment) -> dict[str, Any]:
        """Return the API's object for an experiment, without its cells."""
        live = self._runner.live.get(experiment.id)
        progress = None if live is None or live.progress is None else live.progress
        code, _, message = experiment.error.partition(": ")
        left_s = None if live is None or experiment.is_over else live.seconds_left
        return {
            "id": experiment.id,
            "object": "experiment",
            "status": experiment.status,
            "model": experiment.model,
            "created_at": int(experiment.created_s),
            **{f"{name}_at": int(experiment.times[name]) if name in experiment.times else None for name in TIMES},
            "num_images": experiment.num_images,
            "estimated_seconds": None if experiment.estimated_s is None else round(experiment.estimated_s, 1),
            "progress": None
            if progress is None
            else {
                "phase": progress.phase,
                "images_done": progress.num_images,
                "rows_done": progress.rows_done,
                "num_rows": progress.num_rows,
                "seconds_left": None if left_s is None else round(left_s, 1),
            },
            "plan": experiment.plan,
            "error": {"code": code, "message": message} if experiment.error else None,
        }

    def _listed(self, experiment: Experiment) -> dict[str, Any]:
        """Return the API's object for an experiment without its plan, which may have thousands of prompts."""
        return {name: value for name, value in self._object(experiment).items() if name != "plan"}

    def _encoded(self, experiment: Experiment) -> bytes:
        return msgspec.json.encode(self._complete_object(experiment))

    def _complete_object(self, experiment: Experiment) -> dict[str, Any]:
        """Return the API's object for an experiment, with its cells, verdicts and files; reads files."""
        files = self._files(experiment)
        live = self._runner.live.get(experiment.id)
        done = self._stored_cells(experiment) if live is None else list(live.cells.values())
        report = _Report([each.cell for each in done], [pair for each in done for pair in each.comparisons])
        if experiment.status == "completed" and JSON in files:
            report = msgspec.json.decode(files[JSON].read_bytes(), type=_Report)
        cells = [cell_object(experiment, cell) for cell in report.cells]
        urls = {name: _url(experiment, name) for name, file in files.items() if file.parent.name != CELLS}
        results = {"cells": cells, "comparisons": report.comparisons, "findings": report.findings}
        return self._object(experiment) | results | {"report": urls.get(PAGE), "files": urls}

    def _stored_cells(self, experiment: Experiment) -> list[CellDone]:
        """Return the finished cells of an experiment that was cancelled or failed."""
        try:
            data = (self._experiments.path(experiment.id) / CELLS_FILE).read_bytes()
            return msgspec.json.decode(data, type=list[CellDone])
        except (OSError, msgspec.MsgspecError):
            return []


class _Report(msgspec.Struct):
    """The results in a report.json."""

    cells: list[CellSummary]
    comparisons: list[Comparison]
    findings: list[Finding] = []


def plan_object(plan: SweepPlan, model: str, seconds: float | None, power: list[str]) -> dict[str, Any]:
    """Return the answer for ``plan_only``."""
    return {
        "object": "experiment.plan",
        "model": model,
        "plan": msgspec.to_builtins(plan),
        "num_cells": len(plan.cells),
        "num_images": plan.num_images,
        "estimated_seconds": None if seconds is None else round(seconds, 1),
        "power": power,
    }


def cell_object(experiment: Experiment, cell: CellSummary) -> dict[str, Any]:
    """Return the API's object for a finished cell."""
    image = _url(experiment, f"{cell.cell.slug}.png")
    return {"id": cell.cell.slug, "name": cell.cell.label, "image": image, **msgspec.to_builtins(cell)}


def _cell_event(cell: dict[str, Any], comparisons: Sequence[Comparison]) -> bytes:
    return event({"type": CELL, "cell": cell, "comparisons": comparisons}, CELL)


def _url(experiment: Experiment, name: str) -> str:
    return f"/v1/experiments/{experiment.id}/files/{quote(name)}"


def _not_found(name: str) -> HttpError:
    """Return the same error for a missing and another key's experiment."""
    return HttpError(404, f"you have no experiment {show(name)}.", code="experiment_not_found")
