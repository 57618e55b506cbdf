"""Compile for later rows, in a process of low priority: packages for this engine, or caches for diffusers."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.arms import PipelineArm
from benchmarks.gpu.drawn_models import load_drawn, pipeline_on
from benchmarks.gpu.peer_row import equal_requests
from benchmarks.gpu.worker import MEMORY_FORMAT, MODELS, QUICK_MODELS, numbered_device
from diffserve.disk_cache import DiskCache
from diffserve.engine.image.compiling import CompileError, CompilerProcess, compile_group, order_for
from diffserve.engine.image.task import GroupKey
from diffserve.runtime import DiffusionModel
from diffserve.runtime.text.conditioning import make_conditioner
from diffserve.runtime.unet.compiled import Packages
from diffserve.runtime.unet.memory_format import set_memory_format
from diffserve.runtime.vae.compiled import DecoderPackages
from diffserve.settings.config import EngineConfig

LOWEST_PRIORITY: Final = 19


class CompileJob:
    """One of ``schedule.JOBS``. ``name`` is the model's, ``work`` the folder that all processes of the run share."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.work = Path(order["work"])
        self.device = numbered_device(order["device"])
        self.name = (QUICK_MODELS if order["quick"] else MODELS)[order["model"]]
        self.dtype = str(order["dtype"])
        self.num_rows = int(order["num_rows"])
        self.cache = DiskCache(self.work / "cache")

    def load(self) -> DiffusionModel:
        """Return the model, its weights stored in the memory format of the run's engines."""
        model = load_drawn(self.name, self.work, self.device, self.dtype)
        set_memory_format(model, MEMORY_FORMAT, self.cache)
        return model

    def make_package(self) -> str:
        """Compile calls of the native size: on a GPU as an engine does it, in a process without the weights."""
        model = self.load()
        width_px, height_px = model.info.good_sizes[0]
        group = GroupKey(height_px, width_px, model.text.window_tokens)
        config = EngineConfig(cache_dir=str(self.work / "cache"))
        if self.device.type == "cpu":
            conditioner = make_conditioner(model, config, is_exact=True)
            compile_group(model, conditioner, Packages(model, self.cache), group, (self.num_rows,))
            return "compiled"
        order = order_for(model, config, group, (self.num_rows,), in_background=True)
        del model
        gc.collect()
        torch.cuda.empty_cache()
        process = CompilerProcess(order)
        while (code := process.exit_code(1.0)) is None:
            pass
        if code:
            raise CompileError(process.last_line(code))
        return f"compiled for {order['memory_format']} weights"

    def make_decoder(self) -> str:
        """Compile the decoder for the native size, as ``diffserve warm`` does; what was measured."""
        model = self.load()
        width_px, height_px = model.info.good_sizes[0]
        return DecoderPackages(model.vae, self.cache).make(height_px // model.vae.factor, width_px // model.vae.factor)

    def fill_caches(self) -> str:
        """Compile diffusers' network by ``torch.compile``, which leaves its code in the caches."""
        model = self.load()
        arm = PipelineArm(pipeline_on(model, self.name), model).compiled()
        arm.paint(equal_requests(model, self.num_rows // 2, num_steps=1), output_type="latent")
        return "compiled"


def main() -> None:
    """Do the job that the first argument describes, in JSON."""
    if hasattr(os, "nice"):
        os.nice(LOWEST_PRIORITY)
    order: dict[str, Any] = json.loads(sys.argv[1])
    job = CompileJob(order)
    work = {
        "package": job.make_package,
        "decoder": job.make_decoder,
        "peer": job.fill_caches,
    }
    started_s = time.monotonic()
    print(f"{work[order['kind']]()} after {time.monotonic() - started_s:.1f} s")


if __name__ == "__main__":
    main()
