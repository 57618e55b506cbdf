"""Parity with diffusers: the same seed gives the same latents as its pipelines, alone and in a mixed batch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from diffserve.api.errors import InvalidRequest
from diffserve.engine import Engine
from diffserve.media.infotext import write_infotext
from diffserve.runtime import load_model
from diffserve.runtime.loading.library_imports import import_quietly
from diffserve.runtime.unet.compiled import FlatUNet
from diffserve.runtime.unet.random_rows import random_call
from diffserve.settings.config import EngineConfig
from tests.device import DEVICE
from tests.engine.conftest import MakeEngine
from tests.engine.pipelines import PIPELINES, SCHEDULERS, image_request, load_pipeline, pipeline_latents

TOLERANCE = 1e-3
CONTINUOUS: dict[str, dict[str, Any]] = {
    "EDMDPMSolverMultistepScheduler": {"sigma_data": 0.5, "sigma_max": 80.0, "sigma_min": 0.002},
    "EDMEulerScheduler": {"sigma_data": 1.0, "sigma_max": 120.0, "sigma_min": 0.002, "prediction_type": "v_prediction"},
}
"""Playground 2.5 and CosXL."""


@pytest.mark.parametrize("kind", ["sd15", pytest.param("sd2", marks=pytest.mark.slow), "sdxl"])
def test_latents_are_those_of_diffusers_alone_and_in_a_mixed_batch_of_eight(
    kind: str, make_engine: MakeEngine, tiny_model: Callable[[str], Path]
) -> None:
    pipeline = load_pipeline(PIPELINES[kind], tiny_model(kind))
    judged = [image_request(kind, sampler, seed=3 + place) for place, sampler in enumerate(sorted(SCHEDULERS))]
    expected = [pipeline_latents(pipeline, request, kind) for request in judged]
    engine = make_engine(kind, max_rows=16)
    for request, reference in zip(judged, expected, strict=True):
        [alone] = engine.generate(request)
        assert alone.latents is not None
        assert np.abs(alone.latents.array - reference).max() < TOLERANCE, f"{request.diffusion.sampler} alone"
    neighbours = [
        image_request(kind, "euler_a", seed=50, num_steps=4, guidance_scale=1.0, prompt="cat"),
        image_request(kind, "heun", seed=51, num_steps=6, guidance_scale=7.5, prompt="dog on the cat"),
        image_request(kind, "unipc", seed=52, num_steps=13, negative_prompt=""),
        image_request(kind, "dpmpp_2m_sde", seed=53, num_steps=20, guidance_interval=(0.2, 0.6)),
    ]
    again = [image_request(kind, sampler, seed=3 + place) for place, sampler in enumerate(sorted(SCHEDULERS))]
    mixed = engine.generate([*neighbours, *again])
    assert max(len(set(tick.request_ids)) for tick in engine.trace) == 8
    for result, reference in zip(mixed[len(neighbours) :], expected, strict=True):
        assert result.latents is not None
        assert np.abs(result.latents.array - reference).max() < TOLERANCE, f"{result.sampler} among eight"


def test_an_image_without_guidance_is_that_of_diffusers(
    make_engine: MakeEngine, tiny_model: Callable[[str], Path]
) -> None:
    request = image_request("sd15", "ddim", seed=8, guidance_scale=1.0, num_steps=6)
    reference = pipeline_latents(load_pipeline(PIPELINES["sd15"], tiny_model("sd15")), request, "sd15")
    [result] = make_engine().generate(request)
    assert result.latents is not None
    assert result.num_evaluations == 6
    assert np.abs(result.latents.array - reference).max() < TOLERANCE


@pytest.mark.filterwarnings("ignore:The configuration file of this scheduler:FutureWarning")
@pytest.mark.parametrize("offset", [0, None])
@pytest.mark.parametrize("sampler", ["ddim", "euler"])
def test_steps_offset_of_a_file_is_read_as_by_the_pipeline_of_stable_diffusion(
    sampler: str, offset: int | None, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """StableDiffusionPipeline sets it to 1, except for another scheduler class where the file does not name it.

    Row "steps-offset" of docs/parity.md is about ControlNets, whose pipeline does not.
    """
    path = Path(shutil.copytree(tiny_model("sd15"), tmp_path / "model"))
    file = path / "scheduler" / "scheduler_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({name: value for name, value in config.items() if name != "steps_offset"}))
    if offset is not None:
        file.write_text(json.dumps(config | {"steps_offset": offset}))
    pipeline = load_pipeline(PIPELINES["sd15"], path)
    request = image_request("sd15", sampler, seed=8, num_steps=7)
    expected = pipeline_latents(pipeline, request, "sd15", keep_scheduler=sampler == "ddim")
    [result] = Engine(load_model(path, dtype="float32", device="cpu")).generate(request)
    assert result.latents is not None
    assert np.abs(result.latents.array - expected).max() / np.abs(expected).max() < 1e-4


def test_a_skipped_layer_changes_its_picture_alone(
    make_engine: MakeEngine, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row "negative-clip-skip" of docs/parity.md is left out by a guidance of 1."""
    pipeline = load_pipeline(PIPELINES["sd15"], tiny_model("sd15"))
    monkeypatch.setitem(vars(pipeline.text_encoder), "text_model", pipeline.text_encoder)  # as it was once
    engine = make_engine(max_rows=8)
    plain = {"num_steps": 4, "guidance_scale": 1.0}  # diffusers reads negative prompts from the last layer, A1111 not
    asks = [image_request("sd15", "ddim", seed=8, clip_skip=skip, **plain) for skip in (2, 1)]
    results = engine.generate(asks)
    for request, result, reference in zip(asks, results, (1, None), strict=True):
        expected = pipeline_latents(pipeline, request, "sd15", clip_skip=reference)
        assert result.latents is not None
        assert np.abs(result.latents.array - expected).max() < TOLERANCE
    assert "Clip skip: 2" in write_infotext(results[0], width_px=64, height_px=64)
    with pytest.raises(InvalidRequest, match=r"clip_skip is 4; .* allows 1 to 3"):
        engine.submit(image_request("sd15", "ddim", seed=8, clip_skip=4))


def test_rescaled_guidance_is_that_of_diffusers(make_engine: MakeEngine, tiny_model: Callable[[str], Path]) -> None:
    """The batch includes images without rescaling, whose bytes do not change."""
    pipeline = load_pipeline(PIPELINES["sd15"], tiny_model("sd15"))
    shares = (0.7, 0.0, 1.0)
    asks = [image_request("sd15", "ddim", seed=8, num_steps=6, guidance_rescale=share) for share in shares]
    engine = make_engine(max_rows=8)
    results = engine.generate(asks)
    for request, share, result in zip(asks, shares, results, strict=True):
        reference = pipeline_latents(pipeline, request, "sd15", guidance_rescale=share)
        assert result.latents is not None
        assert np.abs(result.latents.array - reference).max() < TOLERANCE
        assert engine.generate(msgspec.structs.replace(request, request_id=""))[0].picture == result.picture
    assert "CFG rescale phi: 0.7" in write_infotext(results[0], width_px=64, height_px=64)
    [plain] = engine.generate(
        image_request("sd15", "ddim", seed=8, num_steps=1, guidance_scale=1.0, guidance_rescale=0.5)
    )
    assert "guidance_rescale has no effect without guidance." in plain.warnings


def test_a_wide_picture_is_that_of_diffusers(make_engine: MakeEngine, tiny_model: Callable[[str], Path]) -> None:
    request = image_request("sdxl", "euler", seed=8, width_px=96, height_px=64)
    reference = pipeline_latents(load_pipeline(PIPELINES["sdxl"], tiny_model("sdxl")), request, "sdxl")
    [result] = make_engine("sdxl").generate(request)
    assert result.latents is not None
    assert result.pixels.shape == (64, 96, 3)
    assert np.abs(result.latents.array - reference).max() < TOLERANCE


@pytest.mark.parametrize("says_zeros", [True, False])
def test_an_empty_negative_prompt_is_zeros_or_encoded_as_the_model_says_and_as_in_diffusers(
    says_zeros: bool, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    for part in tiny_model("sdxl").iterdir():
        (tmp_path / part.name).symlink_to(part)
    index = json.loads((tmp_path / "model_index.json").read_text()) | {"force_zeros_for_empty_prompt": says_zeros}
    (tmp_path / "model_index.json").unlink()
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    request = image_request("sdxl", "ddim", seed=8, num_steps=4, negative_prompt="")
    pipeline = load_pipeline(PIPELINES["sdxl"], tmp_path)
    reference = pipeline_latents(pipeline, request, "sdxl", negative_prompt=None)
    encoded = pipeline_latents(pipeline, request, "sdxl", negative_prompt="")
    [result] = Engine(load_model(tmp_path, dtype="float32", device=DEVICE)).generate(request)
    assert result.latents is not None
    assert np.abs(result.latents.array - reference).max() < TOLERANCE
    assert (np.abs(reference - encoded).max() > 10 * TOLERANCE) == says_zeros


def test_a_latent_consistency_model_gets_guidance_as_in_diffusers(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Row by row, in whole calls and those of the shallow part, with no unconditional rows."""
    path = Path(shutil.copytree(tiny_model("sd15"), tmp_path / "lcm"))
    plain = import_quietly("diffusers", "UNet2DConditionModel").from_pretrained(path / "unet")
    type(plain).from_config({**plain.config, "time_cond_proj_dim": 33}).save_pretrained(path / "unet")
    index = json.loads((path / "model_index.json").read_text())
    (path / "model_index.json").write_text(json.dumps(index | {"scheduler": ["diffusers", "LCMScheduler"]}))
    betas = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
    import_quietly("diffusers", "LCMScheduler")(**betas, clip_sample=False, steps_offset=1).save_pretrained(
        path / "scheduler"
    )
    pipeline = load_pipeline(PIPELINES["sd15"], path)
    model = load_model(path, dtype="float32", device=DEVICE)
    engine = Engine(model, EngineConfig(max_rows=8, cache_dir=""))
    asks = [image_request("sd15", "lcm", seed=3, num_steps=4, guidance_scale=scale) for scale in (1.0, 4.0, 8.5)]
    together = engine.generate([*asks, image_request("sd15", "lcm", seed=3, num_steps=4, cache_interval=2)])
    for request, result in zip(asks, together, strict=False):
        reference = pipeline_latents(pipeline, request, "sd15", keep_scheduler=True)
        assert result.latents is not None
        assert result.num_evaluations == 4
        assert np.abs(result.latents.array - reference).max() < TOLERANCE
        [alone] = engine.generate(msgspec.structs.replace(request, request_id="again"))
        assert alone.picture == result.picture
    assert len({result.picture.data for result in together}) == 4
    call = random_call(model, (64, 64, 77), 2)
    assert torch.equal(FlatUNet(model.unet.network, call)(*call.tensors), model.unet.plain(call))
    warnings = engine.generate(image_request("sd15", "lcm", seed=3, num_steps=1, guidance_interval=(0.0, 0.5)))[
        0
    ].warnings
    assert any("takes the guidance scale as an input" in warning for warning in warnings)
    assert any("the negative prompt has no effect without guidance" in warning for warning in warnings)


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
    request = image_request("sdxl", sampler, seed=8)
    pipeline = load_pipeline(PIPELINES["sdxl"], path)
    reference = pipeline_latents(pipeline, request, "sdxl", keep_scheduler=True)
    engine = Engine.from_pretrained(str(path), dtype="float32", device=DEVICE)
    [result] = engine.generate(request)
    assert result.latents is not None
    assert engine.info.prediction_type == ("edm" if sampler == "dpmpp_2m" else "v_prediction")
    assert np.abs(result.latents.array - reference).max() < TOLERANCE * max(1.0, float(np.abs(reference).max()))
