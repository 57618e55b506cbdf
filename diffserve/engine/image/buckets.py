"""Row buckets: the batch sizes the UNet is called with, and the cheapest way to cover n rows with them. No torch.

A library picks its kernels by shape, so the same row may round differently in a batch of 2 and of 16. When every call
has a size from a set that has been seen to agree bitwise, an image's bytes cannot depend on its neighbours. Covering 12
rows with 8 + 4 costs less than rounding up to 16.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from diffserve.engine.image.task import GroupKey
from diffserve.runtime.unet.batch_invariance import GroupFacts

KNEE_GAIN = 1.05
PROBE_EVERY = 16
RETRY_EVERY = 64
"""Ticks after which a size with a high estimate is called again, as the cause may be over."""
FALL, RISE = 0.5, 0.05
CALL_SHARE: Final = 0.03
"""Overhead of each call as a share of the smallest call's time, so that fewer calls win where UNet times are equal."""
NO_LIMIT = 1 << 16


class CostCurve:
    """Estimated seconds of a UNet call of each bucket size, from a first measurement and all later calls.

    Args:
        is_exact: Calls must have a bucket's size and are padded to it; otherwise n rows are one call of n.
        is_alone: Every row has a call of the smallest bucket to itself, as larger calls are not measured yet.
    """

    def __init__(self, buckets: Sequence[int], *, is_exact: bool = True, is_alone: bool = False) -> None:
        self.buckets = tuple(sorted(buckets))
        self.is_exact = is_exact
        self.is_alone = is_alone
        self._seconds: dict[int, float] = {}
        self._covers: dict[tuple[int, int], tuple[int, ...]] = {}
        self._passed_over = Counter[int]()

    @classmethod
    def of(cls, facts: GroupFacts, *, is_exact: bool) -> CostCurve:
        """Return a curve that starts from ``facts``."""
        curve = cls(facts.buckets, is_exact=is_exact, is_alone=facts.is_alone)
        for size, wall_s in facts.seconds.items():
            if size in facts.buckets:
                curve.observe(size, wall_s)
        return curve

    def observe(self, num_rows: int, wall_s: float) -> None:
        """Record that a call of ``num_rows`` rows took ``wall_s``."""
        old = self._seconds.get(num_rows)
        new = self._seconds[num_rows] = updated_estimate(old, wall_s)
        if old is None or abs(new - old) > 0.02 * old:
            self._covers.clear()

    def seconds(self, num_rows: int) -> float:
        """Return the estimated seconds of a call of ``num_rows`` rows, extrapolated from the nearest measured size."""
        if num_rows in self._seconds:
            return self._seconds[num_rows]
        if not self._seconds:
            return 0.5 + num_rows
        nearest = min(self._seconds, key=lambda size: abs(size - num_rows))
        return self._seconds[nearest] * (0.5 + 0.5 * num_rows / nearest)

    def cover(self, num_rows: int, max_rows: int = NO_LIMIT) -> tuple[int, ...]:
        """Return the bucket sizes, largest first, that hold ``num_rows`` rows at the least cost (dynamic programming).

        ``max_rows`` is the number of rows for which a call has memory; the smallest bucket is used in any case.
        """
        if self.is_alone:
            return self.buckets[:1] * num_rows
        if not self.is_exact:
            return tuple(min(max_rows, num_rows - start) for start in range(0, num_rows, max_rows))
        if (num_rows, max_rows) not in self._covers:
            self._covers[num_rows, max_rows] = self._cheapest_cover(num_rows, max_rows)
        return self._covers[num_rows, max_rows]

    def calls(self, num_rows: int, max_rows: int = NO_LIMIT) -> list[tuple[int, int, int]]:
        """Assign ``num_rows`` rows to calls and return (start, stop, bucket) of each; for calls that will be made.

        The calls are those of ``cover``, but a bucket that was passed over ``RETRY_EVERY`` times is included whatever
        its estimate. Otherwise a size that was first measured on a busy machine would never be measured again.
        """
        if self.is_alone:
            return [(row, row + 1, self.buckets[0]) for row in range(num_rows)]
        cover = self.cover(num_rows, max_rows)
        if self.is_exact:
            filled = {bucket for bucket in self.buckets if bucket <= min(num_rows, max_rows)}
            self._passed_over.update(filled.difference(cover))
            overdue = next((size for size in filled if self._passed_over[size] >= RETRY_EVERY), None)
            if overdue is not None:
                cover = tuple(sorted((overdue, *self.cover(num_rows - overdue, max_rows)), reverse=True))
            for size in cover:
                del self._passed_over[size]
        return split(num_rows, cover)

    def _cheapest_cover(self, num_rows: int, max_rows: int) -> tuple[int, ...]:
        sizes = [bucket for bucket in self.buckets if bucket <= max_rows] or self.buckets[:1]
        overhead_s = CALL_SHARE * self.seconds(sizes[0])
        best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        for rows in range(1, num_rows + 1):
            options = []
            for bucket in sizes:
                cost, parts = best[max(rows - bucket, 0)]
                options.append((cost + self.seconds(bucket) + overhead_s, (*parts, bucket)))
            best.append(min(options))
        return tuple(sorted(best[num_rows][1], reverse=True))

    def total_s(self, num_rows: int) -> float:
        """Return the estimated seconds of ``num_rows`` rows, in the calls that hold them."""
        return sum(self.seconds(bucket) for bucket in self.cover(num_rows))

    def knee(self, limit: int, gain: float = KNEE_GAIN, overhead_s: float = 0.0) -> int:
        """Return the smallest number of rows whose cost per row is within ``gain`` of the best, from 2 to ``limit``.

        ``overhead_s`` is the time of a tick outside its call, which is shared by its rows.
        """
        if self.is_alone:
            return 2
        sizes = [bucket for bucket in self.buckets if bucket <= limit and bucket in self._seconds]
        if not sizes:
            return max(2, min(limit, self.buckets[-1]))
        a_row_s = {size: (self._seconds[size] + overhead_s) / size for size in sizes}
        best = gain * min(a_row_s.values())
        return max(2, min(size for size in sizes if a_row_s[size] <= best))


def updated_estimate(old_s: float | None, wall_s: float) -> float:
    """Return the estimate of a duration, ``old_s`` before, after a measurement of ``wall_s``.

    A faster measurement moves the estimate by half the difference, as nothing is fast by accident. A slower one moves
    it by a twentieth, and counts as at most twice the estimate.
    """
    return wall_s if old_s is None else old_s + (FALL if wall_s < old_s else RISE) * (min(wall_s, 2.0 * old_s) - old_s)


def split(num_rows: int, cover: Sequence[int]) -> list[tuple[int, int, int]]:
    """Lay ``num_rows`` rows into ``cover``: (start, stop, bucket) for each call; only the last one is padded."""
    calls, start = [], 0
    for bucket in cover:
        stop = min(start + bucket, num_rows)
        calls.append((start, stop, bucket))
        start = stop
    return calls


class KneeCap:
    """Limit of rows in a tick without a configured number: the knee of its cost curve, or the best under "throughput".

    Every ``PROBE_EVERY``-th time twice as many rows are allowed, so that a knee measured on a busy machine is
    corrected.

    Attributes:
        overhead_s: Seconds of a tick outside its calls, as far as known; half as many rows need twice as many ticks.
    """

    def __init__(self, most_rows: int, policy: str) -> None:
        self._most_rows = most_rows
        self._gain = 1.0 if policy == "throughput" else KNEE_GAIN
        self._num_ticks = 0
        self.overhead_s: float | None = None

    def of(self, curve: CostCurve, *, may_probe: bool = True) -> int:
        """Return the cap for one tick. Without ``may_probe`` it is the knee, and the tick is not counted."""
        knee = curve.knee(self._most_rows, self._gain, self.overhead_s or 0.0)
        if not may_probe:
            return knee
        self._num_ticks += 1
        return min(2 * knee, self._most_rows) if self._num_ticks % PROBE_EVERY == 0 else knee


FIRST_PAUSE_S: Final = 30.0
LONGEST_PAUSE_S: Final = 900.0
GROUPS_KEPT: Final = 64


@dataclass
class _Cap:
    num_rows: int
    pause_s: float
    retry_at_s: float


class RowCaps:
    """A cap for each group that ran out of memory. After ``FIRST_PAUSE_S`` twice as many rows are tried.

    Where they run, twice as many again, until nothing is capped; where not, the next try waits twice as long.
    ``room``: rows of a group that will fit by what is known beforehand.
    """

    def __init__(self, clock: Callable[[], float], room: Callable[[GroupKey], int] = lambda _: NO_LIMIT) -> None:
        self._clock = clock
        self._room = room
        self._caps: OrderedDict[GroupKey, _Cap] = OrderedDict()

    def cap(self, group: GroupKey) -> int:
        """Rows that a call of ``group`` may have."""
        cap = self._caps.get(group)
        if cap is None:
            return self._room(group)
        num_rows = 2 * cap.num_rows if self._clock() >= cap.retry_at_s else cap.num_rows
        return min(num_rows, self._room(group))

    def record_out_of_memory(self, group: GroupKey, num_rows: int) -> None:
        """Record that a call of ``num_rows`` ran out of memory."""
        pause_s = FIRST_PAUSE_S
        cap = self._caps.pop(group, None)
        if cap is not None:
            pause_s = min(2 * cap.pause_s, LONGEST_PAUSE_S)
        self._caps[group] = _Cap(max(1, num_rows // 2), pause_s, self._clock() + pause_s)
        if len(self._caps) > GROUPS_KEPT:
            self._caps.popitem(last=False)

    def record_call(self, group: GroupKey, num_rows: int, most_rows: int) -> None:
        """Record that a call of ``num_rows`` rows succeeded; the limit ends if that is ``most_rows``."""
        cap = self._caps.get(group)
        if cap is None or num_rows <= cap.num_rows:
            return
        if num_rows >= most_rows:
            del self._caps[group]
        else:
            self._caps[group] = _Cap(num_rows, FIRST_PAUSE_S, self._clock())
