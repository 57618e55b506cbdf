"""Experiments on the server: types of answers, and the methods of the client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypedDict, Unpack

import msgspec

from diffserve.client.stored import Listed, PageFields, paged
from diffserve.client.transport import AsyncStream, HttpClient, TypedReader, resource

EXPERIMENTS: Final = "/v1/experiments"
OVER: Final = ("completed", "failed", "cancelled")


class ExperimentProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a running experiment: "timing", "generating" or "reporting", and the UNet rows of this run."""

    phase: str
    images_done: int
    rows_done: int
    num_rows: int
    seconds_left: float | None = None


class ExperimentFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Code and message of the error that ended an experiment."""

    code: str
    message: str


class ExperimentCell(msgspec.Struct, frozen=True, kw_only=True):
    """A finished cell.

    Attributes:
        id: Name within the experiment.
        name: Display name.
        image: Path of the image of the first prompt and seed.
        cell: Sampler, steps, guidance scale and settings.
        num_images: Number of images.
        measures: Value and 95 % interval (``low``, ``high``) by the name of the measure.
        evaluations: UNet rows per image.
        alone_s: Seconds of an image generated alone.
    """

    id: str
    name: str
    image: str
    cell: dict[str, Any]
    num_images: int
    measures: dict[str, dict[str, float | None]]
    parts: dict[str, float]
    spacing: str
    evaluations: float
    step_ms: dict[str, float | None]
    alone_s: float
    engine_s: float


class StoredExperiment(msgspec.Struct, frozen=True, kw_only=True):
    """An experiment on the server.

    Attributes:
        num_images: Images of the plan.
        estimated_seconds: Expected duration on an idle machine.
        plan: The plan, as in a report.json; empty in a list of experiments.
        cells: The finished cells; empty in a list of experiments.
        comparisons: Paired differences with their verdicts.
        findings: Claims with their verdicts, once it is completed.
        report: Path of the report in HTML, once it is completed.
        files: Paths of the report's files by name.
    """

    id: str
    status: str
    model: str
    created_at: int
    num_images: int
    estimated_seconds: float | None = None
    progress: ExperimentProgress | None = None
    plan: dict[str, Any] = msgspec.field(default_factory=dict)
    error: ExperimentFailure | None = None
    cells: tuple[ExperimentCell, ...] = ()
    comparisons: tuple[dict[str, Any], ...] = ()
    findings: tuple[dict[str, Any], ...] = ()
    report: str | None = None
    files: dict[str, str] = {}

    @property
    def is_over(self) -> bool:
        """Whether the experiment is finished."""
        return self.status in OVER


class PlannedExperiment(msgspec.Struct, frozen=True, kw_only=True):
    """Size of a planned experiment, its expected seconds, and the differences that it can detect."""

    model: str
    plan: dict[str, Any]
    num_cells: int
    num_images: int
    estimated_seconds: float | None = None
    power: tuple[str, ...] = ()


class CellFinished(msgspec.Struct, frozen=True, kw_only=True):
    """A cell is finished, or has more images than before; with its comparisons with earlier cells."""

    cell: ExperimentCell
    comparisons: tuple[dict[str, Any], ...] = ()


class ExperimentAdvanced(msgspec.Struct, frozen=True, kw_only=True):
    """Status and progress of an experiment."""

    id: str
    status: str
    num_images: int
    progress: ExperimentProgress | None = None


class ExperimentEnded(msgspec.Struct, frozen=True, kw_only=True):
    """The last event, with the whole experiment."""

    experiment: StoredExperiment


ExperimentEvent = CellFinished | ExperimentAdvanced | ExperimentEnded
AxisValues = str | Sequence[str | int | float]


class ExperimentFields(TypedDict, total=False):
    """Fields of an experiment; an axis is text such as "5,10-50 (+10)", or a list.

    Attributes:
        samplers: Samplers.
        steps: Step counts.
        guidance: Guidance scales.
        axes: Values of further request fields by name.
        prompts: Prompts, or a number of held-out captions of the embedded model.
        num_seeds: Images of each prompt and cell.
        first_seed: The first seed.
        reference_steps: DDIM steps of the converged images.
        until_decided: Double the seeds of cells with open verdicts, up to ``max_images``.
        max_images: Images of a cell at the last look.
        detect: Differences of interest, such as "exact=5,psnr_db=0.5".
        model: Name of the model.
    """

    samplers: AxisValues
    steps: AxisValues
    guidance: AxisValues | float
    axes: Mapping[str, AxisValues]
    prompts: int | Sequence[str]
    num_seeds: int
    first_seed: int
    reference_steps: int
    until_decided: bool
    max_images: int
    detect: str
    model: str


def experiment_reader() -> TypedReader[ExperimentEvent]:
    """Return a decoder of the events of an experiment."""
    ends = [f"experiment.{status}" for status in OVER]
    types: dict[str, type[ExperimentEvent]] = {
        "experiment.cell": CellFinished,
        "experiment.progress": ExperimentAdvanced,
        **dict.fromkeys(ends, ExperimentEnded),
    }
    return TypedReader(types, frozenset(ends), 1)


class ExperimentMethods(HttpClient):
    """Methods of the client for experiments."""

    async def begin_experiment(self, **fields: Unpack[ExperimentFields]) -> StoredExperiment:
        """Start an experiment, which the server runs in the background.

        Args:
            **fields: Optional request fields, see ``ExperimentFields``.

        Returns:
            The new experiment.

        Raises:
            InvalidRequest: A value is wrong, or too many experiments are unfinished.
        """
        return await self._call("POST", EXPERIMENTS, StoredExperiment, fields)

    async def plan_experiment(self, **fields: Unpack[ExperimentFields]) -> PlannedExperiment:
        """Check an experiment without starting it.

        Args:
            **fields: Optional request fields, see ``ExperimentFields``.

        Returns:
            Its size, its expected duration, and the differences that it can detect.

        Raises:
            InvalidRequest: A value is wrong.
        """
        return await self._call("POST", EXPERIMENTS, PlannedExperiment, {**fields, "plan_only": True})

    async def experiments(self, **fields: Unpack[PageFields]) -> Listed[StoredExperiment]:
        """List one page of the experiments, without their cells.

        Args:
            **fields: Optional request fields, see ``PageFields``.

        Returns:
            The experiments, the newest first unless ``order`` says otherwise.
        """
        return await self._call("GET", paged(EXPERIMENTS, fields), Listed[StoredExperiment])

    async def experiment(self, experiment_id: str) -> StoredExperiment:
        """Fetch the current state of an experiment.

        Args:
            experiment_id: The ID of the experiment.

        Returns:
            The experiment with its finished cells and verdicts.

        Raises:
            InvalidRequest: No experiment has this ID.
        """
        return await self._call("GET", resource(EXPERIMENTS, experiment_id), StoredExperiment)

    def experiment_events(self, experiment_id: str) -> AsyncStream[ExperimentEvent]:
        """Follow an experiment: the cells that are finished already come first.

        Args:
            experiment_id: The ID of the experiment.

        Returns:
            A stream of events; leaving it does not stop the experiment.

        Raises:
            InvalidRequest: No experiment has this ID.
        """
        return self._events(resource(EXPERIMENTS, experiment_id, "events"), experiment_reader())

    async def cancel_experiment(self, experiment_id: str) -> StoredExperiment:
        """Cancel an experiment; its finished cells are kept.

        Args:
            experiment_id: The ID of the experiment.

        Returns:
            The experiment in its new state.

        Raises:
            InvalidRequest: The experiment is already finished.
        """
        return await self._call("POST", resource(EXPERIMENTS, experiment_id, "cancel"), StoredExperiment)

    async def delete_experiment(self, experiment_id: str) -> bool:
        """Delete a finished experiment with its files.

        Args:
            experiment_id: The ID of the experiment.

        Returns:
            True if it was deleted, False if it does not exist.
        """
        return await self._succeeds("DELETE", resource(EXPERIMENTS, experiment_id), "experiment_not_found")

    async def experiment_file(self, experiment_id: str, name: str) -> bytes:
        """Download a file of an experiment's report, or the image of a cell.

        Args:
            experiment_id: The ID of the experiment.
            name: The name of the file, such as report.html, cells.csv or that of a cell's image.

        Returns:
            The bytes of the file.

        Raises:
            InvalidRequest: There is no such experiment or file.
        """
        return await self._fetch("GET", resource(EXPERIMENTS, experiment_id, "files", name))
