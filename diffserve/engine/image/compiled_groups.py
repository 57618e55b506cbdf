"""Which groups are painted by compiled calls: those for which there are packages, once they are proven and faster."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

import torch
from msgspec.structs import replace

from diffserve.config import EngineConfig
from diffserve.disk_cache import DiskCache
from diffserve.engine.image.buckets import CostCurve
from diffserve.engine.image.compiling import BackgroundCompiler
from diffserve.engine.image.task import GroupKey
from diffserve.runtime import DiffusionModel
from diffserve.runtime.unet.batch_invariance import SHARED, SOLO, GroupFacts, Study, Try, study
from diffserve.runtime.unet.call import Compiled, Kind
from diffserve.runtime.unet.compiled import CompiledUNet, Packages

CLOSE: Final = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""How far compiled calls may be from the network's own: the norm of the difference over the norm."""

PAIRS: Final = 3
LEAST_SAVED: Final = 0.03
LOOKED_KEPT: Final = 256

logger = logging.getLogger(__name__)


class CompiledGroups:
    """The compiled counterparts of groups, as ``[engine] compile`` allows them.

    packages  where compiled calls are kept, ``None`` where they are not wanted
    """

    def __init__(self, model: DiffusionModel, config: EngineConfig) -> None:
        self.packages = None if config.compile == "off" else Packages(model, DiskCache.at(config.cache_dir))
        self._compiled = None if self.packages is None else CompiledUNet(self.packages)
        can_be = self.packages is not None and self.packages.reason is None
        self._compiler = BackgroundCompiler(model, config) if can_be and config.compile == "background" else None
        self._looked_for: set[GroupKey] = set()
        self._proven: set[GroupKey] = set()

    def of(self, group: GroupKey) -> Compiled | None:
        """What makes the calls of ``group``; ``None``: the network itself."""
        return self._compiled.run if self._compiled is not None and group.is_compiled else None

    def is_proven(self, group: GroupKey) -> bool:
        """Whether newcomers are painted in ``group``, which is compiled."""
        return group in self._proven

    def is_new(self, group: GroupKey) -> bool:
        """Whether packages for ``group`` are to be looked for, again where some were made meanwhile."""
        if self.packages is None:
            return False
        if self._compiler is not None and (done := self._compiler.poll()) is not None:
            self._looked_for.discard(GroupKey(*done, is_compiled=True))
        return group not in self._looked_for

    def load(self, group: GroupKey, kind: Callable[[], Kind | None], sizes: Sequence[int]) -> tuple[int, ...]:
        """Of ``sizes`` those for which there are packages, taken into use; the others are wanted to be compiled."""
        if len(self._looked_for) >= LOOKED_KEPT:
            self._looked_for = set(self._proven)
        self._looked_for.add(group)
        found: tuple[int, ...] = ()
        if self._compiled is not None and not self._compiled.packages.is_empty:
            found = self._compiled.load(kind(), sizes)
        if self._compiler is not None and len(found) < len(sizes):
            self._compiler.want(group.shape, sizes)
        return found

    def take(self, group: GroupKey) -> None:
        """Newcomers are painted in ``group`` from now on."""
        self._proven.add(group)

    def forget(self, group: GroupKey) -> None:
        """Look for ``group`` anew when it comes again."""
        self._proven.discard(group)
        self._looked_for.discard(group)


def prove(
    network: Try,
    compiled: Try,
    sizes: Sequence[int],
    *,
    counts: Sequence[int],
    closeness: float,
    curve: CostCurve,
    is_exact: bool,
) -> Study:
    """A study of compiled calls of ``sizes`` rows, timed in pairs with the ``network``'s, which ``curve`` learns.

    is_exact  whether a row's bytes must be the same in every size and place; sizes that differ are left out

    Raises ArithmeticError where a compiled call is further than ``closeness`` from the network's.
    """
    least: dict[int, float] = {}
    for size in sizes:
        for _ in range(PAIRS):
            wanted = network(range(size), counts[0])
            yield
            curve.observe(size, wanted.wall_s)
            got = compiled(range(size), counts[0])
            yield
            least[size] = min(got.wall_s, least.get(size, got.wall_s))
        error = float((got.output - wanted.output).norm() / wanted.output.norm())
        if not error <= closeness:
            raise ArithmeticError(f"the compiled call of {size} rows is {error:.2g} off")
    found: list[GroupFacts] = []
    for reference in [size for size in (SOLO, SHARED) if size in sizes] if is_exact else [None]:
        found.append((yield from study(compiled, sizes, reference=reference, counts=counts)))
        if len(found[-1].buckets) == len(sizes):
            break
    facts = max(found, key=lambda facts: (not facts.is_alone, len(facts.buckets)))
    return replace(
        facts, seconds={size: min(wall_s, facts.seconds.get(size, wall_s)) for size, wall_s in least.items()}
    )


def is_worth(group: GroupKey, facts: GroupFacts, network: CostCurve, sizes: Sequence[int]) -> bool:
    """Whether compiled calls of ``group`` save something over the ``network``'s, all ``sizes`` taken together."""
    compiled = CostCurve.of(facts, is_exact=True)
    saved = 1.0 - sum(compiled.total_s(size) / network.total_s(size) for size in sizes) / len(sizes)
    does = saved >= LEAST_SAVED and not facts.is_alone
    shape = f"{group.width_px}x{group.height_px} pixels, {group.num_tokens} tokens"
    logger.info("compiled calls of %s save %.0f %%, so they are%s used", shape, 100 * saved, "" if does else " not")
    return does
