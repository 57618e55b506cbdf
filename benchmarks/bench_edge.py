"""Memory and latency of ``--config edge``: a server of the embedded model with and without it.

    python benchmarks/bench_edge.py
    python benchmarks/bench_edge.py --rounds 3 --pictures 10

Every arm is a server with API process, engine and spare; rounds alternate (ABBA). Measured are the seconds of a single
image and the memory of all processes after the last one: resident (shared pages count in every process) and
proportional. ``growth`` is the anonymous memory of the last three images over the first three, by their medians; other
sizes are measured meanwhile, and the heap's size varies because memory is returned only now and then. Linux only.
Progress goes to stderr, one JSON document to stdout and to results/.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Annotated, Any, Final

import httpx
import psutil
import typer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.bench_memory import server  # noqa: E402
from benchmarks.report import RESULTS, hardware, versions, write  # noqa: E402

ARMS: Final = {"default": (), "edge": ("--config", "edge")}
GOAL_BYTES: Final = 10**9
SPARE_S: Final = 25.0
"""A spare engine begins ten seconds after the first is ready."""


def memory_of_tree(pid: int) -> dict[str, int]:
    """Sum the bytes of a process and all its descendants by kind: Rss, Pss, Anonymous."""
    totals = dict.fromkeys(("Rss", "Pss", "Anonymous"), 0)
    for process in (parent := psutil.Process(pid), *parent.children(recursive=True)):
        rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii")
        for name in totals:
            totals[name] += 1024 * int(re.findall(rf"^{name}:\s+(\d+)", rollup, re.MULTILINE)[0])
    return totals


def measure(
    options: Sequence[str], num_pictures: int, settle_s: float = 0.0, fields: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Run one server with ``options`` and generate at least two images.

    ``settle_s`` is the pause after the first image; ``fields`` are sent in addition to prompt and seed.
    """
    seconds: list[float] = []
    anonymous: list[int] = []
    with tempfile.TemporaryDirectory() as folder, server(options, Path(folder)) as (url, pid):
        for number in range(num_pictures + 1):
            body = {"prompt": f"a red apple on a table number {number}", "seed": number, **fields}
            started_s = time.monotonic()
            response = httpx.post(f"{url}/v1/images/generations", json=body, timeout=300.0, trust_env=False)
            response.raise_for_status()
            if number:
                seconds.append(time.monotonic() - started_s)
                anonymous.append((after := memory_of_tree(pid))["Anonymous"])
            else:
                time.sleep(settle_s)
    return {
        "resident_bytes": after["Rss"],
        "proportional_bytes": after["Pss"],
        "growth_bytes": median(anonymous[-3:]) - median(anonymous[:3]),
        "seconds": [round(image_s, 3) for image_s in seconds],
    }


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds per arm.")] = 2,
    pictures: Annotated[int, typer.Option(min=2, help="Images per server.")] = 5,
) -> None:
    """Measure, and print one JSON document as the last line of stdout."""
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in ARMS}
    for number in range(rounds):
        for name in list(ARMS)[:: -1 if number % 2 else 1]:
            results[name].append(measure(ARMS[name], pictures, SPARE_S))
            print(f"{name}: {results[name][-1]}", file=sys.stderr, flush=True)
    pairs = zip(results["edge"], results["default"], strict=True)
    document = {
        "benchmark": "edge",
        "command": " ".join(["python", "benchmarks/bench_edge.py", *sys.argv[1:]]),
        "hardware": hardware("cpu"),
        "versions": versions(),
        "found": results,
        "edge_over_default_seconds": [round(median(a["seconds"]) / median(b["seconds"]), 3) for a, b in pairs],
        "holds": all(result["resident_bytes"] < GOAL_BYTES for result in results["edge"]),
    }
    write(document, RESULTS / "edge.json")
    print(json.dumps(document), flush=True)


if __name__ == "__main__":
    typer.run(main)
