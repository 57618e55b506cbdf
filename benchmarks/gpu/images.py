"""Images through the engine: the rate of a mixed batch, latency under load, and bytes alone and among neighbors."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, Final

from msgspec.structs import replace

from benchmarks.open_loop import quantile
from benchmarks.painted_trace import PaintedTrace, RealTime, run
from benchmarks.trace import Recorded, at_poisson_times
from benchmarks.workload import SAMPLERS
from diffserve.api.types import GenerationRequest, new_request_id
from diffserve.engine import Engine

STEPS: Final = (14, 18, 22, 26)
"""20 on average."""

QUICK_STEPS: Final = (1, 2, 2, 3)
GUIDANCE: Final = (5.0, 7.5, 12.0)
LOAD: Final = 0.9


def mixed_requests(engine: Engine, count: int, *, quick: bool) -> list[Recorded]:
    """``count`` guided images of the native size: samplers, steps, guidance and seeds all differ."""
    width_px, height_px = engine.info.good_sizes[0]
    steps = QUICK_STEPS if quick else STEPS
    return [
        Recorded(
            arrival_s=0.0,
            num_steps=steps[number % 4],
            sampler=SAMPLERS[number // 4 % 4],
            guidance_scale=GUIDANCE[number % 3],
            width_px=width_px,
            height_px=height_px,
            seed=number,
        )
        for number in range(count)
    ]


def warm_calls(engine: Engine, requests: Sequence[Recorded]) -> None:
    """Paint ``requests`` with a quarter of their steps, so that nothing is recorded for the first time later.

    Images leave in the same order as with all steps, so calls have the same numbers of rows.
    """
    short = [replace(request, num_steps=max(1, request.num_steps // 4)) for request in requests]
    engine.generate([request.request(new_request_id()) for request in short])


def offline_rate(engine: Engine, requests: Sequence[Recorded]) -> dict[str, Any]:
    """Images a second when all ``requests`` are there at once, after a short warm-up with all of them."""
    warm_calls(engine, requests)
    clock = RealTime()
    started_s = clock()
    painted = run(engine, clock, requests)
    seconds = clock() - started_s
    graphs = engine.runners.groups.compiled.graphs
    return {
        "images": len(requests),
        "images_per_s": round(len(requests) / seconds, 3),
        "row_ms": round(1e3 * seconds / sum(tick.num_rows for tick in painted.ticks), 3),
        **_ticks(painted),
        "unet_path": ", ".join(sorted({f"{path.path} ({path.reason})" for path in engine.unet_paths})),
        "graphs": 0 if graphs is None else graphs.num_graphs,
        "graphs_gb": 0.0 if graphs is None else round(graphs.num_bytes / 1e9, 3),
    }


def _ticks(painted: PaintedTrace) -> dict[str, float]:
    """How full the calls were, and what a tick took."""
    calls = [call for tick in painted.ticks for call in tick.calls]
    rows, padded = sum(len(call.rows) for call in calls), sum(call.num_padded for call in calls)
    return {
        "rows_per_call": round(rows / max(1, len(calls)), 2),
        "padded_share": round(padded / max(1, rows + padded), 3),
        "tick_ms": round(1e3 * statistics.median(tick.wall_s for tick in painted.ticks), 2),
    }


def latency_under_load(engine: Engine, requests: Sequence[Recorded], rate_per_s: float) -> dict[str, Any]:
    """Seconds from arrival to image when ``requests`` come at Poisson times at 0.9 of ``rate_per_s``."""
    warm_calls(engine, requests)
    painted = run(engine, RealTime(), at_poisson_times(requests, LOAD * rate_per_s, seed=1))
    seconds = [request.latency_s for request in painted.served if request.latency_s is not None]
    return {
        "requests": len(requests),
        "load": LOAD,
        "p50_s": round(quantile(seconds, 0.5), 3),
        "p99_s": round(quantile(seconds, 0.99), 3),
    }


def invariance(engine: Engine, requests: Sequence[GenerationRequest]) -> dict[str, Any]:
    """How many images have the same bytes alone as among all the others; a problem where some have not."""

    def copies() -> list[GenerationRequest]:
        return [replace(request, request_id=new_request_id(), return_latents=True) for request in requests]

    together = engine.generate(copies())
    alone = [engine.generate(request)[0] for request in copies()]
    pairs = list(zip(together, alone, strict=True))
    same = sum(left.picture == right.picture and left.latents == right.latents for left, right in pairs)
    problems = [] if same == len(pairs) else [f"{len(pairs) - same} of {len(pairs)} images depend on their neighbors"]
    return {"images": len(pairs), "same_bytes": same, "deterministic": engine.is_deterministic, "problems": problems}
