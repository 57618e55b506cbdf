"""Facts of each group of rows that may share a call: exact batch sizes, their costs, and the knee."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import NamedTuple

import torch
from msgspec.structs import replace

from diffserve.api.types import UNetPath
from diffserve.disk_cache import DiskCache
from diffserve.engine.image.buckets import NO_LIMIT, CostCurve, KneeCap, split, updated_estimate
from diffserve.engine.image.compiled_groups import CLOSE, CompiledGroups, check, is_deterministic, is_worth, prove
from diffserve.engine.image.compiling import PathChooser
from diffserve.engine.image.room import Room
from diffserve.engine.image.task import GroupKey
from diffserve.models.controlnets import WORK_SHARE
from diffserve.models.lora_layers import WHOLE
from diffserve.runtime import DiffusionModel
from diffserve.runtime.device_health import raise_if_sticky
from diffserve.runtime.memory import give_memory_back
from diffserve.runtime.precision import hardware_name
from diffserve.runtime.text.conditioning import Conditioner
from diffserve.runtime.threads import Threads, computing_on
from diffserve.runtime.unet.batch_invariance import (
    PAIR,
    SHARED,
    SOLO,
    FactsOnDisk,
    GroupFacts,
    InterruptedCallError,
    Predict,
    Study,
    Trial,
    Try,
    end_of,
    first_look,
    interrupted_by,
    reference_in,
    sizes_to_check,
    study,
    timed,
    with_layer_sums,
)
from diffserve.runtime.unet.call import Kind
from diffserve.runtime.unet.controlnet import ControlNetRunner
from diffserve.runtime.unet.graphs import graph_sizes
from diffserve.runtime.unet.random_rows import random_call, random_control_rows, random_rows
from diffserve.settings.config import EngineConfig

MOST_ROWS_CPU = 16
MOST_ROWS_DEVICE = 32
UNKNOWN_ROWS = 4
"""Rows of a group in one tick before it is measured, where bytes are not promised."""

MOST_TRIALS = 16
"""Calls at most that are made at start to choose a number of threads."""

FIRST_LOOK = "first look"
GROUPS_KEPT = 64
"""Groups remembered at once; one that was forgotten is read from disk, or measured, when it comes again."""

CHECK_LIMIT_CPU = 2e11
CHECK_LIMIT_DEVICE = 1e15
"""Parameters times latent cells above which the check would take many seconds: there one row fills the machine."""

PAIR_LIMIT_CPU = 2e12
"""Up to this value one row does not fill a CPU, so calls of the two rows of a guided image are checked."""

logger = logging.getLogger(__name__)


def most_rows(model: DiffusionModel, config: EngineConfig) -> int:
    """Return the largest number of rows of a call."""
    return config.max_rows or (MOST_ROWS_CPU if model.device.type == "cpu" else MOST_ROWS_DEVICE)


class CallFacts(NamedTuple):
    """Facts for calls of a group: its cost curve, and thread counts that give the same bytes, the reference first."""

    curve: CostCurve
    counts: tuple[int, ...]


class Groups:
    """A :class:`CostCurve` for each group: read from disk, or cautious until it is measured, a UNet call at a time.

    Images of a new group are generated at once: row by row in deterministic mode, else a few rows together. ``control``
    gives a ControlNet by its digest, or raises KeyError.
    """

    def __init__(
        self,
        model: DiffusionModel,
        config: EngineConfig,
        conditioner: Conditioner,
        room: Room,
        threads: Threads | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model = model
        self._clock = clock
        self.conditioner = conditioner
        self.room = room
        self.threads = threads or Threads()
        self.on_cpu = model.device.type == "cpu"
        self.is_deterministic = is_deterministic(model, config)
        self.most_rows = most_rows(model, config)
        self.has_fixed_cap = config.max_rows is not None
        self._knee_cap = KneeCap(self.most_rows, config.policy)
        self._disk = FactsOnDisk(DiskCache.at(config.cache_dir), self._circumstances(config))
        self.compiled = CompiledGroups(model, config)
        packages = self.compiled.packages
        self.paths = None if packages is None else PathChooser(model, config, packages, self)
        self.control: Callable[[str], ControlNetRunner] = dict[str, ControlNetRunner]().__getitem__
        if (graphs := self.compiled.graphs) is not None:
            graphs.sizes = () if self.is_deterministic else graph_sizes(self.most_rows)
            room.recorded_bytes = lambda: (graphs.pool_bytes, graphs.num_bytes)
        self._facts_by_group: OrderedDict[GroupKey, CallFacts] = OrderedDict()
        self._unmeasured: OrderedDict[GroupKey, Study | None] = OrderedDict()
        width_px, height_px = model.info.good_sizes[0]
        self._native = GroupKey(height_px, width_px, model.text.window_tokens)
        self._first: GroupFacts | None = None

    def learn(self, group: GroupKey) -> None:
        """Measure ``group`` now, unless it is measured already."""
        self.facts_of(group)
        while group in self._unmeasured:
            self.study(group)

    def is_unmeasured(self, group: GroupKey) -> bool:
        """Whether ``group`` is still to be measured."""
        return group in self._unmeasured

    def study(self, group: GroupKey | None = None, has_arrived: Callable[[], bool] | None = None) -> bool:
        """Make one UNet call to measure ``group``, or the shape that has waited longest.

        Args:
            group: The group to measure, ``None`` for the oldest.
            has_arrived: Interrupts the call as soon as it returns true; the measurement is then repeated later.

        Returns:
            Whether there was something to measure.
        """
        if group is None:
            group = next(iter(self._unmeasured), None)
        if group is None or group not in self._unmeasured:
            return False
        measurement = self._unmeasured[group]
        if measurement is None:
            measurement = self._unmeasured[group] = self._begin(group)
        if group.control and not self._has(group.control):  # measured when it comes again
            del self._unmeasured[group]
            self._facts_by_group.pop(group, None)
            return True
        try:
            with nullcontext() if has_arrived is None else interrupted_by(has_arrived):
                next(measurement)
        except StopIteration as end:
            self._settle(group, end.value)
        except InterruptedCallError:
            self._unmeasured[group] = None
        except Exception as error:  # image requests report errors of the model; here the shape only stays unmeasured
            raise_if_sticky(error)
            logger.warning("a shape could not be measured: %s", type(error).__name__, exc_info=error)
            del self._unmeasured[group]
        return True

    def best(self, group: GroupKey) -> GroupKey:
        """Return ``group``, or its compiled counterpart if its calls are compiled.

        Calls with adapters of no rank are never compiled.
        """
        if group.lora_rank == WHOLE:
            return group
        compiled = group._replace(is_compiled=True)
        if self.compiled.is_measured:
            return compiled if self._is_measured_as_faster(compiled) else group
        return compiled if self.paths is not None and self.paths.is_compiled(group) else group

    def _is_measured_as_faster(self, compiled: GroupKey) -> bool:
        if self.compiled.is_new(compiled, self._clock()):
            sizes = self.load_packages(compiled)
            facts = self._facts(self._name_of_packages(compiled, sizes)) if sizes else None
            if facts is not None:
                self.take(compiled, facts)
            elif sizes:
                self._unmeasured[compiled] = None
        return self.compiled.is_proven(compiled)

    @property
    def unet_paths(self) -> tuple[UNetPath, ...]:
        """Paths chosen so far; none if compiled calls are used once measured as faster."""
        return () if self.paths is None or self.compiled.is_measured else self.paths.paths

    def prepare_paths(self, native: GroupKey) -> None:
        """Choose the paths of stored shapes and of ``native`` before the engine serves; packages may be built."""
        if self.paths is not None and not self.compiled.is_measured:
            self.paths.prepare(native)
        if self.is_deterministic:
            self._reference_of(native)  # a few calls now, and none in the first request of another shape

    def least_rows(self, width_px: int, height_px: int) -> int:
        """Return the rows of the smallest call for an image of this size, as far as known."""
        is_free = not self.is_deterministic or self._first is None
        group = GroupKey(height_px, width_px, self.model.text.window_tokens)
        return SOLO if is_free or self._is_large(group) else self._reference_of(group)

    def sizes_to_compile(self, group: GroupKey) -> tuple[int, ...]:
        """Numbers of rows for which a package is useful."""
        return (SOLO,) if self._is_large(group) else sizes_to_check(self.most_rows)

    def choose_threads(self, group: GroupKey) -> None:
        """Find out with calls of ``group`` on how many threads to begin; a few calls on a CPU, else none."""
        curve, counts = self.facts_of(group)
        if len(counts) < 2:
            return
        choice, size = self.threads.choice, curve.buckets[0]
        attempt = self._try(group)
        choice.begin_trial()
        for _ in range(MOST_TRIALS):
            count = choice.next_count((group, size), counts)
            choice.observe((group, size), count, attempt(range(size), count).wall_s)
            if not choice.is_trying:
                return

    def between_calls(self, group: GroupKey) -> AbstractContextManager[None]:
        """Return a context for work between calls of ``group``: one thread, if the calls have their own threads."""
        has_own = group.is_compiled and self.compiled.has_own_threads
        return computing_on(1) if has_own else nullcontext()

    def row_cap(self, group: GroupKey, *, may_probe: bool = True) -> int:
        """Rows that a tick of ``group`` may hold: as configured, else the knee of its curve. See ``TickCosts``."""
        if self.has_fixed_cap:
            return self.most_rows
        return self._knee_cap.of(self.facts_of(group).curve, may_probe=may_probe and not self.is_unmeasured(group))

    def record_overhead(self, seconds: float) -> None:
        """Record the seconds that a tick takes outside its UNet calls; only on a CPU, where calls are synchronous."""
        if self.on_cpu:
            self._knee_cap.overhead_s = updated_estimate(self._knee_cap.overhead_s, max(seconds, 0.0))

    def call_s(self, group: GroupKey, num_rows: int) -> float:
        """Return the estimated seconds of ``num_rows`` rows of ``group``, without measuring anything.

        For an unknown group the estimate comes from a known group of its size, else from one of the native size, scaled
        by pixels; it is 0 where neither is known. For controlled groups the calls of a ControlNet are included.
        """
        network = group._replace(is_controlled=False)
        similar = next((candidate for candidate in (group, network) if candidate in self._facts_by_group), None)
        similar = similar or self._most_similar(group, group) or self._most_similar(self._native, group)
        if similar is None:
            return 0.0
        pixels = group.height_px * group.width_px / (similar.height_px * similar.width_px)
        share = 1.0 + WORK_SHARE * group.is_controlled
        return share * pixels * self._facts_by_group[similar].curve.total_s(num_rows)

    def _most_similar(self, size: GroupKey, group: GroupKey) -> GroupKey | None:
        """Return the known group with the canvas of ``size`` that is most similar to ``group``.

        Preferred are groups with the same depth, then with the same adapter rank, then compiled ones, then the latest.
        """

        def rank(other: GroupKey) -> tuple[bool, bool, bool]:
            return other.is_shallow == group.is_shallow, other.lora_rank == group.lora_rank, other.is_compiled

        candidates = [
            other
            for other in self._facts_by_group
            if other[:2] == size[:2] and not other.control and (self.compiled.is_proven(other) or not other.is_compiled)
        ]
        return max(reversed(candidates), key=rank, default=None)

    def describe(self) -> dict[GroupKey, tuple[int, ...]]:
        """Bucket sizes in use, by group."""
        return {group: facts.curve.buckets for group, facts in tuple(self._facts_by_group.items())}

    def facts_of(self, group: GroupKey) -> CallFacts:
        """Return the facts of ``group``; a new group is scheduled for measurement."""
        if group not in self._facts_by_group:
            self._facts_by_group[group] = self._read(group) or self._guess(group)
            if len(self._facts_by_group) > GROUPS_KEPT:
                forgotten, _ = self._facts_by_group.popitem(last=False)
                self._unmeasured.pop(forgotten, None)
                self.compiled.forget(forgotten)
        self._facts_by_group.move_to_end(group)
        return self._facts_by_group[group]

    def load_packages(self, group: GroupKey) -> tuple[int, ...]:
        """Load the packages of ``group`` and return the numbers of rows that they serve."""
        return self.compiled.load(group, lambda: self._kind(group), self.sizes_to_compile(group))

    def take_unopened(self, group: GroupKey) -> bool:
        """Use the packages of ``group``, opening each before the first call of its size, where disk has their facts.

        The package for the two rows of a single image is opened now.

        Returns:
            False where facts are missing or that package does not load: ``load_packages`` and ``checked`` are needed.
        """
        packages = self.compiled.packages
        if packages is None or not packages.is_by_openvino:  # others are made of packages of several sizes
            return False
        kind = self._kind(group)
        facts = self._facts(
            self._name_of_packages(group, packages.sizes_with_files(kind, self.sizes_to_compile(group)))
        )
        if facts is None or facts.is_alone:
            return False
        self.compiled.open_late(group, kind, CostCurve.of(facts, is_exact=True))
        if not self.compiled.late_cover(group, PAIR, NO_LIMIT):
            return False
        self.take(group, facts)
        return True

    def calls(self, group: GroupKey, num_rows: int, max_rows: int) -> list[tuple[int, int, int]]:
        """Return (start, stop, bucket) of each call for ``num_rows`` rows of ``group``, with its package open.

        Args:
            group: the group of all rows.
            num_rows: the number of rows.
            max_rows: rows for which a call has memory.
        """
        if self.compiled.is_late(group):
            if cover := self.compiled.late_cover(group, num_rows, max_rows):
                return split(num_rows, cover)
            with suppress(ArithmeticError):  # the network then makes the calls of a size without a package
                self._facts_by_group[group] = self._read(group) or self._facts_by_group[group]
        most_rows = max(2, self.most_rows)  # a tiled image has more rows
        return self.facts_of(group).curve.calls(num_rows, min(max_rows, most_rows))

    def _name_of_packages(self, group: GroupKey, sizes: Sequence[int]) -> str:
        """Return the name on disk of the facts of ``group`` computed by packages of ``sizes`` rows."""
        return f"{tuple(group)} of {tuple(sizes)} by {self.compiled.compiler}"

    def checked(self, group: GroupKey, sizes: Sequence[int]) -> GroupFacts:
        """Return the facts of packages of ``sizes`` rows, from disk or checked now. Raises ArithmeticError."""
        name = self._name_of_packages(group, sizes)
        facts = self._facts(name)
        if facts is None:
            facts = end_of(
                check(
                    self._try(group._replace(is_compiled=False)),
                    self._try(group),
                    sizes,
                    counts=self._compiled_counts,
                    closeness=CLOSE[self.model.dtype],
                    is_exact=self.is_deterministic,
                )
            )
            if facts.is_complete:
                self._disk.write(name, facts)
        return facts

    @property
    def _compiled_counts(self) -> tuple[int, ...]:
        return self.threads.counts[:1] if self.compiled.has_own_threads else self.threads.counts

    def prove(self, group: GroupKey) -> bool:
        """Check and time the packages of ``group`` against the network; return whether they are used.

        Used packages keep their facts on disk. Slower and wrong ones are deleted, for a package that exists is used;
        where other load hides which is faster, they are kept and used.
        """
        sizes = self.load_packages(group)
        try:
            facts = end_of(self._proof(group, sizes))
        except ArithmeticError as error:
            logger.warning("packages are deleted: %s", error)
        else:
            curve = self.facts_of(group._replace(is_compiled=False)).curve
            is_unclear = not facts.is_complete and not facts.is_alone
            if is_unclear or is_worth(group, facts, curve, sizes):
                self.take(group, facts)
                self._disk.write(self._name_of_packages(group, sizes), replace(facts, is_complete=True))
                return True
        self.compiled.remove(self._kind(group), self.sizes_to_compile(group))
        return False

    def _proof(self, group: GroupKey, sizes: Sequence[int]) -> Study:
        plain = group._replace(is_compiled=False)
        return prove(
            self._try(plain),
            self._try(group),
            sizes,
            counts=self._compiled_counts,
            closeness=CLOSE[self.model.dtype],
            curve=self.facts_of(plain).curve,
            is_exact=self.is_deterministic,
        )

    def _kind(self, group: GroupKey) -> Kind | None:
        return random_call(self.model, group.shape, 1, self.conditioner, group.lora_rank).kind

    def take(self, group: GroupKey, facts: GroupFacts) -> None:
        """Use the loaded packages of ``group``, which have ``facts``, from now on."""
        self._facts_by_group[group] = CallFacts(CostCurve.of(facts, is_exact=True), facts.counts)
        self.compiled.take(group)

    def _read(self, group: GroupKey) -> CallFacts | None:
        """Return the facts from disk, or those that need no measurement."""
        if group.is_compiled:
            checked = self.checked(group, self.load_packages(group))
            return CallFacts(CostCurve.of(checked, is_exact=True), checked.counts)
        if self._is_large(group):
            facts = self._pair(group) if self.is_deterministic and self._work(group) <= PAIR_LIMIT_CPU else None
            if facts is not None:
                return self._call_facts(group, facts)
            return CallFacts(CostCurve((SOLO,), is_exact=self.is_deterministic), self._free_counts())
        facts = self._facts(_name(group))
        if facts is None or (self.is_deterministic and self._reference_of(group) not in facts.buckets):
            return None
        return self._call_facts(group, facts)

    def _call_facts(self, group: GroupKey, facts: GroupFacts) -> CallFacts:
        """Return the facts of ``group`` from ``facts``, which were measured without rankless adapters."""
        # whether the products of whole changes have the same bytes on other numbers of threads was not measured
        counts = self._free_counts() if group.lora_rank == WHOLE else facts.counts
        return CallFacts(CostCurve.of(facts, is_exact=self.is_deterministic), counts)

    def _facts(self, name: str) -> GroupFacts | None:
        """Return the facts stored on disk under ``name``, if they fit the thread counts of this machine."""
        facts = self._disk.read(name)
        return facts if facts is not None and set(facts.counts) <= set(self.threads.counts) else None

    def _guess(self, group: GroupKey) -> CallFacts:
        """Return facts that hold before any measurement, and schedule one."""
        self._unmeasured[group] = None
        if not self.is_deterministic:
            sizes = sizes_to_check(min(UNKNOWN_ROWS, self.most_rows))
            return CallFacts(CostCurve(sizes, is_exact=False), self._free_counts())
        reference = self._reference_of(group)
        if group == self._native and self._first is not None:
            return CallFacts(CostCurve.of(self._first, is_exact=True), self._first.counts)
        return CallFacts(CostCurve((reference,), is_alone=True), self._free_counts())

    def _free_counts(self) -> tuple[int, ...]:
        """Return the thread counts that may be used before any are known to give the same bytes."""
        return self.threads.counts[:1] if self.is_deterministic else self.threads.counts

    def _begin(self, group: GroupKey) -> Study:
        if group.is_compiled:
            return self._proof(group, self.load_packages(group))
        reference = self._reference_of(group) if self.is_deterministic else None
        sizes = [size for size in sizes_to_check(self.most_rows) if size <= self.room.rows(group)]
        return study(self._try(group, is_strict=True), sizes, reference=reference, counts=self.threads.counts)

    def _settle(self, group: GroupKey, facts: GroupFacts) -> None:
        del self._unmeasured[group]
        if group.is_compiled:
            network = self.facts_of(group._replace(is_compiled=False)).curve
            if not facts.is_complete:
                self.compiled.doubt(group, self._clock())
            elif is_worth(group, facts, network, self.sizes_to_compile(group)):
                self.take(group, facts)
                self._disk.write(self._name_of_packages(group, self.load_packages(group)), facts)
            return
        self._facts_by_group[group] = self._call_facts(group, facts)
        if facts.is_complete and self.room.rows(group) >= self.most_rows:
            self._disk.write(_name(group), facts)

    def _try(self, group: GroupKey, *, is_strict: bool = False) -> Try:
        """Return a function that makes a UNet call on random rows of ``group``; no memory is held between calls.

        Args:
            group: The group to call.
            is_strict: In 16 bits, return the output of a second call that includes sums of its layers, for comparison.
        """
        num_rows = max(self.most_rows, SHARED)
        has_sums = is_strict and self.is_deterministic and self.model.dtype.itemsize == 2

        def attempt(rows: range, num_threads: int) -> Trial:
            predict = self._predict(group, num_rows, rows)
            with computing_on(num_threads):
                trial = timed(predict, self._clock)(rows, num_threads)
                if has_sums:
                    network = self.control(group.control).network if group.control else self.model.unet.network
                    with nullcontext() if self.compiled.graphs is None else self.compiled.graphs.bypassed():
                        trial = trial._replace(output=with_layer_sums(network, lambda: predict(rows)))
                return trial

        return attempt

    def _has(self, digest: str) -> bool:
        try:
            return bool(self.control(digest))
        except KeyError:
            return False

    def _predict(self, group: GroupKey, num_rows: int, rows: range) -> Predict:
        if group.control:
            return random_control_rows(self.model, self.control(group.control), group.shape, num_rows, rows)
        return random_rows(
            self.model,
            group.shape,
            num_rows,
            self.conditioner,
            rows,
            self.compiled.of(group),
            recorder=self.compiled.recorder(group),
            is_shallow=group.is_shallow,
            lora_rank=group.lora_rank,
            is_controlled=group.is_controlled,
        )

    def _reference_of(self, group: GroupKey) -> int:
        """Return the number of rows of the calls that define a row's bytes: one number for all multi-row groups."""
        if self._is_large(group) or self._is_large(self._native):
            return SOLO
        if self._first is None:
            self._first = self._facts(FIRST_LOOK) or self._look()
        return reference_in(self._first.buckets)

    def _look(self) -> GroupFacts:
        """Measure the native size for the first time and store the result. If memory runs out twice, rows run alone."""
        for _ in range(2):
            facts = first_look(self._try(self._native, is_strict=True), self.threads.counts)
            if facts.seconds:
                facts = self._facts(FIRST_LOOK) or facts  # another engine may have stored its own meanwhile
                self._disk.write(FIRST_LOOK, facts)
                break
            give_memory_back(self.model.device)
        return facts

    def _pair(self, group: GroupKey) -> GroupFacts | None:
        """Return facts of ``group`` if calls of two rows are exact, by two stored measurements, else ``None``."""
        facts = self._facts(_name(group))
        if facts is None:
            counts = self._free_counts()
            facts = end_of(
                study(self._try(group, is_strict=True), (PAIR,), reference=PAIR, counts=counts, is_patient=True)
            )
            if facts.is_complete:
                self._disk.write(_name(group), facts)
        return facts if facts.is_complete and not facts.is_alone else None

    def _is_large(self, group: GroupKey) -> bool:
        return self._work(group) > (CHECK_LIMIT_CPU if self.on_cpu else CHECK_LIMIT_DEVICE)

    def _work(self, group: GroupKey) -> float:
        """Return a measure of a row's work: parameters times latent cells."""
        factor = self.model.info.vae_factor
        return self.model.info.num_parameters * (group.height_px // factor) * (group.width_px // factor)

    def _circumstances(self, config: EngineConfig) -> str:
        """Return all that costs and exactness depend on except the shape, as the key of stored facts."""
        model = self.model
        kind = "exact" if self.is_deterministic else "free"
        machine = f"{hardware_name(model.device)} torch {torch.__version__} threads {self.threads.counts}"
        return f"{model.digest} {model.choice.dtype} {config.cross_attention} {kind} {self.most_rows} {machine}"


def _name(group: GroupKey) -> str:
    """Return the name of the facts of ``group`` on disk, without adapters that have no rank."""
    lora = f" lora {group.lora_rank}" if group.lora_rank > 0 else ""
    control = f" control {group.control}" if group.control else " controlled" * group.is_controlled
    shape = group.height_px, group.width_px, group.num_tokens
    return f"{shape}{' shallow' * group.is_shallow}{lora}{control}"
