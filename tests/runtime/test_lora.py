"""Adapters: a LoRA merged into its base while it loads, under every name that diffusers and kohya give its tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from diffserve.api.errors import DiffserveError, ModelLoadError
from diffserve.api.types import GenerationRequest
from diffserve.engine import Engine
from diffserve.models.lora_layers import InvalidLoRAError, read_layers
from diffserve.models.loras import lora_problem
from diffserve.runtime import DiffusionModel, load_model
from diffserve.runtime.loading.library_imports import hushed, import_quietly
from diffserve.runtime.loading.lora import LoRAFile
from diffserve.runtime.quantized_layers import from_int8
from diffserve.settings.layers import load_settings
from tests.device import DEVICE
from tests.runtime.conftest import LoadTiny

LORA = "pytorch_lora_weights.safetensors"
RANK = 4
ATTENTION = "down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_q"
KERNEL = "up_blocks.1.resnets.0.conv1"
POINT_KERNEL = "down_blocks.0.attentions.0.proj_in"
TEXT = "text_model.encoder.layers.1.self_attn.q_proj"

PROCESSORS = {"to_q": ".processor.to_q", "q_proj": ".to_q"}
ORIGINAL = {
    f"_{ATTENTION.replace('.', '_')}.": "_input_blocks_1_1_transformer_blocks_0_attn2_to_q.",
    f"_{POINT_KERNEL.replace('.', '_')}.": "_input_blocks_1_1_proj_in.",
    f"_{KERNEL.replace('.', '_')}.": "_output_blocks_2_0_in_layers_2.",
}
"""Layers of the tiny UNet, which has one resnet in each down block, as kohya's trainer and as SGM's code name them."""

Tensors = dict[str, torch.Tensor]
MakeAdapter = Callable[..., Path]


def pair(weight: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a random down and up matrix for a layer's weight, large enough to change its output."""
    generator = torch.Generator().manual_seed(seed)
    down = torch.randn((RANK, *weight.shape[1:]), generator=generator) / 4
    up = torch.randn((weight.shape[0], RANK, *(1 for _ in weight.shape[2:])), generator=generator) / 4
    return down.half(), up.half()


def unet_layers(model: Path) -> Tensors:
    weights = load_file(model / "unet" / "diffusion_pytorch_model.safetensors")
    return {layer: weights[f"{layer}.weight"] for layer in (ATTENTION, KERNEL, POINT_KERNEL)}


def lora_tensors(model: Path) -> Tensors:
    """Return adapter tensors in diffusers' names: two UNet kernels, a UNet matrix and a text encoder matrix."""
    text = load_file(model / "text_encoder" / "model.safetensors")
    weights = {f"unet.{layer}": weight for layer, weight in unet_layers(model).items()}
    name = next(name for name in (f"{TEXT}.weight", f"{TEXT.removeprefix('text_model.')}.weight") if name in text)
    weights[f"text_encoder.{TEXT}"] = text[name]
    tensors: Tensors = {}
    for seed, (layer, weight) in enumerate(weights.items()):
        tensors[f"{layer}.lora_A.weight"], tensors[f"{layer}.lora_B.weight"] = pair(weight, seed)
    return tensors


@pytest.fixture
def make_adapter(tmp_path: Path, tiny_model: Callable[[str], Path]) -> MakeAdapter:
    """``make_adapter(tensors, **adapter_json)``: an adapter of the tiny sd15 model, and how to read it."""

    def make(tensors: Tensors | None = None, **spec: Any) -> Path:
        directory = tmp_path / f"adapter-{len(list(tmp_path.iterdir()))}"
        directory.mkdir()
        model = tiny_model("sd15")
        (directory / "adapter.json").write_text(json.dumps({"base": str(model)} | spec))
        save_file(lora_tensors(model) if tensors is None else tensors, directory / LORA)
        return directory

    return make


def load(path: Path, dtype: str = "float32") -> DiffusionModel:
    return load_model(path, dtype=dtype, device=DEVICE)


def message_of(path: Path) -> str:
    with pytest.raises(DiffserveError) as caught:
        load(path)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_every_changed_weight_is_its_own_plus_up_times_down(make_adapter: MakeAdapter, tiny: LoadTiny) -> None:
    path = make_adapter()
    changed, base = load(path).unet.network.state_dict(), tiny("sd15").unet.network.state_dict()
    tensors = load_file(path / LORA)
    for layer in (ATTENTION, KERNEL, POINT_KERNEL):
        down, up = (tensors[f"unet.{layer}.lora_{half}.weight"].float() for half in "AB")
        expected = base[f"{layer}.weight"] + torch.einsum("or,r...->o...", up.flatten(1), down).to(DEVICE)
        assert torch.allclose(changed[f"{layer}.weight"], expected, atol=1e-6)
    other_names = base.keys() - {f"{layer}.weight" for layer in (ATTENTION, KERNEL, POINT_KERNEL)}
    assert all(torch.equal(changed[name], base[name]) for name in other_names)


def test_a_text_encoder_is_changed_too(make_adapter: MakeAdapter, tiny: LoadTiny) -> None:
    changed = load(make_adapter()).text.encode("a cat", "", width_px=64, height_px=64).cond
    assert not torch.allclose(changed, tiny("sd15").text.encode("a cat", "", width_px=64, height_px=64).cond, atol=1e-2)


def test_alpha_over_rank_scales_a_change(make_adapter: MakeAdapter, tiny: LoadTiny, tmp_path: Path) -> None:
    path = make_adapter()
    tensors = load_file(path / LORA)
    halved = {f"unet.{ATTENTION}.alpha": torch.tensor(RANK / 2)}
    name = f"{ATTENTION}.weight"
    base, merged_weight = tiny("sd15").unet.network.state_dict()[name], load(path).unet.network.state_dict()[name]
    half = load(make_adapter(tensors | halved)).unet.network.state_dict()[name]
    assert torch.allclose(half - base, (merged_weight - base) / 2, atol=1e-6)
    save_file(tensors, path / LORA, metadata={"lora_adapter_metadata": json.dumps({"unet.lora_alpha": 2 * RANK})})
    doubled = load(path).unet.network.state_dict()[name]
    assert torch.allclose(doubled - base, (merged_weight - base) * 2, atol=1e-6)


def renamed(tensors: Tensors, rename: Callable[[str, str, str], str]) -> Tensors:
    converted: Tensors = {}
    for name, tensor in tensors.items():
        layer, half = name.removesuffix(".weight").rsplit(".lora_", 1)
        component, _, layer = layer.partition(".")
        converted[rename(component, layer, "down" if half == "A" else "up") + ".weight"] = tensor
    return converted


def test_older_names_of_diffusers_and_those_of_kohya_mean_the_same(make_adapter: MakeAdapter) -> None:
    path = make_adapter()
    tensors = load_file(path / LORA)
    older = renamed(
        tensors,
        lambda component, layer, half: (
            f"{component}.{layer}.{'lora' if component == 'unet' else 'lora_linear_layer'}.{half}"
        ),
    )
    kohya = renamed(
        tensors,
        lambda component, layer, half: (
            f"lora_{'unet' if component == 'unet' else 'te'}_{layer.replace('.', '_')}.lora_{half}"
        ),
    )
    by_processor = {
        re.sub(r"\.(to_q|q_proj)\.lora\w*\.", lambda match: f"{PROCESSORS[match[1]]}_lora.", name): tensor
        for name, tensor in older.items()
    }
    peft = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
    bare = {name.removeprefix("base_model.model.unet."): tensor for name, tensor in peft.items()}
    original = {
        re.sub("_(down|up)_blocks_.*?\\.", lambda match: ORIGINAL[match[0]], name): tensor
        for name, tensor in kohya.items()
    }
    assert all(len({*tensors} & {*other}) == 0 for other in (older, kohya, peft, original))
    expected = load(path)
    for other in map(load, map(make_adapter, (older, kohya, by_processor, peft, bare, original))):
        state = other.unet.network.state_dict()
        assert all(torch.equal(state[name], part) for name, part in expected.unet.network.state_dict().items())
        texts = [model.text.encode("a cat", "", width_px=64, height_px=64).cond for model in (other, expected)]
        assert torch.equal(*texts)


def test_int8_quantizes_the_merged_weight(make_adapter: MakeAdapter) -> None:
    path = make_adapter()
    exact = load(path).unet.network.get_parameter(f"{ATTENTION}.weight")
    layer = load(path, "int8").unet.network.get_submodule(ATTENTION)
    quantized = from_int8(layer.weight, layer.weight_scales, torch.float32)
    assert quantized.sub(exact).abs().max() < exact.abs().max() / 50


def test_the_digest_covers_base_and_adapter_and_no_path(
    make_adapter: MakeAdapter, tiny: LoadTiny, tiny_model: Callable[[str], Path]
) -> None:
    first, copied = make_adapter(), make_adapter()
    tensors = lora_tensors(tiny_model("sd15"))
    other = make_adapter({name: tensor * 2 for name, tensor in tensors.items()})
    digests = [load(path, "bfloat16").digest for path in (first, copied, other)]
    assert digests[0] == digests[1]
    assert len({digests[0], digests[2], tiny("sd15").digest}) == 3


def test_an_adapter_brings_its_own_defaults_scheduler_and_name(
    make_adapter: MakeAdapter, tiny_model: Callable[[str], Path]
) -> None:
    path = make_adapter(sampler="lcm", num_steps=4, guidance_scale=1.0)
    scheduler = json.loads((tiny_model("sd15") / "scheduler" / "scheduler_config.json").read_text())
    (path / "scheduler").mkdir()
    (path / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler | {"timestep_spacing": "linspace"}))
    for info in (load(path).info, Engine.from_pretrained(path, dtype="float32", device=DEVICE).info):
        assert (info.model_id, info.default_sampler, info.default_num_steps) == (path.name, "lcm", 4)
        assert (info.default_guidance_scale, info.default_spacing, info.good_sizes) == (1.0, "linspace", ((64, 64),))


def test_settings_of_an_adapter_start_from_those_of_its_base(make_adapter: MakeAdapter) -> None:
    settings = load_settings(model=str(make_adapter(base="embedded", num_steps=3)), env={})
    assert (settings.model.num_steps, settings.model.good_sizes[0]) == (3, (128, 128))
    assert settings.origins["model.guidance_scale"] == "configs/embedded.toml"


def test_a_base_model_may_share_a_folder_with_its_adapter(
    make_adapter: MakeAdapter, tiny_model: Callable[[str], Path]
) -> None:
    path = make_adapter()
    (path.parent / "base").symlink_to(tiny_model("sd15"))
    (path / "adapter.json").write_text(json.dumps({"base": "../base"}))
    assert load(path).digest == load(make_adapter()).digest


def test_an_adapter_without_a_usable_base_says_which(make_adapter: MakeAdapter) -> None:
    assert "its base 'nowhere' is not a diffusers directory" in message_of(make_adapter(base="nowhere"))
    assert "is an adapter too" in message_of(make_adapter(base=str(make_adapter())))
    assert "unknown field `bass`" in message_of(make_adapter(bass="embedded"))
    assert "model_index.json" in message_of(make_adapter(base=str(make_adapter().parent)))


def test_an_adapter_without_its_lora_names_the_file(make_adapter: MakeAdapter) -> None:
    path = make_adapter()
    (path / LORA).rename(path / "pytorch_lora_weights.bin")
    assert "pickle" in message_of(path)
    (path / "pytorch_lora_weights.bin").unlink()
    assert f"{path / LORA} is missing" in message_of(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"unet.nowhere.lora_A.weight": (4, 8), "unet.nowhere.lora_B.weight": (8, 4)}, "there is no such layer"),
        ({f"unet.{ATTENTION}.lora_A.weight": (3, 32)}, "their ranks must be equal"),
        ({f"unet.{ATTENTION}.lora_A.weight": (4, 31)}, "do not fit a weight [32, 32]"),
        ({f"unet.{KERNEL}.lora_B.weight": (31, 4, 1, 1)}, "do not fit a weight"),
        ({"unet.conv_norm_out.lora_A.weight": (4, 1), "unet.conv_norm_out.lora_B.weight": (32, 4)}, "neither matrix"),
        ({"unet.conv_in.lora_A.weight": (4, 36)}, "has no partner"),
        ({"unet.conv_in.dora_scale": (4,)}, "has no partner"),
        ({"unet.conv_in.oft_blocks": (4, 8, 8)}, "is OFT"),
        ({"lora_unet_conv_in.hada_w1_a": (4, 4)}, "has no partner"),
        ({f"lora_unet_conv_in.hada_{name}": (4, 4) for name in ("t1", "w1_a")}, "is LoHa in three factors"),
        ({f"conv_in.hada_w{n}": (4, 4 + (n == "2_b")) for n in ("1_a", "1_b", "2_a", "2_b")}, "layers of different "
            "sizes"),
        ({"vae.conv_in.lora_A.weight": (4, 36)}, "is not named as a LoRA"),
        (
            {"text_encoder_2.layers.0.lora_A.weight": (4, 8), "text_encoder_2.layers.0.lora_B.weight": (8, 4)},
            "changes a text_encoder_2, which the base does not have",
        ),
    ],
)  # fmt: skip
def test_a_lora_that_does_not_fit_is_refused_with_its_tensor(
    make_adapter: MakeAdapter, tiny_model: Callable[[str], Path], change: dict[str, tuple[int, ...]], message: str
) -> None:
    tensors = lora_tensors(tiny_model("sd15")) | {name: torch.ones(shape) for name, shape in change.items()}
    path = make_adapter(tensors)
    assert message in message_of(path)
    assert str(path / LORA) in message_of(path)


def test_files_that_would_take_seconds_to_read_are_refused_by_their_size(tmp_path: Path) -> None:
    pair = {"lora_unet_conv_in.lora_down.weight": (1, 4), "lora_unet_conv_in.lora_up.weight": (4, 1)}
    with pytest.raises(InvalidLoRAError, match="holds 20,002 tensors; at most 20,000 are allowed"):
        read_layers(pair | {f"lora_unet_{number}.diff": (1,) for number in range(20_000)}, {})
    with pytest.raises(InvalidLoRAError, match="name has 1,015 characters; at most 500"):
        read_layers(pair | {f"lora_unet_{'x' * 1000}.diff": (1,)}, {})
    long = tmp_path / "long.safetensors"
    long.write_bytes((9 << 20).to_bytes(8, "little") + b" " * (9 << 20))
    assert lora_problem(long) == "has a header of 9,437,184 bytes; at most 8,388,608 are allowed"


@pytest.mark.parametrize("part", ["diff", "diff_b"])
def test_a_change_that_is_not_finite_is_refused_when_it_is_merged(make_adapter: MakeAdapter, part: str) -> None:
    tensors = {"lora_unet_conv_in.diff": torch.zeros(32, 4, 3, 3), "lora_unet_conv_in.diff_b": torch.zeros(32)}
    tensors[f"lora_unet_conv_in.{part}"].view(-1)[3] = torch.nan
    with pytest.raises(ModelLoadError, match=r"change by 'lora_unet_conv_in\.diff.*' has non-finite numbers"):
        load(make_adapter(tensors))


def test_magnitudes_under_two_names_are_refused() -> None:
    name = "down_blocks.0.attentions.0.proj_in"
    pair: dict[str, tuple[int, ...]] = {f"unet.{name}.lora_A.weight": (1, 4), f"unet.{name}.lora_B.weight": (4, 1)}
    twice: dict[str, tuple[int, ...]] = {
        f"lora_unet_{name.replace('.', '_')}.dora_scale": (4, 1),
        f"unet.{name}.lora_magnitude_vector": (4,),
    }
    with pytest.raises(
        InvalidLoRAError, match=r"changes one layer twice, by .*dora_scale.* and .*lora_magnitude_vector"
    ):
        read_layers(pair | twice, {})


def test_dora_without_its_magnitudes_is_refused(make_adapter: MakeAdapter) -> None:
    path = make_adapter()
    metadata = {"lora_adapter_metadata": json.dumps({"unet.use_dora": True})}
    save_file(load_file(path / LORA), path / LORA, metadata=metadata)
    assert "use_dora is True and holds" in message_of(path)
    save_file(load_file(path / LORA), path / LORA, metadata={"lora_adapter_metadata": "[]"})
    assert "cannot be read" in message_of(path)


def test_a_picture_of_an_adapted_model_differs_from_its_bases(
    make_adapter: MakeAdapter, tiny_model: Callable[[str], Path]
) -> None:
    request = GenerationRequest(prompt="a cat", seed=1)
    paths = (make_adapter(num_steps=2), tiny_model("sd15"))
    pictures = [Engine.from_pretrained(path, dtype="float32", device=DEVICE).generate(request)[0] for path in paths]
    assert pictures[0].num_evaluations < pictures[1].num_evaluations
    assert (pictures[0].pixels != pictures[1].pixels).any()


def test_diffusers_merges_the_same_file_to_the_same_weights(
    make_adapter: MakeAdapter, tiny_model: Callable[[str], Path]
) -> None:
    path = make_adapter()
    with hushed("transformers", "diffusers"):
        pipeline = import_quietly("diffusers", "StableDiffusionPipeline").from_pretrained(
            str(tiny_model("sd15")), safety_checker=None, requires_safety_checker=False
        )
        pipeline.load_lora_weights(str(path))
        pipeline.fuse_lora()
        pipeline.unload_lora_weights()
    actual = load(path)
    reference = pipeline.unet.state_dict()
    assert all(
        torch.allclose(reference[name], part.cpu(), atol=1e-6)
        for name, part in actual.unet.network.state_dict().items()
    )
    encoded = actual.text.encode("a cat", "", width_px=64, height_px=64).cond
    ids = pipeline.tokenizer("a cat", padding="max_length", return_tensors="pt").input_ids
    with torch.inference_mode():
        assert torch.allclose(encoded.cpu(), pipeline.text_encoder(ids).last_hidden_state, atol=1e-4)


def test_a_loha_changes_weights_by_the_product_of_two_products(
    make_adapter: MakeAdapter, tiny: LoadTiny, tiny_model: Callable[[str], Path]
) -> None:
    tensors: Tensors = {}
    for seed, (layer, weight) in enumerate(unet_layers(tiny_model("sd15")).items()):
        name = f"lora_unet_{layer.replace('.', '_')}"
        for number in (1, 2):
            down, up = pair(weight, 2 * seed + number)
            tensors |= {f"{name}.hada_w{number}_a": up.flatten(1), f"{name}.hada_w{number}_b": down.flatten(1)}
        tensors[f"{name}.alpha"] = torch.tensor(RANK / 2)
    merged = load(make_adapter(tensors)).unet.network.state_dict()
    base = tiny("sd15").unet.network.state_dict()
    for layer in unet_layers(tiny_model("sd15")):
        name = f"lora_unet_{layer.replace('.', '_')}"
        up, down, other_up, other_down = (
            tensors[f"{name}.hada_w{part}"].float() for part in ("1_a", "1_b", "2_a", "2_b")
        )
        change = 0.5 * ((up @ down) * (other_up @ other_down)).view_as(base[f"{layer}.weight"]).to(DEVICE)
        assert change.abs().max() > 0.05
        assert torch.allclose(merged[f"{layer}.weight"], base[f"{layer}.weight"] + change, atol=1e-5)


def test_dora_is_merged_as_peft_merges_it(make_adapter: MakeAdapter, tiny_model: Callable[[str], Path]) -> None:
    """Into linear layers and convolutions, from the file that PEFT's names and diffusers' metadata make."""
    peft = pytest.importorskip("peft")
    with hushed("transformers", "diffusers"):
        pipeline = import_quietly("diffusers", "StableDiffusionPipeline").from_pretrained(
            str(tiny_model("sd15")), safety_checker=None, requires_safety_checker=False
        )
        unet, path = pipeline.unet, make_adapter()
        base = {name: tensor.clone() for name, tensor in unet.state_dict().items()}
        unet.add_adapter(
            peft.LoraConfig(
                r=RANK,
                lora_alpha=3,
                use_dora=True,
                init_lora_weights=False,
                target_modules=["to_q", "conv1", "proj_in"],
            )
        )
        generator = torch.Generator().manual_seed(0)
        for name, parameter in unet.named_parameters():
            if "lora_magnitude_vector" in name:
                parameter.data.mul_(1.0 + torch.rand(parameter.shape, generator=generator))
        layers = peft.utils.get_peft_model_state_dict(unet)
        save_file(
            {f"unet.{name}": tensor.contiguous() for name, tensor in layers.items()},
            path / LORA,
            metadata={"lora_adapter_metadata": json.dumps({"unet.lora_alpha": 3, "unet.use_dora": True})},
        )
        unet.fuse_lora()
        unet.unload_lora()
    reference, actual = unet.state_dict(), load(path).unet.network.state_dict()
    assert all(torch.allclose(reference[name], tensor.cpu(), atol=1e-5) for name, tensor in actual.items())
    for name in (f"{ATTENTION}.weight", f"{KERNEL}.weight"):
        assert (reference[name] - base[name]).abs().max() > 0.05


def test_scales_of_rslora_and_alpha_patterns_are_those_of_peft(
    make_adapter: MakeAdapter, tiny_model: Callable[[str], Path]
) -> None:
    peft = pytest.importorskip("peft")
    with hushed("transformers", "diffusers"):
        pipeline = import_quietly("diffusers", "StableDiffusionPipeline").from_pretrained(
            str(tiny_model("sd15")), safety_checker=None, requires_safety_checker=False
        )
        unet, path = pipeline.unet, make_adapter()
        unet.add_adapter(
            peft.LoraConfig(
                r=RANK,
                lora_alpha=3,
                use_rslora=True,
                alpha_pattern={"attn2.to_k": 5, "down_blocks.0.attentions.0.proj_in": 7},
                init_lora_weights=False,
                target_modules=["to_q", "attn2.to_k", "proj_in"],
            )
        )
        layers = peft.utils.get_peft_model_state_dict(unet)
        metadata = {f"unet.{name}": value for name, value in unet.peft_config["default"].to_dict().items()}
        plain = {name: value for name, value in metadata.items() if isinstance(value, bool | int | float | dict)}
        save_file(
            {f"unet.{name}": tensor.contiguous() for name, tensor in layers.items()},
            path / LORA,
            metadata={"lora_adapter_metadata": json.dumps(plain)},
        )
        unet.fuse_lora()
        unet.unload_lora()
    reference, actual = unet.state_dict(), load(path).unet.network.state_dict()
    assert all(torch.allclose(reference[name], tensor.cpu(), atol=1e-6) for name, tensor in actual.items())
    scales = {1.5, 2.5, 3.5}  # alpha / sqrt(4)
    assert {
        (change.declared_alpha or 0.0) / 2 for change in LoRAFile.open([path / LORA]).layers["unet"].values()
    } == scales
    save_file(
        load_file(path / LORA),
        path / LORA,
        metadata={"lora_adapter_metadata": json.dumps({"unet.alpha_pattern": {"(a+)+$": 1.0}})},
    )
    assert "not the name of a layer" in message_of(path)
