"""Folders of embeddings, LoRAs and ControlNets with unusable files: a server skips, lists and refuses them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.random_models import adapter_tensors, lora_tensors, save_image_encoder
from diffserve.client import Client, ImageCapabilities
from diffserve.disk_cache import DiskCache
from diffserve.engine.loading import survey
from diffserve.media.images import decode_image, read_infotext
from diffserve.media.infotext import parse_infotext
from diffserve.models.lora_layers import read_layers
from diffserve.models.loras import LoraFolders
from diffserve.runtime import load_model
from diffserve.service.models import image_capabilities
from diffserve.settings.config import EngineConfig
from diffserve.settings.layers import load_settings
from tests.engine.controlnets import control_map, save_controlnet
from tests.engine.loras import ATTENTION, TEXT
from tests.runtime.original_layout import unet_tensors
from tests.service.server import RunningServer, error_of, files_of, running_server
from tests.service.test_edits import in_base64

Tensors = dict[str, torch.Tensor]

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 12345\n"


def write_words(folder: Path) -> None:
    """Write two usable embeddings, and one file for each way in which a file can be unusable."""
    vectors = torch.randn((2, 64), generator=torch.Generator().manual_seed(1))
    (folder / "deep").mkdir(parents=True)
    for name in ("sloth", "deep/toy", "deep/sloth"):
        save_file({"emb_params": vectors}, folder / f"{name}.safetensors")
    save_file({"emb_params": torch.zeros(2, 1024)}, folder / "wide.safetensors")
    save_file({"a": vectors, "b": vectors.clone()}, folder / "twofold.safetensors")
    content = (folder / "sloth.safetensors").read_bytes()
    (folder / "cut.safetensors").write_bytes(content[:-100])
    (folder / "pointer.safetensors").write_bytes(POINTER)
    (folder / "loop.safetensors").symlink_to("loop.safetensors")
    torch.save({"string_to_param": {"*": vectors}}, folder / "pickled.pt")
    torch.save({"<binary>": vectors}, folder / "binary.bin")


def write_loras(folder: Path, model: Any, other: Any) -> None:
    """Write usable LoRAs of several trainers into subfolders, one LoRA of another model, and unusable files."""
    tensors = lora_tensors(model, (*ATTENTION, *TEXT), 0, 4)
    saved: dict[str, Tensors] = {
        "style/ink": tensors,
        "paper": lora_tensors(model, ATTENTION, 1, 4),
        "a/twin": lora_tensors(model, ATTENTION, 2, 4),
        "b/deep/twin": lora_tensors(model, ATTENTION, 3, 4),
        "tools/comfy": comfy_names(tensors, model.unet.network),
        "tools/bundle": tensors | {"bundle_emb.toy cat.string_to_param.*": torch.zeros(2, 64)},
        "tools/scaled": {name: scaled(name, tensor) for name, tensor in tensors.items()},
        "xl": lora_tensors(other, ATTENTION, 0, 4),
    }
    layer = "lora_unet_mid_block_attentions_0_proj_in"
    down, up = torch.ones(4, 32, 1, 1), torch.ones(32, 4, 1, 1)
    pair = {f"{layer}.lora_down.weight": down, f"{layer}.lora_up.weight": up}
    fit = {f"{layer}.lora_down.weight": torch.ones(4, 64, 1, 1) / 8, f"{layer}.lora_up.weight": torch.ones(64, 4, 1, 1)}
    flux = "lora_unet_double_blocks_0_img_attn_proj"
    saved |= {
        "whole/norm": fit | {"lora_unet_mid_block_resnets_0_norm1.w_norm": torch.ones(64)},
        "whole/bias": fit | {f"{layer}.diff_b": torch.ones(64)},
        "whole/difference": fit | {"diffusion_model.out.2.diff": torch.ones(4, 32, 3, 3) / 8},
        "whole/dora": fit | {f"{layer}.dora_scale": torch.full((64, 1, 1, 1), 2.0)},
        "whole/kronecker": {
            f"{layer}.lokr_w1": torch.ones(8, 8) / 8,
            f"{layer}.lokr_w2": torch.ones(8, 8, 1, 1),
        },
        "bad/lora_bias": {"unet.mid_block.attentions.0.proj_in.lora_B.bias": torch.ones(32)},
        "bad/turned": {f"{layer}.oft_blocks": torch.ones(4, 8, 8)},
        "bad/flux": {name.replace(layer, flux): tensor for name, tensor in pair.items()},
        "bad/transformer": {"transformer.x.lora_A.weight": down, "transformer.x.lora_B.weight": up},
        "bad/huge": {name: torch.ones(300, 300) for name in pair},
        "bad/alphas": pair | {f"{layer}.alpha": torch.ones(2)},
        "bad/ranks": pair | {f"{layer}.lora_up.weight": torch.ones(32, 3, 1, 1)},
        "bad/half": {f"{layer}.lora_up.weight": up},
        "bad/twice": pair | {f"{layer}.lora_A.weight": down.clone()},
        "bad/magnitude": {f"{layer}.dora_scale": torch.ones(32, 1, 1, 1)},
        "bad/words": {"emb_params": torch.ones(2, 64)},
    }
    for name, saved_tensors in saved.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        save_file(saved_tensors, folder / f"{name}.safetensors")
    content = (folder / "paper.safetensors").read_bytes()
    (folder / "bad/cut.safetensors").write_bytes(content[:-100])
    (folder / "bad/pointer.safetensors").write_bytes(POINTER)
    (folder / "bad/page.safetensors").write_bytes(b"<!DOCTYPE html><html><body>Not found</body></html>")
    (folder / "bad/metadata.safetensors").write_bytes(with_metadata(content, {"ss_epoch": 5}))
    (folder / "bad/loop.safetensors").symlink_to("loop.safetensors")
    (folder / "style/again").symlink_to("..")


def comfy_names(tensors: Tensors, unet: Any) -> Tensors:
    """Return ``tensors`` with their names converted from diffusers' to ComfyUI's."""
    original = {tensor.data_ptr(): key for key, tensor in unet_tensors(unet)}
    weights = {name: original[tensor.data_ptr()] for name, tensor in unet.state_dict().items() if tensor.ndim > 1}
    renamed = {}
    for name, tensor in tensors.items():
        component, _, parts = name.partition(".")
        layer, half = parts.removesuffix(".weight").rsplit(".lora_", 1)
        if component == "unet":
            new = weights[f"{layer}.weight"].removeprefix("model.").removesuffix(".weight")
        else:
            new = f"text_encoders.clip_l.transformer.text_model.{layer.removeprefix('text_model.')}"
        renamed[f"{new}.lora_{'down' if half == 'A' else 'up'}.weight"] = tensor.clone()
    return renamed


def scaled(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a LoRA tensor with the scales 0.8 (text encoder) and 0.5 (UNet) multiplied in."""
    if "lora_A" in name:
        return tensor.clone()
    return tensor * (0.5 if name.startswith("unet.") else 0.8)


def with_metadata(content: bytes, metadata: dict[str, Any]) -> bytes:
    """Return a safetensors file with metadata that its library would not write."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.dumps(json.loads(content[8:end]) | {"__metadata__": metadata}).encode()
    return len(header).to_bytes(8, "little") + header + content[end:]


def write_controls(folder: Path, unet: Any) -> None:
    """Write a usable ControlNet into a subfolder, and directories and files that no model can use."""
    good = save_controlnet(unet, folder / "sd15" / "edges", 1)
    weights = "diffusion_pytorch_model.safetensors"
    for name in ("cut", "pointer", "pickled", "union", "missing"):
        copytree(good, folder / name)
    (folder / "cut" / weights).write_bytes((good / weights).read_bytes()[:-10])
    (folder / "pointer" / weights).write_bytes(POINTER)
    (folder / "pickled" / weights).rename(folder / "pickled" / "diffusion_pytorch_model.bin")
    config = json.loads((good / "config.json").read_text())
    (folder / "union" / "config.json").write_text(json.dumps(config | {"_class_name": "ControlNetUnionModel"}))
    (folder / "missing" / weights).unlink()
    save_file(load_file(good / weights), folder / "single.safetensors")
    (folder / "old.pth").write_bytes(b"")


WHOLE_LORAS = tuple(f"whole/{name}" for name in ("bias", "difference", "dora", "kronecker", "norm"))
TOOLS = ("tools/bundle", "tools/comfy", "tools/scaled")
GOOD_LORAS = ("a/twin", "b/deep/twin", "paper", "style/ink", *TOOLS, *WHOLE_LORAS)
REFUSED_LORAS = {
    "bad/lora_bias": "it holds the bias of a low-rank matrix ('unet.mid_block.attentions.0.proj_in.lora_B.bias')",
    "bad/turned": "it is OFT (its tensor",
    "bad/flux": "there is no such layer in the supported models (Stable Diffusion 1, 2 and XL)",
    "bad/transformer": "not named as a LoRA of a UNet or text encoder ('transformer.x.lora_A.weight')",
    "bad/huge": "it has rank 300; at most 256 is allowed.",
    "bad/alphas": "it is damaged: 'lora_unet_mid_block_attentions_0_proj_in.alpha' is [2], not one number.",
    "bad/ranks": "their ranks must be equal",
    "bad/half": "which has no partner",
    "bad/twice": "it changes one layer twice",
    "bad/magnitude": "which has no partner",
    "bad/words": "not named as a LoRA",
    "bad/cut": "it is not a complete safetensors file",
    "bad/pointer": "it is a Git LFS pointer",
    "bad/loop": "it cannot be read (Too many levels of symbolic links).",
    "bad/page": "it is not a safetensors file; download it again",
    "bad/metadata": "it has a __metadata__ value that is not text ('ss_epoch': 5)",
}
OTHER_FAMILY = "is for models whose prompt tokens have 128 numbers; those of this model have 64."
REFUSED_CONTROLS = {
    "cut": "diffusion_pytorch_model.safetensors is not a complete safetensors file",
    "pointer": "diffusion_pytorch_model.safetensors is a Git LFS pointer",
    "pickled": "diffusion_pytorch_model.bin is a pickle file",
    "union": "config.json is of a ControlNetUnionModel",
    "missing": "diffusion_pytorch_model.safetensors is missing",
    "single": "single.safetensors is a single file; diffserve needs a directory with config.json",
    "old": "old.pth is a single file",
}
SKIPPED_WORDS = {
    "wide": "wide.safetensors is 1024 numbers wide, but this model reads 64.",
    "twofold": "twofold.safetensors holds 'a', 'b', which is not a learned word",
    "cut": "cut.safetensors is not a complete safetensors file: it has 412 of 512 bytes of tensors",
    "pointer": "pointer.safetensors is a Git LFS pointer, not the file itself; fetch it with: git lfs pull",
    "loop": "loop.safetensors cannot be read",
    "pickled": "pickled.pt is a pickle file, which can run code when it is read; convert it to safetensors",
    "binary": "binary.bin is a pickle file",
    "sloth.safetensors": "another file in the folder is called 'sloth', too; rename one.",
}


@pytest.fixture(scope="module")
def folders(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with ``words``, ``loras`` and ``controls``."""
    root = tmp_path_factory.mktemp("folders")
    model, other = (load_model(tiny_model(kind), dtype="float32", device="cpu") for kind in ("sd15", "sdxl"))
    write_words(root / "words")
    write_loras(root / "loras", model, other)
    write_controls(root / "controls", model.unet.network)
    return root


@pytest.fixture(scope="module")
def server(
    folders: Path, tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """Run a server that reads the folders."""
    names = {"embeddings_dir": "words", "lora_dir": "loras", "controlnet_dir": "controls"}
    lines = [f"{setting} = {json.dumps(str(folders / name))}" for setting, name in names.items()]
    config = "\n".join(["[model]", 'dtype = "float32"', *lines, "[engine]", "max_rows = 4\n"])
    with running_server(tiny_model("sd15"), tmp_path_factory.mktemp("server"), config=config) as running:
        running.wait_until_ready()
        yield running


def capabilities_of(server: RunningServer) -> ImageCapabilities:
    with Client(server.url) as client:
        [image] = [model.capabilities.image for model in client.models() if model.capabilities is not None]
    assert image is not None
    return image


def assert_problems(problems: dict[str, str], expected: dict[str, str]) -> None:
    assert problems.keys() == expected.keys()
    for name, reason in expected.items():
        assert reason in problems[name]


@pytest.mark.slow
def test_embeddings_that_cannot_be_used_are_listed_with_reasons(server: RunningServer, folders: Path) -> None:
    listed: dict[str, Any] = server.client.get("/sdapi/v1/embeddings").json()
    assert listed["loaded"].keys() == {"sloth", "toy"}
    assert_problems({name: entry["reason"] for name, entry in listed["skipped"].items()}, SKIPPED_WORDS)
    image = capabilities_of(server)
    assert set(image.learnt_words) == {"toy", "sloth"}
    assert_problems(image.refused_words, SKIPPED_WORDS)
    assert str(folders) not in json.dumps(listed)


@pytest.mark.slow
def test_each_embedding_that_cannot_be_used_is_logged_once(server: RunningServer) -> None:
    log = server.errors.read_text()
    for name in SKIPPED_WORDS:
        assert log.count(f"the learned word '{name}' is skipped") == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SKIPPED_WORDS if "." not in name])
def test_prompt_with_an_embedding_that_cannot_be_used_is_refused(server: RunningServer, name: str) -> None:
    answer = server.paint(f"a {name} fox", size="64x64", num_steps=1)
    assert (answer.status_code, error_of(answer)["param"]) == (400, "prompt")
    assert SKIPPED_WORDS[name] in error_of(answer)["message"]
    assert server.paint("a sloth and a toy", size="64x64", num_steps=1).status_code == 200


def paint(server: RunningServer, prompt: str, **fields: Any) -> bytes:
    [file] = files_of(server.paint(prompt, size="64x64", num_steps=2, seed=3, **fields))
    return file


def refusal(server: RunningServer, prompt: str, **fields: Any) -> str:
    answer = server.paint(prompt, size="64x64", num_steps=1, **fields)
    assert answer.status_code == 400, answer.text
    return str(error_of(answer)["message"])


@pytest.mark.slow
def test_loras_that_no_model_can_use_are_listed_with_reasons_and_refused_by_name(
    server: RunningServer, folders: Path
) -> None:
    image = capabilities_of(server)
    assert image.loras == GOOD_LORAS
    assert_problems(image.refused_loras, REFUSED_LORAS | {"xl": OTHER_FAMILY})
    for name, reason in REFUSED_LORAS.items():
        for spelling in (name, name.removeprefix("bad/")):
            message = refusal(server, f"a fox <lora:{spelling}>")
            assert message.startswith(f"LoRA '{spelling}' cannot be used: ")
            assert reason.removeprefix("it ") in message
            assert str(folders) not in message
    assert "the known ones are a/twin, b/deep/twin, paper, style/ink" in refusal(server, "a fox <lora:nowhere>")


@pytest.mark.slow
def test_every_lora_that_is_listed_loads(server: RunningServer) -> None:
    assert {entry["alias"] for entry in server.client.get("/sdapi/v1/loras").json()} == {*GOOD_LORAS}
    for name in GOOD_LORAS:
        assert paint(server, f"a fox <lora:{name}>") != paint(server, "a fox")
    assert "this adapter was made for another base" in refusal(server, "a fox <lora:xl>")


def test_models_list_the_adapters_of_their_family_before_they_are_loaded(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    models = {kind: load_model(tiny_model(kind), dtype="float32", device="cpu") for kind in ("sd15", "sdxl")}
    folders = {name: str(tmp_path / name) for name in ("lora_dir", "controlnet_dir", "reference_dir")}
    for kind, model in models.items():
        for name in ("lora_dir", "reference_dir"):
            (tmp_path / name / kind).mkdir(parents=True)
        save_file(lora_tensors(model, ATTENTION, 0, 4), tmp_path / "lora_dir" / kind / "ink.safetensors")
        save_controlnet(model.unet.network, tmp_path / "controlnet_dir" / kind / "edges", 1)
        file = tmp_path / "reference_dir" / kind / "base.safetensors"
        save_file(adapter_tensors(model.unet.network, "base", 1, 4), file)
    save_file(lora_tensors(models["sd15"], TEXT, 0, 4), tmp_path / "lora_dir" / "text.safetensors")
    save_image_encoder(tmp_path / "reference_dir" / "image_encoder")
    for kind, other in (("sd15", "sdxl"), ("sdxl", "sd15")):
        profile = msgspec.structs.replace(models[kind].profile, dtype="float32", device="cpu", **folders)
        info = survey(profile, EngineConfig(), DiskCache(None)).info
        assert info.text_width == models[kind].info.text_width
        image = image_capabilities(info, load_settings(env={}).serve)
        assert image["loras"] == [f"{kind}/ink", "text"], "one of text encoders only may be of either family"
        assert (image["controlnets"], image["references"]) == ([f"{kind}/edges"], [f"{kind}/base"])
        widths = {each: model.info.text_width for each, model in models.items()}
        reason = (
            f"it is for models whose prompt tokens have {widths[other]} numbers; those of this model have "
            f"{widths[kind]}."
        )
        assert image["refused_loras"] == {f"{other}/ink": reason}
        assert image["refused_controlnets"] == {f"{other}/edges": reason}
        assert image["refused_references"] == {f"{other}/base": reason}
        assert LoraFolders(info.lora_dirs, info.text_width).find("ink").parent.name == kind


@pytest.mark.parametrize(
    "names",
    [
        "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn2_to_k.lora_{}.weight",
        "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn2.processor.to_v_lora.{}.weight",
        "diffusion_model.input_blocks.1.1.transformer_blocks.0.attn2.to_k.lora_{}.weight",
    ],
)
def test_the_family_of_a_lora_is_read_from_its_cross_attention(names: str) -> None:
    shapes = {names.format("down"): (4, 2048), names.format("up"): (320, 4)}
    assert read_layers(shapes, {}).text_width == 2048
    shapes = {name.replace("attn2", "attn1"): shape for name, shape in shapes.items()}
    assert read_layers(shapes, {}).text_width == 0


@pytest.mark.slow
def test_lora_in_a_subfolder_is_found_by_its_path_and_by_its_name_where_that_is_unique(server: RunningServer) -> None:
    by_path = paint(server, "a fox <lora:style/ink:0.8>")
    assert pixels(by_path) == pixels(paint(server, "a fox <lora:ink:0.8>"))
    assert pixels(by_path) == pixels(paint(server, "a fox", loras=[{"name": "style/ink", "scale": 0.8}]))
    assert "there are several LoRAs called 'twin': a/twin, b/deep/twin" in refusal(server, "a fox <lora:twin>")
    assert paint(server, "a fox <lora:a/twin>") != paint(server, "a fox <lora:b/deep/twin>")
    for name in ("../loras/paper", "style/../paper", "/paper", "style//ink", "style/", "./paper"):
        assert "give a path below the folder" in refusal(server, f"a fox <lora:{name}>")
    listed = {entry["name"]: entry["alias"] for entry in server.client.get("/sdapi/v1/loras").json()}
    assert (listed["ink"], listed["a/twin"], listed["paper"]) == ("style/ink", "a/twin", "paper")


@pytest.mark.slow
def test_lora_takes_a_scale_for_the_text_encoder_and_one_for_the_unet(server: RunningServer) -> None:
    file = paint(server, "a fox <lora:ink:0.8:0.5>")
    assert pixels(file) == pixels(paint(server, "a fox <lora:scaled>")), "0.8 of the text encoder's, 0.5 of the UNet's"
    choice = {"name": "ink", "scale": 0.8, "unet_scale": 0.5}
    same = ("a fox <lora:ink:te=0.8:unet=0.5>", "a fox <lora:ink:0.8:unet=0.5>", "a fox <lora:ink:unet=0.5:te=0.8>")
    for prompt in same:
        assert paint(server, prompt) == file
    assert paint(server, "a fox", loras=[choice]) == file
    assert paint(server, "a fox <lora:ink:0.8:0.8>") == paint(server, "a fox <lora:ink:0.8>") != file
    answer = server.paint("a fox <lora:ink:0.8:0.5>", size="64x64", num_steps=2, seed=3).json()
    assert answer["loras"] == [choice]
    prompt = parse_infotext(read_infotext(file) or "").prompt
    assert prompt == "a fox <lora:ink:0.8:0.5>"
    assert paint(server, prompt) == file
    for tag in ("ink:1:2:3", "ink:x", "ink:0.5:x", "ink:lbw=0.5", "ink:te=x"):
        assert "write NAME or NAME:SCALE" in refusal(server, f"a fox <lora:{tag}>")
    assert "it must lie between -10 and 10" in refusal(server, "a fox <lora:ink:1:11>")


@pytest.mark.slow
def test_lora_named_by_comfyui_generates_as_named_by_diffusers(server: RunningServer) -> None:
    assert pixels(paint(server, "a fox <lora:comfy>")) == pixels(paint(server, "a fox <lora:ink>"))


@pytest.mark.slow
def test_lora_with_bundled_embeddings_is_used_without_them_and_says_so(server: RunningServer) -> None:
    answer = server.paint("a fox <lora:bundle>", size="64x64", num_steps=2, seed=3)
    [warning] = answer.json()["warnings"]
    assert "the LoRA 'bundle' contains embeddings ('toy cat'), which are not loaded with it" in warning
    assert pixels(files_of(answer)[0]) == pixels(paint(server, "a fox <lora:ink>"))


@pytest.mark.slow
def test_controlnets_that_no_model_can_use_are_listed_with_reasons_and_refused_by_name(server: RunningServer) -> None:
    image = capabilities_of(server)
    assert image.controlnets == ("sd15/edges",)
    assert_problems(image.refused_controlnets, REFUSED_CONTROLS)
    shown = in_base64(control_map(1).array)
    for name, reason in REFUSED_CONTROLS.items():
        message = refusal(server, "a fox", controlnets=[{"name": name, "image": shown}])
        assert message.startswith(f"ControlNet '{name}' cannot be used: ")
        assert reason in message


@pytest.mark.slow
def test_controlnet_in_a_subfolder_is_found_by_its_path_and_by_its_name(server: RunningServer) -> None:
    choice = {"image": in_base64(control_map(1).array)}
    by_path, by_name = (
        paint(server, "a fox", controlnets=[choice | {"name": name}]) for name in ("sd15/edges", "edges")
    )
    assert pixels(by_path) == pixels(by_name) != pixels(paint(server, "a fox"))
    assert "there is no ControlNet 'nowhere'; the known ones are sd15/edges." in refusal(
        server, "a fox", controlnets=[choice | {"name": "nowhere"}]
    )


def pixels(file: bytes) -> bytes:
    return decode_image(file).data
