"""Rows of the GPU suite on the large models: SDXL in bf16, plain and compiled, and SD 1.5."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from benchmarks.gpu.calls import (
    compare_calls,
    compare_layouts,
    compare_places,
    compiled_calls,
    cost_curve,
    plain_calls,
    profile_step,
    recorded_calls,
)
from benchmarks.gpu.images import invariance, latency_under_load, mixed_requests, offline_rate
from benchmarks.gpu.vae import compare_decoders, compare_tiles
from benchmarks.gpu.worker import Bench, NotMeasurableError
from diffserve.runtime import DiffusionModel

MOST_ROWS: Final = 32
QUICK_CALL_ROWS: Final = 2


def _rows(bench: Bench, count: int) -> int:
    return QUICK_CALL_ROWS if bench.quick else count


def _repeats(bench: Bench) -> int:
    return 1 if bench.quick else 5


def _count(bench: Bench, count: int) -> int:
    return 3 if bench.quick else count


def _load(bench: Bench, name: str) -> DiffusionModel:
    """Return the model, with a point that says what it is. Raises RuntimeError where it cannot be loaded."""

    def load() -> dict[str, Any]:
        model = bench.model(name)
        return {"weights_gb": round(model.info.weights_bytes / 1e9, 3), "dtype": model.choice.dtype}

    if bench.point("load", load, needs_s=5) is None:
        raise RuntimeError(f"{name} was not loaded")
    return bench.model(name)


def _offline(bench: Bench, model: DiffusionModel, count: int, **config: Any) -> dict[str, Any]:
    """Measure the rate of a mixed batch on a new engine of ``config``."""
    engine = bench.engine(model, **config)
    figures = offline_rate(engine, mixed_requests(engine, _count(bench, count), quick=bench.quick))
    engine.close()
    return figures


def _call_arms(bench: Bench, model: DiffusionModel, num_rows: int) -> dict[str, Any]:
    """Plain, recorded, compiled, and compiled and recorded calls of ``num_rows`` rows, as far as they can be made."""
    arms = {"plain": plain_calls(bench, model, num_rows), "recorded": recorded_calls(bench, model, num_rows)}
    left_out: dict[str, str] = {}
    try:
        arms["compiled"] = compiled_calls(bench, model, num_rows, is_recorded=False)
        arms["compiled and recorded"] = compiled_calls(bench, model, num_rows, is_recorded=True)
    except NotMeasurableError as reason:
        left_out["compiled"] = str(reason)
    return compare_calls(arms, num_rows, repeats=_repeats(bench)) | {"left_out": left_out}


def _latency(bench: Bench, model: DiffusionModel, count: int, rate_per_s: float, **config: Any) -> dict[str, Any]:
    engine = bench.engine(model, **config)
    requests = mixed_requests(engine, _count(bench, count), quick=bench.quick)
    figures = latency_under_load(engine, requests, rate_per_s)
    engine.close()
    return figures


def sdxl_compiled(bench: Bench) -> None:
    """Compiled calls of 16 rows, alone and recorded, against the plain network; images and latency with them."""
    model = _load(bench, "sdxl")
    num_rows = 2 if bench.quick else 16
    bench.point(f"calls-{num_rows}", partial(_call_arms, bench, model, num_rows), needs_s=8)
    settings: dict[str, Any] = {"compile": "warm", "cuda_graphs": True}
    figures = bench.point("images", lambda: _offline(bench, model, 16, **settings), needs_s=16)
    if figures is not None:
        rate_per_s = float(figures["images_per_s"])
        bench.point("latency", partial(_latency, bench, model, 14, rate_per_s, **settings), needs_s=18)


def sd15(bench: Bench) -> None:
    """Measure calls of 16 rows, mixed batches compiled, recorded, eager and deterministic, the profile, and bytes."""
    model = _load(bench, "sd15")
    num_rows = _rows(bench, 16)
    bench.point(f"calls-{num_rows}", partial(_call_arms, bench, model, num_rows), needs_s=3)
    bench.point("compiled", lambda: _offline(bench, model, 32, compile="warm", cuda_graphs=True), needs_s=7)
    bench.point("graphs", lambda: _offline(bench, model, 32, cuda_graphs=True), needs_s=7)
    bench.point("profile", lambda: profile_step(bench, model, num_rows), needs_s=3)
    bench.point("eager", lambda: _offline(bench, model, 32, cuda_graphs=False), needs_s=8)
    bench.point("layouts", lambda: compare_layouts(bench, model, (num_rows,), repeats=_repeats(bench)), needs_s=2)
    bench.point("deterministic", lambda: _offline(bench, model, 32, deterministic=True, cuda_graphs=True), needs_s=25)
    bench.point("invariance", lambda: _invariance(bench, model), needs_s=6)


def sdxl_images(bench: Bench) -> None:
    """Measure a mixed batch of 16 images of 20 guided steps: eager, recorded, deterministic; and the VAE."""
    model = _load(bench, "sdxl")
    bench.point("graphs", lambda: _offline(bench, model, 16, cuda_graphs=True), needs_s=18)
    bench.point("vae", lambda: compare_decoders(bench, model, (1, 4)), needs_s=14)
    bench.point("deterministic", lambda: _offline(bench, model, 8, deterministic=True, cuda_graphs=True), needs_s=32)
    bench.point("eager", lambda: _offline(bench, model, 16, cuda_graphs=False), needs_s=18)
    bench.point("vae-tiles", lambda: compare_tiles(bench, model), needs_s=10)


def sdxl_calls(bench: Bench) -> None:
    """Whether a row's place matters, the layouts of weights, the profile of a step, and the cost curve."""
    model = _load(bench, "sdxl")
    sizes = (1, 2) if bench.quick else (2, 16)
    places = (2,) if bench.quick else (2, 4, 8, 16)
    bench.point("places", lambda: compare_places(bench, model, places), needs_s=5)
    bench.point("profile", lambda: profile_step(bench, model, sizes[-1]), needs_s=4)
    bench.point("layouts", lambda: compare_layouts(bench, model, sizes, repeats=_repeats(bench)), needs_s=5)
    most_rows = _rows(bench, MOST_ROWS)
    bench.point("curve", lambda: cost_curve(bench, model, most_rows=most_rows, repeats=_repeats(bench)), needs_s=15)


def _invariance(bench: Bench, model: DiffusionModel) -> dict[str, Any]:
    engine = bench.engine(model, deterministic=True, cuda_graphs=True)
    requests = mixed_requests(engine, _count(bench, 4), quick=bench.quick)
    figures = invariance(engine, [request.request("") for request in requests])
    engine.close()
    return figures
