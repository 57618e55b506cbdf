"""Capacity planning: GPUs for a load at an SLO, and the first bottleneck; writes docs/capacity.md.

    python benchmarks/capacity.py                 # simulate, and write figures and page: ten minutes
    python benchmarks/capacity.py --page-only     # write the page from the existing figures

Engines are simulated (``simulator.py``) over the cost of their calls. It was measured on a CPU and on an H200
(``gpu_suite.py``), and is predicted for other GPUs from the roofline (``diffserve.runtime.dry_run``), the share of it
that kernels reach, and the time of a kernel launch. Each predicted figure has a range: the prediction with slower and
with faster assumptions. Launch times are read from the results of ``gpu_suite.py``.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.capacity_page import PAGE, page
from benchmarks.gpu.table import figure
from benchmarks.open_loop import quantile
from benchmarks.random_models import save_hollow_model
from benchmarks.report import RESULTS, hardware, versions, write
from benchmarks.simulator import Costs, capacity_per_s, loaded, read_costs, replay
from benchmarks.trace import mixed
from diffserve.runtime.dry_run import GPU, Work, find_gpu
from diffserve.runtime.footprint import Footprint, footprint_of
from diffserve.settings.config import EngineConfig
from diffserve.store.database import Database
from diffserve.store.history import History, new_entry_id

FIGURES: Final = RESULTS / "capacity.json"
MEASURED: Final = RESULTS / "simulator-embedded" / "costs-epyc-two-cores.json"


class Assumptions(NamedTuple):
    """Assumptions behind a predicted figure.

    reached         the share of the roofline that the kernels of a UNet call reach
    decode_reached  the share of the roofline that the VAE's decoder reaches
    launch_s        seconds of the CPU for a kernel of a network, Python and libraries included; an eager call cannot be
                    faster than its launches
    """

    reached: float
    decode_reached: float
    launch_s: float


EXPECTED: Final = Assumptions(0.47, 0.2, 4e-6)
SLOW: Final = Assumptions(0.3, 0.13, 10e-6)
FAST: Final = Assumptions(0.7, 0.22, 2.5e-6)
"""On an H200, eager calls of 16 rows reach 0.37 to 0.39 (SD 1.5) and 0.53 to 0.57 (SDXL) of this roofline, and the
decoder 0.13 (channels_last) to 0.22 (contiguous, 4 images). Published times of diffusers on an A100 are 0.23 (SD 1.5,
eager) to 0.68 (SDXL, compiled) of it. These launch times are used only where none was measured."""

SUITE_RESULTS: Final = "gpu-suite*.json"
SUITE: Final = RESULTS / "gpu-suite-h200-2026-11-26.json"
SUITE_ROWS: Final = {"SD 1.5 512x512, H200": "sd15", "SDXL 1024x1024, H200": "sdxl"}
"""Arms whose calls were measured, with the row of ``SUITE`` that has their cost curve."""

DECODER: Final = ("sdxl-images", "vae", "ms_per_image", "bfloat16 contiguous x1")
"""Where ``SUITE`` has the decoding of an image of 1024x1024; others are computed by their pixels."""

TICK_S, PREPARE_S = 0.001, 0.01
ROWS: Final = (1, 2, 4, 8, 16)
ARMS: Final = {
    "embedded 128x128, two CPU cores": ("", "", 5.0),
    "SD 1.5 512x512, L4": ("sd15-random", "l4", 10.0),
    "SD 1.5 512x512, H100": ("sd15-random", "h100", 5.0),
    "SD 1.5 512x512, H200": ("sd15-random", "h200", 5.0),
    "SDXL 1024x1024, L40S": ("sdxl-random", "l40s", 20.0),
    "SDXL 1024x1024, H100": ("sdxl-random", "h100", 10.0),
    "SDXL 1024x1024, H200": ("sdxl-random", "h200", 10.0),
}
"""Model, GPU ("": measured on a CPU), and the SLO: so many seconds for ``WITHIN`` of all requests."""

WITHIN: Final = 0.95
PRICES: Final = {"": 0.10, "l4": 0.80, "l40s": 1.60, "h100": 3.00, "h200": 3.50}
"""Dollars an hour: assumptions, of the size that clouds ask on demand. Cost is proportional to them."""

LOADS: Final = tuple(round(0.3 + 0.05 * step, 2) for step in range(14))
"""Of what full ticks can do."""


def measured_launches_s(folder: Path = RESULTS) -> list[float]:
    """Seconds a kernel of a launch-bound network in the results of ``gpu_suite.py`` in ``folder``, in ascending order.

    It is counted as calls are predicted: time of an eager call over the kernels of a dry run. ``launch_us`` of the same
    results is one addition in a loop, and a third of it.
    """
    launches_us = []
    for file in folder.glob(SUITE_RESULTS):
        document = json.loads(file.read_text(encoding="utf-8"))
        if document.get("device", "").startswith("cuda"):
            launches_us.append(figure({"rows": {}, **document}, "start", "machine", "network_launch_us"))
    return sorted(1e-6 * launch_us for launch_us in launches_us if launch_us is not None)


def assumptions(launches_s: Sequence[float]) -> tuple[Assumptions, Assumptions, Assumptions]:
    """``SLOW``, ``EXPECTED`` and ``FAST`` with the longest, the median and the shortest of ``launches_s``, if any."""
    if not launches_s:
        return SLOW, EXPECTED, FAST
    measured_s = max(launches_s), statistics.median(launches_s), min(launches_s)
    slow, expected, fast = (
        each._replace(launch_s=launch_s) for each, launch_s in zip((SLOW, EXPECTED, FAST), measured_s, strict=True)
    )
    return slow, expected, fast


@cache
def footprint_of_model(model: str) -> Footprint:
    """Count the work of calls of ``model`` (of ``random_models.NAMES``) in bfloat16, without a GPU."""
    with tempfile.TemporaryDirectory() as scratch:
        path = save_hollow_model(model, Path(scratch), dtype=torch.bfloat16)
        return footprint_of(path, dtype="bfloat16", config=EngineConfig(), profile=None, rows=ROWS)


def gpu_costs(model: str, gpu: GPU, assumed: Assumptions = EXPECTED) -> Costs:
    """Predict the costs of calls of ``model`` (of ``random_models.NAMES``) on ``gpu`` in bfloat16."""

    def seconds(work: Work, reached: float) -> float:
        return max(gpu.seconds(work, torch.bfloat16) / reached, assumed.launch_s * len(work.kernels))

    footprint = footprint_of_model(model)
    width_px, height_px = footprint.model.info.good_sizes[0]
    return Costs(
        calls={
            f"{width_px}x{height_px}": {rows: seconds(work, assumed.reached) for rows, work in footprint.steps.items()}
        },
        prepare_s=PREPARE_S,
        decode_s=seconds(footprint.decode, assumed.decode_reached),
        tick_s=TICK_S,
    )


def suite_costs(model: str, row: str) -> Costs:
    """Return the costs of eager calls of ``model`` from ``row`` of ``SUITE``."""
    document = json.loads(SUITE.read_text(encoding="utf-8"))
    curve = document["rows"][row]["points"]["curve"]["result"]["points"]
    width_px, height_px = footprint_of_model(model).model.info.good_sizes[0]
    decode_ms = figure(document, *DECODER)
    assert decode_ms is not None
    return Costs(
        calls={f"{width_px}x{height_px}": {each["rows"]: 1e-3 * each["ms"] for each in curve if each["rows"] in ROWS}},
        prepare_s=PREPARE_S,
        decode_s=1e-3 * decode_ms * width_px * height_px / 1024**2,
        tick_s=TICK_S,
    )


def pool(costs: Costs, num_engines: int, slo_s: float, num_requests: int) -> dict[str, Any]:
    """Find the highest load at which ``num_engines`` keep ``WITHIN`` of the mixed workload within ``slo_s``.

    The search is a bisection over ordered loads.
    """
    config = EngineConfig(max_waiting=100_000)
    requests = mixed(num_requests, costs.sizes, seed=1)
    full_per_s = num_engines * capacity_per_s(requests[:500], costs, config)
    low, high, best = 0, len(LOADS), None
    while low < high:
        middle = (low + high) // 2
        arrivals = loaded(requests, costs, LOADS[middle], engines=num_engines, seed=2)
        outcome = replay(arrivals, costs, config, num_engines=num_engines)
        latencies = [request.latency_s for request in outcome.served]
        within_s = quantile(latencies, WITHIN)
        if within_s <= slo_s:
            best = {"load": LOADS[middle], "p95_s": within_s, "p50_s": quantile(latencies, 0.5)}
            low = middle + 1
        else:
            high = middle
    result = {"engines": num_engines, "requests": num_requests, "full_per_s": full_per_s}
    if best is None:
        return result | {"load": None, "per_s": 0.0}
    return result | best | {"per_s": best["load"] * full_per_s}


def full_rate_per_s(costs: Costs) -> float:
    """Compute the images per second of the mixed workload when all ticks of an engine are full."""
    return capacity_per_s(mixed(500, costs.sizes, seed=1), costs, EngineConfig(max_waiting=100_000))


def predicted_ranges(model: str, gpu: GPU, launches_s: Sequence[float]) -> dict[str, Any]:
    """Return the range of each figure of an arm by ``assumptions``: of times, and of factors on the rate."""
    slow, expected, fast = (gpu_costs(model, gpu, each) for each in assumptions(launches_s))
    [(size, _)] = expected.calls.items()
    rates = [full_rate_per_s(costs) for costs in (slow, expected, fast)]
    return {
        "row_ms": {
            rows: [1000 * costs.calls[size][rows] / rows for costs in (fast, slow)] for rows in expected.calls[size]
        },
        "decode_ms": [1000 * costs.decode_s for costs in (fast, slow)],
        "rate": [rates[0] / rates[1], rates[2] / rates[1]],
    }


def call_figures(costs: Costs) -> dict[str, Any]:
    """Return the milliseconds per row by rows, and of decoding."""
    [calls] = costs.calls.values()
    return {
        "row_ms": {rows: 1000 * seconds / rows for rows, seconds in calls.items()},
        "decode_ms": 1000 * costs.decode_s,
    }


def arm(name: str, engines: list[int], most_requests: int, launches_s: Sequence[float]) -> dict[str, Any]:
    """One of ``ARMS`` with its pools; where a GPU was measured, with the prediction of its calls, too.

    launches_s  measured times of a launch; where there are none they are assumed
    """
    model, gpu, slo_s = ARMS[name]
    ranges = predicted_ranges(model, find_gpu(gpu), launches_s) if gpu else None
    predicted = gpu_costs(model, find_gpu(gpu), assumptions(launches_s)[1]) if gpu else None
    is_measured = predicted is None or name in SUITE_ROWS
    costs = suite_costs(model, SUITE_ROWS[name]) if name in SUITE_ROWS else predicted or read_costs(MEASURED)
    pools = []
    for number in engines:
        pools.append(pool(costs, number, slo_s, min(most_requests, max(1000, 100 * number))))
        print(name, pools[-1], file=sys.stderr, flush=True)
    [(width_px, height_px)] = costs.sizes
    figures = {
        "name": name,
        "gpu": gpu,
        "predicted": None if is_measured else ranges,
        "size": f"{width_px}x{height_px}",
        "pixels": width_px * height_px,
        "slo_s": slo_s,
        "price_per_hour": PRICES[gpu],
        **call_figures(costs),
        "pools": pools,
    }
    if is_measured and predicted is not None:
        rate = {"engines": 1, "full_per_s": full_rate_per_s(predicted)}
        figures["prediction"] = {"name": name, "predicted": ranges, **call_figures(predicted), "pools": [rate]}
    return figures


def front_costs(num_commits: int) -> dict[str, float]:
    """Measure the per-image cost of the store on this machine: the median commit in milliseconds."""
    took = []
    with tempfile.TemporaryDirectory() as folder:
        history = History(Database(Path(folder)))
        recipe = {"sampler": "ddim", "num_inference_steps": 20, "seed": 7, "size": "512x512"}
        for number in range(num_commits):
            started_s = time.perf_counter()
            history.add(new_entry_id(), "owner", f"{number}.png", "a fox on the beach", "sd15", recipe)
            took.append(time.perf_counter() - started_s)
    return {"commit_ms": 1000 * statistics.median(took)}


def main(
    arms: Annotated[str, typer.Option(help="Comma-separated words in the names of arms; default: all arms.")] = "",
    engines: Annotated[str, typer.Option(help="Comma-separated numbers of engines in a pool.")] = "1,4,16,64",
    requests: Annotated[int, typer.Option(min=20, help="Largest number of requests of a simulated trace.")] = 6400,
    commits: Annotated[int, typer.Option(min=1, help="Number of database commits to measure.")] = 300,
    launch_us: Annotated[
        float | None, typer.Option(help="Microseconds per kernel launch; default: as measured by the GPU suite.")
    ] = None,
    page_only: Annotated[bool, typer.Option("--page-only", help="Write the page without a simulation.")] = False,
    out: Annotated[
        Path, typer.Option(help="JSON file of the figures; the page is only written for the committed file.")
    ] = FIGURES,
) -> None:
    """Simulate, write the page, and print one JSON document as the last line of stdout."""
    if page_only:
        document = json.loads(out.read_text(encoding="utf-8"))
    else:
        gc.set_threshold(200_000, 50, 100)
        launches_s = measured_launches_s() if launch_us is None else [1e-6 * launch_us]
        selected = [name for name in ARMS if not arms or any(word in name for word in arms.split(","))]
        sizes = [int(number) for number in engines.split(",")]
        document = {
            "benchmark": "capacity",
            "note": "simulated; calls on a CPU and an H200 were measured, on other GPUs they are predicted",
            "command": " ".join(["python", "benchmarks/capacity.py", *(Path(word).name for word in sys.argv[1:])]),
            "hardware": hardware("cpu"),
            "versions": versions(),
            "assumptions": {
                name: {
                    "reached": each.reached,
                    "decode_reached": each.decode_reached,
                    "launch_us": round(1e6 * each.launch_s, 2),
                }
                for name, each in zip(("slow", "expected", "fast"), assumptions(launches_s), strict=True)
            },
            "launch_is_measured": bool(launches_s),
            "within": WITHIN,
            "front": front_costs(commits),
            "arms": [],
        }
        for name in selected:
            document["arms"].append(arm(name, sizes, requests, launches_s))
            write(document, out)
    if out == FIGURES:
        PAGE.write_text(page(document), encoding="utf-8")
    print(json.dumps(document))


if __name__ == "__main__":
    typer.run(main)
