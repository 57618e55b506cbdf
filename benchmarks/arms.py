"""The arms: diffusers' own pipeline request by request, the same in static batches of equal requests, the engine.

The pipelines also with a compiled UNet, the engine also without one.
"""

from __future__ import annotations

import copy
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.workload import shuffled
from diffserve.api.types import GenerationRequest, ImageFinished
from diffserve.engine import Engine
from diffserve.runtime import DiffusionModel
from diffserve.runtime.loading.library_imports import hushed, import_quietly

ARMS: Final = ("engine", "engine-eager", "serial", "serial-compiled", "static", "static-compiled")
SCHEDULERS = {
    "ddim": "DDIMScheduler",
    "euler": "EulerDiscreteScheduler",
    "euler_a": "EulerAncestralDiscreteScheduler",
    "dpmpp_2m": "DPMSolverMultistepScheduler",
}


class Run(NamedTuple):
    """Timing of one run: ``images`` generated in ``seconds``."""

    images: int
    seconds: float

    @property
    def images_per_s(self) -> float:
        """Throughput in images per second."""
        return self.images / self.seconds


Paint = Callable[[Sequence[Sequence[GenerationRequest]], int], Run]
"""Paints groups of equal requests, in an order that depends on a number where an arm takes them as they come."""


class PipelineArm:
    """diffusers' own pipeline with the samplers of the workload, behind a lock.

    pipeline  the same model in the same precision, on its device
    """

    def __init__(self, pipeline: Any, model: DiffusionModel) -> None:
        config = {**model.scheduler_config, "timestep_spacing": "leading", "clip_sample": False}
        with hushed("transformers", "diffusers"):
            self._schedulers = {
                name: import_quietly("diffusers", cls).from_config(config) for name, cls in SCHEDULERS.items()
            }
        self.pipeline = pipeline
        self.pipeline.set_progress_bar_config(disable=True)
        self._lock = threading.Lock()

    @classmethod
    def load(cls, directory: Path, model: DiffusionModel) -> PipelineArm:
        """Load the diffusers pipeline from the files of ``model``."""
        name = "StableDiffusionXLPipeline" if len(model.text.encoders) == 2 else "StableDiffusionPipeline"
        plain = {} if "XL" in name else {"safety_checker": None, "requires_safety_checker": False}
        with hushed("transformers", "diffusers"):
            pipeline = import_quietly("diffusers", name).from_pretrained(
                str(directory), torch_dtype=model.dtype, **plain
            )
        return cls(pipeline.to(model.device), model)

    def compiled(self) -> PipelineArm:
        """Return an arm whose UNet is compiled by ``torch.compile``, a minute for every shape.

        Weights are frozen into it on a CPU only: there it is faster, on a GPU it keeps compiled code out of caches.
        """
        other, network = copy.copy(self), copy.deepcopy(self.pipeline.unet)
        torch._dynamo.config.recompile_limit = 64
        options: Any = {"freezing": True} if self.pipeline.unet.device.type == "cpu" else None
        forward: Any = torch.compile(network.forward, dynamic=False, options=options)

        def call(sample: Tensor, timestep: Any, **arguments: Any) -> Any:
            # some schedulers count in integers: that would be compiled once more
            times = torch.as_tensor(timestep, dtype=torch.float32, device=sample.device).expand(len(sample))
            return forward(sample, times.contiguous(), **arguments)

        network.forward = call
        other.pipeline = copy.copy(self.pipeline)
        other.pipeline.unet = network
        return other

    def paint(
        self, requests: Sequence[GenerationRequest], output_type: str = "np", noise: Tensor | None = None
    ) -> NDArray[np.float32]:
        """Run the pipeline once for ``requests`` that differ in prompt and seed only.

        Returns images or latents (B, ...). ``noise`` is standard normal initial latents (B, ...). Without it the
        pipeline draws them from the seeds in the model's dtype: up to torch 2.11 those differ between 16 bits
        and float32.
        """
        first = requests[0]
        params = first.diffusion
        negatives = [request.negative_prompt for request in requests]
        with self._lock, warnings.catch_warnings(), torch.inference_mode():
            warnings.simplefilter("ignore")
            self.pipeline.scheduler = self._schedulers[str(params.sampler)]
            output = self.pipeline(
                [request.prompt for request in requests],
                negative_prompt=negatives if any(negatives) else None,  # of SDXL "" would be encoded
                num_inference_steps=params.num_steps,
                guidance_scale=params.guidance_scale,
                width=first.width_px,
                height=first.height_px,
                generator=[torch.Generator("cpu").manual_seed(int(request.seed or 0)) for request in requests],
                output_type=output_type,
                latents=None if noise is None else noise.to(self.pipeline.unet.device, self.pipeline.unet.dtype),
            )
        images = output.images
        return np.asarray(images.float().cpu() if isinstance(images, torch.Tensor) else images)

    def serial(self, requests: Sequence[GenerationRequest]) -> Run:
        """Run each request by itself, in order of arrival."""
        started_s = time.perf_counter()
        for request in requests:
            self.paint([request])
        return Run(len(requests), time.perf_counter() - started_s)

    def static(self, groups: Sequence[Sequence[GenerationRequest]], batch: int) -> Run:
        """Run batches of up to ``batch`` equal requests, sorted in advance: the best case of static batching."""
        started_s = time.perf_counter()
        for group in groups:
            for start in range(0, len(group), batch):
                self.paint(group[start : start + batch])
        return Run(sum(map(len, groups)), time.perf_counter() - started_s)


def make_arms(names: Sequence[str], engine: Engine, arm: PipelineArm, *, batch: int) -> dict[str, Paint]:
    """Build the arms ``names``; ``batch`` is the size of static batches.

    "engine-eager" is left out if the engine has no compiled code, since it would be identical.
    """
    arms: dict[str, Paint] = {}
    compiled = arm.compiled() if any(name in ("serial-compiled", "static-compiled") for name in names) else arm
    for name in names:
        pipeline = compiled if name.endswith("-compiled") else arm
        if name.startswith("serial"):
            arms[name] = lambda groups, order, pipeline=pipeline: pipeline.serial(shuffled(groups, order))  # type: ignore[misc]
        elif name.startswith("static"):
            arms[name] = lambda groups, order, pipeline=pipeline: pipeline.static(groups, batch)  # type: ignore[misc]
        elif name == "engine" or compiled_sizes(engine):
            used = engine if name == "engine" else eager(engine)
            arms[name] = lambda groups, order, used=used: run_engine(used, shuffled(groups, order))  # type: ignore[misc]
    return arms


def settle(engine: Engine) -> None:
    """Run all idle-time measurements and verifications of ``engine`` before the benchmark."""
    engine.warm_up()
    compiled_sizes(engine)
    while engine.study():
        pass


def compiled_sizes(engine: Engine) -> list[tuple[int, int]]:
    """Return (width, height) of the first good sizes that have compiled calls."""
    groups = [(size, engine.runners.group_of_short_prompts(*size)) for size in engine.info.good_sizes[:2]]
    return [size for size, group in groups if engine.runners.groups.best(group).is_compiled]


def eager(engine: Engine) -> Engine:
    """Return another engine on the same network without compiled code."""
    other = Engine(engine.model, msgspec.structs.replace(engine.config, compile="off"))
    settle(other)
    return other


def run_engine(engine: Engine, requests: Sequence[GenerationRequest]) -> Run:
    """Run all requests at once in order of arrival."""
    started_s = time.perf_counter()
    for request in requests:
        engine.submit(request)
    painted = sum(isinstance(event, ImageFinished) for event in engine.events())
    if painted != len(requests):
        raise RuntimeError(f"{painted} of {len(requests)} images were painted")
    return Run(painted, time.perf_counter() - started_s)


def exactness(engine: Engine, arm: PipelineArm, requests: Sequence[GenerationRequest]) -> dict[str, Any]:
    """Compare a sample of ``requests`` run together, alone, and by diffusers: equal bytes and largest difference."""
    together = engine.generate(requests)
    same_bytes, worst, spread = 0, 0.0, 0.0
    for mixed, request in zip(together, requests, strict=True):
        [alone] = engine.generate(request)
        assert alone.latents is not None
        assert mixed.latents is not None
        same_bytes += alone.picture == mixed.picture and alone.latents.data == mixed.latents.data
        reference = arm.paint([request], output_type="latent")[0]
        worst = max(worst, float(np.abs(alone.latents.array - reference).max()))
        spread = max(spread, float(reference.std()))
    return {
        "images": len(requests),
        "bytes_equal_to_solo_run": same_bytes,
        "deterministic": engine.is_deterministic,
        "max_latent_error_against_diffusers": worst,
        "latent_std": spread,
        "note": "the engine keeps latents in float32 between steps, diffusers in the model's dtype",
    }
