"""How many GPUs for a load at an SLO, and what breaks first: ``python benchmarks/capacity.py`` writes docs/capacity.md.

    python benchmarks/capacity.py                 # simulate anew, and write figures and page: ten minutes
    python benchmarks/capacity.py --page-only     # the page from the figures that are there

Engines are simulated (``simulator.py``) over what calls cost: measured on the CPU, predicted on GPUs from the roofline
(``diffserve.runtime.roofline``), the share of it that kernels reach, and the time of a kernel launch. Each predicted
figure has a range: the same prediction with slower and with faster assumptions. The launch time is read from the
newest result of ``gpu_suite.py`` where there is one.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.capacity_page import PAGE, page
from benchmarks.open_loop import quantile
from benchmarks.random_models import save_hollow_model
from benchmarks.report import RESULTS, hardware, versions, write
from benchmarks.simulator import Costs, capacity_per_s, loaded, read_costs, replay
from benchmarks.trace import mixed
from diffserve.config import EngineConfig
from diffserve.runtime.dry_run import Work
from diffserve.runtime.needs import Needs, needs_of
from diffserve.runtime.roofline import GPU, find_gpu
from diffserve.store.database import Database
from diffserve.store.history import History, new_entry_id

FIGURES: Final = RESULTS / "capacity.json"
MEASURED: Final = RESULTS / "simulator-embedded" / "costs-epyc-two-cores.json"


class Assumptions(NamedTuple):
    """Assumptions behind a predicted figure.

    reached   the share of the roofline that kernels reach
    launch_s  seconds of the CPU for the launch of a kernel; a call cannot be faster than its launches
    """

    reached: float
    launch_s: float


EXPECTED: Final = Assumptions(0.5, 4e-6)
SLOW: Final = Assumptions(0.3, 10e-6)
FAST: Final = Assumptions(0.7, 2.5e-6)
"""Published times of diffusers on an A100 are 0.23 (SD 1.5, eager) to 0.68 (SDXL, compiled) of this roofline."""

SUITE_RESULTS: Final = "gpu-suite*.json"
TICK_S, PREPARE_S = 0.001, 0.01
ROWS: Final = (1, 2, 4, 8, 16)
ARMS: Final = {
    "embedded 128x128, two CPU cores": ("", "", 5.0),
    "SD 1.5 512x512, L4": ("sd15-random", "l4", 10.0),
    "SD 1.5 512x512, H100": ("sd15-random", "h100", 5.0),
    "SDXL 1024x1024, L40S": ("sdxl-random", "l40s", 20.0),
    "SDXL 1024x1024, H100": ("sdxl-random", "h100", 10.0),
}
"""Model, GPU ("": measured on a CPU), and the SLO: so many seconds for ``WITHIN`` of all requests."""

WITHIN: Final = 0.95
PRICES: Final = {"": 0.10, "l4": 0.80, "l40s": 1.60, "h100": 3.00}
"""Dollars an hour: assumptions, of the size that clouds ask on demand. Cost is proportional to them."""

LOADS: Final = tuple(round(0.3 + 0.05 * step, 2) for step in range(14))
"""Of what full ticks can do."""


def measured_launch_s(folder: Path = RESULTS) -> float | None:
    """Seconds a kernel of a launch-bound network in the newest result of ``gpu_suite.py`` in ``folder``, if any."""
    documents = [json.loads(file.read_text(encoding="utf-8")) for file in folder.glob(SUITE_RESULTS)]
    for document in sorted(documents, key=lambda document: str(document.get("date", "")), reverse=True):
        machine = document.get("rows", {}).get("start", {}).get("points", {}).get("machine", {})
        launch_us = machine.get("result", {}).get("network_launch_us")
        if launch_us and document.get("device", "").startswith("cuda"):
            return 1e-6 * float(launch_us)
    return None


@cache
def needs_of_model(model: str) -> Needs:
    """The work of calls of ``model`` (of ``random_models.NAMES``) in bfloat16, counted without a GPU."""
    with tempfile.TemporaryDirectory() as scratch:
        path = save_hollow_model(model, Path(scratch), dtype=torch.bfloat16)
        return needs_of(path, dtype="bfloat16", config=EngineConfig(), profile=None, rows=ROWS)


def gpu_costs(model: str, gpu: GPU, assumed: Assumptions = EXPECTED) -> Costs:
    """Predicted costs of calls of ``model`` (of ``random_models.NAMES``) on ``gpu`` in bfloat16."""

    def seconds(work: Work) -> float:
        return max(gpu.seconds(work, torch.bfloat16) / assumed.reached, assumed.launch_s * len(work.kernels))

    needs = needs_of_model(model)
    width_px, height_px = needs.model.info.good_sizes[0]
    return Costs(
        calls={f"{width_px}x{height_px}": {rows: seconds(work) for rows, work in needs.steps.items()}},
        prepare_s=PREPARE_S,
        decode_s=seconds(needs.decode),
        tick_s=TICK_S,
    )


def pool(costs: Costs, num_engines: int, slo_s: float, num_requests: int) -> dict[str, Any]:
    """The most load under which ``num_engines`` keep ``WITHIN`` of the mixed workload within ``slo_s``; loads are
    looked at by halving, so that they count as ordered."""
    config = EngineConfig(max_waiting=100_000)
    requests = mixed(num_requests, costs.sizes, seed=1)
    full_per_s = num_engines * capacity_per_s(requests[:500], costs, config)
    low, high, best = 0, len(LOADS), None
    while low < high:
        middle = (low + high) // 2
        arrivals = loaded(requests, costs, LOADS[middle], engines=num_engines, seed=2)
        found = replay(arrivals, costs, config, num_engines=num_engines)
        latencies = [one.latency_s for one in found.served]
        within_s = quantile(latencies, WITHIN)
        if within_s <= slo_s:
            best = {"load": LOADS[middle], "p95_s": within_s, "p50_s": quantile(latencies, 0.5)}
            low = middle + 1
        else:
            high = middle
    told = {"engines": num_engines, "requests": num_requests, "full_per_s": full_per_s}
    if best is None:
        return told | {"load": None, "per_s": 0.0}
    return told | best | {"per_s": best["load"] * full_per_s}


def predicted_ranges(model: str, gpu: GPU, launch_s: float | None) -> dict[str, Any]:
    """The range of each figure of an arm, by ``SLOW`` and ``FAST``: of times, and of the rate as factors on it.

    A measured ``launch_s`` is the same at both ends.
    """
    assumed = [each if launch_s is None else each._replace(launch_s=launch_s) for each in (SLOW, EXPECTED, FAST)]
    slow, expected, fast = (gpu_costs(model, gpu, each) for each in assumed)
    [(size, _)] = expected.calls.items()
    requests = mixed(500, expected.sizes, seed=1)
    rates = [capacity_per_s(requests, costs, EngineConfig(max_waiting=100_000)) for costs in (slow, expected, fast)]
    return {
        "row_ms": {
            rows: [1000 * costs.calls[size][rows] / rows for costs in (fast, slow)] for rows in expected.calls[size]
        },
        "decode_ms": [1000 * costs.decode_s for costs in (fast, slow)],
        "rate": [rates[0] / rates[1], rates[2] / rates[1]],
    }


def arm(name: str, engines: list[int], most_requests: int, launch_s: float | None) -> dict[str, Any]:
    """One of ``ARMS`` with its pools. ``launch_s``: as measured; ``None``: as assumed."""
    model, gpu, slo_s = ARMS[name]
    assumed = EXPECTED if launch_s is None else EXPECTED._replace(launch_s=launch_s)
    costs = gpu_costs(model, find_gpu(gpu), assumed) if gpu else read_costs(MEASURED)
    [(size, calls)] = costs.calls.items()
    pools = []
    for number in engines:
        pools.append(pool(costs, number, slo_s, min(most_requests, max(1000, 100 * number))))
        print(name, pools[-1], file=sys.stderr, flush=True)
    width_px, height_px = costs.sizes[0]
    return {
        "name": name,
        "predicted": predicted_ranges(model, find_gpu(gpu), launch_s) if gpu else None,
        "size": size,
        "pixels": width_px * height_px,
        "slo_s": slo_s,
        "price_per_hour": PRICES[gpu],
        "row_ms": {rows: 1000 * seconds / rows for rows, seconds in calls.items()},
        "decode_ms": 1000 * costs.decode_s,
        "pools": pools,
    }


def front_costs(num_commits: int) -> dict[str, float]:
    """What is measured here of what all pictures pass: a commit of the store."""
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
    arms: Annotated[str, typer.Option(help="Words of the names of arms, with commas; else all.")] = "",
    engines: Annotated[str, typer.Option(help="Engines in a pool, with commas.")] = "1,4,16,64",
    requests: Annotated[int, typer.Option(min=20, help="At most, of a simulated trace.")] = 6400,
    commits: Annotated[int, typer.Option(min=1, help="Of the store.")] = 300,
    launch_us: Annotated[
        float | None, typer.Option(help="Measured microseconds of a kernel launch; else by the GPU suite, or 4.")
    ] = None,
    page_only: Annotated[bool, typer.Option("--page-only", help="Simulate nothing.")] = False,
    out: Annotated[
        Path, typer.Option(help="Figures, JSON; the page is written beside the committed ones alone.")
    ] = FIGURES,
) -> None:
    """Simulate, write the page, and print one JSON document as the last line of stdout."""
    if page_only:
        document = json.loads(out.read_text(encoding="utf-8"))
    else:
        gc.set_threshold(200_000, 50, 100)
        launch_s = measured_launch_s() if launch_us is None else 1e-6 * launch_us
        chosen = [name for name in ARMS if not arms or any(word in name for word in arms.split(","))]
        sizes = [int(number) for number in engines.split(",")]
        document = {
            "benchmark": "capacity",
            "note": "simulated; GPU figures are predicted from the roofline, no GPU was measured",
            "command": " ".join(["python", "benchmarks/capacity.py", *(Path(word).name for word in sys.argv[1:])]),
            "hardware": hardware("cpu"),
            "versions": versions(),
            "assumptions": {
                name: {"reached": each.reached, "launch_us": round(1e6 * (launch_s or each.launch_s), 2)}
                for name, each in (("expected", EXPECTED), ("slow", SLOW), ("fast", FAST))
            },
            "launch_is_measured": launch_s is not None,
            "within": WITHIN,
            "front": front_costs(commits),
            "arms": [],
        }
        for name in chosen:
            document["arms"].append(arm(name, sizes, requests, launch_s))
            write(document, out)
    if out == FIGURES:
        PAGE.write_text(page(document), encoding="utf-8")
    print(json.dumps(document))


if __name__ == "__main__":
    typer.run(main)
