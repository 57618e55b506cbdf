"""Adapters that change whole weights, biases and norms: served exactly for single rows, and merged at load."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.random_models import lora_tensors
from diffserve.api.errors import InvalidRequest
from diffserve.api.types import GenerationRequest, ImageResult
from diffserve.engine import Engine
from diffserve.engine.image.shape_groups import _name
from diffserve.engine.image.task import GroupKey
from diffserve.models.lora_layers import WHOLE, flat_name
from diffserve.models.loras import Lora, LoraFolders
from diffserve.runtime import load_model
from diffserve.runtime.low_rank import RowLoRAs
from diffserve.runtime.threads import Threads
from diffserve.settings.config import EngineConfig
from tests.device import DEVICE
from tests.engine.loras import QUERIES, with_folder
from tests.engine.pipelines import image_request

TOLERANCE = 1e-4
RANK = 3
BLOCK = "down_blocks.0.attentions.0.transformer_blocks.0"
MATRICES = (
    f"unet.{BLOCK}.attn1.to_q",
    f"unet.{BLOCK}.attn2.to_k",
    f"unet.{BLOCK}.ff.net.2",
    "unet.up_blocks.1.resnets.0.time_emb_proj",
    "text_encoder.encoder.layers.0.self_attn.q_proj",
    "text_encoder.encoder.layers.1.mlp.fc1",
    "unet.mid_block.attentions.0.transformer_blocks.0.attn2.to_q",
    "text_encoder_2.encoder.layers.1.mlp.fc2",
)
KERNELS = (
    "unet.up_blocks.1.resnets.0.conv1",
    "unet.down_blocks.0.downsamplers.0.conv",
    "unet.down_blocks.0.attentions.0.proj_in",
)
NORMS = (
    "unet.conv_norm_out",
    "unet.up_blocks.1.resnets.0.norm1",
    f"unet.{BLOCK}.norm2",
    "text_encoder.encoder.layers.0.layer_norm1",
    "text_encoder.final_layer_norm",
    "text_encoder_2.encoder.layers.0.layer_norm2",
)
BIASES = ("unet.conv_in", f"unet.{BLOCK}.ff.net.0.proj", "unet.mid_block.resnets.0.norm1")

KOHYA = {"unet": "unet", "text_encoder": "te1", "text_encoder_2": "te2"}

Tensors = dict[str, Tensor]
Layers = dict[str, nn.Module]


class Change(NamedTuple):
    """The tensors of one layer by the last part of their names, and by hand the differences of weight and bias."""

    tensors: Tensors
    weight: Tensor | None
    bias: Tensor | None = None


Make = Callable[[Tensor, torch.Generator], Change]


def layers_of(model: Any) -> Layers:
    """Return the layers of UNet and text encoder by component and name, without version-dependent prefixes."""
    networks = {"unet": model.unet.network}
    networks |= zip(
        ("text_encoder", "text_encoder_2"), (encoder.network for encoder in model.text.encoders), strict=False
    )
    return {
        f"{component}.{name.removeprefix('text_model.')}": layer
        for component, network in networks.items()
        for name, layer in network.named_modules()
    }


def randn(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=rng)


def pair(weight: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    ones = [1] * (weight.ndim - 2)
    return randn(rng, RANK, *weight.shape[1:]) / 4, randn(rng, len(weight), RANK, *ones) / 8


def dora_change(weight: Tensor, rng: torch.Generator, dim: int, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """down, up, the magnitudes along ``dim``, and the difference that a DoRA makes."""
    down, up = pair(weight, rng)
    changed = (weight + scale * torch.einsum("or,r...->o...", up.flatten(1), down)).movedim(dim, 0)
    magnitudes = 1.0 + torch.rand(len(changed), generator=rng)
    parts = [magnitude * part / part.norm() for magnitude, part in zip(magnitudes, changed, strict=True)]
    return down, up, magnitudes, torch.stack(parts).movedim(0, dim) - weight


def peft_dora(weight: Tensor, rng: torch.Generator) -> Change:
    down, up, magnitudes, delta = dora_change(weight, rng, dim=0, scale=1.0)
    magnitudes = magnitudes if weight.ndim == 2 else magnitudes.view(1, -1, 1, 1)
    return Change({"lora_A.weight": down, "lora_B.weight": up, "lora_magnitude_vector": magnitudes}, delta)


def kohya_dora(dim: int) -> Make:
    def make(weight: Tensor, rng: torch.Generator) -> Change:
        down, up, magnitudes, delta = dora_change(weight, rng, dim, scale=2.0 / RANK)
        shape = [-1 if place == dim else 1 for place in range(weight.ndim)]
        pair = {"lora_down.weight": down, "lora_up.weight": up, "alpha": torch.tensor(2.0)}
        return Change(pair | {"dora_scale": magnitudes.view(shape)}, delta)

    return make


def kronecker(w1: Tensor, w2: Tensor) -> Tensor:
    """Return the Kronecker product of two matrices, or of a matrix with every position of a kernel."""
    if w2.ndim == 2:
        return torch.from_numpy(np.kron(w1.numpy(), w2.numpy()))
    places = [[np.kron(w1.numpy(), w2[:, :, y, x].numpy()) for x in range(w2.shape[3])] for y in range(w2.shape[2])]
    return torch.from_numpy(np.array(places)).movedim((0, 1), (2, 3))


def lokr(*, is_factored: bool = False, is_tucker: bool = False, has_magnitudes: bool = False) -> Make:
    def make(weight: Tensor, rng: torch.Generator) -> Change:
        (out, inside, *kernel), tensors, scale = weight.shape, {"alpha": torch.tensor(2.0)}, 1.0
        w1 = randn(rng, 4, 2) / 4
        w2 = randn(rng, out // 4, inside // 2, *kernel) / 4
        if is_factored:
            a, b = randn(rng, 4, RANK) / 2, randn(rng, RANK, 2) / 2
            tensors |= {"lokr_w1_a": a, "lokr_w1_b": b}
            w1, scale = a @ b, 2.0 / RANK
        else:
            tensors["lokr_w1"] = w1
        if is_factored:
            a, b = randn(rng, out // 4, RANK) / 2, randn(rng, RANK, inside // 2, *kernel) / 4
            tensors |= {"lokr_w2_a": a, "lokr_w2_b": b.flatten(1)}
            w2 = torch.einsum("or,r...->o...", a, b)
        elif is_tucker and kernel:
            core, a, b = randn(rng, RANK, RANK, *kernel), randn(rng, RANK, out // 4) / 4, randn(rng, RANK, inside // 2)
            tensors |= {"lokr_t2": core, "lokr_w2_a": a, "lokr_w2_b": b / 4}
            w2, scale = torch.einsum("pqyx,po,qi->oiyx", core, a, b / 4), 2.0 / RANK
        else:
            tensors["lokr_w2"] = w2
        delta = scale * kronecker(w1, w2)
        if has_magnitudes:
            changed = weight + delta
            magnitudes = 1.0 + torch.rand(out, generator=rng)
            norms = changed.flatten(1).norm(dim=1)
            tensors["dora_scale"] = magnitudes.view(-1, *[1] * (weight.ndim - 1))
            delta = changed * (magnitudes / norms).view_as(tensors["dora_scale"]) - weight
        return Change(tensors, delta)

    return make


def difference(weight: Tensor, rng: torch.Generator) -> Change:
    delta = randn(rng, *weight.shape) / 16
    return Change({"diff": delta}, delta)


def difference_with_bias(weight: Tensor, rng: torch.Generator) -> Change:
    delta, bias = randn(rng, *weight.shape) / 16, randn(rng, len(weight)) / 4
    return Change({"diff": delta, "diff_b": bias}, delta, bias)


def bias_only(weight: Tensor, rng: torch.Generator) -> Change:
    bias = randn(rng, len(weight)) / 2
    return Change({"diff_b": bias}, None, bias)


def norm(weight: Tensor, rng: torch.Generator) -> Change:
    delta, bias = randn(rng, len(weight)) / 4, randn(rng, len(weight)) / 4
    return Change({"w_norm": delta, "b_norm": bias}, delta, bias)


def ordinary_with_bias(weight: Tensor, rng: torch.Generator) -> Change:
    down, up = pair(weight, rng)
    delta, bias = torch.einsum("or,r...->o...", up.flatten(1), down), randn(rng, len(weight)) / 4
    return Change({"lora_down.weight": down, "lora_up.weight": up, "diff_b": bias}, delta, bias)


BOTH = (*MATRICES, *KERNELS)
WITH_BIAS = tuple(name for name in BOTH if not name.endswith((".to_q", ".to_k")))
KINDS: dict[str, tuple[Make, Iterable[str], bool]] = {
    "dora_peft": (peft_dora, BOTH, False),
    "dora_by_input": (kohya_dora(1), BOTH, True),
    "dora_by_output": (kohya_dora(0), BOTH, True),
    "lokr": (lokr(), BOTH, True),
    "lokr_factored": (lokr(is_factored=True), BOTH, True),
    "lokr_tucker": (lokr(is_tucker=True), BOTH, True),
    "lokr_dora": (lokr(has_magnitudes=True), BOTH, True),
    "diff": (difference, (*BOTH, *NORMS), True),
    "diff_b": (difference_with_bias, WITH_BIAS, False),
    "bias_only": (bias_only, (*WITH_BIAS, *BIASES), True),
    "norms": (norm, NORMS, True),
    "lora_diff_b": (ordinary_with_bias, WITH_BIAS, False),
}
"""How a layer is changed, in which layers, and whether their names are kohya's."""


def changes_of(kind: str, model: Any) -> dict[str, Change]:
    make, names, _ = KINDS[kind]
    layers, rng = layers_of(model), torch.Generator().manual_seed(len(kind))
    return {
        name: make(layers[name].get_parameter("weight").detach().cpu().float(), rng) for name in names if name in layers
    }


def tensors_of(kind: str, changes: Mapping[str, Change]) -> Tensors:
    tensors: Tensors = {}
    for name, change in changes.items():
        component, _, layer = name.partition(".")
        layer = layer if component == "unet" else f"text_model.{layer}"
        full = f"{component}.{layer}"
        if KINDS[kind][2]:
            full = f"lora_{KOHYA[component]}_{layer.replace('.', '_')}"
        tensors |= {f"{full}.{part}": tensor.contiguous() for part, tensor in change.tensors.items()}
    return tensors


def write(folder: Path, model: Any, kinds: Iterable[str] = KINDS) -> Path:
    """Write a file for each of ``kinds``, and an ordinary LoRA."""
    for kind in kinds:
        save_file(tensors_of(kind, changes_of(kind, model)), folder / f"{kind}.safetensors")
    save_file(lora_tensors(model, QUERIES, 1, 4), folder / "ordinary.safetensors")
    return folder


@torch.no_grad()
def changed_by_hand(model: Any, changes: Mapping[str, Change], scale: float) -> Any:
    layers = layers_of(model)
    for name, change in changes.items():
        for parameter, delta in (("weight", change.weight), ("bias", change.bias)):
            if delta is not None:
                layers[name].get_parameter(parameter).add_(scale * delta.to(DEVICE))
    return model


def request_for(*loras: str, seed: int = 1, **fields: Any) -> GenerationRequest:
    tags = "".join(f" <lora:{lora}>" for lora in loras)
    return image_request("sd15", "ddim", seed, prompt=f"cat{tags}", **({"num_steps": 2} | fields))


def latents(result: ImageResult) -> Any:
    assert result.latents is not None
    return result.latents.array


def fresh(tiny_model: Callable[[str], Path]) -> Any:
    return load_model(tiny_model("sd15"), dtype="float32", device=DEVICE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, _models: Callable[[str], Any]) -> Path:
    return write(tmp_path_factory.mktemp("whole"), _models("sd15"))


@pytest.fixture
def model(folder: Path, loaded: Callable[[str], Any]) -> Any:
    return with_folder(loaded("sd15"), folder)


@pytest.mark.parametrize("kind", KINDS)
def test_served_picture_is_that_of_weights_changed_by_hand(
    kind: str, model: Any, tiny_model: Callable[[str], Path]
) -> None:
    by_hand = changed_by_hand(fresh(tiny_model), changes_of(kind, model), 0.7)
    [expected] = Engine(by_hand, EngineConfig()).generate(request_for())
    engine = Engine(model, EngineConfig())
    plain, served, again = engine.generate([request_for(), request_for(f"{kind}:0.7"), request_for()])
    assert np.abs(latents(served) - latents(expected)).max() < TOLERANCE
    assert np.abs(latents(plain) - latents(expected)).max() > 100 * TOLERANCE
    assert plain.picture == again.picture
    engine.check_integrity()


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_are_those_changed_by_hand(
    kind: str, folder: Path, loaded: Callable[[str], Any], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "adapter.json").write_text(json.dumps({"base": str(tiny_model("sd15"))}))
    (tmp_path / "pytorch_lora_weights.safetensors").symlink_to(folder / f"{kind}.safetensors")
    merged = layers_of(load_model(tmp_path, dtype="float32", device=DEVICE))
    changes = changes_of(kind, loaded("sd15"))
    by_hand = layers_of(changed_by_hand(fresh(tiny_model), changes, 1.0))
    base = layers_of(loaded("sd15"))
    for name, layer in by_hand.items():
        change = changes.get(name, Change({}, None))
        for part, parameter in layer.named_parameters(recurse=False):
            served = merged[name].get_parameter(part)
            assert torch.allclose(served, parameter, atol=1e-5), name
            is_changed = (change.weight if part == "weight" else change.bias) is not None
            assert torch.equal(served, base[name].get_parameter(part)) != is_changed, name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dora_peft", "diff"])
def test_sdxl_with_two_text_encoders_and_without_pages_is_served_too(
    kind: str, loaded: Callable[[str], Any], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model = with_folder(loaded("sdxl"), tmp_path)
    changes = changes_of(kind, model)
    assert {name.partition(".")[0] for name in changes} == {"unet", "text_encoder", "text_encoder_2"}
    save_file(tensors_of(kind, changes), tmp_path / f"{kind}.safetensors")
    by_hand = changed_by_hand(load_model(tiny_model("sdxl"), dtype="float32", device=DEVICE), changes, 1.0)
    config = EngineConfig(cross_attention="plain")
    requests = [
        image_request("sdxl", "ddim", 1, prompt=prompt, num_steps=2) for prompt in ("cat", f"cat <lora:{kind}>")
    ]
    [expected] = Engine(by_hand, config).generate(requests[0])
    plain, served = Engine(model, config).generate(requests)
    assert np.abs(latents(served) - latents(expected)).max() < TOLERANCE
    assert np.abs(latents(plain) - latents(expected)).max() > 100 * TOLERANCE


def test_names_of_comfyui_and_of_the_original_code_mean_the_same_norms(
    loaded: Callable[[str], Any], tmp_path: Path
) -> None:
    delta, bias = torch.linspace(-1, 1, 32), torch.linspace(1, 0, 32)
    names = {
        "diffusers": ("unet.conv_norm_out.diff", "unet.conv_norm_out.diff_b"),
        "bare": ("conv_norm_out.w_norm", "conv_norm_out.b_norm"),
        "comfy": ("diffusion_model.out.0.diff", "diffusion_model.out.0.diff_b"),
        "kohya": ("lora_unet_out_0.w_norm", "lora_unet_out_0.b_norm"),
    }
    for name, (weight_name, bias_name) in names.items():
        save_file({weight_name: delta, bias_name: bias}, tmp_path / f"{name}.safetensors")
    engine = Engine(with_folder(loaded("sd15"), tmp_path), EngineConfig())
    plain, first, *other_results = engine.generate([request_for(), *map(request_for, names)])
    assert plain.picture != first.picture
    assert all(other.picture == first.picture for other in other_results)


def test_scale_zero_of_a_dora_changes_nothing(model: Any) -> None:
    plain, served = Engine(model, EngineConfig()).generate([request_for(), request_for("dora_peft:0")])
    assert np.abs(latents(served) - latents(plain)).max() < TOLERANCE


def test_rows_with_whole_changes_have_the_same_bytes_in_shared_calls_as_in_their_own(model: Any) -> None:
    requests = [
        request_for("dora_peft", seed=1),
        request_for("norms", seed=2, guidance_scale=1.0),
        request_for("lokr_tucker:0.5", "diff_b", seed=3),
        request_for(seed=4),
        request_for("ordinary", seed=5),
        request_for("bias_only", "ordinary", seed=6, cache_interval=2, num_steps=4),
    ]
    alone = [Engine(model, EngineConfig()).generate(request)[0] for request in requests]
    engine = Engine(model, EngineConfig(max_rows=8))
    engine.runners.groups.learn(engine.runners.group_of_short_prompts(64, 64)._replace(lora_rank=WHOLE))
    engine.generate(requests)  # adapters are read in the background; now all are in memory
    together = engine.generate(requests)
    for result, expected in zip(together, alone, strict=True):
        assert np.array_equal(latents(result), latents(expected))
        assert result.picture == expected.picture
    loras = {result.request_id: result.loras for result in together}
    shared = max(len({loras[row.request_id] for row in call.rows}) for tick in engine.trace for call in tick.calls)
    assert shared > 1, "rows with different whole changes did not share a call"
    engine.check_integrity()


def test_sum_of_an_ordinary_lora_and_a_dora_is_served(
    model: Any, folder: Path, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "adapter.json").write_text(json.dumps({"base": str(tiny_model("sd15"))}))
    (tmp_path / "pytorch_lora_weights.safetensors").symlink_to(folder / "ordinary.safetensors")
    merged = load_model(tmp_path, dtype="float32", device=DEVICE)
    by_hand = changed_by_hand(merged, changes_of("dora_peft", model), 0.5)
    [expected] = Engine(by_hand, EngineConfig()).generate(request_for())
    [served] = Engine(model, EngineConfig()).generate(request_for("ordinary", "dora_peft:0.5"))
    assert np.abs(latents(served) - latents(expected)).max() < TOLERANCE


def test_outside_of_their_calls_nothing_is_left_of_whole_changes(model: Any) -> None:
    Engine(model, EngineConfig()).generate(request_for("norms", "diff"))
    assert not any(layer._forward_hooks for layer in layers_of(model).values())


def test_calls_with_whole_changes_are_neither_compiled_nor_recorded(model: Any) -> None:
    engine = Engine(model, EngineConfig(activation_bytes=1 << 26))
    groups, room = engine.runners.groups, engine.runners.room
    native = engine.runners.group_of_short_prompts(64, 64)
    whole_group = native._replace(lora_rank=WHOLE)
    groups.compiled.is_measured = True
    groups.compiled.take(whole_group._replace(is_compiled=True))
    groups.compiled._looked_for.add(whole_group._replace(is_compiled=True))
    assert groups.best(whole_group) == whole_group
    shelf = engine.runners.loras
    lora_set = shelf.take((Lora("norms"),))
    assert (lora_set.rank, RowLoRAs([lora_set]).is_kept) == (WHOLE, False)
    deltas = [tensor for change in changes_of("norms", model).values() for tensor in change.tensors.values()]
    assert lora_set.num_bytes == sum(tensor.nbytes for tensor in deltas)
    assert shelf.ranks() == (16,)
    room._now_bytes, room.__dict__["activations"] = 10 * int(room._margin * room._bound.of_row(64, 77)), room._bound
    assert room.rows(GroupKey(64, 64, 77, lora_rank=WHOLE)) == room.rows(GroupKey(64, 64, 77))


def test_calls_with_whole_changes_use_the_batch_sizes_of_plain_calls_on_the_reference_number_of_threads(
    model: Any, tmp_path: Path
) -> None:
    groups = Engine(model, EngineConfig(cache_dir=str(tmp_path), deterministic=True)).runners.groups
    groups.threads = Threads((2, 1))
    native = GroupKey(64, 64, model.text.window_tokens)
    groups.learn(native)
    facts = groups._facts(_name(native))
    assert facts is not None
    whole_group = native._replace(lora_rank=WHOLE)
    assert groups.facts_of(whole_group).curve.buckets == groups.facts_of(native).curve.buckets
    assert not groups.is_unmeasured(whole_group), "it was measured a second time"
    both = replace(facts, counts=(2, 1))
    assert [groups._call_facts(group, both).counts for group in (native, whole_group)] == [(2, 1), (2,)]


def test_dora_on_int8_weights_starts_from_the_weights_that_are_served(
    model: Any, folder: Path, tiny_model: Callable[[str], Path]
) -> None:
    quantized = with_folder(load_model(tiny_model("sd15"), dtype="int8", device=DEVICE), folder)
    base, served = Engine(quantized, EngineConfig()).generate([request_for(), request_for("dora_peft")])
    exact_base, exact = Engine(model, EngineConfig()).generate([request_for(), request_for("dora_peft")])
    change, exact_change = latents(served) - latents(base), latents(exact) - latents(exact_base)
    assert np.linalg.norm(change - exact_change) < 0.1 * np.linalg.norm(exact_change)


def test_dora_over_offloaded_weights_is_refused_and_other_whole_changes_are_served(
    model: Any, folder: Path, tiny_model: Callable[[str], Path]
) -> None:
    offloaded = load_model(tiny_model("sd15"), dtype="float32", device=DEVICE, offload="disk")
    engine = Engine(with_folder(offloaded, folder), EngineConfig())
    with pytest.raises(InvalidRequest, match=r"'dora_peft' is DoRA, which needs the weights of .*offloaded"):
        engine.generate(request_for("dora_peft"))
    [served], [expected] = (
        each.generate(request_for("lokr", "norms")) for each in (engine, Engine(model, EngineConfig()))
    )
    assert np.abs(latents(served) - latents(expected)).max() < TOLERANCE


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({f"lora_unet_{flat_name(BLOCK)}_attn1_to_q.diff_b": (32,)}, "changes a bias, but its layer has no bias"),
        ({"lora_unet_conv_in.diff_b": (31,)}, r"a difference \[31\] does not fit a bias \[32\]"),
        ({"lora_unet_conv_in.diff": (32, 4, 3, 1)}, "does not fit a weight"),
        ({"lora_unet_conv_norm_out.w_norm": (16,)}, r"a difference \[16\] does not fit a weight \[32\]"),
        ({"lora_unet_conv_in.lokr_w1": (4, 2), "lora_unet_conv_in.lokr_w2": (8, 2, 3, 1)}, "do not fit a weight"),
        (
            {f"unet.conv_in.lora_{part}": shape for part, shape in
             {"A.weight": (3, 4, 3, 3), "B.weight": (32, 3, 1, 1), "magnitude_vector": (4,)}.items()},
            r"magnitudes \[4\] do not fit a weight",
        ),
        (
            {f"lora_unet_conv_in.{part}": shape for part, shape in
             {"lora_down.weight": (3, 4, 3, 3), "lora_up.weight": (32, 3, 1, 1), "dora_scale": (32,)}.items()},
            r"magnitudes \[32\] do not fit a weight",
        ),
    ],
)  # fmt: skip
def test_whole_changes_that_do_not_fit_the_model_are_refused(
    tensors: dict[str, tuple[int, ...]], message: str, loaded: Callable[[str], Any], tmp_path: Path
) -> None:
    save_file({name: torch.ones(shape) for name, shape in tensors.items()}, tmp_path / "bad.safetensors")
    assert LoraFolders([str(tmp_path)]).names() == ("bad",), "a fit for another model is listed"
    with pytest.raises(InvalidRequest, match=message):
        Engine(with_folder(loaded("sd15"), tmp_path), EngineConfig()).submit(request_for("bad"))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"conv_in.lokr_w1": (4, 2)}, "w2 is neither one tensor nor a pair"),
        ({"conv_in.lokr_w1_a": (4, 2), "conv_in.lokr_w2": (4, 2)}, "w1 is neither one tensor nor a pair"),
        (
            {"conv_in.lokr_w1_a": (4, 3), "conv_in.lokr_w1_b": (2, 2), "conv_in.lokr_w2": (8, 2, 3, 3)},
            "they do not fit",
        ),
        (
            {"conv_in.lokr_w1": (4, 2), "conv_in.lokr_t2": (3, 2, 3, 3), "conv_in.lokr_w2_a": (3, 8),
             "conv_in.lokr_w2_b": (3, 2)},
            "they do not fit",
        ),
        ({"conv_in.dora_scale": (32, 1, 1, 1)}, "has no partner"),
        ({"conv_in.dora_scale": (32, 1, 1, 1), "conv_in.diff_b": (32,)}, "has no partner"),
        ({"conv_norm_out.lokr_w1": (4, 1), "conv_norm_out.lokr_w2": (8, 1)}, "a norm layer has no matrix to change"),
        ({"conv_in.lora_B.bias": (32,)}, "holds the bias of a low-rank matrix"),
        ({"conv_in.oft_blocks": (4, 8, 8)}, "is OFT"),
        ({"conv_in.on_input": (4,)}, "is IA3"),
    ],
)  # fmt: skip
def test_whole_changes_that_no_model_can_use_are_listed_as_refused(
    tensors: dict[str, tuple[int, ...]], message: str, tmp_path: Path
) -> None:
    save_file({name: torch.ones(shape) for name, shape in tensors.items()}, tmp_path / "bad.safetensors")
    assert message in LoraFolders([str(tmp_path)]).refused()["bad"]
