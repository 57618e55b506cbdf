"""UNet calls recorded once for each number of rows and replayed: on CUDA one launch in place of some thousand.

A recording reads its arguments from buffers that stay where they are, so a call copies its own into them; the keys and
values of its texts only when they are others than last time, for the same rows run together step after step. It is
used once its replay was seen to give the bytes of the call that it was recorded from. (NVIDIA, "CUDA Graphs".)
"""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from diffserve.runtime.device_health import raise_if_sticky
from diffserve.runtime.unet.call import Kind, UNetArguments
from diffserve.runtime.unet.cross_attention import Contexts, KeysValues, Pair

MOST_GRAPHS: Final = 32
"""Kept at once; the longest unused go first."""

Make = Callable[[UNetArguments], Tensor]

logger = logging.getLogger(__name__)


class Recorded(NamedTuple):
    """What a device noted down: ``replay`` does it again, and the result is in ``output`` then.

    num_bytes  of memory that it keeps for that, besides
    """

    replay: Callable[[], object]
    output: Tensor
    num_bytes: int


Record = Callable[[Callable[[], Tensor]], Recorded]
"""Notes down what a function does on the device. RuntimeError where that cannot be."""


class CudaRecord:
    """Records CUDA graphs on ``device``, with one pool of memory for all: they never run side by side."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensor]) -> Recorded:
        """Run it twice: once for what libraries do only the first time, once to be recorded."""
        with torch.cuda.device(self._device):
            beside, here = torch.cuda.Stream(), torch.cuda.current_stream()
            beside.wait_stream(here)
            with torch.cuda.stream(beside):
                run()
            here.wait_stream(beside)
            before = torch.cuda.memory_reserved()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                output = run()
            return Recorded(graph.replay, output, max(0, torch.cuda.memory_reserved() - before))


class CallGraph:
    """One recorded call, with the buffers that it reads."""

    def __init__(self, call: UNetArguments, make: Make, record: Record) -> None:
        self._buffers = _copy(call)
        self._recorded = record(lambda: make(self._buffers))
        self._told: weakref.ref[Contexts] | None = None
        self.num_bytes = self._recorded.num_bytes

    def replay(self, call: UNetArguments) -> Tensor:
        """(R, C, h, w): what ``call``, of the same shapes, would give."""
        ours, theirs = self._buffers.tensors, call.tensors
        if self._told is not None and self._told() is call.contexts:
            num_others = 2 + len(call.added or ())
            ours, theirs = ours[:num_others], theirs[:num_others]
        torch._foreach_copy_(ours, theirs)
        self._told = weakref.ref(call.contexts)
        self._recorded.replay()
        return self._recorded.output.clone()  # the next replay, of whatever graph, writes there


class CallGraphs:
    """Recordings by who makes the call, shapes and number of rows; none any more after the first trouble."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._graphs: OrderedDict[tuple[bool, Kind, int], CallGraph] = OrderedDict()
        self.is_off = False

    @property
    def num_bytes(self) -> int:
        """Memory that the recordings keep beside their buffers, which nobody else can have."""
        return sum(graph.num_bytes for graph in self._graphs.values())

    @torch.inference_mode()
    def run(self, call: UNetArguments, make: Make, *, is_compiled: bool) -> Tensor | None:
        """(R, C, h, w) as ``make`` gives it for ``call``; ``None`` where it is to be asked itself."""
        if self.is_off or (kind := call.kind) is None:
            return None
        key = (is_compiled, kind, len(call.sample))
        try:
            if key in self._graphs:
                self._graphs.move_to_end(key)
                return self._graphs[key].replay(call)
            wanted = make(call)
            graph = CallGraph(call, make, self._record)
            if not torch.equal(graph.replay(call), wanted):
                raise RuntimeError("a replayed call gave other bytes")
        except RuntimeError as error:
            raise_if_sticky(error)
            self.clear()
            self.is_off = True
            logger.warning("UNet calls are not recorded any more: %s", str(error).partition("\n")[0])
            return None
        self._graphs[key] = graph
        while len(self._graphs) > MOST_GRAPHS:
            self._graphs.popitem(last=False)
        return wanted

    def clear(self) -> None:
        """Give their memory back; they are recorded again when they are wanted."""
        self._graphs.clear()


def _copy(call: UNetArguments) -> UNetArguments:
    contexts = call.contexts
    return UNetArguments(
        call.sample.clone(),
        call.timesteps.clone(),
        KeysValues(tuple(Pair(pair.keys.clone(), pair.values.clone()) for pair in contexts.layers))
        if isinstance(contexts, KeysValues)
        else contexts.clone(),
        None if call.added is None else {name: tensor.clone() for name, tensor in call.added.items()},
    )
