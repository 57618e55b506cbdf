"""Choice of the number of threads of UNet calls, by measuring real calls.

Two threads halve a call on an idle machine, but on a loaded one they wait for each other and one thread is faster. So
calls with another number are compared in pairs with the current one: at the start, when the speed changes by half, and
from time to time. All numbers give the same bytes, and trials cost at most 2 %.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

import torch
from cachetools import LRUCache

from diffserve.settings.config import EngineConfig

DRIFT: Final = 1.5
"""Factor of slowdown or speedup since the last choice that starts a trial."""

DRIFTED_CALLS: Final = 2
CHOSEN_BELOW: Final = (0.4, 0.67, 0.9)
"""Largest ratio of times at which the other number is chosen after one, two and three pairs."""

MUCH_WORSE: Final = 1.3
"""Ratio from which the first pair rejects the other number."""

TRIAL_SHARE: Final = 0.02
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0
"""Limits of the seconds of calls between two trials, doubled after each trial without a change."""

PACE_WEIGHT: Final = 0.4
MAX_KEYS: Final = 256
KINDS_TRIED: Final = 4
"""Kinds of calls that a trial compares at a time."""


def candidates(max_threads: int) -> tuple[int, ...]:
    """Return the numbers of threads to try, ``max_threads`` first: each about half of the one before."""
    counts = [max(1, max_threads)]
    while counts[-1] > 1:
        counts.append(counts[-1] // 2)
    return tuple(counts)


@dataclass
class _Trial:
    """A comparison in progress, of calls of the same kind; sums are in multiples of the kind's best time.

    Attributes:
        other: The other number of threads.
        other_sum: Time of its calls.
        current_sum: Time of the current number's calls.
        num_pairs: Completed pairs.
        extra_s: Time lost by the trial.
        waiting_s: By kind, the time of a call on the other number that is not paired yet.
    """

    other: int
    other_sum: float = 0.0
    current_sum: float = 0.0
    num_pairs: int = 0
    extra_s: float = 0.0
    waiting_s: dict[Hashable, float] = field(default_factory=dict)


class ThreadChoice:
    """Chooses the number of threads for every call from observed times.

    Attributes:
        counts: Numbers to choose from, the first is the initial one.
        current: The number in use.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = tuple(counts)
        self.current = self.counts[0]
        self._best_s: LRUCache[Hashable, float] = LRUCache(MAX_KEYS)
        self._seen: LRUCache[tuple[Hashable, int], None] = LRUCache(MAX_KEYS)
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
        """Start a comparison with the next call."""
        self._trial = _Trial(self._candidate()) if len(self.counts) > 1 else None

    def next_count(self, key: Hashable, allowed: Sequence[int]) -> int:
        """Return the threads for the next call of the kind ``key``: one of ``allowed``, whose first is the fallback."""
        if self.current not in allowed:
            return allowed[0]
        trial = self._trial
        is_due = trial is not None and key not in trial.waiting_s and len(trial.waiting_s) < KINDS_TRIED
        return trial.other if trial is not None and is_due and trial.other in allowed else self.current

    def observe(self, key: Hashable, count: int, wall_s: float) -> None:
        """Record that a call of the kind ``key`` took ``wall_s`` on ``count`` threads."""
        self._busy_s += wall_s
        if self._is_first(key, count, wall_s):  # kernels are selected and compiled in it
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
        """Return whether a call of the kind ``key`` ran on ``count`` threads for the first time, and remember it."""
        is_first = (key, count) not in self._seen
        self._seen[key, count] = None
        self._best_s[key] = self._best_s.get(key, wall_s / (self._pace or 1.0))
        return is_first

    def _watch(self, slowness: float) -> None:
        """Start a trial if it is due, or if calls have become slower or faster."""
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
        """Add a pair to the trial, and end it if the result is clear."""
        trial.other_sum += other_s / best_s
        trial.current_sum += our_s / best_s
        trial.extra_s += max(0.0, other_s - our_s)
        trial.num_pairs += 1
        ratio = trial.other_sum / trial.current_sum
        if ratio < CHOSEN_BELOW[trial.num_pairs - 1]:
            self._settle(trial, is_better=True, pace=trial.other_sum / trial.num_pairs)
        elif ratio > MUCH_WORSE or trial.num_pairs == len(CHOSEN_BELOW):
            self._settle(trial, is_better=False, pace=trial.current_sum / trial.num_pairs)

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
        """Return the next number in the current direction, which is reversed at an end of ``counts``."""
        place = self.counts.index(self.current)
        if not 0 <= place + self._direction < len(self.counts):
            self._direction = -self._direction
        return self.counts[place + self._direction]


class Threads:
    """Thread counts of a process. Only UNet calls use others than ``counts[0]``, on which other bytes might depend.

    ``counts``: the reference first; by default torch's current number and no other.
    """

    def __init__(self, counts: Sequence[int] = ()) -> None:
        self.choice = ThreadChoice(counts or (torch.get_num_threads(),))

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers to choose from, the reference first."""
        return self.choice.counts


@contextmanager
def computing_on(num_threads: int) -> Iterator[None]:
    """Run the block on ``num_threads`` of torch's threads.

    With one thread small operations do not disturb other computations: OpenMP workers spin for milliseconds after an
    operation on several threads.
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
    """Start threads in the block with the scheduling policy ``SCHED_BATCH``, if the kernel has it.

    They do not preempt the thread that wakes them. Otherwise the first one would, and the other cores would wait for
    milliseconds.
    """
    if not hasattr(os, "SCHED_BATCH") or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield
        return
    plain = os.sched_param(0)
    with suppress(OSError):  # a sandbox may forbid it
        os.sched_setscheduler(0, os.SCHED_BATCH, plain)
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_OTHER, plain)


def make_threads(config: EngineConfig, device: torch.device) -> Threads:
    """Return the thread counts of ``config.threads``: that number, or on a CPU torch's number and fewer to try."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    elif device.type == "cpu":
        return Threads(candidates(torch.get_num_threads()))
    return Threads()


def pool_of_threads(max_workers: int, name: str, num_threads: int | None = None) -> ThreadPoolExecutor:
    """Return an executor whose threads compute on ``num_threads``, by default torch's current number.

    Without this a thread would use torch's number at its start, which may be temporary.
    """
    return ThreadPoolExecutor(max_workers, name, set_threads, (num_threads or torch.get_num_threads(),))


def set_threads(num_threads: int) -> None:
    """Set torch's number of threads for the calling thread, and for all that start after it."""
    torch.get_num_threads()  # a thread's first use of torch sets the global default
    torch.set_num_threads(num_threads)
