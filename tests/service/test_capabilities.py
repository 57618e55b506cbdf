"""What ``GET /v1/models`` says of the loaded models, and how the client reads it."""

from __future__ import annotations

import json

import msgspec
import pytest

from diffserve.client import Capabilities, Client, ImageCapabilities
from diffserve.config import ServeConfig, load_settings
from diffserve.errors import ModelNotFound
from diffserve.quality import quality_steps
from diffserve.service.models import ALIASES, capabilities_of
from diffserve.text_types import LanguageModelInfo
from diffserve.types import ModelInfo
from schedulers import SAMPLERS
from tests.service import talker
from tests.service.server import RunningServer

INFO = ModelInfo(
    model_id="my-model", family="sd1", digest="0123456789ab", prediction_type="epsilon", vae_factor=8,
    latent_channels=4, size_multiple_px=8, good_sizes=((512, 512), (512, 768)), max_side_px=768, train_timesteps=1000,
    is_inpainting=False, default_sampler="DPM++ 2M Karras", default_num_steps=30, default_guidance_scale=7.0,
    default_spacing="trailing", device="cpu", dtype="float32", choice_reason="a test", num_parameters=1,
    weights_bytes=4,
)  # fmt: skip
LANGUAGE = LanguageModelInfo(
    model_id="writer", architecture="LlamaForCausalLM", digest="ba9876543210", vocab_size=10, context_tokens=512,
    end_ids=(0,), has_chat_template=True, device="cpu", dtype="float32", choice_reason="a test", num_parameters=1,
    weights_bytes=4,
)  # fmt: skip


def serve_config() -> ServeConfig:
    return load_settings(env={}).serve


def told(info: ModelInfo, language: LanguageModelInfo | None = None) -> dict[str, Capabilities]:
    """As a client reads it after it went through JSON."""
    said = json.dumps(capabilities_of(info, language, serve_config()))
    return msgspec.json.decode(said, type=dict[str, Capabilities])


def image_of(info: ModelInfo) -> ImageCapabilities:
    image = told(info)[info.model_id].image
    assert image is not None
    return image


def test_the_client_reads_all_that_is_said_of_an_image_model() -> None:
    image = image_of(INFO)
    assert (image.family, image.digest, image.device, image.dtype) == ("sd1", "0123456789ab", "cpu", "float32")
    assert (image.sizes, image.native_size) == (((512, 512), (512, 768)), (512, 512))
    assert (image.min_side_px, image.max_side_px) == (serve_config().min_size_px, serve_config().max_size_px)
    assert (image.default_sampler, image.default_sigma_schedule) == ("dpmpp_2m", "karras")
    assert (image.default_num_steps, image.default_guidance_scale, image.train_timesteps) == (30, 7.0, 1000)
    assert set(capabilities_of(INFO, None, serve_config())["my-model"]["image"]) == set(
        ImageCapabilities.__struct_fields__
    )


def test_every_sampler_is_offered_by_name_and_label() -> None:
    image = image_of(INFO)
    assert {choice.name: choice.label for choice in image.samplers} == {
        name: sampler.label for name, sampler in SAMPLERS.items()
    }
    assert image.sampler("DDIM") == image.sampler("ddim")
    assert image.sampler("ddim") in image.samplers
    assert image.sampler("nope") is None
    assert [choice.name for choice in image.samplers if choice.takes_eta] == ["ddim", "euler_a"]


@pytest.mark.parametrize(
    ("default", "length", "steps"),
    [(25, 1000, [10, 25, 50]), (1, 1000, [1, 1, 2]), (4, 1000, [2, 4, 8]), (30, 40, [12, 30, 40])],
)
def test_qualities_lie_around_the_models_own_steps_and_within_its_training(
    default: int, length: int, steps: list[int]
) -> None:
    info = msgspec.structs.replace(INFO, default_num_steps=default, train_timesteps=length)
    assert list(quality_steps(info).values()) == steps


def test_a_language_model_says_how_it_may_be_asked_for_a_prompt() -> None:
    language = told(INFO, LANGUAGE)["writer"].language
    assert language is not None
    assert language.can_rewrite
    assert set(language.styles) == {"embedded", "prose", "tags"}


def test_a_language_model_without_a_chat_template_rewrites_nothing() -> None:
    language = told(INFO, msgspec.structs.replace(LANGUAGE, has_chat_template=False))["writer"].language
    assert language is not None
    assert not language.can_rewrite


def test_two_models_of_one_name_are_told_together() -> None:
    both = told(INFO, msgspec.structs.replace(LANGUAGE, model_id=INFO.model_id))[INFO.model_id]
    assert both.image is not None
    assert both.language is not None


@pytest.mark.slow
def test_a_server_tells_them_of_loaded_models_and_of_no_alias(text_server: RunningServer) -> None:
    with Client(text_server.url) as client:
        models = client.models()
        assert {model.id for model in models if model.capabilities is None} == set(ALIASES)
        image, language = (model.capabilities for model in models[:2])
        assert image is not None
        assert image.image is not None
        assert language is not None
        assert language.language is not None
        assert models[1].id == talker.NAME
        assert client.model(models[0].id) == models[0]
        assert client.model(ALIASES[0]).capabilities is None
        with pytest.raises(ModelNotFound):
            client.model("no such/model")


def test_an_older_server_says_nothing_of_them() -> None:
    from diffserve.client import Model

    assert msgspec.json.decode(b'{"id": "a", "created": 1, "object": "model"}', type=Model).capabilities is None
