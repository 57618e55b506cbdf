"""The rows of one call shared out over calls that run side by side, each on threads of its own.

Within a call threads meet after every layer, and wait for whichever of them has been interrupted; calls of their own
never do. (OpenVINO calls it throughput streams.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Barrier

import torch
from torch import Tensor

from diffserve.runtime.threads import pool_of_threads

Make = Callable[[Sequence[Tensor]], Tensor]
"""Makes a call of its tensors, each of as many rows. It must leave Python's lock to others while it computes."""


class Streams:
    """Threads that make calls, kept from call to call: the first one of a thread takes longer."""

    def __init__(self) -> None:
        self._pools: dict[tuple[int, int], ThreadPoolExecutor] = {}

    @torch.inference_mode()
    def run(self, make: Make, tensors: Sequence[Tensor], num_streams: int) -> Tensor:
        """What ``make`` gives for all rows, in their order: it is called for as many equal shares side by side, which
        have torch's number of threads together. Raises what it raises, once all are done.
        """
        pool = self._pool(num_streams, torch.get_num_threads() // num_streams)
        shares = zip(*(tensor.chunk(num_streams) for tensor in tensors), strict=True)
        made = [pool.submit(_make, make, share) for share in shares]
        wait(made)
        return torch.cat([one.result() for one in made])

    def _pool(self, num_streams: int, num_threads: int) -> ThreadPoolExecutor:
        if (num_streams, num_threads) not in self._pools:
            together, started = torch.get_num_threads(), Barrier(num_streams)
            pool = pool_of_threads(num_streams, "call", num_threads)
            wait([pool.submit(started.wait) for _ in range(num_streams)])
            torch.set_num_threads(together)  # what a thread says holds for it, and for all that begin after it
            self._pools[num_streams, num_threads] = pool
        return self._pools[num_streams, num_threads]


@torch.inference_mode()
def _make(make: Make, share: Sequence[Tensor]) -> Tensor:
    return make(share)
