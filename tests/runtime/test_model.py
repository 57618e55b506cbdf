"""A loaded model as a whole: what it says of itself, its digest, the ways it may lie on disk."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from diffserve.api.types import ModelProfile
from diffserve.models.vocabulary import WORLD_FILE
from diffserve.runtime import load_model
from diffserve.runtime.loading.family import BUILT_IN, EMBEDDED
from diffserve.runtime.loading.pruned import prune_directory
from diffserve.runtime.unet.pruning import Shares
from tests.device import DEVICE
from tests.runtime.conftest import LoadTiny
from tests.tiny_models import save_model

STEM = "diffusion_pytorch_model"


def test_the_info_describes_each_family(tiny: LoadTiny) -> None:
    infos = {kind: tiny(kind).info for kind in ("sd15", "sd2", "sdxl", "inpaint9")}
    assert {kind: info.family for kind, info in infos.items()} == {
        "sd15": "sd1",
        "sd2": "sd2",
        "sdxl": "sdxl",
        "inpaint9": "sd1",
    }
    assert {kind for kind, info in infos.items() if info.is_inpainting} == {"inpaint9"}
    assert infos["sd2"].prediction_type == "v_prediction"
    assert infos["sd2"].default_spacing == "trailing"
    for info in infos.values():
        assert info.good_sizes == ((64, 64),)
        assert (info.vae_factor, info.latent_channels, info.train_timesteps) == (8, 4, 1000)
        assert (torch.device(info.device).type, info.dtype) == (torch.device(DEVICE).type, "float32")


def test_a_copy_of_the_embedded_model_is_of_its_family_whole_or_pruned(tmp_path: Path) -> None:
    copy = shutil.copytree(BUILT_IN[EMBEDDED], tmp_path / "copy")
    prune_directory(copy, tmp_path / "pruned", Shares(heads=0.0, channels=0.25))
    families = [load_model(path, device="meta").info.family for path in (EMBEDDED, copy, tmp_path / "pruned")]
    assert families == [EMBEDDED] * 3
    (copy / WORLD_FILE).unlink()
    assert load_model(copy, device="meta").info.family == "sd1"


def test_a_profile_gives_the_defaults(tiny_model: Callable[[str], Path]) -> None:
    profile = ModelProfile(
        model_id="mine",
        path="elsewhere",
        device="auto",
        dtype="auto",
        sampler="euler",
        num_steps=12,
        guidance_scale=4.0,
        spacing="linspace",
        good_sizes=(),
        max_side_px=96,
    )
    info = load_model(tiny_model("sd15"), dtype="float32", device=DEVICE, profile=profile).info
    assert (info.model_id, info.default_sampler, info.default_num_steps) == ("mine", "euler", 12)
    assert (info.default_guidance_scale, info.default_spacing, info.max_side_px) == (4.0, "linspace", 96)
    assert info.good_sizes == ((64, 64),)


def test_the_memory_report_adds_up(tiny: LoadTiny) -> None:
    model = tiny("sdxl")
    report = model.memory_report()
    assert [entry.component for entry in report] == ["text_encoder", "text_encoder_2", "unet", "vae"]
    assert sum(entry.num_parameters for entry in report) == model.info.num_parameters
    assert sum(entry.weights_bytes for entry in report) == model.info.weights_bytes == 4 * model.info.num_parameters


def test_the_digest_follows_the_weights_and_nothing_else(
    tiny: LoadTiny, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    copied = Path(shutil.copytree(tiny_model("sd15"), tmp_path / "renamed"))
    (copied / "README.md").write_text("hello")
    assert load_model(copied, dtype="bfloat16", device=DEVICE).digest == tiny("sd15").digest
    assert tiny("sd15").info.digest == tiny("sd15").digest[:12]
    assert tiny("sd2").digest != tiny("sd15").digest


def split(path: Path) -> None:
    """Turn the UNet's one file into two shards with an index."""
    file = path / "unet" / f"{STEM}.safetensors"
    tensors = load_file(file)
    names = sorted(tensors)
    file.unlink()
    weight_map: dict[str, str] = {}
    for part, part_names in enumerate((names[::2], names[1::2])):
        shard = f"{STEM}-{part + 1:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part_names}, path / "unet" / shard)
        weight_map |= dict.fromkeys(part_names, shard)
    (path / "unet" / f"{STEM}.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def assert_same_unet(path: Path, expected: torch.nn.Module) -> None:
    actual = load_model(path, dtype="float32", device=DEVICE).unet.network.state_dict()
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.state_dict().items())


def test_sharded_weights_are_read_by_their_index(tmp_path: Path, tiny: LoadTiny) -> None:
    path = save_model("sd15", tmp_path / "model")
    split(path)
    assert_same_unet(path, tiny("sd15").unet.network)


def test_weights_that_exist_only_as_the_fp16_variant_are_read(tmp_path: Path) -> None:
    path = save_model("sd15", tmp_path / "model")
    file = path / "unet" / f"{STEM}.safetensors"
    half = {name: tensor.half() for name, tensor in load_file(file).items()}
    file.unlink()
    save_file(half, path / "unet" / f"{STEM}.fp16.safetensors")
    model = load_model(path, dtype="float32", device=DEVICE)
    for name, tensor in model.unet.network.state_dict().items():
        assert torch.equal(tensor.cpu(), half[name].float())


def test_old_text_encoder_names_with_their_prefix_and_position_buffer_are_read(tmp_path: Path, tiny: LoadTiny) -> None:
    path = save_model("sd15", tmp_path / "model")
    file = path / "text_encoder" / "model.safetensors"
    tensors = {f"text_model.{name.removeprefix('text_model.')}": tensor for name, tensor in load_file(file).items()}
    save_file(tensors | {"text_model.embeddings.position_ids": torch.arange(77)[None]}, file)
    actual = load_model(path, dtype="float32", device=DEVICE).text.encode("a cat", "", width_px=64, height_px=64)
    assert torch.equal(actual.cond, tiny("sd15").text.encode("a cat", "", width_px=64, height_px=64).cond)


def test_a_loaded_model_no_longer_needs_its_files(tmp_path: Path, tiny: LoadTiny) -> None:
    path = save_model("sd15", tmp_path / "model")
    model = load_model(path, dtype="float32", device=DEVICE)
    for file in path.rglob("*.safetensors"):
        with file.open("r+b") as stream:
            stream.seek(-4096, 2)
            stream.write(b"\xff" * 4096)
    expected = tiny("sd15").unet.network.state_dict()
    assert all(torch.equal(part, expected[name]) for name, part in model.unet.network.state_dict().items())


def test_no_parameter_takes_gradients_and_no_dropout_is_left_on(tiny: LoadTiny) -> None:
    model = tiny("sdxl")
    for network in (model.unet.network, model.vae.network, *(encoder.network for encoder in model.text.encoders)):
        assert not network.training
        assert not any(part.requires_grad for part in network.parameters())
        assert not any(part.is_meta for part in [*network.parameters(), *network.buffers()])


QUIET_LOAD = """
import logging, socket
def refuse(*_, **__):
    raise AssertionError("the loader reached for the network")
socket.socket.connect = socket.getaddrinfo = refuse
from diffserve.runtime import load_model
from diffserve.runtime.loading.family import BUILT_IN, EMBEDDED
from diffserve.runtime.loading.pruned import prune_directory
from diffserve.runtime.unet.pruning import Shares
logging.getLogger("diffserve.runtime.loading.plausibility").disabled = True  # it rightly warns of random weights
for dtype in ("float32", "int8"):
    load_model({path!r}, dtype=dtype, device={device!r})
"""


@pytest.mark.slow
def test_loading_in_a_fresh_process_says_nothing_and_opens_no_connection(
    tiny_model: Callable[[str], Path],
) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", QUIET_LOAD.format(path=str(tiny_model("sdxl")), device=DEVICE)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
