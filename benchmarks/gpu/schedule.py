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
    needs    compile jobs that should have ended before it begins, for its code or for a quiet machine; other rows go
             first, and what the schedule has to spare is spent on waiting
    """

    name: str
    seconds: float
    what: str
    place: str
    needs: tuple[str, ...] = ()
    most_s: float = 0.0


class Job(NamedTuple):
    """Something to compile in a process of its own while rows run: ``model`` in ``dtype`` for calls of ``num_rows``.

    kind   "package": a package of UNet calls; "decoder": one of the VAE's decoder; "peer": the caches of
           ``torch.compile`` for diffusers' network; "format": not compiled, but the memory format is measured that the
           others compile for; "variants": which ways of opening a package work, with a small network
    after  the job that has to end before
    """

    name: str
    kind: str
    model: str
    dtype: str
    num_rows: int
    after: str = ""


START: Final = "start"
HERE: Final = "benchmarks.gpu"
NETWORK: Final = f"{HERE}.network_rows"
COMPILED: Final = (
    *("sdxl-16", "sdxl-2", "sdxl-decoder", "sdxl-float8-16", "sd15-16", "diffusers-16"),
    "package-variants",
)
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
    Row(
        "sdxl",
        40,
        "SDXL bf16: cost curve, layouts, profile of a step",
        f"{NETWORK}:sdxl_calls",
        needs=COMPILED,
    ),
    Row(
        "sdxl-images",
        80,
        "16 images of 20 steps: eager, graphs, deterministic, VAE",
        f"{NETWORK}:sdxl_images",
        needs=COMPILED,
    ),
    Row(
        "sdxl-compiled",
        50,
        "compiled calls, with and without graphs, and their exactness",
        f"{NETWORK}:sdxl_compiled",
        needs=COMPILED,
    ),
    Row("sdxl-float8", 45, "float8: calls and images", f"{NETWORK}:sdxl_float8", needs=COMPILED),
    Row(
        "diffusers",
        55,
        "diffusers on the same weights: serial, batches of 8",
        f"{HERE}.peer_row:run",
        needs=COMPILED,
    ),
    Row("sd15", 45, "SD 1.5 bf16: cost curve, graphs, compiled, images", f"{NETWORK}:sd15", needs=COMPILED),
)
LENGTH_S: Final = 580.0
"""Seconds that all rows have together; what their budgets leave over is time to wait for compile jobs."""

FORMAT: Final = "sdxl-format"
JOBS: Final = (
    Job(FORMAT, "format", "sdxl", "bfloat16", 0),
    Job("sdxl-float8-16", "package", "sdxl", "float8", 16),
    Job("sdxl-16", "package", "sdxl", "bfloat16", 16, after=FORMAT),
    Job("sdxl-2", "package", "sdxl", "bfloat16", 2, after=FORMAT),
    Job("sd15-16", "package", "sd15", "bfloat16", 16),
    Job("diffusers-16", "peer", "sdxl", "bfloat16", 16, after=FORMAT),
    Job("sdxl-decoder", "decoder", "sdxl", "bfloat16", 1),
    Job("package-variants", "variants", "", "", 0),
)
QUICK_JOBS: Final = (Job("sdxl-2", "package", "sdxl", "float32", 2),)
QUICK_PATIENCE: Final = 12.0
"""A dry run has so many times the seconds of the schedule: its machine may be slow, and busy with something else."""

MOST_JOBS: Final = 7
"""Compile jobs that run at once."""


def planned_starts(rows: Sequence[Row]) -> dict[str, float]:
    """Seconds after the beginning at which each row is due."""
    starts, now_s = {}, 0.0
    for row in rows:
        starts[row.name] = now_s
        now_s += row.seconds
    return starts


def seconds_of(rows: Sequence[Row]) -> float:
    """The budgets of ``rows`` together."""
    return sum(row.seconds for row in rows)


def choose_rows(names: str) -> tuple[Row, ...]:
    """The rows called ``names``, with commas, and always the first one; all of them for "".

    Raises ValueError for a name that is not a row.
    """
    if not names:
        return SCHEDULE
    wanted_names = names.split(",")
    if unknown := [name for name in wanted_names if name not in planned_starts(SCHEDULE)]:
        choices = ", ".join(row.name for row in SCHEDULE)
        raise ValueError(f"there is no row {', '.join(unknown)}; choose from {choices}.")
    return tuple(row for row in SCHEDULE if row.name == START or row.name in wanted_names)


def next_row(pending: Sequence[Row], unfinished: set[str]) -> Row:
    """The first of ``pending`` that waits for none of the ``unfinished`` jobs, or else the first."""
    return next((row for row in pending if not unfinished.intersection(row.needs)), pending[0])
