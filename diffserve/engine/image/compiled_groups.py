"""Which groups are painted by compiled calls: those for which there are packages, once they are proven and faster."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Sequence
from statistics import median
from typing import Final

import torch
from msgspec.structs import replace
from torch import Tensor

from diffserve.config import EngineConfig
from diffserve.disk_cache import DiskCache
from diffserve.engine.image.buckets import CostCurve
from diffserve.engine.image.compiling import BackgroundCompiler
from diffserve.engine.image.task import GroupKey
from diffserve.runtime import DiffusionModel
from diffserve.runtime.unet.batch_invariance import SHARED, SOLO, GroupFacts, Study, Try, study
from diffserve.runtime.unet.call import Compiled, Kind, UNetArguments
from diffserve.runtime.unet.compiled import CompiledUNet, Packages
from diffserve.runtime.unet.graphs import CallGraphs, CudaRecord

CLOSE: Final = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""How far compiled calls may be from the network's own: the norm of the difference over the norm."""

PAIRS: Final = 3
MOST_PAIRS: Final = 9
"""Of calls, the network's and a compiled one, for each size: more are made while it is not clear who is faster."""
REPEATS: Final = 3
"""Of a pair's compiled call, where there are sizes to choose from."""

LEAST_SAVED: Final = 0.03
DOUBT_S: Final = 900.0
"""After which calls are timed again that were not clearly faster or slower: what disturbed them may be over."""
LOOKED_KEPT: Final = 256

logger = logging.getLogger(__name__)


class CompiledGroups:
    """The compiled counterparts of groups, as ``[engine] compile`` allows them.

    packages  where compiled calls are kept, ``None`` where they are not wanted
    graphs    recordings of calls, compiled or not, ``None`` where calls are made one by one
    """

    def __init__(self, model: DiffusionModel, config: EngineConfig) -> None:
        self.packages = None if config.compile == "off" else Packages(model, DiskCache.at(config.cache_dir))
        self._compiled = None if self.packages is None else CompiledUNet(self.packages)
        is_recorded = config.cuda_graphs and model.device.type == "cuda" and model.choice.is_unet_whole
        self.graphs = CallGraphs(CudaRecord(model.device)) if is_recorded else None
        self._plain = model.unet.plain
        can_be = self.packages is not None and self.packages.reason is None
        self._compiler = BackgroundCompiler(model, config) if can_be and config.compile == "background" else None
        self._looked_for: set[GroupKey] = set()
        self._done: set[GroupKey] = set()
        self._proven: set[GroupKey] = set()
        self._doubted: dict[GroupKey, float] = {}

    def of(self, group: GroupKey, *, is_watched: bool = False) -> Compiled | None:
        """What makes the calls of ``group``; ``None``: the network itself. ``is_watched``: somebody looks into it
        meanwhile, and would see nothing of a recording."""
        compiled = self._compiled.run if self._compiled is not None and group.is_compiled else None
        graphs, plain = self.graphs, self._plain
        if graphs is None or is_watched or group.lora_rank:  # its buffers would be filled with factors anew each time
            return compiled

        def make(call: UNetArguments) -> Tensor:
            output = compiled(call) if compiled else None
            return plain(call) if output is None else output

        return lambda call: graphs.run(call, make, is_compiled=group.is_compiled)

    @property
    def has_own_threads(self) -> bool:
        """Whether compiled calls run on the same threads whatever torch is told."""
        return self.packages is not None and self.packages.is_by_openvino

    @property
    def compiler(self) -> str:
        """Who makes packages here, and which version of it."""
        return self.packages.compiler if self.packages else ""

    def is_proven(self, group: GroupKey) -> bool:
        """Whether newcomers are painted in ``group``, which is compiled."""
        return group in self._proven

    def is_doubted(self, group: GroupKey) -> bool:
        """Whether it was not clear who is faster; that is looked at again."""
        return group in self._doubted

    def is_new(self, group: GroupKey, now_s: float) -> bool:
        """Whether packages for ``group`` are to be looked for, again where some were made meanwhile, or are doubted."""
        if self.packages is None:
            return False
        if self._compiler is not None and (done := self._compiler.poll()) is not None:
            self._looked_for.discard(done)
            self._done.add(done)
        return group not in self._looked_for or self._doubted.get(group, math.inf) <= now_s

    def load(self, group: GroupKey, kind: Callable[[], Kind | None], sizes: Sequence[int]) -> tuple[int, ...]:
        """Of ``sizes`` those for which there are packages, taken into use; the others are wanted to be compiled."""
        if len(self._looked_for) >= LOOKED_KEPT:
            self._looked_for = set(self._proven)
            self._done.clear()
        self._looked_for.add(group)
        self._doubted.pop(group, None)
        found: tuple[int, ...] = ()
        if self._compiled is not None and not self._compiled.packages.is_empty:
            found = self._compiled.load(kind(), sizes)
        if self._compiler is not None and len(found) < len(sizes) and group not in self._done:
            self._compiler.want(group, sizes)  # once: what does not load then would not the next time
        return found

    def doubt(self, group: GroupKey, now_s: float) -> None:
        """It is not clear whether ``group`` is faster."""
        logger.info("beside other work it was not clear whether compiled calls are faster, so it is looked at again")
        self._doubted[group] = now_s + DOUBT_S

    def take(self, group: GroupKey) -> None:
        """Newcomers are painted in ``group`` from now on."""
        self._proven.add(group)

    def close(self) -> None:
        """Compile nothing any more."""
        if self._compiler is not None:
            self._compiler.close()

    def forget(self, group: GroupKey) -> None:
        """Look for ``group`` anew when it comes again."""
        self._proven.discard(group)
        self._looked_for.discard(group)
        self._doubted.pop(group, None)


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

    Who is faster is judged by the ratio within the pairs, so that whatever disturbs both is in neither; the facts are
    complete where that is clear. Their seconds are the least of the compiled calls, on a machine as quiet as ``curve``
    has the network's: which size costs least a row is between compiled calls. Raises ArithmeticError where a compiled
    call is further than ``closeness`` from the network's.
    """
    ratios: dict[int, list[float]] = {size: [] for size in sizes}
    least_s: dict[int, tuple[float, float]] = {}

    def pair(size: int) -> Generator[None, None, tuple[Tensor, Tensor]]:
        wanted = network(range(size), counts[0])
        yield
        got = compiled(range(size), counts[0])
        yield
        curve.observe(size, wanted.wall_s)
        ratios[size].append(got.wall_s / wanted.wall_s)
        network_s, compiled_s = least_s.get(size, (wanted.wall_s, got.wall_s))
        for _ in range(REPEATS if len(sizes) > 1 else 0):  # as between two steps, its weights at hand
            compiled_s = min(compiled_s, compiled(range(size), counts[0]).wall_s)
            yield
        least_s[size] = min(network_s, wanted.wall_s), compiled_s
        return wanted.output, got.output

    for size in sizes:
        for _ in range(PAIRS):
            wanted, got = yield from pair(size)
        error = float((got - wanted).norm() / wanted.norm())
        if not error <= closeness:
            raise ArithmeticError(f"the compiled call of {size} rows is {error:.2g} off")
    found: list[GroupFacts] = []
    for reference in [size for size in (SOLO, SHARED) if size in sizes] if is_exact else [None]:
        found.append((yield from study(compiled, sizes, reference=reference, counts=counts)))
        if len(found[-1].buckets) == len(sizes):
            break
    facts = max(found, key=lambda facts: (not facts.is_alone, len(facts.buckets)))

    def at(share: float) -> GroupFacts:
        """With the ratio that ``share`` of the pairs are below."""
        ranked = {size: sorted(ratios[size])[round(share * (len(ratios[size]) - 1))] for size in sizes}
        return replace(facts, seconds={size: curve.seconds(size) * ratio for size, ratio in ranked.items()})

    def is_clear() -> bool:
        return _pays(at(0.25), curve, sizes) == _pays(at(0.75), curve, sizes)

    for size in () if is_clear() else (*sizes,) * (MOST_PAIRS - PAIRS):
        yield from pair(size)
    quieter = median(curve.seconds(size) / network_s for size, (network_s, _) in least_s.items())
    taken_s = {size: quieter * ours_s for size, (_, ours_s) in least_s.items()}
    return replace(facts, seconds=taken_s, is_complete=is_clear())


def _saved(facts: GroupFacts, network: CostCurve, sizes: Sequence[int]) -> float:
    """The share of the ``network``'s seconds that compiled calls save, all ``sizes`` taken together."""
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
