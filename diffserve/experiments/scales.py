"""From values to places on a chart: linear and logarithmic axes, and the ticks worth a number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

NICE: Final = (1.0, 2.0, 5.0, 10.0)


class Scale(NamedTuple):
    """Maps ``low`` to ``start`` and ``high`` to ``end``, by logarithms where ``is_log``."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def place(self, value: float) -> float:
        """Where ``value`` stands."""
        low, high, at = self.low, self.high, value
        if self.is_log:
            low, high, at = math.log(low), math.log(high), math.log(value)
        return self.start + (at - low) / (high - low) * (self.end - self.start)


def log_scale(values: Sequence[float], start: float, end: float) -> Scale:
    """A logarithmic scale on which all ``values``, above zero, have some room."""
    low, high = min(values), max(values)
    room = (high / low) ** 0.06 if high > low else 2.0
    return Scale(low / room, high * room, start, end, is_log=True)


def linear_scale(values: Sequence[float], start: float, end: float) -> Scale:
    """A linear scale whose ends are ticks."""
    low, high = min(values), max(values)
    if high - low < 1e-9 * max(1.0, abs(high)):
        low, high = low - 1, high + 1
    step = nice_step(high - low)
    return Scale(math.floor(low / step) * step, math.ceil(high / step) * step, start, end)


def nice_step(width: float) -> float:
    """A distance of ticks, 1, 2 or 5 times a power of ten, that cuts ``width`` into about five."""
    power = 10.0 ** math.floor(math.log10(width / 5))
    return next(nice * power for nice in NICE if nice * power >= width / 5 * 0.999)


def linear_ticks(scale: Scale) -> tuple[float, ...]:
    """Round values from one end to the other."""
    step = nice_step(scale.high - scale.low)
    first, last = math.ceil(scale.low / step - 1e-6), math.floor(scale.high / step + 1e-6)
    return tuple(index * step for index in range(first, last + 1))


def log_ticks(scale: Scale) -> tuple[float, ...]:
    """1, 2 and 5 times powers of ten; only powers of ten over more than three of them."""
    first, last = math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high))
    marks = NICE[:3] if last - first <= 4 else NICE[:1]
    values = (mark * 10.0**power for power in range(first, last + 1) for mark in marks)
    return tuple(value for value in values if scale.low <= value <= scale.high)


def apart(values: Sequence[float], scale: Scale, least: float) -> tuple[float, ...]:
    """Of ``values``, ascending, those whose numbers do not run into each other: ``least`` between neighbours."""
    kept: list[float] = []
    for value in values:
        if not kept or abs(scale.place(value) - scale.place(kept[-1])) >= least:
            kept.append(value)
    return tuple(kept)
