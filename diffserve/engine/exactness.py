"""Which batch sizes give a row the same bytes: found out on this machine, with this model, at this shape.

A library picks its kernels by shape, so whether a row rounds alike in batches of 2 and of 16 is a property of the
machine, not a promise. The check runs the real UNet on random rows at every size of interest, forwards and backwards,
and keeps the most useful set of sizes that agree bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from diffserve.engine.buckets import CostCurve

SOLO = (1,)
"""Where a row fills the machine by itself, calls of one row cost nothing more and cannot depend on anybody."""

CALL_ROWS = 0.85
"""Nominal cost of a call in rows (13 M parameters, fp32, one core: 11 ms a call and 13 ms a row)."""

LOADS = (2, 4, 8, 16, 16)
"""The numbers of rows whose cost is weighed: one guided image up to full batches."""

Predict = Callable[[range], Tensor]
"""(row numbers) -> UNet output (len(rows), C, h, w) on the CPU, so that the clock has stopped when it returns."""


def sizes_to_check(max_rows: int) -> tuple[int, ...]:
    """Powers of two up to ``max_rows``."""
    return tuple(1 << power for power in range(max_rows.bit_length()) if 1 << power <= max_rows)


def check_buckets(predict: Predict, sizes: Sequence[int], *, is_exact: bool) -> CostCurve:
    """Run ``predict`` at each size; the curve holds the measured costs.

    Its buckets are the agreeing sizes when ``is_exact``, else all that ran. A size for which there is no memory ends
    the check.
    """
    outputs: dict[int, Tensor] = {}
    seconds: dict[int, float] = {}
    for size in sizes:
        try:
            forwards, cold_s = _timed(predict, range(size))
            backwards, warm_s = _timed(predict, range(size - 1, -1, -1))
        except torch.OutOfMemoryError:
            break
        seconds[size] = min(cold_s, warm_s)
        if not is_exact or torch.equal(forwards, backwards.flip(0)):
            outputs[size] = forwards
    curve = CostCurve(choose_class(outputs) if is_exact else tuple(outputs) or SOLO, is_exact=is_exact)
    for size in curve.buckets:
        if size in seconds:
            curve.observe(size, seconds[size])
    return curve


def _timed(predict: Predict, rows: range) -> tuple[Tensor, float]:
    started_s = time.perf_counter()
    output = predict(rows)
    return output, time.perf_counter() - started_s


def choose_class(outputs: dict[int, Tensor]) -> tuple[int, ...]:
    """Of the sets of sizes whose common rows are equal, the one that covers few and many rows at the least cost.

    The choice is made with a nominal cost, never a measured one: the same machine always chooses the same bytes.
    """
    classes: list[list[int]] = []
    for size in sorted(outputs):
        for members in classes:
            if all(torch.equal(outputs[other], outputs[size][:other]) for other in members):
                members.append(size)
                break
        else:
            classes.append([size])
    return tuple(min(classes, key=_nominal_cost)) if classes else SOLO


def _nominal_cost(sizes: Iterable[int]) -> float:
    curve = CostCurve(tuple(sizes))
    for size in curve.buckets:
        curve.observe(size, CALL_ROWS + size)
    return sum(sum(CALL_ROWS + size for size in curve.cover(rows)) / (CALL_ROWS + rows) for rows in LOADS)
