"""Ours against theirs: the same seed gives the latents that diffusers' pipelines give, alone and in a mixed batch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diffserve.engine import Engine
from tests.engine.conftest import MakeEngine
from tests.engine.pipelines import SCHEDULERS, asked, load_pipeline, pipeline_latents

TOLERANCE = 1e-3
CONTINUOUS: dict[str, dict[str, Any]] = {
    "EDMDPMSolverMultistepScheduler": {"sigma_data": 0.5, "sigma_max": 80.0, "sigma_min": 0.002},
    "EDMEulerScheduler": {"sigma_data": 1.0, "sigma_max": 120.0, "sigma_min": 0.002, "prediction_type": "v_prediction"},
}
"""Playground 2.5 and CosXL."""
PIPELINES = {"sd15": "StableDiffusionPipeline", "sd2": "StableDiffusionPipeline", "sdxl": "StableDiffusionXLPipeline"}


@pytest.mark.parametrize("kind", ["sd15", pytest.param("sd2", marks=pytest.mark.slow), "sdxl"])
def test_latents_are_those_of_diffusers_alone_and_in_a_mixed_batch_of_eight(
    kind: str, make_engine: MakeEngine, tiny_model: Callable[[str], Path]
) -> None:
    pipeline = load_pipeline(PIPELINES[kind], tiny_model(kind))
    judged = [asked(kind, sampler, seed=3 + place) for place, sampler in enumerate(sorted(SCHEDULERS))]
    expected = [pipeline_latents(pipeline, request, kind) for request in judged]
    engine = make_engine(kind, max_rows=16)
    for request, theirs in zip(judged, expected, strict=True):
        [alone] = engine.generate(request)
        assert alone.latents is not None
        assert np.abs(alone.latents.array - theirs).max() < TOLERANCE, f"{request.diffusion.sampler} alone"
    neighbours = [
        asked(kind, "euler_a", seed=50, num_steps=4, guidance_scale=1.0, prompt="cat"),
        asked(kind, "heun", seed=51, num_steps=6, guidance_scale=7.5, prompt="dog on the cat"),
        asked(kind, "unipc", seed=52, num_steps=13, negative_prompt=""),
        asked(kind, "dpmpp_2m_sde", seed=53, num_steps=20, guidance_interval=(0.2, 0.6)),
    ]
    again = [asked(kind, sampler, seed=3 + place) for place, sampler in enumerate(sorted(SCHEDULERS))]
    mixed = engine.generate([*neighbours, *again])
    assert max(len(set(tick.request_ids)) for tick in engine.trace) == 8
    for result, theirs in zip(mixed[len(neighbours) :], expected, strict=True):
        assert result.latents is not None
        assert np.abs(result.latents.array - theirs).max() < TOLERANCE, f"{result.sampler} among eight"


def test_an_image_without_guidance_is_that_of_diffusers(
    make_engine: MakeEngine, tiny_model: Callable[[str], Path]
) -> None:
    request = asked("sd15", "ddim", seed=8, guidance_scale=1.0, num_steps=6)
    theirs = pipeline_latents(load_pipeline(PIPELINES["sd15"], tiny_model("sd15")), request, "sd15")
    [ours] = make_engine().generate(request)
    assert ours.latents is not None
    assert ours.num_evaluations == 6
    assert np.abs(ours.latents.array - theirs).max() < TOLERANCE


def test_a_wide_picture_is_that_of_diffusers(make_engine: MakeEngine, tiny_model: Callable[[str], Path]) -> None:
    request = asked("sdxl", "euler", seed=8, width_px=96, height_px=64)
    theirs = pipeline_latents(load_pipeline(PIPELINES["sdxl"], tiny_model("sdxl")), request, "sdxl")
    [ours] = make_engine("sdxl").generate(request)
    assert ours.latents is not None
    assert ours.pixels.shape == (64, 96, 3)
    assert np.abs(ours.latents.array - theirs).max() < TOLERANCE


@pytest.mark.parametrize("scheduler", sorted(CONTINUOUS))
def test_a_model_of_edm_s_noise_paints_as_in_diffusers(
    scheduler: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    path = Path(shutil.copytree(tiny_model("sdxl"), tmp_path / "edm"))
    index = json.loads((path / "model_index.json").read_text())
    (path / "model_index.json").write_text(json.dumps(index | {"scheduler": ["diffusers", scheduler]}))
    config = {"_class_name": scheduler, **CONTINUOUS[scheduler]}
    (path / "scheduler" / "scheduler_config.json").write_text(json.dumps(config))
    sampler = "euler" if "Euler" in scheduler else "dpmpp_2m"
    request = asked("sdxl", sampler, seed=8)
    pipeline = load_pipeline(PIPELINES["sdxl"], path)
    theirs = pipeline_latents(pipeline, request, "sdxl", keep_scheduler=True)
    engine = Engine.from_pretrained(str(path), dtype="float32", device="cpu")
    [ours] = engine.generate(request)
    assert ours.latents is not None
    assert engine.info.prediction_type == ("edm" if sampler == "dpmpp_2m" else "v_prediction")
    assert np.abs(ours.latents.array - theirs).max() < TOLERANCE * max(1.0, float(np.abs(theirs).max()))
