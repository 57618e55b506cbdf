"""Experiments: a row for each, and a folder with its records and its report.

States, as of batches: validating (waits for its turn), in_progress, finalizing (the report is written), completed; or
cancelling, cancelled; or failed.
"""

from __future__ import annotations

import re
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from sqlalchemy import case, delete, func, select, update

from diffserve.api.errors import InvalidRequest
from diffserve.store.database import Database, PageSelection, find_row, insert_row, read_row
from diffserve.store.schema import experiments

FOLDER: Final = "experiments"
KEPT_S: Final = 90 * 24 * 3600.0
MAX_UNFINISHED: Final = 20
"""Unfinished experiments per owner."""

MAX_KEPT: Final = 200
"""Experiments per owner."""

ORPHAN_S: Final = 24 * 3600.0
"""Age of a folder without a row that is deleted; longer than a clock may be wrong."""
UNFINISHED: Final = ("validating", "in_progress", "finalizing", "cancelling")
_ID: Final = re.compile(r"exp_[0-9a-f]{32}")


class Experiment(msgspec.Struct, frozen=True, kw_only=True):
    """Row of an experiment.

    Attributes:
        model: Name of the model.
        plan: The plan as JSON.
        error: Code and message of a failure, with a colon between them.
        times: When it entered each status, in seconds since 1970.
        num_images: Images of the plan; at most as many are generated.
        estimated_s: Seconds that it was expected to take on an idle machine; ``None`` if unknown.
    """

    id: str
    owner: str
    model: str
    plan: dict[str, Any]
    status: str
    error: str = ""
    times: dict[str, float]
    created_s: float
    num_images: int
    estimated_s: float | None

    @property
    def is_over(self) -> bool:
        """Whether the experiment is finished."""
        return self.status not in UNFINISHED


class Experiments:
    """Table and folders of experiments.

    Args:
        database: The database; the folders are in its data folder.
        clock: Returns seconds since 1970.
    """

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self.folder = database.folder / FOLDER
        self._database = database
        self._clock = clock

    def add(
        self, owner: str, model: str, plan: dict[str, Any], num_images: int, estimated_s: float | None
    ) -> Experiment:
        """Add an experiment.

        Raises:
            InvalidRequest: ``owner`` has too many experiments.
        """
        now_s = self._clock()
        experiment = Experiment(
            id=f"exp_{secrets.token_hex(16)}", owner=owner, model=model, plan=plan, status="validating", times={},
            created_s=now_s, num_images=num_images, estimated_s=estimated_s,
        )  # fmt: skip
        is_unfinished = case((experiments.c.status.in_(UNFINISHED), 1))
        query = select(func.count(), func.count(is_unfinished)).where(experiments.c.owner == owner)
        with self._database.writing(exclusive=True) as connection:
            num_kept, num_unfinished = connection.execute(query).one()
            if num_unfinished >= MAX_UNFINISHED:
                message = f"{num_unfinished} experiments are unfinished, which is the limit; wait for one or cancel it."
                raise InvalidRequest(message, code="too_many_experiments")
            if num_kept >= MAX_KEPT:
                message = f"{num_kept} experiments are stored, which is the limit; delete some."
                raise InvalidRequest(message, code="too_many_experiments")
            insert_row(connection, experiments, experiment)
        return experiment

    def page(self, owner: str, selection: PageSelection) -> tuple[list[Experiment], bool] | None:
        """Return a page of ``owner``'s experiments and whether more follow; None if ``after`` does not exist."""
        return self._database.page(Experiment, experiments, owner, selection)

    def get(self, name: str) -> Experiment | None:
        """Return the experiment with the ID ``name`` of any owner, or None."""
        with self._database.reading() as connection:
            return find_row(connection, Experiment, experiments, id=name)

    def unfinished(self) -> list[Experiment]:
        """Return the unfinished experiments, the oldest first."""
        query = select(experiments).where(experiments.c.status.in_(UNFINISHED)).order_by(experiments.c.number)
        with self._database.reading() as connection:
            return [read_row(Experiment, row) for row in connection.execute(query)]

    def move(self, name: str, to: str, *, of: Sequence[str] = UNFINISHED, error: str = "") -> Experiment | None:
        """Change the status of an experiment to ``to`` if it is one of ``of``.

        Args:
            name: The ID of the experiment.
            to: The new status.
            of: The statuses that may change.
            error: Code and message, if it failed.

        Returns:
            The experiment after the call, or None if it does not exist.
        """
        with self._database.writing(exclusive=True) as connection:
            experiment = find_row(connection, Experiment, experiments, id=name)
            if experiment is None or experiment.status not in of or experiment.status == to:
                return experiment
            times = msgspec.json.encode(experiment.times | {to: self._clock()}).decode()
            is_experiment = experiments.c.id == name
            connection.execute(update(experiments).where(is_experiment).values(status=to, error=error, times=times))
            return find_row(connection, Experiment, experiments, id=name)

    def delete(self, experiment: Experiment) -> None:
        """Delete an experiment: first its folder, so that the row never disappears before it."""
        shutil.rmtree(self.path(experiment.id), ignore_errors=True)
        with self._database.writing() as connection:
            connection.execute(delete(experiments).where(experiments.c.id == experiment.id))

    def path(self, name: str) -> Path:
        """Return the folder of the experiment with the ID ``name``, which must be a generated ID."""
        assert _ID.fullmatch(name), name
        return self.folder / name

    def sweep(self) -> None:
        """Delete finished experiments older than ``KEPT_S``, and folders without a row.

        Raises:
            OSError, StoreError: The table or the folder cannot be read.
        """
        now_s = self._clock()
        with self._database.reading() as connection:
            rows = [read_row(Experiment, row) for row in connection.execute(select(experiments))]
        for experiment in rows:
            if experiment.is_over and experiment.created_s < now_s - KEPT_S:
                self.delete(experiment)
        names = {experiment.id for experiment in rows}
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if path.name not in names and now_s - path.stat().st_mtime > ORPHAN_S:
                shutil.rmtree(path, ignore_errors=True)
