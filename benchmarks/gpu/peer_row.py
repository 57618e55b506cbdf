"""diffusers on the same weights: behind a lock, in static batches of equal requests, and with ``torch.compile``."""

from __future__ import annotations

from typing import Any

from benchmarks.arms import PipelineArm
from benchmarks.gpu.drawn_models import pipeline_on
from benchmarks.gpu.worker import MODELS, QUICK_MODELS, Bench
from diffserve.runtime import DiffusionModel
from diffserve.types import DiffusionParams, GenerationRequest

NUM_STEPS = 20
BATCH = 8


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
    if not bench.quick:  # it takes minutes on a CPU
        bench.point(f"compiled-batch-{BATCH}", lambda: rate(arm.compiled(), batch), needs_s=22)
    bench.point("parity", lambda: _parity(bench, model, arm, num_steps), needs_s=4)


def _parity(bench: Bench, model: DiffusionModel, arm: PipelineArm, num_steps: int) -> dict[str, Any]:
    """How far our latents are from diffusers' for one request: the norm of the difference over the norm."""
    import numpy as np

    [request] = equal_requests(model, 1, num_steps=num_steps)
    engine = bench.engine(model)
    [result] = engine.generate(request)
    assert result.latents is not None
    expected = arm.paint([request], output_type="latent")[0]
    difference = float(np.linalg.norm(result.latents.array - expected) / np.linalg.norm(expected))
    engine.close()
    return {"difference": difference, "note": "latents are float32 between steps here, and in the model's dtype there"}
