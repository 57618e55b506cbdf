"""CUDA graphs of UNet calls: recorded for a few numbers of rows, one launch in place of about a thousand.

A recording reads static buffers, into which each call copies its arguments; keys, values and LoRA factors only if the
rows change. Recordings of one kind of call share the largest buffers. A recording is used once a replay has given the
bytes of the call that it was made from. (NVIDIA, "CUDA Graphs".)
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final, NamedTuple

import torch
from cachetools import LRUCache
from torch import Tensor

from diffserve.runtime.device_health import is_out_of_memory, raise_if_sticky
from diffserve.runtime.unet.call import Kind, Make, Outputs, Recorder, UNetArguments

MOST_GRAPHS: Final = 32
"""Largest number of recordings; the least recently used ones are freed first."""

MOST_DEVICE_TIME: Final = 1.25
"""Calls whose device time exceeds the host's launch time by this factor are not recorded.

Their launches are hidden anyway, and a recording keeps memory (11 GB for SDXL). The host's time includes waits, because
about a thousand launches can be queued: for 2,800 launches of 270 ms it is two thirds of that.
"""

FIRST_PAUSE_S: Final = 30.0
LONGEST_PAUSE_S: Final = 900.0
MOST_PAUSES: Final = 256

logger = logging.getLogger(__name__)


class Recording(NamedTuple):
    """A recording: ``replay`` runs it again and overwrites ``outputs``.

    Attributes:
        replay: Runs the recorded work.
        outputs: The results of the last replay.
        num_bytes: Memory that the recording keeps, without its input buffers.
        launch_s: Time that the host needs to launch the same work without the recording.
        replay_s: Time that a replay takes on the device.
    """

    replay: Callable[[], object]
    outputs: Outputs
    num_bytes: int
    launch_s: float
    replay_s: float


Record = Callable[[Callable[[], Outputs]], Recording | None]
"""Records what a function does on the device, and replays it once; ``None`` if that saves nothing.

Raises RuntimeError if recording is not possible.
"""

Key = tuple[Hashable, Kind, int]
"""What makes the call, the shapes of its arguments, and the number of rows."""


class CudaRecord:
    """Records CUDA graphs on ``device``. They share one memory pool, because they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._graphs = weakref.WeakSet[torch.cuda.CUDAGraph]()
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Outputs]) -> Recording | None:
        """Run it twice, to prepare libraries for the stream and to time it; then record and replay it if that pays."""
        with torch.cuda.device(self._device):
            here = torch.cuda.current_stream()
            self._stream.wait_stream(here)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            with torch.cuda.stream(self._stream):
                run()
                self._stream.synchronize()
                begin.record()
                started_s = time.perf_counter()
                run()
                launch_s = time.perf_counter() - started_s
                end.record()
            here.wait_stream(self._stream)
            torch.cuda.synchronize()
            if begin.elapsed_time(end) / 1000.0 > MOST_DEVICE_TIME * launch_s:
                return None
            torch.cuda.empty_cache()  # cached blocks cannot be used by the recording, and would be counted below
            before = torch.cuda.memory_reserved()
            if not self._graphs:  # a pool whose graphs are all gone may not be used again
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                outputs = run()
            self._graphs.add(graph)
            num_bytes = max(0, torch.cuda.memory_reserved() - before)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            return Recording(graph.replay, outputs, num_bytes, launch_s, begin.elapsed_time(end) / 1000.0)


class Buffers:
    """The tensors that recordings of one kind of call read, for up to ``num_rows`` rows."""

    def __init__(self, call: UNetArguments, num_rows: int) -> None:
        self.num_rows = num_rows
        self._call = call.map(lambda tensor: tensor.new_empty((num_rows, *tensor.shape[1:])))
        self._filled_rows = 0
        self._filled_with: tuple[weakref.ref[object], ...] = ()
        self.num_bytes = sum(tensor.nbytes for tensor in self._call.tensors)

    def first(self, num_rows: int) -> UNetArguments:
        """Return the first ``num_rows`` rows."""
        return self._call.map(lambda tensor: tensor[:num_rows])

    def fill(self, call: UNetArguments, num_rows: int) -> None:
        """Copy ``call`` into the first ``num_rows`` rows, its last row repeated: the result depends on no earlier call.

        Texts and adapters are copied only if they are other objects than last time.
        """
        buffers, tensors = self._call.step_tensors, call.step_tensors
        sources: list[object] = [call.contexts, *(pair.down for pair in call.factors[:1])]
        is_same = self._filled_rows == num_rows and len(self._filled_with) == len(sources)
        if not (is_same and all(ref() is source for ref, source in zip(self._filled_with, sources, strict=True))):
            buffers, tensors = buffers + self._call.row_tensors, tensors + call.row_tensors
        self._filled_rows = 0  # until all is copied
        num_given = len(call.sample)
        torch._foreach_copy_([buffer[:num_given] for buffer in buffers], tensors)
        if num_given < num_rows:
            for buffer, tensor in zip(buffers, tensors, strict=True):
                buffer[num_given:num_rows].copy_(tensor[-1:].expand(num_rows - num_given, *tensor.shape[1:]))
        self._filled_rows, self._filled_with = num_rows, tuple(map(weakref.ref, sources))


class CallGraph(NamedTuple):
    """A recorded call of ``num_rows`` rows and the buffers that it reads."""

    recorded: Recording
    buffers: Buffers
    num_rows: int

    @property
    def is_worth_padding(self) -> bool:
        """Whether calls of fewer rows gain from it: only where the host is slower at launching than the device.

        Elsewhere the added rows cost device time, and the launches are hidden.
        """
        return self.recorded.replay_s <= self.recorded.launch_s

    def replay(self, call: UNetArguments) -> None:
        """Make ``call``, of at most ``num_rows`` rows."""
        self.buffers.fill(call, self.num_rows)
        self.recorded.replay()

    def outputs(self, num_rows: int) -> Outputs:
        """Return copies of the first rows of the results: the next replay of any graph overwrites them."""
        return tuple(tensor[:num_rows].clone() for tensor in self.recorded.outputs)


class _Pause(NamedTuple):
    until_s: float
    length_s: float


class CallGraphs:
    """Recordings of calls, by the function that makes them, the shapes of their arguments, and the number of rows.

    If memory runs out all recordings are freed, and the call is recorded again after a pause that doubles. Any other
    error turns recording off for calls of that key.

    Attributes:
        sizes: Numbers of rows that are recorded, ascending: a call is padded to the next. Empty: each call's own size,
            because only a call of the same size is sure to give the same bytes.
    """

    def __init__(self, record: Record, sizes: Sequence[int] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self._record = record
        self._clock = clock
        self.sizes = sizes
        self._graphs: OrderedDict[Key, CallGraph] = OrderedDict()
        self._pauses: LRUCache[Key | None, _Pause] = LRUCache(MOST_PAUSES)
        self._is_bypassed = False
        self.pool_bytes = 0

    @property
    def num_graphs(self) -> int:
        """Number of recordings in use."""
        return len(self._graphs)

    @property
    def num_bytes(self) -> int:
        """Memory of all recordings: ``pool_bytes``, which torch reports as unused, and the buffers."""
        buffers = {id(graph.buffers): graph.buffers.num_bytes for graph in tuple(self._graphs.values())}
        return self.pool_bytes + sum(buffers.values())

    def recorder(self, name: Hashable, *, is_padded: bool = True) -> Recorder:
        """Return a recorder for calls of ``name``, padded to one of ``sizes`` or not."""
        return partial(self._run, name, self.sizes if is_padded else ())

    @contextmanager
    def bypassed(self) -> Iterator[None]:
        """Replay no calls in the block, so that hooks in the network run."""
        self._is_bypassed = True
        try:
            yield
        finally:
            self._is_bypassed = False

    @torch.inference_mode()
    def _run(
        self, name: Hashable, sizes: Sequence[int], call: UNetArguments, make: Make, variant: Hashable
    ) -> Outputs | None:
        if self._is_bypassed or (kind := call.kind) is None:
            return None
        num_rows = len(call.sample)
        size = next((size for size in sizes if size >= num_rows), num_rows)
        key = ((name, variant), kind, size)
        if self._is_paused(None) or self._is_paused(key):
            return None
        try:
            if key in self._graphs:
                self._graphs.move_to_end(key)
                if num_rows < size and not self._graphs[key].is_worth_padding:
                    return None
                self._graphs[key].replay(call)
            elif (recorded := self._recorded(key, call, make)) is None:
                self._pauses[key] = _Pause(math.inf, math.inf)
                return None
            else:
                self._graphs[key] = recorded
                while len(self._graphs) > MOST_GRAPHS:
                    self._graphs.popitem(last=False)
            return self._graphs[key].outputs(num_rows)
        except RuntimeError as error:
            raise_if_sticky(error)
            self._graphs.pop(key, None)
            what = f"UNet calls of {size} rows"
            if is_out_of_memory(error):
                self._free()
                pause_s = self._pause(key)
                logger.warning("%s are not recorded for %.0f s: there is no memory for it", what, pause_s)
            else:
                self._pauses[key] = _Pause(math.inf, math.inf)
                logger.warning("%s are not recorded any more: %s", what, str(error).partition("\n")[0])
            return None

    def _recorded(self, key: Key, call: UNetArguments, make: Make) -> CallGraph | None:
        """Record ``call`` padded to the rows of ``key``; ``None`` if that saves nothing.

        Raises:
            RuntimeError: A replay gives other bytes.
        """
        _, kind, size = key
        of_this_kind = (graph.buffers for (_, other, _), graph in self._graphs.items() if other == kind)
        shared = next((buffers for buffers in of_this_kind if buffers.num_rows >= size), None)
        buffers = shared or Buffers(call, size)
        buffers.fill(call, size)
        static_call = buffers.first(size)
        expected = make(call if len(call.sample) == size else static_call)
        recorded = self._record(lambda: make(static_call))
        if recorded is None:
            return None
        self.pool_bytes += recorded.num_bytes
        if not all(map(_are_same_bytes, recorded.outputs, expected)):
            raise RuntimeError("a replayed call gave a different result")
        return CallGraph(recorded, buffers, size)

    def clear(self) -> None:
        """Free the recordings because memory is needed; after a pause calls are recorded again."""
        if self._graphs:
            self._free()
            self._pause(None)

    def _free(self) -> None:
        self._graphs.clear()
        self.pool_bytes = 0

    def _is_paused(self, key: Key | None) -> bool:
        pause = self._pauses.get(key)
        return pause is not None and self._clock() < pause.until_s

    def _pause(self, key: Key | None) -> float:
        """Stop recording ``key`` (``None``: anything) and return for how many seconds: twice the last recent pause."""
        now_s, last = self._clock(), self._pauses.pop(key, None)
        is_recent = last is not None and now_s < last.until_s + LONGEST_PAUSE_S
        length_s = min(2.0 * last.length_s, LONGEST_PAUSE_S) if last is not None and is_recent else FIRST_PAUSE_S
        self._pauses[key] = _Pause(now_s + length_s, length_s)
        return length_s


def graph_sizes(most_rows: int) -> tuple[int, ...]:
    """Return the numbers of rows to record: 1, 2, 3, 4, 6, 8, 12, 16, ..., up to and including ``most_rows``."""
    sizes = {size for power in range(most_rows.bit_length()) for size in (1 << power, (3 << power) >> 1)}
    return tuple(sorted({size for size in sizes if size < most_rows} | {most_rows}))


def _are_same_bytes(left: Tensor, right: Tensor) -> bool:
    """Compare bit patterns: for ``torch.equal`` NaN differs from itself."""
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
