"""Estimated duration of experiments on an idle server, compared with the duration that follows.

    python benchmarks/bench_experiment_estimate.py
    python benchmarks/bench_experiment_estimate.py --model embedded-turbo

Each experiment runs alone. Its estimate is the one that the server returns when the experiment is created. The duration
is from the request to the report. Progress goes to stderr, one JSON document to stdout and to results/.
"""

from __future__ import annotations

import datetime
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any, Final

import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bench_memory import server
from benchmarks.report import RESULTS, hardware, versions, write
from diffserve.client import Client, ExperimentEnded

LONGEST_S: Final = 1800.0
EXPERIMENTS: Final[tuple[dict[str, Any], ...]] = (
    {"samplers": "ddim", "steps": "4,8", "prompts": 4, "num_seeds": 1},
    {"samplers": "ddim,dpmpp_2m", "steps": "5,10,20", "prompts": 8, "num_seeds": 1},
    {"samplers": "ddim,heun,lcm", "steps": "4,10", "prompts": 8, "num_seeds": 3},
    {"samplers": "dpmpp_2m", "steps": "10-50 (+10)", "prompts": 6, "num_seeds": 2, "axes": {"cache_interval": "1,2"}},
)


def measure(client: Client, fields: dict[str, Any]) -> dict[str, Any]:
    """Run one experiment; return its estimated and actual seconds."""
    started_s = time.monotonic()
    created = client.begin_experiment(**fields)
    with client.experiment_events(created.id) as events:
        ended = list(events)[-1]
    assert isinstance(ended, ExperimentEnded)
    over = ended.experiment
    assert over.status == "completed", over.error
    assert created.estimated_seconds is not None
    actual_s = round(time.monotonic() - started_s, 1)
    return {
        "experiment": fields,
        "images": over.num_images,
        "estimated_s": created.estimated_seconds,
        "actual_s": actual_s,
        "estimated_over_actual": round(created.estimated_seconds / actual_s, 3),
    }


def main(
    model: Annotated[str, typer.Option(help="Model, as for diffserve serve.")] = "embedded",
    out: Annotated[Path | None, typer.Option(help="File for the JSON results.")] = None,
) -> None:
    """Measure, and print one JSON document as the last line of stdout."""
    document = {
        "benchmark": "experiment-estimate",
        "command": " ".join(["python", "benchmarks/bench_experiment_estimate.py", *sys.argv[1:]]),
        "hardware": hardware("cpu"),
        "versions": versions(),
        "date": datetime.date.today().isoformat(),
        "model": {"id": Path(model).name},
        "points": (points := list[dict[str, Any]]()),
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        server(("--model", model, "--no-page"), Path(folder)) as (url, _),
        Client(url, timeout_s=LONGEST_S) as client,
    ):
        for fields in EXPERIMENTS:
            points.append(measure(client, fields))
            print(points[-1], file=sys.stderr, flush=True)
    write(document, out or RESULTS / f"experiment-estimate-{Path(model).name}.json")
    print(json.dumps(document), flush=True)


if __name__ == "__main__":
    typer.run(main)
