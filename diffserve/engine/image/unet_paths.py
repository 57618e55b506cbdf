"""Chooses how the UNet calls of each shape are made: by the network itself, or by packages compiled ahead of time.

Both round differently, so a shape is decided once and for good. Nothing is timed for that: a shape is compiled where
packages exist and were checked, or where a server builds them before it reports ready. A server stores its choices
(``store/unet_paths.py``) and hands them to every engine it starts; ``diffserve warm`` changes them.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final, Literal, NamedTuple, Protocol

from diffserve.api.types import UNetPath
from diffserve.engine.image.compiling import CompileError, compile_in_child
from diffserve.engine.image.task import GroupKey
from diffserve.runtime import DiffusionModel
from diffserve.runtime.unet.batch_invariance import GroupFacts
from diffserve.runtime.unet.compiled import Packages
from diffserve.settings.config import EngineConfig

BUILD_TIMEOUT_S: Final = 600.0
"""A build that takes longer is given up, and the network itself is used. It takes 20 s on two quiet cores."""

PLAIN: Final = "plain"
COMPILED: Final = "compiled"

on_build: list[Callable[[float], None]] = []
"""Called before a build with the most seconds that it may take: an engine process tells its server."""

logger = logging.getLogger(__name__)


class Outcome(NamedTuple):
    """A path and the reason for it."""

    path: Literal["plain", "compiled"]
    reason: str


class CompiledCalls(Protocol):
    """Interface of the shape groups that the path chooser uses. Groups are passed with ``is_compiled`` set."""

    def sizes_to_compile(self, group: GroupKey) -> tuple[int, ...]:
        """Return the numbers of rows that packages of ``group`` are made for."""

    def load_packages(self, group: GroupKey) -> tuple[int, ...]:
        """Load the packages of ``group`` and return the numbers of rows that they serve."""

    def take_unopened(self, group: GroupKey) -> bool:
        """Use packages of ``group`` that were checked before, opening each when it is called; False without any."""

    def checked(self, group: GroupKey, sizes: Sequence[int]) -> GroupFacts:
        """Return the facts of packages of ``sizes`` rows, from disk or checked now. Raises ArithmeticError."""

    def take(self, group: GroupKey, facts: GroupFacts) -> None:
        """Use the loaded packages of ``group`` from now on."""


def path_key(model: DiffusionModel, packages: Packages, setting: str) -> str:
    """Return the digest of all that a choice depends on; ``setting`` is the value of ``[engine] compile``."""
    return hashlib.sha256(f"{model.digest} {packages.identity} {setting}".encode()).hexdigest()[:16]


def path_of(key: str, group: GroupKey, outcome: Outcome) -> UNetPath:
    """Return ``outcome`` as the path of the calls of ``group``."""
    return UNetPath(
        key=key,
        height_px=group.height_px,
        width_px=group.width_px,
        num_tokens=group.num_tokens,
        lora_rank=group.lora_rank,
        path=outcome.path,
        reason=outcome.reason,
    )


class PathChooser:
    """Chooses the path of each shape's UNet calls for one model."""

    def __init__(self, model: DiffusionModel, config: EngineConfig, packages: Packages, calls: CompiledCalls) -> None:
        self._model = model
        self._config = config
        self._packages = packages
        self._calls = calls
        self._key = path_key(model, packages, config.compile)
        self._stored = {path.calls: path for path in config.served_paths or () if path.key == self._key}
        self._chosen: dict[tuple[str, int, int, int, int], UNetPath] = {}
        self._may_build = config.served_paths is not None and config.compile in ("auto", "background")

    @property
    def chosen(self) -> tuple[UNetPath, ...]:
        """The paths of all shapes seen so far."""
        return tuple(self._chosen.values())

    def is_compiled(self, group: GroupKey) -> bool:
        """Whether the calls of ``group`` are compiled; chosen now if the shape is new."""
        return self._of(group).path == COMPILED

    def prepare(self, native: GroupKey) -> None:
        """Choose the paths of stored shapes and of the native one, and build packages that are missing."""
        stored = [path for path in self._stored.values() if path.path == COMPILED]
        for path in stored:
            self._of(GroupKey(path.height_px, path.width_px, path.num_tokens, lora_rank=path.lora_rank), builds=True)
        self._of(native, builds=True)

    def _of(self, group: GroupKey, *, builds: bool = False) -> UNetPath:
        calls = path_of(self._key, group, Outcome(PLAIN, "")).calls
        if calls not in self._chosen:
            stored = self._stored.get(calls)
            if stored is not None and stored.path == PLAIN:
                self._chosen[calls] = stored
                return stored
            has_builder = stored is not None or self._packages.is_by_openvino
            outcome = self._open(group, builds=builds and self._may_build and has_builder)
            if stored is not None and outcome.path == PLAIN:
                logger.error("calls of %s are stored as compiled, but %s", _shape(group), outcome.reason)
            self._chosen[calls] = path_of(self._key, group, outcome)
        return self._chosen[calls]

    def _open(self, group: GroupKey, *, builds: bool) -> Outcome:
        """Take the packages of ``group`` into use, built first where they are missing and ``builds`` is true."""
        if self._packages.reason:
            return Outcome(PLAIN, self._packages.reason)
        compiled = group._replace(is_compiled=True)
        sizes_to_compile, origin = self._calls.sizes_to_compile(compiled), "found in the cache folder"
        if self._config.served_paths is None and self._calls.take_unopened(compiled):
            return Outcome(COMPILED, f"packages by {self._packages.compiler_name}, {origin}")
        sizes = self._calls.load_packages(compiled)
        if builds and len(sizes) < len(sizes_to_compile):
            origin = "built at start"
            failure = self._build(group, sizes_to_compile)
            sizes = self._calls.load_packages(compiled)
            if len(sizes) < len(sizes_to_compile):
                return Outcome(PLAIN, failure or "a package that was just built cannot be loaded")
        if not sizes:
            return Outcome(PLAIN, f"it has no packages; diffserve warm --size {_shape(group)} makes them")
        try:
            facts = self._calls.checked(compiled, sizes)
        except ArithmeticError as error:
            return Outcome(PLAIN, str(error))
        if facts.is_alone:
            return Outcome(PLAIN, "bytes of a row depend on its place in a compiled call")
        self._calls.take(compiled, facts)
        return Outcome(COMPILED, f"packages by {self._packages.compiler_name}, {origin}")

    def _build(self, group: GroupKey, sizes: Sequence[int]) -> str:
        """Build packages in a child process; return the error message, or an empty string."""
        needed = sorted({size // self._packages.num_streams(size) for size in sizes})
        logger.info("compiling the UNet for %s, once; this takes about 20 s for a small model", _shape(group))
        for announce in on_build:
            announce(BUILD_TIMEOUT_S)
        started_s = time.monotonic()
        try:
            compile_in_child(self._model, self._config, group, needed, BUILD_TIMEOUT_S)
        except CompileError as error:
            logger.warning("the UNet is not compiled: %s", error)
            return f"compiling failed: {error}"
        logger.info("the UNet was compiled in %.0f s", time.monotonic() - started_s)
        return ""


def _shape(group: GroupKey) -> str:
    adapters = f" with adapters of rank {group.lora_rank}" if group.lora_rank else ""
    return f"{group.width_px}x{group.height_px}{adapters}"
