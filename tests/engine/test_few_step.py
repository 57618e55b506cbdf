"""Few-step models and adapters: asked for nothing but a prompt, they paint what diffusers paints as published."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.torch import save_file

from benchmarks.random_models import lora_tensors
from diffserve.api.types import DiffusionParams
from diffserve.engine import Engine
from diffserve.models.loras import Lora
from diffserve.runtime import load_model
from diffserve.runtime.loading.library_imports import hushed, import_quietly
from diffserve.settings.layers import load_settings
from tests.device import DEVICE
from tests.engine.loras import ATTENTION, with_folder
from tests.engine.pipelines import PIPELINES, image_request, load_pipeline, pipeline_latents

PUBLISHED = [
    ("sdxl", "sdxl-turbo", "EulerAncestralDiscreteScheduler", 4, 1.0),
    ("sdxl", "sdxl_lightning_2step_lora", "EulerDiscreteScheduler", 2, 1.0),
    ("sd15", "Hyper-SD15-8steps-CFG-lora", "EulerDiscreteScheduler", 8, 5.0),
    ("sd15", "lcm-lora-sdv1-5", "LCMScheduler", 4, 1.0),
    ("sdxl", "TCD-SDXL-lora", "TCDScheduler", 4, 1.0),
    ("sdxl", "dmd2_sdxl_4step_lora", "LCMScheduler", 4, 1.0),
    ("sdxl", "PCM_SDXL_smallcfg_4step_lora", "TCDScheduler", 4, 1.0),
]
INPUTS: dict[str, dict[str, Any]] = {
    "TCD-SDXL-lora": {"eta": 0.3},
    "dmd2_sdxl_4step_lora": {"timesteps": [999, 749, 499, 249], "num_inference_steps": None},
}
"""Arguments that the publishers give to the pipeline in addition to steps and guidance.

Row "tcd-gamma" of docs/parity.md: the pipeline's default of eta is 0.
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # raised in diffusers
@pytest.mark.parametrize(("kind", "name", "scheduler", "num_steps", "guidance_scale"), PUBLISHED)
def test_asked_for_nothing_but_a_prompt_it_paints_as_in_diffusers_as_published(
    kind: str,
    name: str,
    scheduler: str,
    num_steps: int,
    guidance_scale: float,
    tiny_model: Callable[[str], Path],
    loaded: Callable[[str], Any],
    tmp_path: Path,
) -> None:
    loras: tuple[Lora, ...] = ()
    spacing = {"timestep_spacing": "trailing"} if "Euler" in scheduler else {}
    pipeline = load_pipeline.__wrapped__(PIPELINES[kind], tiny_model(kind))
    pipeline.scheduler = import_quietly("diffusers", scheduler).from_config(pipeline.scheduler.config, **spacing)
    if "lora" in name:
        model, loras = with_folder(loaded(kind), tmp_path), (Lora(name),)
        save_file(lora_tensors(model, ATTENTION, seed=1, rank=4), tmp_path / f"{name}.safetensors")
        with hushed("transformers", "diffusers"):
            pipeline.load_lora_weights(str(tmp_path / f"{name}.safetensors"))
    else:
        with hushed("transformers", "diffusers"):
            pipeline.save_pretrained(str(tmp_path / name))
        profile = msgspec.structs.replace(load_settings(model=str(tmp_path / name), env={}).model, probe=False)
        model = load_model(tmp_path / name, dtype="float32", device=DEVICE, profile=profile)
    bare = image_request(kind, "", seed=3)
    [result] = Engine(model).generate(msgspec.structs.replace(bare, diffusion=DiffusionParams(loras=loras)))
    params = {"num_steps": num_steps, "guidance_scale": guidance_scale}
    request = image_request(kind, result.sampler, seed=3, **params)
    reference = pipeline_latents(pipeline, request, kind, keep_scheduler=True, **INPUTS.get(name, {}))
    assert (result.num_steps, result.guidance_scale) == (num_steps, guidance_scale)
    assert result.latents is not None
    assert np.abs(result.latents.array - reference).max() < 1e-3
    warned = [
        text for text in result.warnings if f"sampler {result.sampler}" in text and f", steps {num_steps}," in text
    ]
    assert len(warned) == len(loras)
