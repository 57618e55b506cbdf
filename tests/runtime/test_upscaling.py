"""Upscaler networks against plain references, detection of their files, and tiled execution."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from diffserve.api.errors import InvalidRequest, ModelLoadError, NumericalError
from diffserve.models import upscalers
from diffserve.models.upscalers import (
    EMBEDDED_UPSCALER,
    CompactShape,
    RrdbShape,
    SwinIRShape,
    UnknownUpscalerError,
    UpscalerFolders,
    UpscalerShape,
    detect,
    read_upscaler,
)
from diffserve.runtime import choose_device
from diffserve.runtime.upscaling.network import Upscaler, build_network
from diffserve.runtime.upscaling.tiles import TiledImage, TilePlan
from tests.upscalers import COMPACT, RRDB, SWINIR, random_tensors, write_upscaler

Tensors = dict[str, Tensor]
CPU = choose_device("cpu", "float32")


def picture(height: int, width: int, seed: int = 0) -> Tensor:
    return torch.rand(1, 3, height, width, generator=torch.Generator().manual_seed(seed))


def pixels(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def shapes_of(tensors: Tensors) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def run(shape: UpscalerShape, tensors: Tensors, x: Tensor) -> Tensor:
    network = build_network(shape)
    network.load_state_dict(tensors)
    with torch.inference_mode():
        result: Tensor = network(x)
    return result


def conv(x: Tensor, tensors: Tensors, name: str) -> Tensor:
    weight = tensors[f"{name}.weight"]
    return F.conv2d(x, weight, tensors[f"{name}.bias"], padding=weight.shape[-1] // 2)


def enlarged(x: Tensor, times: int) -> Tensor:
    return x.repeat_interleave(times, 2).repeat_interleave(times, 3)


def shuffled(x: Tensor, times: int) -> Tensor:
    """Move channels to pixels: (B, C times^2, h, w) -> (B, C, times h, times w)."""
    batch, channels, height, width = x.shape
    parts = x.view(batch, channels // times**2, times, times, height, width)
    return parts.permute(0, 1, 4, 2, 5, 3).reshape(batch, -1, times * height, times * width)


def compact_reference(x: Tensor, tensors: Tensors, shape: CompactShape) -> Tensor:
    hidden = x
    for layer in range(shape.num_convs + 1):
        hidden = conv(hidden, tensors, f"body.{2 * layer}")
        slope = tensors[f"body.{2 * layer + 1}.weight"].view(1, -1, 1, 1) if shape.has_slopes else 0.1
        hidden = torch.where(hidden > 0, hidden, slope * hidden)
    hidden = conv(hidden, tensors, f"body.{2 * shape.num_convs + 2}")
    return shuffled(hidden, shape.scale) + enlarged(x, shape.scale)


@pytest.mark.parametrize("shape", [COMPACT, replace(COMPACT, scale=4, has_slopes=False), replace(COMPACT, scale=3)])
def test_compact_networks_compute_what_the_reference_does(shape: CompactShape) -> None:
    tensors, x = random_tensors(shape), picture(7, 9)
    assert torch.allclose(run(shape, tensors, x), compact_reference(x, tensors, shape), atol=1e-5)


def leaky(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, 0.2 * x)


def dense_reference(x: Tensor, tensors: Tensors, name: str) -> Tensor:
    first = leaky(conv(x, tensors, f"{name}.conv1"))
    second = leaky(conv(torch.cat([x, first], 1), tensors, f"{name}.conv2"))
    third = leaky(conv(torch.cat([x, first, second], 1), tensors, f"{name}.conv3"))
    fourth = leaky(conv(torch.cat([x, first, second, third], 1), tensors, f"{name}.conv4"))
    return x + 0.2 * conv(torch.cat([x, first, second, third, fourth], 1), tensors, f"{name}.conv5")


def rrdb_reference(x: Tensor, tensors: Tensors, shape: RrdbShape) -> Tensor:
    batch, channels, height, width = x.shape
    fold = shape.fold
    parts = x.view(batch, channels, height // fold, fold, width // fold, fold).permute(0, 1, 3, 5, 2, 4)
    first = conv(parts.reshape(batch, -1, height // fold, width // fold), tensors, "conv_first")
    hidden = first
    for block in range(shape.num_blocks):
        inner = hidden
        for part in (1, 2, 3):
            inner = dense_reference(inner, tensors, f"body.{block}.rdb{part}")
        hidden = hidden + 0.2 * inner
    hidden = first + conv(hidden, tensors, "conv_body")
    for up in range(shape.num_doublings):
        hidden = leaky(conv(enlarged(hidden, 2), tensors, f"conv_up.{up}"))
    return conv(leaky(conv(hidden, tensors, "conv_hr")), tensors, "conv_last")


RRDBS = {
    "x4": RRDB,
    "x2 by folding": replace(RRDB, fold=2),
    "x2": replace(RRDB, num_doublings=1),
    "x8": replace(RRDB, num_doublings=3),
    "x1": replace(RRDB, num_doublings=0),
}


@pytest.mark.parametrize("name", RRDBS)
def test_rrdb_networks_compute_what_the_reference_does(name: str) -> None:
    shape, x = RRDBS[name], picture(6, 8)
    tensors = random_tensors(shape)
    assert shape.scale == {"x4": 4, "x2 by folding": 2, "x2": 2, "x8": 8, "x1": 1}[name]
    assert torch.allclose(run(shape, tensors, x), rrdb_reference(x, tensors, shape), atol=1e-4)


def attention_reference(x: Tensor, tensors: Tensors, name: str, heads: int, window: int, shift: int) -> Tensor:
    """Window attention (h, w, C), pixel by pixel: each attends to those of its window that were not wrapped around."""
    height, width, embed = x.shape
    qkv = x @ tensors[f"{name}.qkv.weight"].T + tensors[f"{name}.qkv.bias"]
    table = tensors[f"{name}.relative_position_bias_table"]
    result = torch.zeros_like(x)
    width_each = embed // heads

    def window_of(y: int, x_: int) -> tuple[int, int]:
        return ((y - shift) % height // window, (x_ - shift) % width // window)

    def is_wrapped(y: int, x_: int) -> tuple[bool, bool]:
        return y < shift, x_ < shift

    for y in range(height):
        for x_ in range(width):
            attended = [
                (b, a)
                for b in range(height)
                for a in range(width)
                if window_of(b, a) == window_of(y, x_) and is_wrapped(b, a) == is_wrapped(y, x_)
            ]
            for head in range(heads):
                part = slice(head * width_each, (head + 1) * width_each)
                query = qkv[y, x_, :embed][part] / math.sqrt(width_each)
                scores = []
                for b, a in attended:
                    row = (y - b + window - 1) * (2 * window - 1) + x_ - a + window - 1
                    scores.append(query @ qkv[b, a, embed : 2 * embed][part] + table[row, head])
                weights = torch.stack(scores).softmax(0)
                values = torch.stack([qkv[b, a, 2 * embed :][part] for b, a in attended])
                result[y, x_, part] = weights @ values
    return result @ tensors[f"{name}.proj.weight"].T + tensors[f"{name}.proj.bias"]


def norm_reference(x: Tensor, tensors: Tensors, name: str) -> Tensor:
    centered = x - x.mean(-1, keepdim=True)
    scaled = centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return scaled * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]


def convs_reference(x: Tensor, tensors: Tensors, name: str, shape: SwinIRShape) -> Tensor:
    if not shape.has_three_convs:
        return conv(x, tensors, name)
    return conv(leaky(conv(leaky(conv(x, tensors, f"{name}.0")), tensors, f"{name}.2")), tensors, f"{name}.4")


def swinir_reference(x: Tensor, tensors: Tensors, shape: SwinIRShape) -> Tensor:
    mean = torch.tensor([0.4488, 0.4371, 0.4040]).view(1, 3, 1, 1)
    x = x - mean
    first = conv(x, tensors, "conv_first")
    hidden = norm_reference(first[0].permute(1, 2, 0), tensors, "patch_embed.norm")
    for group, (depth, heads) in enumerate(zip(shape.depths, shape.heads, strict=True)):
        inner = hidden
        for block in range(depth):
            name = f"layers.{group}.residual_group.blocks.{block}"
            shift = shape.window // 2 if block % 2 else 0
            normed = norm_reference(inner, tensors, f"{name}.norm1")
            inner = inner + attention_reference(normed, tensors, f"{name}.attn", heads, shape.window, shift)
            normed = norm_reference(inner, tensors, f"{name}.norm2")
            wide = normed @ tensors[f"{name}.mlp.fc1.weight"].T + tensors[f"{name}.mlp.fc1.bias"]
            wide = wide * (1 + torch.erf(wide / math.sqrt(2))) / 2
            inner = inner + wide @ tensors[f"{name}.mlp.fc2.weight"].T + tensors[f"{name}.mlp.fc2.bias"]
        last = convs_reference(inner.permute(2, 0, 1)[None], tensors, f"layers.{group}.conv", shape)
        hidden = hidden + last[0].permute(1, 2, 0)
    normed = norm_reference(hidden, tensors, "norm").permute(2, 0, 1)[None]
    deep = first + convs_reference(normed, tensors, "conv_after_body", shape)
    if shape.upsampler == "":
        return x + conv(deep, tensors, "conv_last") + mean
    if shape.upsampler == "pixelshuffledirect":
        return shuffled(conv(deep, tensors, "upsample.0"), shape.scale) + mean
    deep = conv(deep, tensors, "conv_before_upsample.0")
    deep = torch.where(deep > 0, deep, 0.01 * deep)
    if shape.upsampler == "nearest+conv":
        deep = leaky(conv(enlarged(deep, 2), tensors, "conv_up1"))
        if shape.scale == 4:
            deep = leaky(conv(enlarged(deep, 2), tensors, "conv_up2"))
        return conv(leaky(conv(deep, tensors, "conv_hr")), tensors, "conv_last") + mean
    for index, factor in enumerate([3] if shape.scale == 3 else [2] * int(math.log2(shape.scale))):
        deep = shuffled(conv(deep, tensors, f"upsample.{2 * index}"), factor)
    return conv(deep, tensors, "conv_last") + mean


SWINIRS = {
    "lightweight": SWINIR,
    "classical x4": replace(SWINIR, upsampler="pixelshuffle", scale=4, features=8),
    "classical x3": replace(SWINIR, upsampler="pixelshuffle", scale=3, features=8),
    "real x4": replace(SWINIR, upsampler="nearest+conv", scale=4, features=8),
    "real x2": replace(SWINIR, upsampler="nearest+conv", scale=2, features=8),
    "large": replace(SWINIR, upsampler="nearest+conv", scale=4, features=8, has_three_convs=True),
    "denoising": replace(SWINIR, upsampler="", scale=1),
}


@pytest.mark.parametrize("name", SWINIRS)
def test_swinir_networks_compute_what_the_reference_does(name: str) -> None:
    shape, x = SWINIRS[name], picture(8, 12)
    tensors = random_tensors(shape)
    reference = swinir_reference(x, tensors, shape)
    assert reference.shape == (1, 3, 8 * shape.scale, 12 * shape.scale)
    assert torch.allclose(run(shape, tensors, x), reference, atol=1e-4)


def old_rrdb_names(shape: RrdbShape, name: str) -> str:
    """Return the name of a tensor in ESRGAN's first layout."""
    parts = name.split(".")
    if parts[0] == "body":
        block, dense, layer, kind = parts[1:]
        return f"model.1.sub.{block}.{dense.upper()}.{layer}.0.{kind}"
    high = 2 + 3 * shape.num_doublings
    numbers = {"conv_first": "0", "conv_body": f"1.sub.{shape.num_blocks}", "conv_hr": high, "conv_last": high + 2}
    numbers |= {f"conv_up.{up}": 3 * up + 3 for up in range(shape.num_doublings)}
    return f"model.{numbers[name.rpartition('.')[0]]}.{parts[-1]}"


def middle_rrdb_names(name: str) -> str:
    """Return the name of a tensor in the second layout, of BSRGAN among attended."""
    for new, old in (("body.", "RRDB_trunk."), ("conv_body.", "trunk_conv."), ("conv_hr.", "HRconv.")):
        if name.startswith(new):
            return name.replace(new, old, 1).replace(".rdb", ".RDB")
    return name.replace("conv_up.0", "upconv1").replace("conv_up.1", "upconv2").replace("conv_up.2", "upconv3")


def new_rrdb_names(name: str) -> str:
    """Return the name of a tensor in the layout of Real-ESRGAN."""
    return name.replace("conv_up.0", "conv_up1").replace("conv_up.1", "conv_up2").replace("conv_up.2", "conv_up3")


@pytest.mark.parametrize("name", RRDBS)
@pytest.mark.parametrize("layout", ["old", "middle", "new", "wrapped"])
def test_every_layout_of_rrdb_files_is_read(name: str, layout: str, tmp_path: Path) -> None:
    shape, tensors = RRDBS[name], random_tensors(RRDBS[name])
    renames: dict[str, Callable[[str], str]] = {
        "old": lambda key: old_rrdb_names(shape, key),
        "middle": middle_rrdb_names,
        "new": new_rrdb_names,
        "wrapped": lambda key: f"params_ema.{new_rrdb_names(key)}",
    }
    rename = renames[layout]
    file = tmp_path / "a.safetensors"
    save_file({rename(key): tensor for key, tensor in tensors.items()}, file)
    assert read_upscaler(file).shape == shape
    upscaler, x = Upscaler.load(file, CPU), picture(8, 8)
    assert torch.allclose(upscaler.network(x), run(shape, tensors, x), atol=1e-4)


@pytest.mark.parametrize("shape", [COMPACT, replace(COMPACT, has_slopes=False, scale=4), *SWINIRS.values()])
def test_other_architectures_are_detected(shape: UpscalerShape, tmp_path: Path) -> None:
    tensors = random_tensors(shape)
    further = {}
    if isinstance(shape, SwinIRShape):  # published files have these; the network computes them
        further = {"layers.0.residual_group.blocks.0.attn.relative_position_index": torch.zeros(16, 16)}
        further |= {"layers.0.residual_group.blocks.1.attn_mask": torch.zeros(4, 16, 16)}
    save_file(tensors | further, tmp_path / "a.safetensors")
    detected = read_upscaler(tmp_path / "a.safetensors").shape
    assert detected == shape
    x = picture(8, 8)
    network = Upscaler.load(tmp_path / "a.safetensors", CPU).network
    assert torch.allclose(network(x), run(shape, tensors, x), atol=1e-4)


def test_files_that_are_no_upscalers_are_refused_with_one_sentence(tmp_path: Path) -> None:
    cases = {
        "unet": ({"down_blocks.0.resnets.0.conv1.weight": torch.zeros(4, 4, 3, 3)}, "of no known upscaler"),
        "gray": (random_tensors(replace(COMPACT, channels=1)), "images of 1 channels; only RGB"),
        "gaps": ({k: v for k, v in random_tensors(RRDB).items() if not k.startswith("body.0")}, "no known upscaler"),
        "mixed": ({**random_tensors(COMPACT), "head.weight": torch.zeros(1)}, "of no known upscaler"),
    }
    for name, (tensors, problem) in cases.items():
        save_file({new_rrdb_names(key): tensor for key, tensor in tensors.items()}, tmp_path / f"{name}.safetensors")
        with pytest.raises(ModelLoadError) as error:
            read_upscaler(tmp_path / f"{name}.safetensors")
        assert problem in error.value.message
        assert error.value.message.count(". ") == 0
    file = write_upscaler(tmp_path / "whole.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ModelLoadError, match="not a complete safetensors file"):
        read_upscaler(tmp_path / "cut.safetensors")
    (tmp_path / "old.pth").write_bytes(b"anything")
    with pytest.raises(ModelLoadError, match=r"torch.load\(sys.argv\[1\], map_location='cpu', weights_only=True\)"):
        read_upscaler(tmp_path / "old.pth")


def test_gigantic_files_and_scales_are_refused() -> None:
    shapes = shapes_of(random_tensors(COMPACT))
    with pytest.raises(UnknownUpscalerError, match="enlarges 32 times"):
        detect(shapes | {"body.8.weight": (3 * 32 * 32, 8, 3, 3), "body.8.bias": (3 * 32 * 32,)})


def test_files_with_too_many_parameters_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upscalers, "MAX_PARAMETERS", 1000)
    file = write_upscaler(tmp_path / "large.safetensors")
    with pytest.raises(ModelLoadError, match="parameters; an upscaler has at most 1,000"):
        read_upscaler(file)


def test_the_conversion_command_makes_a_usable_file(tmp_path: Path) -> None:
    import subprocess
    import sys

    from diffserve.models.model_files import CONVERT

    tensors = {new_rrdb_names(name): tensor for name, tensor in random_tensors(RRDB).items()}
    torch.save({"params_ema": tensors}, tmp_path / "a.pth")
    files = [str(tmp_path / "a.pth"), str(tmp_path / "a.safetensors")]
    subprocess.run([sys.executable, "-c", CONVERT, *files], check=True, timeout=120)
    assert read_upscaler(tmp_path / "a.safetensors").shape == RRDB


def test_folders_list_the_files_of_the_user_and_the_shipped_one(tmp_path: Path) -> None:
    write_upscaler(tmp_path / "anime" / "small.safetensors")
    (tmp_path / "old.pth").write_bytes(b"anything")
    (tmp_path / "broken.safetensors").write_bytes(b"anything")
    folders = UpscalerFolders(str(tmp_path))
    assert folders.names() == ("anime/small", EMBEDDED_UPSCALER, "lanczos", "nearest")
    assert set(folders.refused()) == {"broken", "old"}
    assert folders.find("small") == ("anime/small", tmp_path / "anime" / "small.safetensors")
    for name, problem in (("old", "pickle file"), ("broken", "not a"), ("none", "there is no upscaler 'none'")):
        with pytest.raises(InvalidRequest, match=problem) as error:
            folders.find(name)
        assert error.value.param == "upscaler"
        assert str(tmp_path) not in error.value.message


# Tiles --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [COMPACT, CompactShape(features=8, num_convs=8, scale=4)])
def test_tiles_give_the_image_of_one_call_if_they_cover_the_receptive_field(
    shape: CompactShape, tmp_path: Path
) -> None:
    upscaler = Upscaler.load(write_upscaler(tmp_path / "a.safetensors", shape), CPU)
    image = pixels(150, 203)
    in_one_piece = upscaler.tiled(image, 10**9)
    parts = upscaler.tiled(image, 60**2)
    assert (in_one_piece.num_tiles, parts.num_tiles > 8) == (1, True)
    for each in (in_one_piece, parts):
        while not each.is_done:
            each.run_next(upscaler.enlarge)
    assert in_one_piece.result().shape == (150 * shape.scale, 203 * shape.scale, 3)
    assert np.abs(in_one_piece._sum - parts._sum).max() < 1e-5
    difference = np.abs(in_one_piece.result().astype(int) - parts.result().astype(int))
    assert difference.max() <= 1


@pytest.mark.parametrize("shape", [RrdbShape(8, 4, 6, 2), replace(SWINIR, depths=(2, 2, 2), heads=(2, 2, 2))])
def test_tiles_of_networks_with_larger_fields_have_no_visible_seams(shape: UpscalerShape, tmp_path: Path) -> None:
    upscaler = Upscaler.load(write_upscaler(tmp_path / "a.safetensors", shape), CPU)
    image = pixels(160, 160)
    in_one_piece, parts = upscaler.tiled(image, 10**9), upscaler.tiled(image, 64**2)
    assert parts.num_tiles >= 9
    for each in (in_one_piece, parts):
        while not each.is_done:
            each.run_next(upscaler.enlarge)
    error = np.abs(in_one_piece._sum - parts._sum)
    assert error.max() < 0.01
    assert np.sqrt(np.square(error).mean()) < 1e-3


def test_the_margin_matters(tmp_path: Path) -> None:
    upscaler = Upscaler.load(write_upscaler(tmp_path / "a.safetensors"), CPU)
    image = pixels(150, 150)
    in_one_piece = TiledImage(image, TilePlan(1024, 0, 2))
    bare = TiledImage(image, TilePlan(48, 4, 2))  # blended, but without the context that the network needs
    for each in (in_one_piece, bare):
        while not each.is_done:
            each.run_next(upscaler.enlarge)
    assert np.abs(in_one_piece._sum - bare._sum).max() > 1e-3


@pytest.mark.parametrize("length", [1, 31, 64, 100, 144, 145, 500, 1023])
def test_weights_of_tiles_sum_to_one(length: int) -> None:
    plan = TilePlan.of(receptive_px=14, multiple_px=8, scale=2, max_tile_pixels=96**2)
    image = TiledImage(np.zeros((length, 1, 3), np.uint8), plan)
    total = np.zeros(2 * length)
    for span in plan.spans(length):
        assert span.low % 8 == 0
        assert span.start == 0 or span.start - span.low == plan.margin_px
        assert span.end - span.start >= min(length, 16)
        total[2 * span.low : 2 * span.high] += image._weights(span, length)
    assert np.allclose(total, 1)


@pytest.mark.parametrize("size", [(1, 1), (3, 5), (9, 30)])
def test_sizes_that_do_not_fit_the_windows_are_padded_and_cropped(size: tuple[int, int], tmp_path: Path) -> None:
    shapes: tuple[UpscalerShape, ...] = (SWINIR, replace(RRDB, fold=2), COMPACT)
    for index, shape in enumerate(shapes):
        upscaler = Upscaler.load(write_upscaler(tmp_path / f"{index}.safetensors", shape), CPU)
        assert upscaler.upscale(pixels(*size)).shape == (size[0] * shape.scale, size[1] * shape.scale, 3)


def test_results_that_are_not_finite_are_an_error(tmp_path: Path) -> None:
    tensors = random_tensors(COMPACT)
    tensors["body.8.bias"][0] = math.nan
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(NumericalError, match="not finite"):
        Upscaler.load(tmp_path / "a.safetensors", CPU).upscale(pixels(8, 8))


def test_a_network_that_overflows_in_half_precision_continues_in_float32(tmp_path: Path) -> None:
    tensors = random_tensors(COMPACT)
    for name in ("body.0.weight", "body.2.weight"):
        tensors[name] *= 1e3
    tensors["body.8.weight"] *= 1e-4
    upscaler = Upscaler.load(save_to(tmp_path, tensors), CPU)
    expected = upscaler.upscale(pixels(8, 8))
    upscaler.network, upscaler.dtype = upscaler.network.half(), torch.float16
    upscaler.network.load_state_dict({name: tensor.half() for name, tensor in tensors.items()})
    again = upscaler.upscale(pixels(8, 8))
    assert upscaler.dtype == torch.float32
    assert np.abs(expected.astype(int) - again.astype(int)).mean() <= 2  # the weights were rounded


def save_to(folder: Path, tensors: Tensors) -> Path:
    save_file(tensors, folder / "a.safetensors")
    return folder / "a.safetensors"


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [COMPACT, RRDB, SWINIR])
def test_a_gpu_gives_the_image_of_the_cpu(shape: UpscalerShape, tmp_path: Path) -> None:
    file, image = write_upscaler(tmp_path / "a.safetensors", shape), pixels(40, 48)
    expected = Upscaler.load(file, CPU).upscale(image).astype(int)
    for dtype, max_error in (("float32", 2), ("float16", 6), ("bfloat16", 24)):
        result = Upscaler.load(file, choose_device("cuda", dtype)).upscale(image)
        assert np.abs(expected - result.astype(int)).max() <= max_error
