"""Turns: in which order the texts of several clients get on, and what waits for whom. No torch.

A request is told its turn once, when it comes, so that nobody who waits is ever overtaken by more and more::

    starts   where its client's last request ends, or at ``now``, whichever is later
    ends     so many tokens further as it may take, by its client's share
    turn     where it starts; of batch work ``BATCH_LATER`` tokens further

``now`` is the start of the latest request that has begun (start-time fair queueing, Goyal et al. 1996). So the first
request of a client comes before the second of another, however many that has; and batch work is passed by those alone
who begin within so many tokens after it: it ages, and never starves.
"""

from __future__ import annotations

from typing import Final

from diffserve.engine.text.task import LiveText

BATCH_LATER: Final = 16_384.0

MOST_REMEMBERED: Final = 1024


class Turns:
    """Where each client's last request ends; it has a line for each priority."""

    def __init__(self) -> None:
        self.now = 0.0
        self._ends: dict[tuple[str, str], float] = {}

    def join(self, live: LiveText) -> None:
        """Tell ``live`` its turn."""
        request = live.request
        width = request.params.num_beams if request.params.num_beams > 1 else request.num_texts
        tokens = len(live.prompt_ids) + width * request.params.max_tokens
        live.starts, live.turn = self.of(live)
        self._ends[live.line] = live.starts + tokens / request.share
        if len(self._ends) > MOST_REMEMBERED:
            self._ends = {line: end for line, end in self._ends.items() if end > self.now}

    def of(self, live: LiveText) -> tuple[float, float]:
        """(where it would start, its turn), if it came now."""
        starts = max(self.now, self._ends.get(live.line, 0.0))
        return starts, starts + BATCH_LATER * (live.request.priority == "batch")

    def begun(self, live: LiveText) -> None:
        """``live`` waits no more."""
        self.now = max(self.now, live.starts)

    def rest(self) -> None:
        """Nobody is here any more."""
        self.now = 0.0
        self._ends.clear()
