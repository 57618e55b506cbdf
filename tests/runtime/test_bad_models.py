"""Models that cannot or will not be loaded: one line each, with the file, the tensor and the way out."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from diffserve.api.errors import ModelLoadError, ModelNotFound
from diffserve.models.model_files import model_path
from diffserve.runtime import load_model
from diffserve.runtime.loading.library_imports import import_quietly
from diffserve.settings.layers import load_settings
from tests.device import DEVICE

UNET = "unet/diffusion_pytorch_model.safetensors"
TEXT = "text_encoder/model.safetensors"
CopyTiny = Callable[[str], Path]


@pytest.fixture
def copy_tiny(tiny_model: Callable[[str], Path], tmp_path: Path) -> CopyTiny:
    """``copy_tiny(kind)``: a copy of the tiny model that the test may spoil."""

    def copy(kind: str) -> Path:
        return Path(shutil.copytree(tiny_model(kind), tmp_path / kind))

    return copy


def message_of(path: Path) -> str:
    """Return the one-line error of ``load_model`` for ``path``."""
    with pytest.raises(ModelLoadError) as caught:
        load_model(path, dtype="float32", device=DEVICE)
    assert "\n" not in caught.value.message
    assert caught.value.code == "model_load_error"
    return caught.value.message


def edit_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_tensors(file: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def test_a_path_with_nothing_there_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"there is no model at .*nowhere; give a diffusers directory"):
        load_model(tmp_path / "nowhere")


def test_a_missing_tensor_is_named_with_its_file(copy_tiny: CopyTiny) -> None:
    path = copy_tiny("sd15")
    edit_tensors(path / UNET, lambda tensors: tensors.pop("conv_in.bias"))
    message = message_of(path)
    assert "'conv_in.bias' is missing from" in message
    assert str(path / UNET) in message


def test_many_missing_tensors_are_counted(copy_tiny: CopyTiny) -> None:
    path = copy_tiny("sd15")
    edit_tensors(path / UNET, lambda tensors: [tensors.pop(key) for key in list(tensors)[:9]])
    assert "and 4 more are missing" in message_of(path)


@pytest.mark.parametrize("name", ["conv_in.extra", "add_embedding.linear_1.weight"])
def test_a_surplus_tensor_of_a_part_of_the_network_is_refused(copy_tiny: CopyTiny, name: str) -> None:
    path = copy_tiny("sd15")
    edit_tensors(path / UNET, lambda tensors: tensors.update({name: torch.zeros(2)}))
    assert f"{name!r} is in" in message_of(path)
    assert "not in the configured network" in message_of(path)


def test_a_surplus_tensor_of_no_part_of_the_network_is_left_out(
    copy_tiny: CopyTiny, caplog: pytest.LogCaptureFixture
) -> None:
    path = copy_tiny("sd15")
    edit_tensors(path / UNET, lambda tensors: tensors.update({"global_step": torch.zeros(2)}))
    load_model(path, dtype="float32", device=DEVICE)
    assert "'global_step' is in" in caplog.text
    assert "left out" in caplog.text


def test_a_folder_of_the_cache_of_the_hub_is_its_snapshot(copy_tiny: CopyTiny, tmp_path: Path) -> None:
    model, hub = copy_tiny("sd15"), tmp_path / "models--owner--tiny-lcm"
    for commit in ("aaa", "bbb"):
        (hub / "snapshots").mkdir(parents=True, exist_ok=True)
        (hub / "snapshots" / commit).symlink_to(model, target_is_directory=True)
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("aaa\n")
    assert model_path(hub) == hub / "snapshots" / "aaa"
    assert load_model(hub, dtype="float32", device=DEVICE).family == "sd1"
    settings = load_settings(model=str(hub), env={})
    assert settings.model.model_id == "owner-tiny-lcm"
    (hub / "refs" / "main").write_text("ccc\n")
    assert model_path(hub).parent == hub / "snapshots"


@pytest.mark.parametrize(
    ("file", "key"),
    [(UNET, "conv_in.weight"), (TEXT, "final_layer_norm.bias"), (TEXT, "embeddings.token_embedding.weight")],
)
def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(copy_tiny: CopyTiny, file: str, key: str) -> None:
    path = copy_tiny("sd15")
    shape = list(load_file(path / file)[key].shape)
    edit_tensors(path / file, lambda tensors: tensors.update({key: torch.zeros(7, 3)}))
    message = message_of(path)
    assert f"tensor '{key}' of {path / file} has shape [7, 3]" in message
    assert f"expects {shape}" in message


def test_a_tensor_of_integers_is_refused(copy_tiny: CopyTiny) -> None:
    path = copy_tiny("sd15")
    edit_tensors(path / UNET, lambda tensors: tensors.update({"conv_in.bias": torch.zeros(32, dtype=torch.int8)}))
    assert "'conv_in.bias'" in message_of(path)
    assert "torch.int8, not floats" in message_of(path)


@pytest.mark.parametrize("keep", [0, 5, 100, -1000, -1])
def test_a_truncated_file_is_named(copy_tiny: CopyTiny, keep: int) -> None:
    path = copy_tiny("sd15")
    content = (path / UNET).read_bytes()
    (path / UNET).write_bytes(content[:keep])
    message = message_of(path)
    assert f"{path / UNET} is not a complete safetensors file" in message
    assert "download it again" in message


@pytest.mark.parametrize("name", ["diffusion_pytorch_model.bin", "model.ckpt", "weights.pt"])
def test_pickle_weights_are_refused_by_name(copy_tiny: CopyTiny, name: str) -> None:
    path = copy_tiny("sd15")
    (path / UNET).rename(path / "unet" / name)
    message = message_of(path)
    assert f"{path / 'unet' / name} is a pickle file" in message
    assert "safetensors only" in message


def test_command_in_the_refusal_of_a_pickle_file_converts_it(copy_tiny: CopyTiny) -> None:
    path = copy_tiny("sd15")
    weights = path / UNET
    pickled = weights.with_suffix(".bin")
    torch.save({"state_dict": load_file(weights), "epoch": 3}, pickled)
    weights.unlink()
    command = message_of(path).partition("that you can lose: python ")[2].removesuffix(".")
    subprocess.run([sys.executable, *shlex.split(command)], cwd=weights.parent, check=True, timeout=200)
    load_model(path, dtype="float32", device=DEVICE)


def test_a_single_pickle_file_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "v1-5.ckpt"
    file.write_bytes(b"\x80\x04.")
    assert f"{file} is a pickle file" in message_of(file)


def test_a_directory_of_pickles_without_an_index_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "model.ckpt").write_bytes(b"\x80\x04.")
    assert "model.ckpt is a pickle file" in message_of(tmp_path)


def test_a_missing_weight_file_is_named(copy_tiny: CopyTiny) -> None:
    path = copy_tiny("sd15")
    (path / UNET).unlink()
    assert f"{path / UNET} is missing" in message_of(path)


def test_a_directory_that_is_no_model_points_at_the_file_in_it(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "dream.safetensors")
    assert "has no model_index.json" in message_of(tmp_path)
    assert "dream.safetensors, give that file's path" in message_of(tmp_path)


@pytest.mark.parametrize(
    ("component", "value"),
    [
        ("unet", ["diffusers", "SD3Transformer2DModel"]),
        ("unet", ["my_code", "UNet2DConditionModel"]),
        ("vae", ["diffusers", "AutoencoderDC"]),
        ("text_encoder", ["transformers", "T5EncoderModel"]),
        ("tokenizer", ["transformers", "T5Tokenizer"]),
        ("scheduler", ["my_code", "DDIMScheduler"]),
        ("unet", []),
    ],
)
def test_a_class_that_is_not_on_the_list_is_refused(copy_tiny: CopyTiny, component: str, value: list[str]) -> None:
    path = copy_tiny("sd15")
    edit_json(path / "model_index.json", **{component: value})
    message = message_of(path)
    assert f"{component} is {value!r}" in message


@pytest.mark.parametrize("component", ["transformer", "prior", "controlnet", "text_encoder_3"])
def test_a_component_that_is_not_served_is_refused(copy_tiny: CopyTiny, component: str) -> None:
    path = copy_tiny("sd15")
    edit_json(path / "model_index.json", **{component: ["diffusers", "Thing"]})
    assert f"needs a component '{component}'" in message_of(path)


def test_the_safety_checker_and_its_kin_are_not_looked_at(copy_tiny: CopyTiny) -> None:
    path = copy_tiny("sd15")
    edit_json(path / "model_index.json", safety_checker=["stable_diffusion", "Checker"], image_encoder=["x", "Y"])
    load_model(path, dtype="float32", device=DEVICE)


def test_an_index_without_a_unet_says_what_is_needed(copy_tiny: CopyTiny) -> None:
    path = copy_tiny("sd15")
    edit_json(path / "model_index.json", unet=[None, None])
    assert "names no unet" in message_of(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("class_embed_type", "timestep"),
        ("encoder_hid_dim_type", "text_proj"),
        ("encoder_hid_dim_type", "ip_image_proj"),
    ],
)
def test_a_unet_that_needs_other_conditions_is_refused(copy_tiny: CopyTiny, name: str, value: Any) -> None:
    path = copy_tiny("sd15")
    edit_json(path / "unet" / "config.json", **{name: value})
    message = message_of(path)
    assert f"{name} is {value!r}" in message
    assert ("it belongs to an IP-Adapter" in message) == (value == "ip_image_proj")


def test_an_ip_adapter_is_refused_by_name_as_a_file_and_within_a_unet(copy_tiny: CopyTiny, tmp_path: Path) -> None:
    path = copy_tiny("sd15")
    unet = import_quietly("diffusers", "UNet2DConditionModel").from_pretrained(str(path / "unet"))
    layers = [name for name in unet.attn_processors if name.endswith("attn2.processor")]
    places = [2 * place + 1 for place in range(len(layers))]
    shapes = [unet.get_submodule(name.removesuffix(".processor")).to_k.weight.shape for name in layers]
    parts = {
        "image_proj": {"proj.weight": (256, 16), "proj.bias": (256,), "norm.weight": (64,), "norm.bias": (64,)},
        "ip_adapter": {f"{i}.to_{k}_ip.weight": shape for i, shape in zip(places, shapes, strict=True) for k in "kv"},
    }
    adapter = {part: {key: torch.zeros(shape) for key, shape in tensors.items()} for part, tensors in parts.items()}
    file = tmp_path / "ip-adapter_sd15.safetensors"
    save_file({f"{part}.{key}": tensor for part, tensors in adapter.items() for key, tensor in tensors.items()}, file)
    unet._load_ip_adapter_weights([adapter])
    for config in (unet.config, json.loads((path / "unet" / "config.json").read_text())):
        unet.save_pretrained(str(path / "unet"))
        (path / "unet" / "config.json").write_text(json.dumps(dict(config)))
        assert "IP-Adapter" in message_of(path)
    assert f"{path / UNET} holds an IP-Adapter (its tensor '" in message_of(path)
    assert f"{file} holds an IP-Adapter (its tensor 'image_proj." in message_of(file)


def test_a_configuration_that_builds_nothing_is_named(copy_tiny: CopyTiny) -> None:
    path = copy_tiny("sd15")
    edit_json(path / "unet" / "config.json", down_block_types=["NoSuchBlock", "DownBlock2D"])
    assert str(path / "unet" / "config.json") in message_of(path)
    assert "NoSuchBlock" in message_of(path)


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", "\x00\x01"])
def test_a_configuration_that_is_no_json_object_is_named(copy_tiny: CopyTiny, content: str) -> None:
    path = copy_tiny("sd15")
    (path / "vae" / "config.json").write_text(content)
    assert str(path / "vae" / "config.json") in message_of(path)


def test_parts_that_were_not_trained_together_are_found_out(
    copy_tiny: CopyTiny, tiny_model: Callable[[str], Path]
) -> None:
    path = copy_tiny("sdxl")
    for component in ("unet",):
        shutil.rmtree(path / component)
        shutil.copytree(tiny_model("sd15") / component, path / component)
    assert "the text encoder gives 128 features, the UNet reads 64" in message_of(path)


def test_a_noise_schedule_that_is_unknown_is_named(copy_tiny: CopyTiny) -> None:
    path = copy_tiny("sd15")
    file = path / "scheduler" / "scheduler_config.json"
    edit_json(file, timestep_spacing="wide")
    assert f"{file}: the scheduler's configuration cannot be used (timestep_spacing is 'wide'; " in message_of(path)
    edit_json(file, timestep_spacing=None, beta_schedule="zigzag")
    assert "zigzag" in message_of(path)


def test_missing_tokenizer_files_are_named(copy_tiny: CopyTiny) -> None:
    path = copy_tiny("sd15")
    for file in (path / "tokenizer").iterdir():
        if file.name in ("vocab.json", "merges.txt", "tokenizer.json"):
            file.unlink()
    assert f"{path / 'tokenizer'} holds neither vocab.json" in message_of(path)
    shutil.rmtree(path / "tokenizer")
    assert f"{path / 'tokenizer'} is missing" in message_of(path)


def test_a_shard_that_is_missing_or_outside_is_named(copy_tiny: CopyTiny) -> None:
    path = copy_tiny("sd15")
    (path / UNET).unlink()
    index = path / "unet" / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"conv_in.bias": "part-1.safetensors"}}))
    assert f"{path / 'unet' / 'part-1.safetensors'} is missing" in message_of(path)
    index.write_text(json.dumps({"weight_map": {"conv_in.bias": "../../other.safetensors"}}))
    assert "shards lie in the directory of their index" in message_of(path)
    index.write_text("{}")
    assert "has no weight_map" in message_of(path)


def test_a_tensor_in_two_shards_is_refused(copy_tiny: CopyTiny) -> None:
    path = copy_tiny("sd15")
    shutil.copy(path / UNET, path / "unet" / "copy.safetensors")
    index = path / "unet" / "diffusion_pytorch_model.safetensors.index.json"
    names = {"a": "diffusion_pytorch_model.safetensors", "b": "copy.safetensors"}
    index.write_text(json.dumps({"weight_map": names}))
    plain = path / "unet" / "first.safetensors"
    (path / UNET).rename(plain)
    index.write_text(json.dumps({"weight_map": names | {"a": plain.name}}))
    assert "is in both" in message_of(path)


def test_formulation_that_is_not_served_is_refused_before_any_weight_is_read(copy_tiny: CopyTiny) -> None:
    path = copy_tiny("sd15")
    (path / UNET).unlink()
    edit_json(path / "scheduler/scheduler_config.json", _class_name="FlowMatchEulerDiscreteScheduler", shift=3.0)
    assert "FlowMatchEulerDiscreteScheduler (a flow-matching model" in message_of(path)
    edit_json(path / "scheduler/scheduler_config.json", _class_name="DDIMScheduler")
    assert "shift is 3.0, which no supported scheduler has" in message_of(path)
    edit_json(path / "scheduler/scheduler_config.json", shift=0)
    edit_json(path / "model_index.json", scheduler=["diffusers", "EDMEulerScheduler"])
    assert "says DDIMScheduler, model_index.json says EDMEulerScheduler" in message_of(path)


def test_class_that_the_scheduler_s_file_leaves_out_is_that_of_the_index(copy_tiny: CopyTiny) -> None:
    path = copy_tiny("sd15")
    config = json.loads((path / "scheduler/scheduler_config.json").read_text())
    del config["_class_name"]
    (path / "scheduler/scheduler_config.json").write_text(json.dumps(config))
    edit_json(path / "model_index.json", scheduler=["diffusers", "FlowMatchEulerDiscreteScheduler"])
    assert "a flow-matching model" in message_of(path)
