"""How long a thread that waits for others keeps its core busy. Decided before torch is loaded, for it asks only once.

GNU OpenMP spins for about a tenth of a second, which is the fastest on an idle machine and the slowest beside anybody
else: who is waited for may not run because of who waits. ``OMP_WAIT_POLICY=PASSIVE`` sleeps at once, which doubles the
time of a call when the machine is idle. A short spin has the speed of the one and most of the patience of the other
(``benchmarks/bench_threads.py``); what is left is for the engine, which changes the number of threads.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Final

SPIN_COUNT: Final = "10000"
CHOSEN_BY_USER: Final = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def bound_spinning(environment: MutableMapping[str, str]) -> None:
    """Have processes that start with ``environment`` spin shortly, unless it says otherwise already."""
    if not any(name in environment for name in CHOSEN_BY_USER):
        environment["GOMP_SPINCOUNT"] = SPIN_COUNT
