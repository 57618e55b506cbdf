"""Batch sizes and thread counts that give a row the same bytes, measured with the real model on this machine.

Libraries choose kernels by shape and thread count, so rounding is a property of the machine. A row's bytes are defined
as those in a call of the *reference* size. Other sizes and thread counts are used once the UNet gave the same bytes on
random rows, in both orders. New groups run at the reference size at once, and their images keep their bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from diffserve.disk_cache import DiskCache

KIND: Final = "shapes"
FORMAT: Final = 3
MOST_SIZE: Final = 1 << 16

SOLO = 1
"""Reference size if a row fills the machine by itself: calls of one row cost no more per row."""

PAIR = 2
"""Reference size if a row nearly fills the machine, and both rows of a guided image cost less in one call than in two.
"""

SHARED = 4
"""Reference size if one row rounds unlike four. On the CPUs tested four, eight and sixteen then agree."""

LONGEST_CALL_S = 1.0
"""Sizes with longer calls are skipped: requests wait during a measurement, and large calls save little."""

LEAST_S = 1e-9
"""Duration assumed if the clock did not advance."""

Predict = Callable[[range], Tensor]
"""(row numbers) -> UNet output (len(rows), C, h, w) on the CPU, so that the clock has stopped when it returns."""


class GroupFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Results of a study of one group of calls.

    Attributes:
        buckets: Batch sizes that give a row the same bytes; all that ran if bytes are not guaranteed.
        counts: Thread counts that do, the reference first.
        seconds: Least time of a call by size.
        is_alone: Rows in one call of the reference size disagree, so each row needs a call of its own.
        is_complete: Whether every size was tried; otherwise the study continues later.
    """

    buckets: tuple[int, ...]
    counts: tuple[int, ...]
    seconds: dict[int, float]
    is_alone: bool = False
    is_complete: bool = True

    def __post_init__(self) -> None:
        numbers = (*self.buckets, *self.counts, *self.seconds)
        if not self.buckets or not self.counts or not all(0 < number <= MOST_SIZE for number in numbers):
            raise ValueError("buckets and numbers of threads must be positive")
        if not all(0.0 <= wall_s < float("inf") for wall_s in self.seconds.values()):
            raise ValueError("seconds must be finite")


class FactsOnDisk:
    """Stored facts by group, of one model on one device. ``name`` contains everything else that they depend on."""

    def __init__(self, cache: DiskCache, name: str) -> None:
        self._cache = cache
        self._name = f"{FORMAT} {name}"

    def read(self, group: str) -> GroupFacts | None:
        """Return the facts of ``group``; ``None`` if there are no valid ones."""
        try:
            return msgspec.convert(self._cache.read(KIND, f"{self._name} {group}"), GroupFacts, str_keys=True)
        except (msgspec.ValidationError, ValueError):
            return None

    def write(self, group: str, facts: GroupFacts) -> None:
        """Store ``facts``."""
        self._cache.write(KIND, f"{self._name} {group}", msgspec.to_builtins(facts, str_keys=True))


class Trial(NamedTuple):
    """One UNet call: its output (len(rows), C, h, w) and how long it took."""

    output: Tensor
    wall_s: float


Try = Callable[[range, int], Trial]
"""(row numbers, number of threads) -> the call's trial. Raises ``torch.OutOfMemoryError``."""

Study = Generator[None, None, GroupFacts]
"""Measurement in slices: every ``next`` makes one UNet call."""


def sizes_to_check(max_rows: int) -> tuple[int, ...]:
    """Return the powers of two up to ``max_rows``."""
    return tuple(1 << power for power in range(max_rows.bit_length()) if 1 << power <= max_rows)


def timed(predict: Predict, clock: Callable[[], float] = time.perf_counter) -> Try:
    """Wrap ``predict`` to measure its time; the number of threads is ignored."""

    def attempt(rows: range, _num_threads: int) -> Trial:
        started_s = clock()
        output = predict(rows)
        return Trial(output, max(clock() - started_s, LEAST_S))

    return attempt


def first_look(attempt: Try, counts: Sequence[int]) -> GroupFacts:
    """Determine the reference size with a few small calls, and which thread counts agree with it.

    The reference is ``SOLO`` if one row rounds as four do, else ``SHARED`` if a row's place in such a call does not
    matter. (On an H200 it matters for SDXL in calls of every size, even of two rows.) The facts are not complete. If
    memory does not suffice for the calls they contain no times.
    """
    solo = end_of(study(attempt, (SOLO, 2, SHARED), reference=SOLO, counts=counts, is_patient=True))
    if not solo.is_complete:
        return GroupFacts(buckets=(SOLO,), counts=tuple(counts[:1]), seconds={}, is_complete=False)
    if SHARED not in solo.buckets:
        shared = end_of(study(attempt, (PAIR, SHARED), reference=SHARED, counts=counts, is_patient=True))
        if not shared.is_alone:
            return replace(shared, is_complete=False)
    return replace(solo, is_complete=False)


def reference_in(buckets: Sequence[int]) -> int:
    """Return the reference size, given the sizes that agree with it."""
    return next((size for size in (SOLO, SHARED) if size in buckets), PAIR)


def end_of(going: Study) -> GroupFacts:
    """Run a study to its end."""
    while True:
        try:
            next(going)
        except StopIteration as end:
            facts: GroupFacts = end.value
            return facts


def study(
    attempt: Try,
    sizes: Sequence[int],
    *,
    reference: int | None,
    counts: Sequence[int] = (1,),
    is_patient: bool = False,
) -> Study:
    """Run ``attempt`` at each size, one call per slice, and compare the outputs with those of the reference.

    Args:
        attempt: Makes one call.
        sizes: Batch sizes to try. One that takes too long or for which there is no memory ends the study.
        reference: The reference size; ``None`` if bytes are not guaranteed, then all sizes that ran are buckets.
        counts: Thread counts to try, the reference first.
        is_patient: Try sizes that take long, too.
    """
    outputs: dict[int, Tensor] = {}
    seconds: dict[int, float] = {}
    agreeing = list(counts)
    is_complete = True
    for size in sorted({*sizes, *([reference] if reference else [])}, key=lambda size: (size != reference, size)):
        if not is_patient and _too_long(size, reference, seconds):
            is_complete = False
            break
        try:
            forwards, cold_s = attempt(range(size), counts[0])
            yield
            backwards, warm_s = attempt(range(size - 1, -1, -1), counts[0])
            yield
            fastest_s = min(cold_s, warm_s)
            if reference is not None and not _agrees(forwards, backwards, outputs):
                if size == reference:
                    return GroupFacts(buckets=(reference,), is_alone=True, counts=tuple(counts[:1]), seconds={})
                continue
            for count in agreeing[1:]:
                other = attempt(range(size), count)
                yield
                fastest_s = min(fastest_s, other.wall_s)
                if reference is not None and not torch.equal(other.output, forwards):
                    agreeing.remove(count)
        except torch.OutOfMemoryError:
            is_complete = False
            break
        outputs[size], seconds[size] = forwards, fastest_s
    buckets = tuple(sorted(outputs)) or (reference or SOLO,)
    return GroupFacts(buckets=buckets, counts=tuple(agreeing), seconds=seconds, is_complete=is_complete)


def _too_long(size: int, reference: int | None, seconds: dict[int, float]) -> bool:
    if not seconds or size == reference:
        return False
    largest = max(seconds)
    return seconds[largest] * size / largest > LONGEST_CALL_S


def _agrees(forwards: Tensor, backwards: Tensor, outputs: dict[int, Tensor]) -> bool:
    """Return whether no row's place matters, and the rows equal those of every size in ``outputs``."""
    if not torch.equal(forwards, backwards.flip(0)):
        return False
    pairs = [(forwards[: len(other)], other[: len(forwards)]) for other in outputs.values()]
    return all(torch.equal(left, right) for left, right in pairs)


PERIOD = 8191
"""Weights repeat after this many numbers: swapped or opposite changes of neighbors change the sum."""


def with_layer_sums(network: nn.Module, run: Callable[[], Tensor]) -> Tensor:
    """Run ``network`` and return the bits of its output with a position-weighted sum of each layer's bits behind them.

    A kernel that sums in another order changes about one value in 100,000 in 16 bits. The output of a small network may
    not show that for hundreds of calls; the outputs of all its layers do.

    Args:
        network: The network, in 16 bits.
        run: Calls ``network`` once and returns its output (R, ...).

    Returns:
        (R, N) int64.
    """
    sums: list[Tensor] = []

    def add(_module: nn.Module, _arguments: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.element_size() == 2:
            sums.append(_sum(output))

    leaves = [module for module in network.modules() if next(module.children(), None) is None]
    hooks = [leaf.register_forward_hook(add) for leaf in leaves]
    try:
        output = run()
    finally:
        for hook in hooks:
            hook.remove()
    bits = output.contiguous().view(torch.int32 if output.element_size() == 4 else torch.int16).flatten(1)
    return torch.cat([bits.to(torch.int64), *(total for total in sums if len(total) == len(bits))], dim=1)


def bit_sums(outputs: Sequence[Tensor]) -> Tensor:
    """Return position-weighted sums of the bits of each of ``outputs`` (R, ...), as (R, len(outputs)) int64."""
    return torch.cat([_sum(output) for output in outputs], dim=1)


def _sum(output: Tensor) -> Tensor:
    kind = torch.int32 if output.element_size() == 4 else torch.int16
    bits = output.contiguous().view(kind).flatten(1).to(torch.int32)
    weights = torch.arange(bits.shape[1], dtype=torch.int32, device=bits.device) % PERIOD + 1
    return (bits * weights).sum(1, keepdim=True, dtype=torch.int64).cpu()


class InterruptedCallError(Exception):
    """A network call was stopped between two of its layers."""


@contextmanager
def interrupted_by(has_arrived: Callable[[], bool]) -> Iterator[None]:
    """Raise InterruptedCallError before the next layer of any network once ``has_arrived`` returns true.

    This ends a measurement in an idle moment when a request arrives. Compiled calls run to their end.
    """

    def check(*_: Any) -> None:
        if has_arrived():
            raise InterruptedCallError

    handle = register_module_forward_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()
