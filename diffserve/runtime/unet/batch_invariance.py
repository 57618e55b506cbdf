"""Which batch sizes give a row the same bytes: found out on this machine, with this model, at this shape.

A library picks its kernels by shape and by the number of threads, so whether a row rounds alike in batches of 2 and of
16 is a property of the machine, not a promise. What a row's bytes are is settled before anything is measured: those
that it has in the first place of a call of the *reference* size, in which it may be alone. Other sizes, and other
numbers of threads, are taken into use once the real UNet on random rows, forwards and backwards, was seen to give the
same. So a group that is new is painted at once, row by row, and its pictures keep their bytes when it is known.
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
"""The reference where a row fills the machine by itself: calls of one row cost nothing more there."""

PAIR = 2
"""The reference where a row nearly does, and both rows of a guided picture cost less in one call than in two."""

SHARED = 4
"""The reference where one row rounds unlike four. On the CPUs seen so far four, eight and sixteen then agree."""

LONGEST_CALL_S = 1.0
"""A size whose call would take longer is left out: whoever comes meanwhile waits for it, and it saves little."""

LEAST_S = 1e-9
"""What a call takes on a clock that did not move meanwhile."""

Predict = Callable[[range], Tensor]
"""(row numbers) -> UNet output (len(rows), C, h, w) on the CPU, so that the clock has stopped when it returns."""


class GroupFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a study found out.

    buckets      sizes of calls that give a row the same bytes, or all that ran where bytes are not promised
    counts       numbers of threads that do, the reference first
    seconds      the least that a call of each size took
    is_alone     not even rows in one call of the reference size agree: each needs a call of its own
    is_complete  every size was tried; otherwise it is studied further
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
    """Facts by group, of one model on one device. ``name`` holds everything else that they depend on."""

    def __init__(self, cache: DiskCache, name: str) -> None:
        self._cache = cache
        self._name = f"{FORMAT} {name}"

    def read(self, group: str) -> GroupFacts | None:
        """The facts of ``group``; ``None`` where none are kept, or none that make sense."""
        try:
            return msgspec.convert(self._cache.read(KIND, f"{self._name} {group}"), GroupFacts, str_keys=True)
        except (msgspec.ValidationError, ValueError):
            return None

    def write(self, group: str, facts: GroupFacts) -> None:
        """Keep ``facts``."""
        self._cache.write(KIND, f"{self._name} {group}", msgspec.to_builtins(facts, str_keys=True))


class Trial(NamedTuple):
    """One UNet call: its output (len(rows), C, h, w) and how long it took."""

    output: Tensor
    wall_s: float


Try = Callable[[range, int], Trial]
"""(row numbers, number of threads) -> the call's trial. Raises ``torch.OutOfMemoryError``."""

Study = Generator[None, None, GroupFacts]
"""Measuring in slices: every ``next`` makes one UNet call."""


def sizes_to_check(max_rows: int) -> tuple[int, ...]:
    """Powers of two up to ``max_rows``."""
    return tuple(1 << power for power in range(max_rows.bit_length()) if 1 << power <= max_rows)


def timed(predict: Predict, clock: Callable[[], float] = time.perf_counter) -> Try:
    """``predict`` as something to try; it does not know about threads."""

    def attempt(rows: range, _num_threads: int) -> Trial:
        started_s = clock()
        output = predict(rows)
        return Trial(output, max(clock() - started_s, LEAST_S))

    return attempt


def first_look(attempt: Try, counts: Sequence[int]) -> GroupFacts:
    """What is settled with a few small calls: the reference, which is among the buckets, and who agrees with it.

    ``SOLO`` is the reference where one row rounds as four do, else ``SHARED`` where a row's place in such a call does
    not matter. (On an H200 it matters for SDXL in calls of every size, also of two rows.) The facts are not complete;
    without memory for the calls there are no seconds in them.
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
    """The reference, given sizes that agree with it."""
    return next((size for size in (SOLO, SHARED) if size in buckets), PAIR)


def end_of(going: Study) -> GroupFacts:
    """Drive a study to its end."""
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
    """Run ``attempt`` at each size, one call a slice; the facts hold what agrees with ``reference``, and the costs.

    ``reference`` is ``None`` where bytes are not promised: then all that ran are buckets. ``counts``: numbers of
    threads, the reference first. A size for which there is no memory, or that takes too long (unless ``is_patient``),
    ends the study.
    """
    kept: dict[int, Tensor] = {}
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
            if reference is not None and not _agrees(forwards, backwards, kept):
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
        kept[size], seconds[size] = forwards, fastest_s
    buckets = tuple(sorted(kept)) or (reference or SOLO,)
    return GroupFacts(buckets=buckets, counts=tuple(agreeing), seconds=seconds, is_complete=is_complete)


def _too_long(size: int, reference: int | None, seconds: dict[int, float]) -> bool:
    if not seconds or size == reference:
        return False
    known = max(seconds)
    return seconds[known] * size / known > LONGEST_CALL_S


def _agrees(forwards: Tensor, backwards: Tensor, kept: dict[int, Tensor]) -> bool:
    """Whether no row's place matters, and the rows are those of every size kept so far."""
    if not torch.equal(forwards, backwards.flip(0)):
        return False
    pairs = [(forwards[: len(other)], other[: len(forwards)]) for other in kept.values()]
    return all(torch.equal(one, other) for one, other in pairs)


PERIOD = 8191
"""Weights repeat after so many numbers: neighbours that change places, or by opposite amounts, change the sum."""


def with_layer_sums(network: nn.Module, run: Callable[[], Tensor]) -> Tensor:
    """(R, N) int64: the bits of what ``run`` gives, (R, ...), and after them a sum of the bits of each layer's output,
    weighted by place. ``run`` calls ``network`` once. 16 bits.
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
    return torch.cat([bits.to(torch.int64), *(made for made in sums if len(made) == len(bits))], dim=1)


def bit_sums(outputs: Sequence[Tensor]) -> Tensor:
    """(R, len(outputs)) int64: of each, (R, ...), a sum of its bits weighted by place."""
    return torch.cat([_sum(output) for output in outputs], dim=1)


def _sum(output: Tensor) -> Tensor:
    kind = torch.int32 if output.element_size() == 4 else torch.int16
    bits = output.contiguous().view(kind).flatten(1).to(torch.int32)
    weights = torch.arange(bits.shape[1], dtype=torch.int32, device=bits.device) % PERIOD + 1
    return (bits * weights).sum(1, keepdim=True, dtype=torch.int64).cpu()


class InterruptedCallError(Exception):
    """A network call was given up between two of its layers."""


@contextmanager
def interrupted_by(has_arrived: Callable[[], bool]) -> Iterator[None]:
    """Raise InterruptedCallError before the next layer of a network inside, once ``has_arrived`` returns true.

    Compiled calls run to their end.
    """

    def check(*_: Any) -> None:
        if has_arrived():
            raise InterruptedCallError

    handle = register_module_forward_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()
