"""Rows for which a call of a group has memory: learnt when it runs out, and unlearnt when that has passed. No torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from diffserve.engine.buckets import NO_LIMIT
from diffserve.engine.task import GroupKey

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
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._caps: OrderedDict[GroupKey, _Cap] = OrderedDict()

    def cap(self, group: GroupKey) -> int:
        """Rows that a call of ``group`` may have."""
        cap = self._caps.get(group)
        if cap is None:
            return NO_LIMIT
        return 2 * cap.num_rows if self._clock() >= cap.retry_at_s else cap.num_rows

    def ran_out(self, group: GroupKey, num_rows: int) -> None:
        """There was no memory for a call of ``num_rows``."""
        pause_s = FIRST_PAUSE_S
        cap = self._caps.pop(group, None)
        if cap is not None:
            pause_s = min(2 * cap.pause_s, LONGEST_PAUSE_S)
        self._caps[group] = _Cap(max(1, num_rows // 2), pause_s, self._clock() + pause_s)
        if len(self._caps) > GROUPS_KEPT:
            self._caps.popitem(last=False)

    def ran(self, group: GroupKey, num_rows: int, most_rows: int) -> None:
        """A call of ``num_rows`` ran; nothing is capped any more where that is ``most_rows``."""
        cap = self._caps.get(group)
        if cap is None or num_rows <= cap.num_rows:
            return
        if num_rows >= most_rows:
            del self._caps[group]
        else:
            self._caps[group] = _Cap(num_rows, FIRST_PAUSE_S, self._clock())
