"""The first row of the GPU suite: does anything work at all, what is the machine, and how fast are its parts."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import statistics
import subprocess
import time
from typing import Any, Final

import numpy as np
import torch

from benchmarks.device_timing import call_seconds, copy_bytes_per_s, launch_seconds, peak_flops
from benchmarks.gpu.calls import native_group
from benchmarks.gpu.worker import Bench
from benchmarks.report import hardware, versions
from diffserve.api.types import DiffusionParams, GenerationRequest
from diffserve.cli import doctor
from diffserve.engine import Engine
from diffserve.runtime import load_model
from diffserve.runtime.footprint import step_work
from diffserve.runtime.text.conditioning import make_conditioner
from diffserve.runtime.unet.inductor import missing_tools
from diffserve.runtime.unet.random_rows import random_call
from diffserve.settings.config import EngineConfig
from diffserve.settings.layers import load_settings

WEB_PACKAGES: Final = ("fastapi", "starlette", "uvicorn", "pydantic", "python_multipart")
OPTIONAL_PACKAGES: Final = (*WEB_PACKAGES, "torchao", "triton", "llguidance", "openvino", "gradio", "pytest", "xdist")
SMI: Final = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.sm,power.limit,temperature.gpu",
              "--format=csv,noheader")  # fmt: skip


def run(bench: Bench) -> None:
    """Versions, doctor, a small image, and the rates of the machine. Any error here ends the whole run."""
    if bench.on_gpu and not torch.cuda.is_available():
        bench.no_gpu("there is no CUDA GPU on this machine; --device cpu --quick is a dry run.")
        return
    bench.about(hardware=hardware(str(bench.device)), versions=versions())
    bench.point("packages", lambda: packages(bench.device))
    bench.point("doctor", lambda: run_doctor(bench))
    bench.point("image", lambda: small_image(bench))
    bench.point("machine", lambda: machine(bench))


def packages(device: torch.device) -> dict[str, Any]:
    """Installed optional packages, and the report of the driver."""
    figures: dict[str, Any] = {name: importlib.util.find_spec(name) is not None for name in OPTIONAL_PACKAGES}
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        figures["nvidia-smi"] = subprocess.run(
            SMI, capture_output=True, text=True, timeout=10, check=False
        ).stdout.strip()
    figures |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version() if torch.version.cuda else None}
    if torch.cuda.is_available():
        figures["capability"] = list(torch.cuda.get_device_capability())
    return figures | {"missing_tools": missing_tools(device)}


def run_doctor(bench: Bench) -> dict[str, str]:
    """Return the report of ``diffserve doctor`` on the device: its last lines; all of it goes to a file."""
    output = io.StringIO()
    dtype = "float32" if bench.quick else "auto"
    env = {"DIFFSERVE_MODEL_DEVICE": str(bench.device), "DIFFSERVE_MODEL_DTYPE": dtype}
    settings = load_settings(model="embedded", env=env)
    with contextlib.redirect_stdout(output):
        code = doctor.run(settings)
    bench.write("doctor.txt", output.getvalue())
    if code:
        raise RuntimeError(f"doctor ended with {code}: {output.getvalue()[-1000:]}")
    return {"says": output.getvalue().strip().splitlines()[-1]}


def small_image(bench: Bench) -> dict[str, Any]:
    """One image of the embedded model: seconds from loading to pixels, and the spread of the pixels."""
    started_s = time.monotonic()
    config = EngineConfig(cache_dir=str(bench.work / "cache"), compile="off", deterministic=False)
    dtype = "float32" if bench.quick else "auto"
    engine = Engine.from_pretrained("embedded", device=str(bench.device), dtype=dtype, config=config)
    loaded_s = time.monotonic() - started_s
    params = DiffusionParams(num_steps=2 if bench.quick else 8)
    [result] = engine.generate(GenerationRequest(prompt="a red fox on the beach", seed=1, diffusion=params))
    spread = float(np.std(result.picture.array))
    if spread < 1.0:
        raise RuntimeError(f"the image is of one color: the standard deviation of its pixels is {spread:.3f}")
    return {
        "load_s": round(loaded_s, 2),
        "total_s": round(time.monotonic() - started_s, 2),
        "dtype": engine.info.dtype,
        "pixel_std": round(spread, 1),
    }


def machine(bench: Bench) -> dict[str, Any]:
    """Measure reference rates: matrix product, copy, launch of a kernel, and a launch-bound call."""
    dtypes = (torch.float32,) if bench.quick else (torch.bfloat16, torch.float16, torch.float32)
    figures: dict[str, Any] = {
        f"peak_tflops_{str(dtype).removeprefix('torch.')}": round(
            peak_flops(bench.device, dtype, size=256 if bench.quick else 0) / 1e12, 3
        )
        for dtype in dtypes
    }
    figures["copy_gb_per_s"] = round(copy_bytes_per_s(bench.device, num_bytes=1 << 20 if bench.quick else 0) / 1e9, 1)
    figures["launch_us"] = round(1e6 * launch_seconds(bench.device, launches=200 if bench.quick else 2000), 2)
    return figures | launches_of_a_network(bench)


@torch.inference_mode()
def launches_of_a_network(bench: Bench) -> dict[str, Any]:
    """Microseconds a kernel of a call in which launching is all that takes time: one row of the embedded UNet.

    Kernels are counted by a dry run on the meta device, as ``benchmarks/capacity.py`` counts them.
    """
    model = load_model("embedded", device=str(bench.device), dtype=bench.dtype)
    outline = load_model("embedded", device="meta", dtype=bench.dtype)
    config = EngineConfig(cache_dir="")
    kernels = len(step_work(outline, make_conditioner(outline, config, is_exact=False), model.native_size, 1).kernels)
    call = random_call(model, native_group(model).shape, 1, make_conditioner(model, config, is_exact=False))
    seconds = call_seconds(lambda: model.unet.plain(call), bench.device, 3 if bench.quick else 50)
    return {
        "network_kernels": kernels,
        "network_call_ms": round(1e3 * statistics.median(seconds), 3),
        "network_launch_us": round(1e6 * statistics.median(seconds) / kernels, 2),
    }
