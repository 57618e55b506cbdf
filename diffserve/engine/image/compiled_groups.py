"""Groups with compiled calls: those with packages that are proven to be correct and faster."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Sequence
from statistics import median
from typing import Final, NamedTuple

import torch
from msgspec.structs import replace

from diffserve.disk_cache import DiskCache
from diffserve.engine.image.buckets import CostCurve
from diffserve.engine.image.compiling import BackgroundCompiler
from diffserve.engine.image.task import GroupKey
from diffserve.runtime import DiffusionModel
from diffserve.runtime.unet.batch_invariance import SHARED, SOLO, GroupFacts, Study, Try, study
from diffserve.runtime.unet.call import Compiled, Kind, Recorder
from diffserve.runtime.unet.compiled import CompiledUNet, Packages
from diffserve.runtime.unet.graphs import CallGraphs, CudaRecord
from diffserve.settings.config import EngineConfig

CLOSE: Final = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""How far compiled calls may be from the network's own: the norm of the difference over the norm."""

PAIRS: Final = 3
MOST_PAIRS: Final = 9
"""Pairs of plain and compiled calls that are timed for each size; more follow while the faster one is not clear."""
REPEATS: Final = 3
"""Of a pair's compiled call, where there are sizes to choose from."""

LEAST_SAVED: Final = 0.03
DOUBT_S: Final = 900.0
"""After which calls are timed again that were not clearly faster or slower: what disturbed them may be over."""
LOOKED_KEPT: Final = 256

logger = logging.getLogger(__name__)


class LatePackages(NamedTuple):
    """Packages of a group that are opened before the first call of their size; ``curve`` has their stored costs."""

    kind: Kind | None
    curve: CostCurve
    unopened: set[int]


class CompiledGroups:
    """Compiled counterparts of groups, as ``[engine] compile`` allows.

    Attributes:
        packages: Stored compiled calls, ``None`` if compilation is off.
        graphs: Recordings of calls, compiled or not; ``None`` if calls are not recorded.
        is_measured: Whether shapes are compiled in the background and used once measured as faster; otherwise a shape's
            path is chosen once (see ``PathChooser``).
    """

    def __init__(self, model: DiffusionModel, config: EngineConfig) -> None:
        self.packages = None if config.compile == "off" else Packages(model, DiskCache.at(config.cache_dir))
        self._compiled = None if self.packages is None else CompiledUNet(self.packages)
        is_recorded = config.cuda_graphs and model.device.type == "cuda" and model.choice.is_unet_whole
        self.graphs = CallGraphs(CudaRecord(model.device)) if is_recorded else None
        self.is_measured = compiles_in_background(model, config)
        can_be = self.packages is not None and self.packages.reason is None
        if can_be and self.is_measured and self.packages is not None and self.packages.missing_tools:
            instead = "replayed from CUDA graphs" if self.graphs else "made by the network"
            logger.warning("UNet calls are not compiled but %s: %s", instead, self.packages.missing_tools)
            can_be = False
        self._compiler = BackgroundCompiler(model, config) if can_be and self.is_measured else None
        self._late: dict[GroupKey, LatePackages] = {}
        self._looked_for: set[GroupKey] = set()
        self._done: set[GroupKey] = set()
        self._proven: set[GroupKey] = set()
        self._doubted: dict[GroupKey, float] = {}

    def of(self, group: GroupKey) -> Compiled | None:
        """Return the function for compiled calls of ``group``; ``None`` if the network makes its calls."""
        return self._compiled.run if self._compiled is not None and group.is_compiled else None

    def recorder(self, group: GroupKey) -> Recorder | None:
        """Return the recorder of the calls of ``group``, or ``None`` if calls are not recorded."""
        # a compiled call has the size of its package already
        return None if self.graphs is None else self.graphs.recorder(group, is_padded=not group.is_compiled)

    @property
    def has_own_threads(self) -> bool:
        """Whether compiled calls ignore the number of threads that torch is set to."""
        return self.packages is not None and self.packages.is_by_openvino

    @property
    def compiler(self) -> str:
        """Name and version of the compiler that makes packages."""
        return self.packages.compiler if self.packages else ""

    def is_proven(self, group: GroupKey) -> bool:
        """Whether new images use ``group``, which is compiled."""
        return group in self._proven

    def is_new(self, group: GroupKey, now_s: float) -> bool:
        """Whether to look for packages of ``group``: at first, after new ones were made, or to compare again."""
        if self.packages is None:
            return False
        if self._compiler is not None and (done := self._compiler.poll()) is not None:
            self._looked_for.discard(done)
            self._done.add(done)
        return group not in self._looked_for or self._doubted.get(group, math.inf) <= now_s

    def load(self, group: GroupKey, kind: Callable[[], Kind | None], sizes: Sequence[int]) -> tuple[int, ...]:
        """Load the packages of ``group`` and return their sizes; missing ones are queued for compilation."""
        if len(self._looked_for) >= LOOKED_KEPT:
            self._looked_for = set(self._proven)
            self._done.clear()
        self._looked_for.add(group)
        self._doubted.pop(group, None)
        loaded: tuple[int, ...] = ()
        if self._compiled is not None and not self._compiled.packages.is_empty:
            loaded = self._compiled.load(kind(), sizes)
        if self._compiler is not None and len(loaded) < len(sizes) and group not in self._done:
            self._compiler.enqueue(group, sizes)  # only once, as a package that fails to load will fail again
        return loaded

    def open_late(self, group: GroupKey, kind: Kind | None, curve: CostCurve) -> None:
        """Schedule packages of ``kind`` for loading at their first call; ``curve`` holds their sizes and costs."""
        self._late[group] = LatePackages(kind, curve, set(curve.buckets))

    def is_late(self, group: GroupKey) -> bool:
        """Return whether packages of ``group`` are opened by ``late_cover``."""
        return group in self._late

    def late_cover(self, group: GroupKey, num_rows: int, max_rows: int) -> tuple[int, ...]:
        """Return the sizes of calls for ``num_rows`` rows, with their packages open.

        Stored costs choose the sizes: measured ones change with the load, and then more packages would be opened.

        Returns:
            An empty tuple where one does not load; packages of ``group`` are not opened late any more.
        """
        late = self._late[group]
        cover = late.curve.cover(num_rows, max_rows)
        needed = sorted(late.unopened.intersection(cover))
        late.unopened.difference_update(needed)
        if self._compiled is None or len(self._compiled.load(late.kind, needed)) < len(needed):
            del self._late[group]
            return ()
        return cover

    def doubt(self, group: GroupKey, now_s: float) -> None:
        """Record that it is unclear whether ``group`` is faster."""
        logger.info("the speed of compiled calls could not be measured under load; it is measured again later")
        self._doubted[group] = now_s + DOUBT_S

    def take(self, group: GroupKey) -> None:
        """Use ``group`` for new images from now on."""
        self._proven.add(group)

    def remove(self, kind: Kind | None, sizes: Sequence[int]) -> None:
        """Delete the packages of ``kind`` for calls of ``sizes`` rows."""
        if self.packages is not None:
            self.packages.remove(kind, sizes)

    def close(self) -> None:
        """Stop compiling."""
        if self._compiler is not None:
            self._compiler.close()

    def forget(self, group: GroupKey) -> None:
        """Search for ``group`` again when it is next used."""
        self._proven.discard(group)
        self._late.pop(group, None)
        self._looked_for.discard(group)
        self._doubted.pop(group, None)


def is_deterministic(model: DiffusionModel, config: EngineConfig) -> bool:
    """Return whether the bytes of an image are independent of its neighbors; by default on a CPU."""
    return model.device.type == "cpu" if config.deterministic == "auto" else config.deterministic


def compiles_in_background(model: DiffusionModel, config: EngineConfig) -> bool:
    """Return whether shapes are compiled while the engine serves: not where a seed must keep its bytes.

    On CUDA that is the default. On an H200 compiled calls of 16 rows save 12 % of SDXL's time and 32 % of SD 1.5's.
    """
    is_on = config.compile == "background" or (config.compile == "auto" and model.device.type == "cuda")
    return is_on and not is_deterministic(model, config)


def check(
    network: Try, compiled: Try, sizes: Sequence[int], *, counts: Sequence[int], closeness: float, is_exact: bool
) -> Study:
    """Compare compiled calls with the ``network``'s and return which sizes may be used.

    Args:
        network: Makes calls by the network.
        compiled: Makes compiled calls.
        sizes: Numbers of rows of the packages.
        counts: Numbers of threads, the one to compare with first.
        closeness: Largest norm of the difference, relative to the norm of the network's output.
        is_exact: Whether a row must have the same bytes in every size and place; sizes that differ are left out.

    Raises:
        ArithmeticError: A compiled call differs by more than ``closeness``, or no package has a number of rows that can
            define the bytes of a row.
    """
    for size in sizes:
        expected = network(range(size), counts[0]).output
        yield
        got = compiled(range(size), counts[0]).output
        yield
        error = float((got - expected).norm() / expected.norm())
        if not error <= closeness:
            raise ArithmeticError(f"the compiled call of {size} rows is {error:.2g} off")
    facts_of_references: list[GroupFacts] = []
    references = [size for size in (SOLO, SHARED) if size in sizes]
    if is_exact and not references:
        raise ArithmeticError(
            f"there is no package of {SOLO} or of {SHARED} rows, which is needed for reproducible results"
        )
    for reference in references if is_exact else [None]:
        facts_of_references.append(
            (yield from study(compiled, sizes, reference=reference, counts=counts, is_patient=is_exact))
        )
        if len(facts_of_references[-1].buckets) == len(sizes):
            break
    return max(facts_of_references, key=lambda facts: (not facts.is_alone, len(facts.buckets)))


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
    """Check compiled calls, then time them in pairs with the ``network``'s, whose seconds ``curve`` learns.

    The ratio within the pairs decides which is faster, so that load on the machine cancels out; the facts are complete
    where the pairs agree. Their seconds are the least of the compiled calls, scaled to a machine as quiet as the one
    ``curve`` was measured on. Arguments and errors: see ``check``.
    """
    facts = yield from check(network, compiled, sizes, counts=counts, closeness=closeness, is_exact=is_exact)
    ratios: dict[int, list[float]] = {size: [] for size in sizes}
    least_s: dict[int, tuple[float, float]] = {}

    def pair(size: int) -> Generator[None, None, None]:
        plain_s = network(range(size), counts[0]).wall_s
        yield
        wall_s = compiled(range(size), counts[0]).wall_s
        yield
        curve.observe(size, plain_s)
        ratios[size].append(wall_s / plain_s)
        network_s, compiled_s = least_s.get(size, (plain_s, wall_s))
        for _ in range(REPEATS if len(sizes) > 1 else 0):  # warm, as between two steps
            compiled_s = min(compiled_s, compiled(range(size), counts[0]).wall_s)
            yield
        least_s[size] = min(network_s, plain_s), compiled_s

    for size in (*sizes,) * PAIRS:
        yield from pair(size)

    def at(share: float) -> GroupFacts:
        """Return the facts with the quantile ``share`` of each size's ratios."""
        ranked = {size: sorted(ratios[size])[round(share * (len(ratios[size]) - 1))] for size in sizes}
        return replace(facts, seconds={size: curve.seconds(size) * ratio for size, ratio in ranked.items()})

    def is_clear() -> bool:
        return _pays(at(0.25), curve, sizes) == _pays(at(0.75), curve, sizes)

    for size in () if is_clear() else (*sizes,) * (MOST_PAIRS - PAIRS):
        yield from pair(size)
    scale = median(curve.seconds(size) / network_s for size, (network_s, _) in least_s.items())
    seconds = {size: scale * compiled_s for size, (_, compiled_s) in least_s.items()}
    return replace(facts, seconds=seconds, is_complete=is_clear())


def _saved(facts: GroupFacts, network: CostCurve, sizes: Sequence[int]) -> float:
    """Return the share of the ``network``'s seconds that compiled calls save, over all ``sizes``."""
    compiled = CostCurve.of(facts, is_exact=True)
    return 1.0 - sum(compiled.total_s(size) / network.total_s(size) for size in sizes) / len(sizes)


def _pays(facts: GroupFacts, network: CostCurve, sizes: Sequence[int]) -> bool:
    return not facts.is_alone and _saved(facts, network, sizes) >= LEAST_SAVED


def is_worth(group: GroupKey, facts: GroupFacts, network: CostCurve, sizes: Sequence[int]) -> bool:
    """Whether compiled calls of ``group`` save something over the ``network``'s, all ``sizes`` taken together."""
    saved, does = _saved(facts, network, sizes), _pays(facts, network, sizes)
    shape = f"{group.width_px}x{group.height_px} pixels, {group.num_tokens} tokens"
    shape += f", adapters of rank {group.lora_rank}" * bool(group.lora_rank)
    logger.info("compiled calls of %s save %.0f %%, so they are%s used", shape, 100 * saved, "" if does else " not")
    return does
