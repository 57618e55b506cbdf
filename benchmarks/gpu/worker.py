"""The process that runs rows of the GPU suite, and what a row is given: the device, models, and a place for results."""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TextIO

import torch

from benchmarks.gpu.drawn_models import load_drawn
from benchmarks.gpu.report import MOST_ERROR_CHARS
from diffserve.disk_cache import DiskCache
from diffserve.engine import Engine
from diffserve.runtime import DiffusionModel
from diffserve.runtime.device_health import is_sticky
from diffserve.runtime.unet.memory_format import set_memory_format
from diffserve.settings.config import EngineConfig

MEMORY_FORMAT: Final = "contiguous"
"""Of the UNets' convolutions, so that packages are compiled for the format that engines use. An engine would measure it
when it starts; the point "layouts" measures both."""

QUICK_ROWS: Final = 4
"""Rows of a call in a dry run: more would be measured first."""

DEVICE_LOST: Final = 7
"""Exit code of a worker whose CUDA context is broken: every later call would fail in it."""

MODELS: Final = {"sdxl": "sdxl-random", "sd15": "sd15-random"}
QUICK_MODELS: Final = {"sdxl": "tiny-xl-random", "sd15": "tiny-random"}


class NotMeasurableError(Exception):
    """A point cannot be measured here; the message says why."""


def numbered_device(name: str) -> torch.device:
    """Return the device called ``name``, with a number where it is not a CPU: some functions of torch ask for one."""
    device = torch.device(name)
    return device if device.type == "cpu" or device.index is not None else torch.device(device.type, 0)


class Bench:
    """The device, the models and the place for results that a row of the schedule uses.

    device  where models run
    quick   a dry run: tiny models in float32, few rows, few steps
    out     the folder of results
    work    a folder for files that are not results, shared by all processes of the run
    """

    def __init__(self, options: Mapping[str, Any], channel: TextIO) -> None:
        self.device = numbered_device(options["device"])
        self.quick = bool(options["quick"])
        self.out = Path(options["out"])
        self.work = Path(options["work"])
        self._channel = channel
        self._models: dict[str, DiffusionModel] = {}
        self._until_s = 0.0

    @property
    def on_gpu(self) -> bool:
        """Whether ``device`` is a CUDA device."""
        return self.device.type == "cuda"

    @property
    def dtype(self) -> str:
        """The 16-bit precision of the large models; float32 in a dry run."""
        return "float32" if self.quick else "bfloat16"

    @property
    def left_s(self) -> float:
        """Seconds until the deadline of the row."""
        return self._until_s - time.monotonic()

    def begin(self, seconds: float) -> None:
        """Start a row that has ``seconds``."""
        self._until_s = time.monotonic() + seconds
        if self.on_gpu and torch.cuda.is_available():
            torch.cuda.init()  # the counters of its memory exist only then

    def about(self, **entries: Any) -> None:
        """Add ``entries`` to the head of the document."""
        self._tell({"about": entries})

    def no_gpu(self, reason: str) -> None:
        """End the run: there is no GPU."""
        self._tell({"no_gpu": reason})

    def point(self, name: str, measure: Callable[[], Any], *, needs_s: float = 1.0) -> Any:
        """Measure one point of the row and send the result or the error. An error does not end the row.

        Args:
            name: Name of the point in the results.
            measure: Runs the measurement.
            needs_s: Expected seconds on the GPU of the schedule; the point is left out if less time is left.

        Returns:
            The result of ``measure``; ``None`` after an error and for a point that is left out.

        Raises:
            SystemExit: An error has made the device unusable.
        """
        if self.left_s < (0.0 if self.quick else needs_s):
            self._tell({"point": name, "left_out": f"{self.left_s:.0f} s were left, it takes about {needs_s:.0f} s"})
            return None
        started_s = time.monotonic()
        message: dict[str, Any] = {"point": name}
        result, is_lost = None, False
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        try:
            result = measure()
            message["result"] = result if isinstance(result, (dict, list, str, int, float)) else "done"
        except NotMeasurableError as reason:
            message["left_out"] = str(reason)
        except Exception as error:
            message["error"] = "".join(traceback.format_exception(error))[-MOST_ERROR_CHARS:]
            is_lost = is_sticky(error)
        message["wall_s"] = round(time.monotonic() - started_s, 1)
        if self.on_gpu and not is_lost:
            message["peak_gb"] = round(torch.cuda.max_memory_allocated(self.device) / 1e9, 2)
        self._tell(message)
        if is_lost:
            raise SystemExit(DEVICE_LOST)
        self.free_memory()
        return result

    def end(self, error: str | None) -> None:
        """Say that the row has ended."""
        self._tell({"error": error})

    def model(self, name: str) -> DiffusionModel:
        """Return the model ``name`` ("sdxl", "sd15") with drawn weights; loaded once."""
        if name not in self._models:
            names = QUICK_MODELS if self.quick else MODELS
            self._models[name] = load_drawn(names[name], self.work, self.device, self.dtype)
        self.as_served(self._models[name])
        return self._models[name]

    def as_served(self, model: DiffusionModel) -> None:
        """Store the weights of ``model`` in the memory format of the run's engines."""
        set_memory_format(model, MEMORY_FORMAT, DiskCache(self.work / "cache"))

    def engine(self, model: DiffusionModel, **config: Any) -> Engine:
        """Return a new engine on ``model`` with measured call costs; packages and costs are stored in ``work``."""
        settings: dict[str, Any] = {"compile": "off", "cuda_graphs": False, "deterministic": False}
        settings |= {"memory_format": MEMORY_FORMAT, **config}
        settings |= {"max_rows": QUICK_ROWS} if self.quick else {}
        cache_dir = str(self.work / "cache")
        engine = Engine(model, EngineConfig(max_waiting=4096, cache_dir=cache_dir, **settings), trace_ticks=4096)
        engine.warm_up()
        while engine.study():
            pass
        return engine

    def free_memory(self) -> None:
        """Give back what engines of earlier points held."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    def write(self, name: str, text: str, *, append: bool = False) -> None:
        """Write a file of results, or ``append`` to it. ``name`` is one of few: a run may leave eight files."""
        with (self.out / name).open("a" if append else "w", encoding="utf-8") as file:
            file.write(text)

    def _tell(self, message: Mapping[str, Any]) -> None:
        print(json.dumps(message), file=self._channel, flush=True)


def main() -> None:
    """Run the rows that come by standard input, one line each, and send their results by standard output."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no message
    bench = Bench(json.loads(sys.argv[1]), channel)
    for line in sys.stdin:
        order = json.loads(line)
        module, _, function = order["place"].partition(":")
        try:
            bench.begin(order["seconds"])
            getattr(importlib.import_module(module), function)(bench)
        except Exception as error:
            bench.end("".join(traceback.format_exception(error)))
        else:
            bench.end(None)


if __name__ == "__main__":
    main()
