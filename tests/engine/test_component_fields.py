"""Every field of a UNet's, VAE's and text encoder's configuration: as in diffusers, or refused by name at load.

The fields are read from the classes of the installed diffusers and transformers, so a field that a new release adds
fails here until it has a probe.
"""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from diffserve.api.errors import ModelLoadError
from diffserve.engine import Engine
from diffserve.runtime import load_model
from diffserve.runtime.loading.library_imports import hushed, import_quietly
from diffserve.settings.config import EngineConfig
from diffserve.settings.layers import load_settings
from tests.engine.pipelines import PIPELINES, image_request, load_pipeline, pipeline_latents

BOUND = 1e-4
PIXEL_BOUND = 1.01
"""Of 255; diffserve rounds pixels, the decoder does not."""

CLASSES = {"unet": "UNet2DConditionModel", "vae": "AutoencoderKL", "text_encoder": "CLIPTextConfig"}
MANAGED = ("self", "kwargs")
NOT_OF_THE_NETWORK = (
    "output_hidden_states", "output_attentions", "return_dict", "dtype", "chunk_size_feed_forward",
    "is_encoder_decoder", "architectures", "id2label", "label2id", "problem_type", "transformers_version",
)  # fmt: skip
"""Fields of every configuration of transformers, which name no part of a text encoder."""

DOWN, UP = "CrossAttnDownBlock2D", "CrossAttnUpBlock2D"
PROBES: dict[str, dict[str, tuple[Any, ...]]] = {
    "unet": {
        "act_fn": ("gelu",),
        "addition_embed_type_num_heads": (32,),
        "addition_embed_type": ("text",),
        "addition_time_embed_dim": (16,),
        "attention_head_dim": (4, [4, 8]),
        "attention_type": ("gated",),
        "block_out_channels": ([32, 32],),
        "center_input_sample": (True,),
        "class_embed_type": ("timestep",),
        "class_embeddings_concat": (True,),
        "conv_in_kernel": (1,),
        "conv_out_kernel": (1,),
        "cross_attention_dim": (32, [64, 64]),
        "cross_attention_norm": ("layer_norm",),
        "down_block_types": ([DOWN, "AttnDownBlock2D"], [DOWN, "ResnetDownsampleBlock2D"], [DOWN, "KDownBlock2D"]),
        "downsample_padding": (0,),
        "dropout": (0.1,),
        "dual_cross_attention": (True,),
        "encoder_hid_dim": (32,),
        "encoder_hid_dim_type": ("text_proj",),
        "flip_sin_to_cos": (False,),
        "freq_shift": (1,),
        "in_channels": (6,),
        "layers_per_block": (2, [1, 2]),
        "mid_block_only_cross_attention": (True,),
        "mid_block_scale_factor": (0.5,),
        "mid_block_type": ("UNetMidBlock2D", None),
        "norm_eps": (1e-3,),
        "norm_num_groups": (16,),
        "num_attention_heads": (4,),
        "num_class_embeds": (10,),
        "only_cross_attention": (True, [True, False]),
        "out_channels": (8,),
        "projection_class_embeddings_input_dim": (64,),
        "resnet_out_scale_factor": (2.0,),
        "resnet_skip_time_act": (True,),
        "resnet_time_scale_shift": ("scale_shift",),
        "reverse_transformer_layers_per_block": ([1, 1],),
        "sample_size": (None, 16, [8, 8]),
        "time_cond_proj_dim": (32,),
        "time_embedding_act_fn": ("silu",),
        "time_embedding_dim": (64,),
        "time_embedding_type": ("fourier",),
        "timestep_post_act": ("silu",),
        "transformer_layers_per_block": (2, [1, 2]),
        "up_block_types": (["AttnUpBlock2D", UP], ["ResnetUpsampleBlock2D", UP]),
        "upcast_attention": (True,),
        "use_linear_projection": (True,),
    },
    "vae": {
        "act_fn": ("mish",),
        "block_out_channels": ([32, 32, 32, 64],),
        "down_block_types": (["DownEncoderBlock2D"] * 3 + ["AttnDownEncoderBlock2D"],),
        "force_upcast": (False,),
        "in_channels": (6, 1),
        "latent_channels": (16,),
        "latents_mean": ([0.1] * 3, "0.1", [0.1] * 4),
        "latents_std": ([2.0] * 3, [2.0] * 4),
        "layers_per_block": (2,),
        "mid_block_add_attention": (False,),
        "norm_num_groups": (16,),
        "out_channels": (6, 1),
        "sample_size": (128,),
        "scaling_factor": (0.5, None, 0, "0.18"),
        "shift_factor": (0.1, "0.1"),
        "up_block_types": (["UpDecoderBlock2D"] * 3 + ["AttnUpDecoderBlock2D"],),
        "use_post_quant_conv": (False,),
        "use_quant_conv": (False,),
    },
    "text_encoder": {
        "attention_dropout": (0.1,),
        "bos_token_id": (5,),
        "eos_token_id": (2, 7),
        "hidden_act": ("relu",),
        "hidden_size": (32,),
        "initializer_factor": (2.0,),
        "initializer_range": (0.1,),
        "intermediate_size": (48,),
        "layer_norm_eps": (1e-2,),
        "max_position_embeddings": (120,),
        "num_attention_heads": (2,),
        "num_hidden_layers": (1, 4),
        "pad_token_id": (3,),
        "projection_dim": (16,),
        "vocab_size": (600,),
    },
}

REFUSED: list[tuple[str, str, Any]] = [
    ("unet", "addition_embed_type", "text"),
    ("unet", "addition_embed_type_num_heads", 32),
    ("unet", "class_embed_type", "timestep"),
    ("unet", "class_embeddings_concat", True),
    ("unet", "cross_attention_dim", 32),
    ("unet", "cross_attention_dim", [64, 64]),
    ("unet", "dual_cross_attention", True),
    ("unet", "encoder_hid_dim_type", "text_proj"),
    ("unet", "in_channels", 6),
    ("unet", "num_attention_heads", 4),
    ("unet", "num_class_embeds", 10),
    ("unet", "out_channels", 8),
    ("vae", "in_channels", 6),
    ("vae", "in_channels", 1),
    ("vae", "latent_channels", 16),
    ("vae", "latents_mean", [0.1] * 3),
    ("vae", "latents_mean", "0.1"),
    ("vae", "latents_std", [2.0] * 3),
    ("vae", "out_channels", 6),
    ("vae", "out_channels", 1),
    ("vae", "scaling_factor", None),
    ("vae", "scaling_factor", 0),
    ("vae", "scaling_factor", "0.18"),
    ("vae", "shift_factor", "0.1"),
]
OTHER_FIELDS = {
    ("unet", "encoder_hid_dim"): "encoder_hid_dim_type",
    ("text_encoder", "hidden_size"): "cross_attention_dim",
}
"""Fields whose refusal names another one, which has to suit them."""

DIFFERENT = (("vae", "latents_mean"), ("vae", "latents_std"), ("vae", "shift_factor"))
"""Row "vae-normalization" of docs/parity.md: StableDiffusionPipeline does not read these."""


def fields_of(component: str) -> set[str]:
    """Return the fields that the class of a component reads from its configuration."""
    library = "transformers" if component == "text_encoder" else "diffusers"
    cls = import_quietly(library, CLASSES[component])
    return set(inspect.signature(cls.__init__).parameters) - {*MANAGED, *NOT_OF_THE_NETWORK}


@pytest.mark.parametrize("component", CLASSES)
def test_every_field_of_a_component_has_a_probe(component: str) -> None:
    assert sorted(PROBES[component]) == sorted(fields_of(component))


def rebuild(component: str, field: str, value: Any, path: Path) -> None:
    """Replace a component of the model at ``path`` by one with a field of its configuration changed, random weights."""
    directory = path / component
    config = json.loads((directory / "config.json").read_text()) | {field: value}
    torch.manual_seed(1)
    with hushed("transformers", "diffusers"):
        if component == "text_encoder":
            fields = {name: entry for name, entry in config.items() if name not in NOT_OF_THE_NETWORK}
            settings = import_quietly("transformers", CLASSES[component])(**fields)
            network = import_quietly("transformers", "CLIPTextModel")(settings)
        else:
            network = import_quietly("diffusers", CLASSES[component]).from_config(config)
        shutil.rmtree(directory)
        network.save_pretrained(directory)


@pytest.mark.parametrize(("component", "field", "value"), REFUSED)
def test_value_that_is_not_served_is_refused_with_its_field(
    component: str, field: str, value: Any, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    path = Path(shutil.copytree(tiny_model("sd15"), tmp_path / "model"))
    try:
        rebuild(component, field, value, path)
    except (TypeError, ValueError):  # the class of diffusers refuses it as well
        file = path / component / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    with pytest.raises(ModelLoadError) as caught:
        load_model(path, dtype="float32", device="cpu")
    assert field in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("component", "field", "value", "message"),
    [
        ("vae", "in_channels", 6, r"in_channels is 6; images have 3 \(RGB\): name another VAE \(--vae, model.vae\)"),
        ("vae", "scaling_factor", None, "scaling_factor is None; it must be a positive number, 0.18215 for"),
        ("vae", "latents_mean", [0.1] * 3, "latents_mean is .*; it must be a list of 4 numbers or null"),
        ("unet", "dual_cross_attention", True, "dual_cross_attention is True; diffserve only supports .* without it"),
    ],
)
def test_refusal_says_field_value_and_fix(
    component: str, field: str, value: Any, message: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    path = Path(shutil.copytree(tiny_model("sd15"), tmp_path / "model"))
    file = path / component / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    with pytest.raises(ModelLoadError, match=message):
        load_model(path, dtype="float32", device="cpu")


SERVED = [
    (component, field, value)
    for component, probes in PROBES.items()
    for field, values in probes.items()
    for value in values
    if (component, field, value) not in REFUSED and (component, field) not in OTHER_FIELDS
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("component", "field", "value"), SERVED)
def test_value_that_is_served_gives_the_picture_of_diffusers(
    component: str, field: str, value: Any, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    path = Path(shutil.copytree(tiny_model("sd15"), tmp_path / "model"))
    rebuild(component, field, value, path)
    profile = msgspec.structs.replace(load_settings(model=str(path), env={}).model, probe=False)
    model = load_model(path, dtype="float32", device="cpu", profile=profile)
    request = image_request("sd15", "ddim", seed=3, num_steps=2)
    [result] = Engine(model, EngineConfig(max_rows=4, cache_dir="")).generate(request)
    assert result.latents is not None
    pipeline = load_pipeline.__wrapped__(PIPELINES["sd15"], path)
    expected = pipeline_latents(pipeline, request, "sd15")
    assert np.abs(result.latents.array - expected).max() / np.abs(expected).max() < BOUND
    if (component, field) in DIFFERENT:
        return
    with torch.inference_mode():
        decoded = pipeline.vae.decode(torch.tensor(expected)[None] / pipeline.vae.config.scaling_factor).sample[0]
    pixels = (127.5 * decoded.permute(1, 2, 0) + 127.5).clamp(0.0, 255.0).numpy()
    assert np.abs(result.pixels - pixels).max() < PIXEL_BOUND


@pytest.mark.parametrize(("component", "field"), OTHER_FIELDS)
def test_field_that_has_to_suit_another_is_refused_by_the_name_of_that(
    component: str, field: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    path = Path(shutil.copytree(tiny_model("sd15"), tmp_path / "model"))
    for value in PROBES[component][field]:
        rebuild(component, field, value, path)
        with pytest.raises(ModelLoadError, match=OTHER_FIELDS[component, field]):
            load_model(path, dtype="float32", device="cpu")
