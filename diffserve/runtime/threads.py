"""How many threads a UNet call runs on: chosen by what calls take, not by what the machine has.

Two threads halve a call on an idle machine. Beside a busy neighbour they wait for each other, and one thread is faster,
by a factor that nobody can foretell. So real calls are compared in pairs, one with another number of threads and one
with the present one: when it begins, when calls have become half as slow again (or as fast), and from time to time.
Since every number that is tried gives the same bytes, a trial costs nothing but its own slowness, which is kept to 2 %.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

import torch

from diffserve.settings.config import EngineConfig

DRIFT: Final = 1.5
"""A pace so many times slower, or faster, than when the choice was made asks for a trial."""

DRIFTED_CALLS: Final = 2
CHOSEN_BELOW: Final = (0.4, 0.67, 0.9)
"""What the other number must take of the present one's time, after one, two and three pairs, to be chosen."""

MUCH_WORSE: Final = 1.3
"""From here on the first pair decides against it."""

TRIAL_SHARE: Final = 0.02
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0
"""Seconds of calls between two trials: doubled by each that changes nothing."""

PACE_WEIGHT: Final = 0.4
KEYS_KEPT: Final = 256
KINDS_TRIED: Final = 4
"""Kinds of calls that one trial follows at a time."""


def candidates(most: int) -> tuple[int, ...]:
    """Numbers worth trying, ``most`` first: each about half of the one before."""
    found = [max(1, most)]
    while found[-1] > 1:
        found.append(found[-1] // 2)
    return tuple(found)


@dataclass
class _Trial:
    """A comparison in progress, of calls of one kind with each other; sums are in multiples of a kind's best time.

    waiting_s  what calls took on the other number, by kind, that have not been made on the present one since
    """

    other: int
    others: float = 0.0
    ours: float = 0.0
    num_pairs: int = 0
    extra_s: float = 0.0
    waiting_s: dict[Hashable, float] = field(default_factory=dict)


class ThreadChoice:
    """Says for every call on how many threads to run it, and is told what it took.

    counts   numbers to choose from, the first is where it begins
    current  the number in use
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = tuple(counts)
        self.current = self.counts[0]
        self._best_s: OrderedDict[Hashable, float] = OrderedDict()
        self._seen: OrderedDict[tuple[Hashable, int], None] = OrderedDict()
        self._busy_s = 0.0
        self._pace: float | None = None  # of the present number, in multiples of the best
        self._chosen_at_pace: float | None = None
        self._num_drifted = 0
        self._direction = 1  # towards fewer threads
        self._pause_s = FIRST_PAUSE_S
        self._next_trial_s = 0.0
        self._earliest_trial_s = 0.0
        self._trial: _Trial | None = None

    @property
    def is_trying(self) -> bool:
        """Whether two numbers are being compared."""
        return self._trial is not None

    def begin_trial(self) -> None:
        """Compare from the next call on, whatever was found before."""
        self._trial = _Trial(self._candidate()) if len(self.counts) > 1 else None

    def next_count(self, key: Hashable, allowed: Sequence[int]) -> int:
        """Threads for the next call, of the kind ``key``: one of ``allowed``, whose first is the way out."""
        if self.current not in allowed:
            return allowed[0]
        trial = self._trial
        is_due = trial is not None and key not in trial.waiting_s and len(trial.waiting_s) < KINDS_TRIED
        return trial.other if trial is not None and is_due and trial.other in allowed else self.current

    def observe(self, key: Hashable, count: int, wall_s: float) -> None:
        """A call of the kind ``key`` took ``wall_s`` on ``count`` threads."""
        self._busy_s += wall_s
        if self._is_first(key, count, wall_s):  # kernels are chosen and compiled: it says nothing
            return
        self._best_s[key] = min(self._best_s[key], wall_s)
        trial = self._trial
        if trial is not None and count == trial.other:
            trial.waiting_s[key] = wall_s
        elif count == self.current:
            slowness = wall_s / self._best_s[key]
            self._pace = slowness if self._pace is None else self._pace + PACE_WEIGHT * (slowness - self._pace)
            if trial is None:
                self._watch(slowness)
            elif key in trial.waiting_s:
                self._compare(trial, trial.waiting_s.pop(key), wall_s, self._best_s[key])

    def _is_first(self, key: Hashable, count: int, wall_s: float) -> bool:
        """Whether a call of the kind ``key`` ran on ``count`` threads for the first time; all are remembered."""
        is_first = (key, count) not in self._seen
        self._seen[key, count] = None
        self._seen.move_to_end((key, count))
        self._best_s[key] = self._best_s.get(key, wall_s / (self._pace or 1.0))
        self._best_s.move_to_end(key)
        for kept in (self._seen, self._best_s):
            if len(kept) > KEYS_KEPT:
                kept.popitem(last=False)
        return is_first

    def _watch(self, slowness: float) -> None:
        """Begin a trial where it is time for one, or where calls have changed their pace."""
        if len(self.counts) < 2:
            return
        usual = self._chosen_at_pace
        if usual is None:
            self._chosen_at_pace = usual = self._pace or slowness
        is_slow, is_fast = slowness > DRIFT * usual, slowness < usual / DRIFT
        self._num_drifted = self._num_drifted + 1 if is_slow or is_fast else 0
        if self._num_drifted >= DRIFTED_CALLS and self._busy_s >= self._earliest_trial_s:
            self._direction = 1 if is_slow else -1
            self._pause_s = FIRST_PAUSE_S
            self.begin_trial()
        elif self._busy_s >= self._next_trial_s:
            self.begin_trial()

    def _compare(self, trial: _Trial, other_s: float, our_s: float, best_s: float) -> None:
        """A pair is complete: settle the trial, or go on to the next pair."""
        trial.others += other_s / best_s
        trial.ours += our_s / best_s
        trial.extra_s += max(0.0, other_s - our_s)
        trial.num_pairs += 1
        ratio = trial.others / trial.ours
        if ratio < CHOSEN_BELOW[trial.num_pairs - 1]:
            self._settle(trial, is_better=True, pace=trial.others / trial.num_pairs)
        elif ratio > MUCH_WORSE or trial.num_pairs == len(CHOSEN_BELOW):
            self._settle(trial, is_better=False, pace=trial.ours / trial.num_pairs)

    def _settle(self, trial: _Trial, *, is_better: bool, pace: float) -> None:
        self._trial = None
        self._pace = self._chosen_at_pace = pace
        self._num_drifted = 0
        if is_better:
            self.current = trial.other
            self._pause_s = FIRST_PAUSE_S
        else:
            self._direction = -self._direction
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._earliest_trial_s = self._busy_s + trial.extra_s / TRIAL_SHARE / 2
        self._next_trial_s = self._busy_s + max(self._pause_s, min(trial.extra_s / TRIAL_SHARE, LONGEST_PAUSE_S))

    def _candidate(self) -> int:
        """The neighbour of the present number in the direction that is next, or the other one at an end."""
        place = self.counts.index(self.current)
        if not 0 <= place + self._direction < len(self.counts):
            self._direction = -self._direction
        return self.counts[place + self._direction]


class Threads:
    """Everything but UNet calls runs on ``counts[0]``: its bytes might depend on the number, and it takes little time.
    (What is done beside calls that have threads of their own runs on one, and has the same bytes on any number.)

    ``counts``: the reference first; without any, the number that torch has now and no other.
    """

    def __init__(self, counts: Sequence[int] = ()) -> None:
        self.choice = ThreadChoice(counts or (torch.get_num_threads(),))

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers to choose from, the reference first."""
        return self.choice.counts


@contextmanager
def computing_on(num_threads: int) -> Iterator[None]:
    """Run the block on ``num_threads`` of torch's.

    One keeps small operations out of the way of who computes next on threads of its own: after an operation on several
    these look out for more work for some milliseconds.
    """
    before = torch.get_num_threads()
    if num_threads == before:
        yield
        return
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def patient_threads() -> Iterator[None]:
    """Threads that begin within the block do not interrupt whoever wakes them, where the kernel knows of such
    (``SCHED_BATCH`` of Linux).

    Who wakes one for each core is else interrupted by the first, and the next core waits for milliseconds until the
    kernel has found it something to do.
    """
    if not hasattr(os, "SCHED_BATCH") or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield
        return
    plain = os.sched_param(0)
    with suppress(OSError):  # a sandbox may not have it
        os.sched_setscheduler(0, os.SCHED_BATCH, plain)
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_OTHER, plain)


def make_threads(config: EngineConfig, device: torch.device) -> Threads:
    """As ``config.threads`` says: that number, or on a CPU what turns out best of torch's own number and fewer."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    elif device.type == "cpu":
        return Threads(candidates(torch.get_num_threads()))
    return Threads()


def pool_of_threads(max_workers: int, name: str, num_threads: int | None = None) -> ThreadPoolExecutor:
    """Each of whose threads computes on ``num_threads``; ``None``: on as many as torch has here and now. Else it would
    on what torch has when it begins, which may be the number for something that is going on.
    """
    return ThreadPoolExecutor(max_workers, name, set_threads, (num_threads or torch.get_num_threads(),))


def set_threads(num_threads: int) -> None:
    """For the thread that says so, and for all that begin after it."""
    torch.get_num_threads()  # the first thing that a thread asks of torch sets the number that all begin with
    torch.set_num_threads(num_threads)
