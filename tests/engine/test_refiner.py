"""An ensemble of experts: a second UNet takes over for the last steps, as in diffusers' two pipelines, row by row."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from diffserve.api.errors import InvalidRequest, ModelLoadError
from diffserve.api.types import DiffusionParams, GenerationRequest, ImageFinished, ImageResult, ModelProfile, Preview
from diffserve.engine import Engine
from diffserve.runtime import DiffusionModel, load_model
from diffserve.runtime.loading.library_imports import hushed
from diffserve.settings.config import EngineConfig
from diffserve.settings.layers import load_settings
from tests.device import DEVICE, tolerance
from tests.engine.capturing import check_resumes
from tests.engine.conftest import MakeEngine
from tests.engine.loras import with_folder, write_folder
from tests.engine.pipelines import image_request, load_pipeline, pipeline_latents, use_sampler
from tests.engine.test_init_images import fields_of, inputs_of

TOLERANCE = tolerance(1e-3)


@pytest.fixture(scope="session")
def ensemble(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> DiffusionModel:
    """Return the tiny SDXL with the tiny refiner, and a folder of adapters."""
    path, folder = tiny_model("sdxl"), tmp_path_factory.mktemp("loras")
    model = load_model(path, dtype="float32", device=DEVICE, profile=profile_of(path, refiner=tiny_model("refiner")))
    return with_folder(model, write_folder(folder, model))  # type: ignore[no-any-return]


def profile_of(path: Path, *, refiner: Path) -> ModelProfile:
    """Return the profile of the tiny model at ``path``, without the plausibility check, which needs a trained model."""
    model_settings = load_settings(model=str(path), env={}).model
    return msgspec.structs.replace(model_settings, refiner=str(refiner), probe=False)


def engine_of(model: DiffusionModel, **config: Any) -> Engine:
    """Return a new engine of few rows."""
    return Engine(model, EngineConfig(max_rows=4, **config))


def reference_latents(request: GenerationRequest, base: Path, refiner: Path) -> NDArray[np.float32]:
    """Return the final latents (C, h, w) of diffusers' base and refiner pipelines in sequence."""
    params, latents = request.diffusion, None
    generator = torch.Generator("cpu").manual_seed(request.seed or 0)
    for name, directory in (("StableDiffusionXLPipeline", base), ("StableDiffusionXLImg2ImgPipeline", refiner)):
        pipeline = load_pipeline(name, directory)
        assert params.sampler is not None
        use_sampler(pipeline, params.sampler, "leading")
        is_base = latents is None
        fields: dict[str, Any] = {"denoising_end": params.switch_at, "width": 64, "height": 64}
        fields = fields if is_base else {"denoising_start": params.switch_at, "image": latents}
        with hushed("transformers", "diffusers"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            latents = pipeline(
                request.prompt,
                negative_prompt=request.negative_prompt or None,
                num_inference_steps=params.num_steps,
                guidance_scale=params.guidance_scale,
                generator=generator,
                output_type="latent",
                **fields,
            ).images
    assert latents is not None
    final: NDArray[np.float32] = latents[0].float().cpu().numpy()
    return final


def latents_of(result: ImageResult) -> NDArray[np.float32]:
    assert result.latents is not None
    return result.latents.array


def check_integrity(engine: Engine) -> None:
    """Check that no page is lost and that no request holds a page."""
    engine.check_integrity()
    tenants = engine.page_stats.tenants.values() if engine.page_stats is not None else ()
    assert not any(stats.held_pages for stats in tenants)


@pytest.mark.usefixtures("waits_for_device")
def test_the_refiner_goes_on_where_diffusers_has_it_go_on(
    ensemble: DiffusionModel, tiny_model: Callable[[str], Path]
) -> None:
    request = image_request("sdxl", "euler", seed=3, switch_at=0.6, num_steps=3, negative_prompt="")
    engine = engine_of(ensemble)
    events = list(engine.stream(msgspec.structs.replace(request, preview_every=1)))
    [result] = [event.result for event in events if isinstance(event, ImageFinished)]
    assert (
        np.abs(latents_of(result) - reference_latents(request, tiny_model("sdxl"), tiny_model("refiner"))).max()
        < TOLERANCE
    )
    assert result.refiner.startswith("refiner [")
    assert [event.step_index for event in events if isinstance(event, Preview)] == [1, 2]
    check_integrity(engine)


@pytest.mark.parametrize(
    "sampler",
    ["ddim", "ddpm", "euler_a", "dpmpp_2m", "dpmpp_2m_sde", "dpmpp_3m_sde", "deis", "unipc", "lcm", "tcd"],
)
def test_every_sampler_hands_over_to_the_refiner_as_in_diffusers(
    sampler: str, ensemble: DiffusionModel, tiny_model: Callable[[str], Path]
) -> None:
    """The history of a multistep sampler starts empty at the refiner, whose scheduler is another one in diffusers."""
    eta = {"eta": 0.0} if sampler == "tcd" else {}  # what the pipelines of diffusers give to the scheduler
    request = image_request("sdxl", sampler, seed=3, switch_at=0.6, num_steps=16, negative_prompt="", **eta)
    [result] = engine_of(ensemble).generate(request)
    expected = reference_latents(request, tiny_model("sdxl"), tiny_model("refiner"))
    assert np.abs(latents_of(result) - expected).max() / np.abs(expected).max() < tolerance(1e-4)


def test_captured_image_continues_before_and_after_the_refiner_takes_over(ensemble: DiffusionModel) -> None:
    check_resumes(partial(engine_of, ensemble), image_request("sdxl", "euler_a", seed=3, switch_at=0.5), number=6)


@pytest.mark.parametrize("sampler", ["heun", "lms", "plms"])
def test_samplers_that_diffusers_hands_over_wrongly_still_differ(
    sampler: str, ensemble: DiffusionModel, tiny_model: Callable[[str], Path]
) -> None:
    """Rows "refiner-heun", "late-lms" and "late-plms" of docs/parity.md."""
    request = image_request("sdxl", sampler, seed=3, switch_at=0.5, num_steps=10, negative_prompt="")
    [result] = engine_of(ensemble).generate(request)
    expected = reference_latents(request, tiny_model("sdxl"), tiny_model("refiner"))
    assert np.abs(latents_of(result) - expected).max() / np.abs(expected).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("cross_attention", ["paged", "plain"])
def test_pictures_of_both_networks_share_ticks_and_none_depends_on_another(
    cross_attention: str, ensemble: DiffusionModel, tiny_model: Callable[[str], Path]
) -> None:
    judged = [
        image_request("sdxl", "euler", seed=3, switch_at=0.8, num_steps=5),
        image_request("sdxl", "ddim", seed=4, switch_at=0.45, num_steps=7),
    ]
    other_requests = [
        image_request("sdxl", "dpmpp_2m", seed=5, num_steps=3),
        image_request("sdxl", "heun", seed=6, switch_at=0.5, num_steps=2, guidance_scale=1.0),
        image_request("sdxl", "euler_a", seed=7, switch_at=0.0, num_steps=2),
        image_request("sdxl", "ddim", seed=8, switch_at=0.6, cache_interval=2, num_steps=5),
        image_request("sdxl", "ddim", seed=9, switch_at=0.5, num_steps=4, prompt="cat <lora:everything>"),
        image_request("sdxl", "ddim", seed=10, switch_at=0.5, num_steps=4, hires_scale=1.5, hires_strength=0.8),
        image_request("sdxl", "ddim", seed=11, switch_at=0.5, num_steps=4, width_px=96, height_px=96, tile_size=64),
    ]
    engine = engine_of(ensemble, cross_attention=cross_attention)
    alone = [engine.generate(request)[0] for request in (*judged, *other_requests)]
    for request, expected_result in zip(judged, alone, strict=False):
        expected = reference_latents(request, tiny_model("sdxl"), tiny_model("refiner"))
        assert np.abs(latents_of(expected_result) - expected).max() < TOLERANCE, request.diffusion.sampler
    plain = msgspec.structs.replace(judged[0], diffusion=msgspec.structs.replace(judged[0].diffusion, switch_at=None))
    assert np.abs(latents_of(engine.generate(again(plain))[0]) - latents_of(alone[0])).max() > 0.01
    mixed = engine.generate([again(request) for request in (*judged, *other_requests)])
    for result, other in zip(alone, mixed, strict=True):
        assert latents_of(result).tobytes() == latents_of(other).tobytes(), result.sampler
        assert result.picture == other.picture
    check_integrity(engine)


def again(request: GenerationRequest) -> GenerationRequest:
    """Return a copy of the request with another id."""
    return msgspec.structs.replace(request, request_id=f"{request.request_id}-again")


@pytest.mark.slow
def test_a_refiner_alone_repaints_pictures_as_in_diffusers(tiny_model: Callable[[str], Path]) -> None:
    model = load_model(tiny_model("refiner"), dtype="float32", device=DEVICE)
    assert (model.family, model.text.has_score, len(model.text.encoders)) == ("sdxl", True, 1)
    request = image_request("refiner", "euler", seed=4, num_steps=5, strength=0.6, **fields_of(with_mask=False))
    pipeline = load_pipeline("StableDiffusionXLImg2ImgPipeline", tiny_model("refiner"))
    expected = pipeline_latents(pipeline, request, "refiner", strength=0.6, **inputs_of(with_mask=False))
    [result] = Engine(model).generate(request)
    assert np.abs(latents_of(result) - expected).max() < TOLERANCE
    assert result.refiner == ""


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("embedded", "it has 8 latent channels, the model 4"),
        ("sd2", "its UNet uses v_prediction, that of the model epsilon"),
        ("inpaint9", "one of the two is an inpainting model"),
    ],
)
def test_what_is_no_refiner_is_refused_in_a_sentence(
    kind: str, problem: str, tiny_model: Callable[[str], Path]
) -> None:
    path = tiny_model("sd15")
    with pytest.raises(ModelLoadError, match=f"cannot refine images of this model: .*{problem}"):
        load_model(path, dtype="float32", device=DEVICE, profile=profile_of(path, refiner=tiny_model(kind)))


def test_room_is_checked_for_the_refiner_when_it_is_used(
    ensemble: DiffusionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    runners = engine_of(ensemble).runners
    base, refiner = runners._experts[0], runners._experts[-1]
    asked_for: list[str] = []
    monkeypatch.setattr(base.room, "check", lambda *_, **kwargs: asked_for.append(f"base {kwargs['is_controlled']}"))
    monkeypatch.setattr(
        refiner.room, "check", lambda *_, **kwargs: asked_for.append(f"refiner {kwargs['is_controlled']}")
    )
    runners.check_room(64, 64, False, True)
    runners.check_room(64, 64, False, True, is_refined=True)
    assert asked_for == ["base True", "base True", "refiner False"]


def test_where_to_switch_is_checked_and_what_is_shared_is_held_once(
    ensemble: DiffusionModel, make_engine: MakeEngine
) -> None:
    with pytest.raises(InvalidRequest, match=r"switch_at is 0.8; sd15 has no refiner to switch to: leave it out"):
        make_engine().submit(image_request("sd15", "euler", seed=1, switch_at=0.8))
    for share in (1.5, -0.1, float("nan")):
        with pytest.raises(InvalidRequest, match=r"switch_at is .*; it must lie between 0 and 1"):
            DiffusionParams(switch_at=share)
    assert ensemble.refiner is not None
    assert ensemble.refiner.text.encoders[0] is ensemble.text.encoders[1], "held twice"
    assert [entry.component for entry in ensemble.memory_report() if "refiner" in entry.component] == ["refiner unet"]
    [base_result] = engine_of(ensemble).generate(image_request("sdxl", "euler", seed=1, num_steps=2, switch_at=1.0))
    assert base_result.refiner == ""
    assert "switch_at 1 leaves no steps of 2 to the refiner." in base_result.warnings
