"""Contents of ``GET /v1/models`` and how the client parses them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from diffserve.api.errors import ModelNotFound
from diffserve.api.sampling_params import MAX_BEAMS, MAX_TEMPERATURE
from diffserve.api.text_types import LanguageModelInfo
from diffserve.api.types import MAX_IMAGES, ModelInfo, ServedModel, Timings
from diffserve.client import Capabilities, Client, ImageCapabilities, Price, ServerCapabilities
from diffserve.service.endpoint import RequestPlan
from diffserve.service.images.schemas import GenerateBody
from diffserve.service.models import ALIASES, Offer, capabilities, capabilities_of, image_capabilities, refused_fields
from diffserve.service.texts.schemas import ChatBody, CompletionBody
from diffserve.settings.config import ServeConfig
from diffserve.settings.layers import load_settings
from diffserve.settings.quality import quality_steps
from schedulers import SAMPLERS
from tests.service import talker
from tests.service.server import RunningServer, error_of
from tests.service.test_chat import says

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


def round_trip(info: ModelInfo, language: LanguageModelInfo | None = None) -> dict[str, Capabilities]:
    """Return the capabilities as a client decodes them from JSON."""
    served = ServedModel(name=info.model_id, info=info, is_loaded=True)
    encoded = json.dumps(capabilities_of([served], language, serve_config()))
    return msgspec.json.decode(encoded, type=dict[str, Capabilities])


def image_of(info: ModelInfo) -> ImageCapabilities:
    image = round_trip(info)[info.model_id].image
    assert image is not None
    return image


def test_the_client_parses_all_capabilities_of_an_image_model() -> None:
    image = image_of(INFO)
    assert (image.family, image.digest, image.device, image.dtype) == ("sd1", "0123456789ab", "cpu", "float32")
    assert (image.sizes, image.native_size) == (((512, 512), (512, 768)), (512, 512))
    assert (image.min_side_px, image.max_side_px) == (serve_config().min_size_px, serve_config().max_size_px)
    assert (image.default_sampler, image.default_sigma_schedule) == ("dpmpp_2m", "karras")
    assert (image.default_num_steps, image.default_guidance_scale, image.train_timesteps) == (30, 7.0, 1000)
    assert set(image_capabilities(INFO, serve_config())) == set(ImageCapabilities.__struct_fields__)


VALUES: dict[str, Any] = {
    "cache_interval": 2, "similarity_threshold": 0.9, "clip_skip": 2, "switch_at": 0.5, "best_of": 2,
    "refiner": True,
    "micro_conditioning": {"original_size": [64, 64], "crop": [0, 0], "target_size": [64, 64]},
}  # fmt: skip


def test_fields_that_the_model_does_not_support_are_refused() -> None:
    assert set(image_of(INFO).refused_fields) == set(VALUES)
    able = msgspec.structs.replace(
        INFO, shallow_share=0.2, most_clip_skip=2, has_size_conditioning=True, refiner="xl [01]", scorer="checker"
    )
    assert image_of(able).refused_fields == ("similarity_threshold",)
    assert refused_fields(able, keeps_latents=True) == []
    assert refused_fields(msgspec.structs.replace(able, is_inpainting=True), keeps_latents=True) == [
        "similarity_threshold"
    ]


@pytest.mark.slow
def test_a_server_refuses_exactly_the_unsupported_fields(server: RunningServer) -> None:
    (model, *_) = server.client.get("/v1/models").json()["data"]
    for name, value in VALUES.items():
        answer = server.paint(**{name: value})
        param = "switch_at" if name == "refiner" else name  # "refiner" alone stands for "switch_at"
        is_refused = answer.status_code == 400 and error_of(answer)["param"].startswith(param)
        assert is_refused == (name in model["capabilities"]["image"]["refused_fields"]), (name, answer.text[:300])


PAIR = {
    "lora_unet_conv_in.lora_down.weight": np.zeros((1, 4), np.float32),
    "lora_unet_conv_in.lora_up.weight": np.zeros((4, 1), np.float32),
}


def test_loras_are_listed_from_the_current_folder(tmp_path: Path) -> None:
    info = msgspec.structs.replace(INFO, lora_dirs=(str(tmp_path),))
    assert image_of(info).loras == image_of(INFO).loras == ()
    for name in ("ink.safetensors", "fur.safetensors", "notes.txt", "a:b.safetensors", ".hidden.safetensors"):
        save_file(PAIR, tmp_path / name)
    (tmp_path / "broken.safetensors").write_bytes(b"no weights")
    (tmp_path / "folder.safetensors").mkdir()
    assert image_of(info).loras == ("fur", "ink")
    (tmp_path / "ink.safetensors").unlink()
    assert image_of(info).loras == ("fur",)


def test_other_kinds_of_adapters_are_refused_with_reasons(tmp_path: Path) -> None:
    info = msgspec.structs.replace(INFO, lora_dirs=(str(tmp_path),))
    tensors = {
        "face": "ip_adapter.1.to_k_ip.weight",
        "fur": "lora_unet_conv_in.oft_blocks",
        "paper": "lora_unet_conv_in.on_input",
    }
    for name, tensor in tensors.items():
        save_file(PAIR | {tensor: np.zeros(1, np.float32)}, tmp_path / f"{name}.safetensors")
    save_file(PAIR, tmp_path / "ink.safetensors")
    (tmp_path / "torn.safetensors").write_bytes((tmp_path / "ink.safetensors").read_bytes()[:-1])
    image = image_of(info)
    assert image.loras == ("ink",)
    assert [(name, reason.split(" (")[0].split(";")[0]) for name, reason in image.refused_loras.items()] == [
        ("face", "it holds an IP-Adapter"),
        ("fur", "it is OFT"),
        ("paper", "it is IA3"),
        ("torn", "it is not a complete safetensors file: it has 31 of 32 bytes of tensors"),
    ]


def test_controlnets_are_listed_from_the_current_folder(tmp_path: Path) -> None:
    info = msgspec.structs.replace(INFO, controlnet_dir=str(tmp_path))
    assert image_of(info).controlnets == image_of(INFO).controlnets == ()
    for name in ("edges", "depth", "a:b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"_class_name": "ControlNetModel"}')
        save_file(PAIR, tmp_path / name / "diffusion_pytorch_model.safetensors")
    (tmp_path / "notes").mkdir()
    assert image_of(info).controlnets == ("depth", "edges")
    assert image_of(msgspec.structs.replace(info, controlnet_dir=str(tmp_path / "edges"))).controlnets == ("edges",)


def test_every_sampler_is_offered_by_name_and_label() -> None:
    image = image_of(INFO)
    assert {choice.name: choice.label for choice in image.samplers} == {
        name: sampler.label for name, sampler in SAMPLERS.items()
    }
    assert image.sampler("DDIM") == image.sampler("ddim")
    assert image.sampler("ddim") in image.samplers
    assert image.sampler("nope") is None
    assert [choice.name for choice in image.samplers if choice.takes_eta] == ["ddim", "euler_a", "tcd"]


@pytest.mark.parametrize(
    ("default", "length", "steps"),
    [(25, 1000, [10, 25, 50]), (1, 1000, [1, 1, 2]), (4, 1000, [2, 4, 8]), (30, 40, [12, 30, 40])],
)
def test_qualities_are_near_the_models_default_steps_and_within_its_training(
    default: int, length: int, steps: list[int]
) -> None:
    info = msgspec.structs.replace(INFO, default_num_steps=default, train_timesteps=length)
    assert list(quality_steps(info).values()) == steps


def test_a_language_model_lists_its_rewriting_options() -> None:
    language = round_trip(INFO, LANGUAGE)["writer"].language
    assert language is not None
    assert language.can_rewrite
    assert set(language.styles) == {"embedded", "prose", "tags"}


def test_a_language_model_without_a_chat_template_rewrites_nothing() -> None:
    language = round_trip(INFO, msgspec.structs.replace(LANGUAGE, has_chat_template=False))["writer"].language
    assert language is not None
    assert not language.can_rewrite


def test_two_models_of_one_name_share_an_entry() -> None:
    both = round_trip(INFO, msgspec.structs.replace(LANGUAGE, model_id=INFO.model_id))[INFO.model_id]
    assert both.image is not None
    assert both.language is not None


@pytest.mark.slow
def test_capabilities_are_listed_for_loaded_models_but_not_for_aliases(text_server: RunningServer) -> None:
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


def test_an_older_server_lists_no_capabilities() -> None:
    from diffserve.client import Model

    assert msgspec.json.decode(b'{"id": "a", "created": 1, "object": "model"}', type=Model).capabilities is None


def offers() -> dict[str, Offer]:
    return {
        "/v1/images/generations": Offer("image", GenerateBody),
        "/v1/chat/completions": Offer("chat", ChatBody),
        "/v1/completions": Offer("text", CompletionBody),
    }


def test_field_bounds_come_from_the_validation_and_models_list_their_routes() -> None:
    served = ServedModel(name=INFO.model_id, info=INFO, is_loaded=True)
    mute = msgspec.structs.replace(LANGUAGE, has_chat_template=False, speaks_json=True)
    priced = msgspec.structs.replace(serve_config(), price_per_hour=3.6, currency="EUR")
    encoded = json.dumps(capabilities(1, offers(), [served], mute, priced))
    decoded = msgspec.json.decode(encoded, type=ServerCapabilities)
    assert json.loads(encoded).keys() - {"object"} == set(ServerCapabilities.__struct_fields__)
    painting, chat = (decoded.endpoints[path].fields for path in list(offers())[:2])
    assert set(painting) == set(GenerateBody.model_fields)
    assert painting["prompt"] == {"type": "string", "minLength": 1, "maxLength": 32_000, "required": True}
    assert (painting["n"]["minimum"], painting["n"]["maximum"]) == (1, MAX_IMAGES)
    assert painting["output_format"]["enum"] == list(decoded.output_formats)
    assert (chat["temperature"]["minimum"], chat["temperature"]["maximum"]) == (0.0, MAX_TEMPERATURE)
    assert chat["num_beams"]["maximum"] == MAX_BEAMS
    assert [model.endpoints for model in decoded.models] == [("/v1/images/generations",), ("/v1/completions",)]
    assert decoded.models[1].capabilities is not None
    assert decoded.models[1].capabilities.language is not None
    assert decoded.models[1].capabilities.language.response_formats == ("text", "json_object", "json_schema")
    assert decoded.price == Price(per_hour=3.6, currency="EUR")
    plan = RequestPlan(warnings=(), price=priced.price)
    assert plan.spent(2.0) == {"device_s": 2.0, "cost": {"amount": 0.002, "currency": "EUR"}}
    assert RequestPlan(warnings=()).spent(2.0) == {"device_s": 2.0}


@pytest.mark.slow
def test_a_server_refuses_values_beyond_its_listed_bounds(text_server: RunningServer) -> None:
    with Client(text_server.url) as client:
        offered = client.capabilities()
        assert [model.id for model in offered.models] == [model.id for model in client.models() if model.endpoints]
    needed: dict[str, dict[str, Any]] = {
        "/v1/images/generations": {"prompt": "a"},
        "/v1/chat/completions": {"messages": says("a")},
    }
    num_tried = 0
    for path, body in needed.items():
        assert any(path in model.endpoints for model in offered.models)
        for name, field in offered.endpoints[path].fields.items():
            for bound, past in (("minimum", -1), ("maximum", 1)):
                if field.get("type") in ("integer", "number") and bound in field:
                    answer = text_server.client.post(path, json={**body, name: field[bound] + past})
                    assert (answer.status_code, error_of(answer)["param"]) == (400, name), (path, name, bound)
                    num_tried += 1
    assert num_tried > 30
    images = text_server.paint("a fox", num_inference_steps=2, n=2).json()
    assert images["usage"]["device_s"] > 0.0
    assert "cost" not in images["usage"]
    assert [set(entry["timings"]) for entry in images["data"]] == [set(Timings.__struct_fields__)] * 2
