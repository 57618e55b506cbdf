"""The schedule of the GPU suite: its rows in order, each with a budget in seconds, and the code that runs them.

The end of a row's budget is the row's deadline. Time that an earlier row did not use is added to the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple


class Row(NamedTuple):
    """One row of the schedule.

    seconds  its budget
    most_s   how long it may take before it is abandoned, where that is more than what is left of its budget
    place    "module:function"; the function takes a ``worker.Bench``
    needs    compile jobs whose results it measures
    quiet    whether compile jobs would disturb it: other rows go first, and what the schedule has to spare is spent on
             waiting until they have ended
    """

    name: str
    seconds: float
    what: str
    place: str
    needs: tuple[str, ...] = ()
    quiet: bool = False
    most_s: float = 0.0


class Job(NamedTuple):
    """Something to compile in a process of its own while rows run: ``model`` in ``dtype`` for calls of ``num_rows``.

    kind   "package": a package of UNet calls; "decoder": one of the VAE's decoder; "peer": the caches of
           ``torch.compile`` for diffusers' network
    """

    name: str
    kind: str
    model: str
    dtype: str
    num_rows: int


START: Final = "start"
HERE: Final = "benchmarks.gpu"
NETWORK: Final = f"{HERE}.network_rows"
FEATURES: Final = f"{HERE}.feature_rows"
SCHEDULE: Final = (
    Row(
        START,
        35,
        "versions, doctor, one small image, the rates of the machine",
        f"{HERE}.start_row:run",
        most_s=80,
    ),
    Row("tests", 70, "the gpu tests, and the engine's tests with --device cuda", f"{HERE}.tests_row:run"),
    Row(
        "embedded",
        60,
        "the embedded model against a CPU, batch invariance, memory, texts",
        f"{HERE}.embedded_row:run",
    ),
    Row("server", 40, "HTTP server: 32 clients, cancel, engine killed and back", f"{HERE}.server_row:run"),
    Row("sd15", 60, "SD 1.5 bf16: graphs, compiled, images", f"{NETWORK}:sd15", needs=("sd15-16", "sd15-decoder")),
    Row(
        "sdxl-compiled",
        65,
        "SDXL by compiled calls, with and without graphs: exactness, images, latency",
        f"{NETWORK}:sdxl_compiled",
        needs=("sdxl-16", "sdxl-8", "sdxl-4", "sdxl-decoder"),
        quiet=True,
    ),
    Row("sdxl-images", 75, "16 images of 20 steps: eager, deterministic, VAE", f"{NETWORK}:sdxl_images", quiet=True),
    Row("sdxl", 25, "SDXL bf16: layouts, profile of a step, cost curve", f"{NETWORK}:sdxl_calls", quiet=True),
    Row("diffusers", 55, "diffusers on the same weights: serial, batches of 8", f"{HERE}.peer_row:run",
        needs=("diffusers-16",), quiet=True),
)  # fmt: skip
ON_REQUEST: Final = (
    Row("captures", 180, "cost of captures, images continued from them", f"{FEATURES}:captures", quiet=True),
    Row("references", 75, "rows with reference images against plain ones", f"{FEATURES}:references", quiet=True),
    Row("large", 45, "SDXL at 2048 px, tiled diffusion, an upscaler network", f"{FEATURES}:large", quiet=True),
)
"""Rows that run only when they are named: the schedule has no time for them."""

LENGTH_S: Final = 580.0
"""Seconds that all rows have together; what their budgets leave over is time to wait for compile jobs."""

JOBS: Final = (
    Job("sdxl-16", "package", "sdxl", "bfloat16", 16),
    Job("diffusers-16", "peer", "sdxl", "bfloat16", 16),
    Job("sdxl-8", "package", "sdxl", "bfloat16", 8),
    Job("sdxl-4", "package", "sdxl", "bfloat16", 4),
    Job("sd15-16", "package", "sd15", "bfloat16", 16),
    Job("sdxl-decoder", "decoder", "sdxl", "bfloat16", 1),
    Job("sd15-decoder", "decoder", "sd15", "bfloat16", 1),
)
QUICK_JOBS: Final = (Job("sdxl-2", "package", "sdxl", "float32", 2),)
QUICK_PATIENCE: Final = 12.0
"""A dry run has so many times the seconds of the schedule: its machine may be slow, and busy with something else."""

MOST_JOBS: Final = 5
"""Compile jobs that run at once."""


def planned_starts(rows: Sequence[Row]) -> dict[str, float]:
    """Seconds after the beginning at which each row is due."""
    starts, now_s = {}, 0.0
    for row in rows:
        starts[row.name] = now_s
        now_s += row.seconds
    return starts


def seconds_of(rows: Sequence[Row]) -> float:
    """Return the budgets of ``rows`` together."""
    return sum(row.seconds for row in rows)


def choose_rows(names: str) -> tuple[Row, ...]:
    """Return the rows called ``names``, with commas, and always the first one; those of the schedule for "".

    Raises ValueError for a name that is not a row.
    """
    if not names:
        return SCHEDULE
    rows = (*SCHEDULE, *ON_REQUEST)
    names_to_run = _names_among(names, [row.name for row in rows], "row")
    return tuple(row for row in rows if row.name == START or row.name in names_to_run)


def choose_jobs(names: str) -> tuple[Job, ...]:
    """Return the jobs called ``names``, with commas; all of them for "".

    Raises:
        ValueError: A name is not that of a job.
    """
    names_to_run = _names_among(names, [job.name for job in JOBS], "job")
    return tuple(job for job in JOBS if job.name in names_to_run)


def _names_among(names: str, choices: Sequence[str], what: str) -> Sequence[str]:
    wanted_names = names.split(",") if names else choices
    if unknown := [name for name in wanted_names if name not in choices]:
        raise ValueError(f"there is no {what} {', '.join(unknown)}; choose from {', '.join(choices)}.")
    return wanted_names


def next_row(pending: Sequence[Row], unfinished: set[str], *, is_patient: bool = True) -> Row | None:
    """Return the first of ``pending`` that waits for none of the ``unfinished`` jobs, or ``None``.

    ``is_patient``: rows that need a quiet machine wait for all jobs, and not only for those that they need.
    """
    for row in pending:
        if not unfinished.intersection(row.needs) and not (is_patient and row.quiet and unfinished):
            return row
    return None
