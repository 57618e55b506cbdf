"""The numbers of threads that UNet calls may run on, set in torch for the length of a call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from diffserve.config import EngineConfig
from diffserve.engine.thread_choice import ThreadChoice, candidates


class Threads:
    """Everything but UNet calls runs on ``counts[0]``: its bytes might depend on the number, and it takes little time.

    ``counts``: the reference first; without any, the number that torch has now and no other.
    """

    def __init__(self, counts: Sequence[int] = ()) -> None:
        self.choice = ThreadChoice(counts or (torch.get_num_threads(),))

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers to choose from, the reference first."""
        return self.choice.counts

    @contextmanager
    def using(self, count: int) -> Iterator[None]:
        """Run the block on ``count`` threads."""
        if count == self.counts[0]:
            yield
            return
        torch.set_num_threads(count)
        try:
            yield
        finally:
            torch.set_num_threads(self.counts[0])


def make_threads(config: EngineConfig, device: torch.device) -> Threads:
    """As ``config.threads`` says: that number, or on a CPU what turns out best of torch's own number and fewer."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    elif device.type == "cpu":
        return Threads(candidates(torch.get_num_threads()))
    return Threads()
