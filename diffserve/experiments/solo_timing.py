"""The time of a step, measured honestly: one image at a time, alone on the engine.

While many cells share the engine, an image's own clock also counts the rows of others. So after all pictures are
painted, one picture of each cell is painted alone, in ``TIMED_ROUNDS`` rounds that visit every cell, so that whatever
else the machine does in the meantime falls on all cells alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from diffserve.experiments.painting import request_for
from diffserve.experiments.plan import TIMED_ROUNDS, Cell, SweepPlan

if TYPE_CHECKING:
    from diffserve.engine import Engine


class SoloTime(msgspec.Struct, frozen=True):
    """One cell alone, in the order of rounds: milliseconds a step, and seconds from the first step to the picture."""

    step_ms: tuple[float, ...]
    image_s: tuple[float, ...]


def time_alone(engine: Engine, plan: SweepPlan, cells: Sequence[Cell]) -> Iterator[tuple[Cell, SoloTime]]:
    """Paint the first picture of every cell alone, round after round; each cell with what this round measured.

    A first picture, which finds buckets and fills caches, is not counted.
    """
    place = plan.places[0]
    engine.generate(request_for(plan, min(cells, key=lambda cell: cell.rows), place))
    for _ in range(TIMED_ROUNDS):
        for cell in cells:
            timings = engine.generate(request_for(plan, cell, place))[0].timings
            yield cell, SoloTime((1000 * timings.step_s,), (timings.denoise_s + timings.decode_s,))


def together(rounds: Sequence[SoloTime]) -> SoloTime:
    """The rounds of one cell as one."""
    return SoloTime(sum((one.step_ms for one in rounds), ()), sum((one.image_s for one in rounds), ()))
