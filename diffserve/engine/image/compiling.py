"""Compile UNet calls for shapes: here and now (``diffserve warm``), or beside an engine that serves on meanwhile."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import IO, Any, Final

import msgspec
import torch

from diffserve.config import EngineConfig
from diffserve.disk_cache import DiskCache
from diffserve.engine.image.task import GroupKey
from diffserve.runtime import DiffusionModel, load_model
from diffserve.runtime.loading.library_imports import import_lean
from diffserve.runtime.text.conditioning import Conditioner, make_conditioner
from diffserve.runtime.unet.compiled import Packages
from diffserve.runtime.unet.random_rows import random_call
from diffserve.types import ModelProfile

LOWEST_PRIORITY: Final = 19
GROUPS_KEPT: Final = 16
"""That wait to be compiled; the oldest are forgotten first, and come again when they are painted again."""

logger = logging.getLogger(__name__)


@torch.no_grad()
def compile_group(
    model: DiffusionModel,
    conditioner: Conditioner,
    packages: Packages,
    group: GroupKey,
    sizes: Sequence[int],
    told: Callable[[int], None] = lambda num_rows: None,
) -> None:
    """Have a package of every one of ``sizes`` of ``group`` on disk; ``told`` of each once it is there.

    Raises ConfigError where none can be made, and what the compiler raises.
    """
    for num_rows in sizes:
        packages.compile(random_call(model, group.shape, num_rows, conditioner, group.lora_rank))
        told(num_rows)
    packages.finish()


class BackgroundCompiler:
    """Compiles one group after the other in a process of the lowest priority, which ends with this one."""

    def __init__(self, model: DiffusionModel, config: EngineConfig) -> None:
        self._order: dict[str, Any] = {
            "path": model.profile.path,
            "profile": msgspec.to_builtins(model.profile),
            "dtype": model.choice.dtype,
            "device": str(model.device),
            "cross_attention": config.cross_attention,
            "cache_dir": config.cache_dir,
        }
        self._wanted: OrderedDict[GroupKey, tuple[int, ...]] = OrderedDict()
        self._process: subprocess.Popen[str] | None = None
        self._errors: IO[bytes] | None = None
        self._group: GroupKey | None = None
        self._is_broken = False

    def want(self, group: GroupKey, sizes: Sequence[int]) -> None:
        """Compile calls of ``group`` of ``sizes`` rows when its turn comes."""
        self._wanted.setdefault(group, tuple(sizes))
        while len(self._wanted) > GROUPS_KEPT:
            self._wanted.popitem(last=False)

    def poll(self) -> GroupKey | None:
        """Go on with the next group where one is done, which is returned. Returns at once."""
        done = None
        if self._process is not None:
            code = self._process.poll()
            if code is None:
                return None
            if code == 0:
                done = self._group
            else:
                self._is_broken = True  # the next group would fare no better
                logger.warning("compiling failed, so the UNet stays as it is: %s", self._last_words(code))
            self._end()
        if self._wanted and not self._is_broken:
            try:
                self._begin(*self._wanted.popitem(last=False))
            except OSError as error:  # a full disk, no more processes: nobody's picture fails for that
                self._is_broken = True
                logger.warning("nothing can be compiled, so the UNet stays as it is: %s", error)
        return done

    def close(self) -> None:
        """End what is going on."""
        self._is_broken = True
        if self._process is not None:
            self._process.kill()
            self._end()

    def _end(self) -> None:
        assert self._process is not None
        assert self._errors is not None
        with self._process, self._errors:
            self._process = None

    def _begin(self, group: GroupKey, sizes: tuple[int, ...]) -> None:
        self._group = group
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
        self._process.stdin.write(json.dumps({**self._order, "group": group, "sizes": sizes}) + "\n")
        self._process.stdin.flush()  # and stays open: its end tells the other side that we are gone

    def _last_words(self, code: int) -> str:
        assert self._errors is not None
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {code}"


def main() -> None:
    """Compile what one line of standard input says; end, with all compilers, as soon as standard input does."""
    if hasattr(os, "nice"):
        os.nice(LOWEST_PRIORITY)
    torch.set_num_threads(1)
    import_lean()  # the process is this compiler's own
    order = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()
    cache = DiskCache.at(order["cache_dir"])
    profile = msgspec.convert(order["profile"], ModelProfile)
    model = load_model(order["path"], dtype=order["dtype"], device=order["device"], profile=profile, cache=cache)
    config = EngineConfig(cross_attention=order["cross_attention"])
    conditioner = make_conditioner(model, config, is_exact=True)
    compile_group(model, conditioner, Packages(model, cache), GroupKey(*order["group"]), order["sizes"])


def _end_with_input() -> None:
    sys.stdin.read()
    import signal

    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
