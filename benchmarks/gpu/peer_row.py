"""diffusers on the same weights: behind a lock, in static batches of equal requests, and with ``torch.compile``."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import numpy as np
import torch

from benchmarks.arms import PipelineArm
from benchmarks.gpu.drawn_models import load_drawn, pipeline_on
from benchmarks.gpu.worker import MODELS, QUICK_MODELS, Bench
from diffserve.api.types import DiffusionParams, GenerationRequest
from diffserve.engine import Engine
from diffserve.runtime import DiffusionModel
from diffserve.settings.config import EngineConfig

NUM_STEPS = 20
BATCH = 8
PARITY_STEPS: Final = 5
PARITY_TOLERANCES: Final = {"float32": 0.01, "bfloat16": 0.1}
"""Of latents: the norm of the difference from diffusers' over the norm. On a CPU, a tiny SDXL is 2e-6 away in float32.
In bfloat16, where diffusers also rounds the latents after each step, a tiny one is 0.02 to 0.04 away and a full one at
256 px 0.02. Latents from other noise are 1.4 away."""


def equal_requests(model: DiffusionModel, count: int, *, num_steps: int = NUM_STEPS) -> list[GenerationRequest]:
    """``count`` guided requests of the native size that differ in prompt and seed only."""
    width_px, height_px = model.info.good_sizes[0]
    params = DiffusionParams(sampler="euler", num_steps=num_steps, guidance_scale=7.5, spacing="leading")
    return [
        GenerationRequest(
            prompt=f"a fox on the beach {number}",
            seed=number,
            width_px=width_px,
            height_px=height_px,
            diffusion=params,
            return_latents=True,
        )
        for number in range(count)
    ]


def run(bench: Bench) -> None:
    """Images a second of SDXL by diffusers: one by one, in batches of 8, and both with a compiled UNet."""
    model = bench.model("sdxl")
    name = (QUICK_MODELS if bench.quick else MODELS)["sdxl"]
    num_steps, batch = (2, 2) if bench.quick else (NUM_STEPS, BATCH)

    def rate(arm: PipelineArm, count: int) -> dict[str, Any]:
        arm.paint(equal_requests(model, count, num_steps=1))  # what happens once: kernels are chosen, code is compiled
        requests = equal_requests(model, count, num_steps=num_steps)
        done = arm.static([requests], count) if count > 1 else arm.serial([*requests, *requests])
        return {"images": done.images, "images_per_s": round(done.images_per_s, 3)}

    arm = PipelineArm(pipeline_on(model, name), model)
    bench.point("serial", lambda: rate(arm, 1), needs_s=6)
    bench.point(f"batch-{BATCH}", lambda: rate(arm, batch), needs_s=10)
    for dtype, needs_s in {"float32": 8.0, bench.dtype: 4.0}.items():
        bench.point(f"parity-{dtype}", partial(parity, bench, name, dtype), needs_s=needs_s)
    if not bench.quick:  # it takes minutes on a CPU
        bench.point(f"compiled-batch-{BATCH}", lambda: rate(arm.compiled(), batch), needs_s=22)


def parity(bench: Bench, name: str, dtype: str) -> dict[str, Any]:
    """How far latents of the model ``name`` in ``dtype`` are from diffusers', from the same noise."""
    model = load_drawn(name, bench.work, bench.device, dtype)
    [request] = equal_requests(model, 1, num_steps=2 if bench.quick else PARITY_STEPS)
    config = EngineConfig(compile="off", cuda_graphs=False, deterministic=False, cache_dir="", max_rows=2)
    engine = Engine(model, config)
    [result] = engine.generate(request)
    engine.close()
    assert result.latents is not None
    shape = (1, *result.latents.array.shape)
    noise = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(int(request.seed or 0)))
    expected = PipelineArm(pipeline_on(model, name), model).paint([request], output_type="latent", noise=noise)[0]
    difference = float(np.linalg.norm(result.latents.array - expected) / np.linalg.norm(expected))
    tolerance = PARITY_TOLERANCES[dtype]
    problems = [] if difference <= tolerance else [f"latents are {difference:.3g} away, more than {tolerance}"]
    return {
        "steps": request.diffusion.num_steps,
        "difference": difference,
        "tolerance": tolerance,
        "problems": problems,
    }
