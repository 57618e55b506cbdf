"""Compiled UNet calls: compilers in this process or in a child, and the choice between compiled calls and the network.

The two round differently, so the path of a shape is chosen once and for good, without timing: compiled where packages
exist and were checked, or where a server builds them before it reports ready. A server stores its paths
(``store/unet_paths.py``) and passes them to every engine that it starts; ``diffserve warm`` changes them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, NamedTuple, Protocol

import msgspec
import torch

from diffserve.api.types import ModelProfile, UNetPath
from diffserve.disk_cache import DiskCache
from diffserve.engine.image.task import GroupKey
from diffserve.runtime import DiffusionModel, choose_for, load_model
from diffserve.runtime.loading.library_imports import import_lean
from diffserve.runtime.text.conditioning import Conditioner, make_conditioner
from diffserve.runtime.unet.batch_invariance import GroupFacts
from diffserve.runtime.unet.compiled import Packages
from diffserve.runtime.unet.memory_format import set_memory_format
from diffserve.runtime.unet.outline import load_outline
from diffserve.runtime.unet.random_rows import random_call
from diffserve.settings.config import EngineConfig

LOWEST_PRIORITY: Final = 19
GROUPS_KEPT: Final = 16
"""Maximum number of groups that wait to be compiled; the oldest are dropped, and queued again when next used."""

logger = logging.getLogger(__name__)


@torch.no_grad()
def compile_group(
    model: DiffusionModel,
    conditioner: Conditioner,
    packages: Packages,
    group: GroupKey,
    sizes: Sequence[int],
    on_package: Callable[[int], None] = lambda num_rows: None,
) -> None:
    """Compile and store a package of each of ``sizes`` of ``group``; ``on_package`` is called with each finished size.

    Raises ConfigError if no package can be made, and the compiler's errors.
    """
    for num_rows in sizes:
        packages.compile(random_call(model, group.shape, num_rows, conditioner, group.lora_rank))
        on_package(num_rows)
    packages.finish()


class CompileError(Exception):
    """A compiler's process failed; the message is its last line."""


class CompilerProcess:
    """A process that compiles one group and ends; it is killed when this process ends."""

    def __init__(self, order: dict[str, Any]) -> None:
        """Start the process with ``order`` (see ``order_for``). Raises OSError if it cannot be started."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # read when the process is over
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()  # stays open: the child exits when it closes

    def exit_code(self, timeout_s: float | None = None) -> int | None:
        """Return the exit code, after waiting up to ``timeout_s``; ``None`` while the process runs."""
        try:
            return self._process.poll() if timeout_s is None else self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def last_line(self, code: int) -> str:
        """Return the signal that ended the process, or else the last line that it wrote to standard error."""
        if code < 0:
            return f"the compiler process was killed by {signal.Signals(-code).name}"
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {code}"

    def close(self) -> None:
        """Kill the process if it still runs, and release what belongs to it."""
        self._process.kill()
        with self._process, self._errors:
            pass


def order_for(
    model: DiffusionModel, config: EngineConfig, group: GroupKey, sizes: Sequence[int], *, in_background: bool
) -> dict[str, Any]:
    """Return the job of a compiler process: compile calls of ``group`` of ``sizes`` rows.

    For an engine on a GPU the process builds the UNet without its weights, which packages do not contain there.
    """
    return {
        "path": model.profile.path,
        "profile": msgspec.to_builtins(model.profile),
        "dtype": model.choice.dtype,
        "device": str(model.device),
        "cross_attention": config.cross_attention,
        "memory_format": model.unet.memory_format,
        "cache_dir": config.cache_dir,
        "in_background": in_background,
        "needs_weights": model.device.type == "cpu",
        "group": group,
        "sizes": tuple(sizes),
    }


def compile_in_child(
    model: DiffusionModel, config: EngineConfig, group: GroupKey, sizes: Sequence[int], timeout_s: float
) -> None:
    """Compile calls of ``group`` of ``sizes`` rows in a child process and wait for it, at most ``timeout_s`` seconds.

    Raises:
        CompileError: the child failed, took too long, or could not be started.
    """
    try:
        child = CompilerProcess(order_for(model, config, group, sizes, in_background=False))
    except OSError as error:
        raise CompileError(f"no compiler could be started: {error}") from error
    try:
        code = child.exit_code(timeout_s)
        if code is None:
            raise CompileError(f"it took longer than {timeout_s:.0f} s")
        if code:
            raise CompileError(child.last_line(code))
    finally:
        child.close()


class BackgroundCompiler:
    """Compiles groups one by one in a process of the lowest priority, which ends with this one."""

    def __init__(self, model: DiffusionModel, config: EngineConfig) -> None:
        self._model = model
        self._config = config
        self._queue: OrderedDict[GroupKey, tuple[int, ...]] = OrderedDict()
        self._process: CompilerProcess | None = None
        self._group: GroupKey | None = None
        self._is_broken = False

    def enqueue(self, group: GroupKey, sizes: Sequence[int]) -> None:
        """Compile calls of ``group`` of ``sizes`` rows when its turn comes."""
        self._queue.setdefault(group, tuple(sizes))
        while len(self._queue) > GROUPS_KEPT:
            self._queue.popitem(last=False)

    def poll(self) -> GroupKey | None:
        """Return a finished group, if any, and start the next one; does not wait."""
        done = None
        if self._process is not None:
            code = self._process.exit_code()
            if code is None:
                return None
            if code == 0:
                done = self._group
            else:
                self._is_broken = True  # the next group would fare no better
                logger.warning("compiling failed, so the UNet is not compiled: %s", self._process.last_line(code))
            self._end()
        if self._queue and not self._is_broken:
            try:
                self._begin(*self._queue.popitem(last=False))
            except OSError as error:  # a full disk or no more processes must not fail images
                self._is_broken = True
                logger.warning("nothing can be compiled, so the UNet is not compiled: %s", error)
        return done

    def close(self) -> None:
        """Stop the running compilation."""
        self._is_broken = True
        if self._process is not None:
            self._end()

    def _end(self) -> None:
        assert self._process is not None
        self._process.close()
        self._process = None

    def _begin(self, group: GroupKey, sizes: tuple[int, ...]) -> None:
        self._group = group
        self._process = CompilerProcess(order_for(self._model, self._config, group, sizes, in_background=True))


def main() -> None:
    """Compile the job on standard input; stop all compilers when standard input closes."""
    order = json.loads(sys.stdin.readline())
    if order["in_background"]:
        if hasattr(os, "nice"):
            os.nice(LOWEST_PRIORITY)
        torch.set_num_threads(1)
    import_lean()  # the process is this compiler's own
    threading.Thread(target=_end_with_input, daemon=True).start()
    cache = DiskCache.at(order["cache_dir"])
    profile = msgspec.convert(order["profile"], ModelProfile)
    if order["needs_weights"]:
        model = load_model(order["path"], dtype=order["dtype"], device=order["device"], profile=profile, cache=cache)
        set_memory_format(model, order["memory_format"], cache)
    else:
        choice = choose_for(order["path"], order["device"], order["dtype"], "none", cache)
        channels_last = order["memory_format"] == "channels_last"
        model = load_outline(order["path"], choice, profile=profile, channels_last=channels_last)
    config = EngineConfig(cross_attention=order["cross_attention"])
    conditioner = make_conditioner(model, config, is_exact=True)
    compile_group(model, conditioner, Packages(model, cache), GroupKey(*order["group"]), order["sizes"])


def _end_with_input() -> None:
    sys.stdin.read()
    os.killpg(0, signal.SIGKILL)


BUILD_TIMEOUT_S: Final = 600.0
"""A build that takes longer is given up, and the network itself is used. It takes 20 s on two quiet cores."""

PLAIN: Final = "plain"
COMPILED: Final = "compiled"

on_build: list[Callable[[float], None]] = []
"""Called before a build with the most seconds that it may take: an engine process tells its server."""


class PathChoice(NamedTuple):
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


def path_of(key: str, group: GroupKey, choice: PathChoice) -> UNetPath:
    """Return ``choice`` as the path of the calls of ``group``."""
    return UNetPath(
        key=key,
        height_px=group.height_px,
        width_px=group.width_px,
        num_tokens=group.num_tokens,
        lora_rank=group.lora_rank,
        path=choice.path,
        reason=choice.reason,
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
        self._paths: dict[tuple[str, int, int, int, int], UNetPath] = {}
        self._may_build = config.served_paths is not None and config.compile in ("auto", "background")

    @property
    def paths(self) -> tuple[UNetPath, ...]:
        """The paths of all shapes seen so far."""
        return tuple(self._paths.values())

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
        calls = path_of(self._key, group, PathChoice(PLAIN, "")).calls
        if calls not in self._paths:
            stored = self._stored.get(calls)
            if stored is not None and stored.path == PLAIN:
                self._paths[calls] = stored
                return stored
            has_builder = stored is not None or self._packages.is_by_openvino
            choice = self._open(group, builds=builds and self._may_build and has_builder)
            if stored is not None and choice.path == PLAIN:
                logger.error("calls of %s are stored as compiled, but %s", _shape(group), choice.reason)
            self._paths[calls] = path_of(self._key, group, choice)
        return self._paths[calls]

    def _open(self, group: GroupKey, *, builds: bool) -> PathChoice:
        """Take the packages of ``group`` into use, built first where they are missing and ``builds`` is true."""
        if self._packages.reason:
            return PathChoice(PLAIN, self._packages.reason)
        compiled = group._replace(is_compiled=True)
        sizes_to_compile, origin = self._calls.sizes_to_compile(compiled), "found in the cache folder"
        if self._config.served_paths is None and self._calls.take_unopened(compiled):
            return PathChoice(COMPILED, f"packages by {self._packages.compiler_name}, {origin}")
        sizes = self._calls.load_packages(compiled)
        if builds and len(sizes) < len(sizes_to_compile):
            origin = "built at start"
            failure = self._build(group, sizes_to_compile)
            sizes = self._calls.load_packages(compiled)
            if len(sizes) < len(sizes_to_compile):
                return PathChoice(PLAIN, failure or "a package that was just built cannot be loaded")
        if not sizes:
            return PathChoice(PLAIN, f"it has no packages; diffserve warm --size {_shape(group)} makes them")
        try:
            facts = self._calls.checked(compiled, sizes)
        except ArithmeticError as error:
            return PathChoice(PLAIN, str(error))
        if facts.is_alone:
            return PathChoice(PLAIN, "the result of a row depends on its position in a compiled call")
        self._calls.take(compiled, facts)
        return PathChoice(COMPILED, f"packages by {self._packages.compiler_name}, {origin}")

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


if __name__ == "__main__":
    main()
