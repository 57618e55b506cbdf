"""What was measured of a group of rows, as it is kept on disk between two starts. No torch."""

from __future__ import annotations

from typing import Final

import msgspec

from diffserve.disk_cache import DiskCache
from diffserve.engine.buckets import CostCurve

KIND: Final = "shapes"
FORMAT: Final = 1
MOST_SIZE: Final = 1 << 16


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

    def curve(self, *, is_exact: bool) -> CostCurve:
        """A cost curve that starts from these facts."""
        made = CostCurve(self.buckets, is_exact=is_exact, is_alone=self.is_alone)
        for size, wall_s in self.seconds.items():
            if size in self.buckets:
                made.observe(size, wall_s)
        return made


class FactsOnDisk:
    """Facts by group, of one model on one device. ``name`` holds everything else that they depend on."""

    def __init__(self, cache: DiskCache, name: str) -> None:
        self._cache = cache
        self._name = f"{FORMAT} {name}"

    def read(self, group: str) -> GroupFacts | None:
        """The facts of ``group``; ``None`` where none are kept, or none that make sense."""
        try:
            return msgspec.convert(self._cache.read(KIND, self._key(group)), GroupFacts, str_keys=True)
        except (msgspec.ValidationError, ValueError):
            return None

    def write(self, group: str, facts: GroupFacts) -> None:
        """Keep ``facts``."""
        self._cache.write(KIND, self._key(group), msgspec.to_builtins(facts, str_keys=True))

    def _key(self, what: str) -> str:
        return f"{self._name} {what}"
