"""Everything that a CUDA GPU has to show, in one run of nine minutes: what works, how exactly, and how fast.

    python benchmarks/gpu_suite.py --out DIR
    python benchmarks/gpu_suite.py --out DIR --rows sdxl-compiled,diffusers
    python benchmarks/gpu_suite.py --out DIR --device cpu --quick

It needs torch, diffserve's requirements and this tree, and no network: weights are drawn on the device. The rows of
``gpu/schedule.py`` run in order, each with a deadline; results are written as soon as they exist, to at most eight
files of DIR. ``benchmarks/gpu_bundle.py`` says how to take all of it to a machine without a network. The last command
is the dry run: every row's code on any machine, with tiny models in float32.
"""

from __future__ import annotations

import datetime
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu.report import TABLE, Report
from benchmarks.gpu.run import ROOT, run_rows, say
from benchmarks.gpu.schedule import (
    JOBS,
    LENGTH_S,
    QUICK_JOBS,
    SCHEDULE,
    Row,
    choose_jobs,
    choose_rows,
    planned_starts,
)
from benchmarks.gpu.table import goals, table

HAD_ERRORS = 1


def document_head(rows: tuple[Row, ...], device: str, *, quick: bool) -> dict[str, Any]:
    """Date, command, commit and schedule of the run."""
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    arguments = [Path(word).name if "/" in word else word for word in sys.argv[1:]]
    starts = planned_starts(rows)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", "benchmarks/gpu_suite.py", *arguments]),
        "commit": commit.stdout.strip() or None,
        "device": device,
        "quick": quick,
        "schedule": [
            {"row": row.name, "from_s": starts[row.name], "seconds": row.seconds, "what": row.what} for row in rows
        ],
    }


def main(
    out: Annotated[Path, typer.Option(help="Folder for the results.")],
    device: Annotated[str, typer.Option(help="Device: cuda, cuda:1, or cpu for a dry run.")] = "cuda",
    quick: Annotated[
        bool, typer.Option("--quick", help="Smoke test with tiny models, few rows and few steps.")
    ] = False,
    rows: Annotated[
        str,
        typer.Option(help=f"Comma-separated rows: {', '.join(row.name for row in SCHEDULE)}; the first always runs."),
    ] = "",
    jobs: Annotated[str, typer.Option(help=f"Comma-separated jobs: {', '.join(job.name for job in JOBS)}.")] = "",
    length_s: Annotated[float, typer.Option(help="Time limit in seconds for all rows together.")] = LENGTH_S,
) -> None:
    """Run the schedule and print the table. Exit code 1: something failed; 2: the first row did; 3: there is no GPU."""
    try:
        selected, chosen_jobs = choose_rows(rows), QUICK_JOBS if quick else choose_jobs(jobs)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    report = Report(out, document_head(selected, device, quick=quick))
    with tempfile.TemporaryDirectory(prefix="gpu-suite-") as work:
        options = {"device": device, "quick": quick, "out": str(out.resolve()), "work": work, "length_s": length_s}
        code = run_rows(selected, chosen_jobs, options, report)
    report.document["goals"] = [goal._asdict() | {"verdict": goal.verdict} for goal in goals(report.document)]
    report.document["num_problems"] = report.num_errors
    report.document["wall_s"] = round(report.now_s, 1)
    report.write()
    text = table(report.document)
    (out / TABLE).write_text(text + "\n", encoding="utf-8")
    if code:
        say(f"the run ended early with exit code {code}")
    print(text)
    raise typer.Exit(code or (HAD_ERRORS if report.num_errors else 0))


if __name__ == "__main__":
    typer.run(main)
