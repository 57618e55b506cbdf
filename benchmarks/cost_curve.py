"""Cost of a UNet call by number of rows, with its arithmetic and the machine's measured peak."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.device_timing import peak_flops
from diffserve.runtime import DiffusionModel
from diffserve.runtime.unet.batch_invariance import Predict
from diffserve.training.eval.parts import giga_operations

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def measure_cost_curve(model: DiffusionModel, predict: Predict, *, repeats: int, most_rows: int) -> dict[str, Any]:
    """Median ms of a call at each number of rows (warm-up excluded), share of peak, and bitwise agreement.

    ``predict`` runs the UNet on its first so many random rows and returns when the device is done.
    """
    work = row_gflop(predict)
    peak = peak_flops(model.device, model.dtype) / 1e9
    points: list[dict[str, Any]] = []
    outputs: dict[int, Tensor] = {}
    for rows in [count for count in ROWS if count <= most_rows]:
        outputs[rows] = predict(range(rows))  # warm-up
        times = [seconds_of(predict, range(rows)) for _ in range(repeats)]
        median_s = statistics.median(times)
        points.append(
            {
                "rows": rows,
                "ms": round(1e3 * median_s, 3),
                "ms_min": round(1e3 * min(times), 3),
                "ms_max": round(1e3 * max(times), 3),
                "ms_per_row": round(1e3 * median_s / rows, 3),
                "gflops": round(rows * work / median_s, 1),
                "share_of_peak": round(rows * work / median_s / peak, 3),
            }
        )
    last = outputs[max(outputs)]
    for point in points:
        point["equal_bytes_to_largest"] = bool(torch.equal(outputs[point["rows"]], last[: point["rows"]]))
    return {"gflop_per_row": round(work, 3), "measured_peak_gflops": round(peak, 1), "points": points}


def row_gflop(predict: Predict) -> float:
    """Count the floating-point operations of one row in units of 10^9 (2 x multiply-add)."""
    return giga_operations(lambda: predict(range(1)))


def seconds_of(predict: Predict, rows: range) -> float:
    """Measure the wall time of one call."""
    return seconds_of_call(lambda: predict(rows))


def seconds_of_call(call: Callable[[], object]) -> float:
    """Wall time of ``call``."""
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s
