"""Two priorities at one engine: who is interactive goes first, and batch work gets what that leaves. No torch.

Rows that interactive images leave in a tick are filled with batch images that may share its call. Where they leave too
few, be it in rows or in calls that batch images could share, those are owed a guaranteed part of the work,
``BATCH_SHARE``; once that is due, a tick is theirs, and what they leave in it is filled the other way round. So neither
starves, and one that is alone has everything. Within a priority clients have fair shares (``queues``); what a client
has done at one does not count at the other.

Who fills a tick makes it longer for those it is filled beside, where more rows cost more time. So of a client that
could fill it alone, with what waits for lanes, and of batch work, only as much is let in beside an interactive image as
makes it ``MAX_SLOWDOWN`` times as long as it is without. And while there are both, the work of such a crowd counts
``CROWD_COSTS`` times: its turns are fewer than half, for beside them stand its ticks between two requests of the others
and the end of the one that they come in. So somebody's flood costs others no more than another client would.

Lanes: batch images leave a part of them, ``KEPT_LANES``, to those who come, and one of them may always hold one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from diffserve.api.types import PRIORITIES, Priority
from diffserve.engine.image.policy import TickCosts, TickLoad
from diffserve.engine.image.queues import FairShare, LaneTable, Line, Order
from diffserve.engine.image.task import ImageTask, LiveRequest

BATCH_SHARE: Final = 0.1
"""Of the work, while there is some of both priorities."""

MAX_SLOWDOWN: Final = 1.4
"""Factor by which rows of saturating clients may make the ticks of other clients longer."""

CROWD_COSTS: Final = 3.0
"""What the work of a crowd counts while there is somebody who asks for less than a tick."""

KEPT_LANES: Final = 0.25
"""Of the lanes that anybody may have."""


class PriorityShare:
    """The fair shares of both priorities, and what batch work is owed. ``forgiven``: see ``FairShare``."""

    def __init__(self, forgiven: float) -> None:
        self._shares: dict[Priority, FairShare] = {name: FairShare(forgiven) for name in PRIORITIES}
        self._owed = 0.0
        self._crowds: set[Line] = set()  # beside whom there are others

    @property
    def is_contested(self) -> bool:
        """Whether there is work of both priorities."""
        return all(share.is_wanted for share in self._shares.values())

    def copy(self, newcomers: Iterable[LiveRequest] = (), *, is_due: bool = True) -> PriorityShare:
        """One to play with, in which ``newcomers`` are in; without ``is_due`` batch work is owed nothing."""
        made = PriorityShare(0.0)
        made._owed, made._crowds = self._owed if is_due else 0.0, self._crowds
        made._shares = {name: share.copy() for name, share in self._shares.items()}
        for live in newcomers:
            made.join(live)
        return made

    def join(self, live: LiveRequest) -> None:
        """``live`` is in."""
        self._shares[live.request.priority].join(live.client, live.request.share)

    def leave(self, live: LiveRequest) -> None:
        """``live`` is over."""
        self._shares[live.request.priority].leave(live.client)

    def in_order(self, tasks: Iterable[ImageTask], order: Order) -> list[ImageTask]:
        """``tasks`` as they are to run now. ``order``: within a client."""
        parts = zip(self._shares.values(), self._split(tasks), strict=True)
        interactive, batch = (share.in_order(part, order) for share, part in parts)
        return [*batch, *interactive] if self._owed > 0.0 else [*interactive, *batch]

    def spared(
        self,
        chosen: Sequence[ImageTask],
        ready: Iterable[ImageTask],
        costs: TickCosts,
        num_waiting: Callable[[], Mapping[Line, int]],
    ) -> list[ImageTask]:
        """Those of ``chosen``, out of ``ready``, whom interactive images of others can bear beside them.

        num_waiting  of images that have no lane, by line
        """
        group, first = chosen[0].group, chosen[0].live.line
        alike = [task for task in ready if task.group == group]
        self._crowds = set()
        if first[1] == "batch" or all(task.live.line == first for task in alike):
            return list(chosen)
        full, rows = sum(task.rows_now for task in chosen), Counter[Line]()
        for task in alike:
            rows[task.live.line] += task.rows_now
        more = num_waiting()
        crowds = {line for line, number in rows.items() if number + more.get(line, 0) >= full or line[1] == "batch"}
        if not crowds or crowds == rows.keys():
            return list(chosen)
        self._crowds = crowds
        load, kept, num_rows = TickLoad(costs), list[ImageTask](), 0
        for task in alike:
            if task.live.line not in crowds and num_rows + task.rows_now <= full:
                kept.append(task)
                load.add(task)
                num_rows += task.rows_now
        most_s = MAX_SLOWDOWN * load.seconds()
        for place, task in enumerate(chosen):
            fits = task.live.line in crowds and num_rows + task.rows_now <= full
            if fits and (place == 0 or load.seconds(task) <= most_s):
                kept.append(task)
                load.add(task)
                num_rows += task.rows_now
        return kept

    def in_turn(self, tasks: Iterable[ImageTask]) -> list[ImageTask]:
        """Interactive ones first, among equals by turns of their clients."""
        parts = zip(self._shares.values(), self._split(tasks), strict=True)
        return [task for share, part in parts for task in share.in_turn(part)]

    def led_by(self, chosen: Sequence[ImageTask]) -> None:
        """``chosen`` run now, each priority's first first."""
        parts = self._split(chosen)
        for share, part in zip(self._shares.values(), parts, strict=True):
            if part:
                share.led_by(part[0].live.client)
        work, of_batch = (sum(task.cost_now for task in part) for part in (chosen, parts[1]))
        owed = self._owed + BATCH_SHARE * work - of_batch
        self._owed = max(owed, -work) if self.is_contested else 0.0  # nobody pays for long for what nobody else used

    def charge(self, task: ImageTask, cost: float) -> None:
        """``cost`` of work was done for ``task``."""
        weight = CROWD_COSTS if task.live.line in self._crowds else 1.0
        self._shares[task.live.request.priority].charge(task.live.client, weight * cost)

    def may_hold(self, task: ImageTask, lanes: LaneTable, num_batch: int) -> bool:
        """Whether ``task`` may have a lane, where ``num_batch`` batch images have one."""
        if task.live.request.priority == "interactive" or not num_batch:
            return True
        return lanes.num_free > int(KEPT_LANES * lanes.num_lanes)

    @staticmethod
    def _split(tasks: Iterable[ImageTask]) -> tuple[list[ImageTask], list[ImageTask]]:
        parts: dict[Priority, list[ImageTask]] = {name: [] for name in PRIORITIES}
        for task in tasks:
            parts[task.live.request.priority].append(task)
        return parts["interactive"], parts["batch"]
