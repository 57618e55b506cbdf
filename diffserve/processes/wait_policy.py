"""Spin time of waiting OpenMP threads, set before torch is loaded because OpenMP reads it only once.

By default GNU OpenMP spins for about 0.1 s, which is fast on an idle machine but slows down other processes;
``OMP_WAIT_POLICY=PASSIVE`` sleeps at once, which doubles the time of a call on an idle machine. A short spin is nearly
as fast and yields the core soon (``benchmarks/bench_threads.py``). The engine also adapts its number of threads.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Final

SPIN_COUNT: Final = "10000"
CHOSEN_BY_USER: Final = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def bound_spinning(environment: MutableMapping[str, str]) -> None:
    """Limit the spin time of processes started with ``environment``, unless the user has set it."""
    if not any(name in environment for name in CHOSEN_BY_USER):
        environment["GOMP_SPINCOUNT"] = SPIN_COUNT
