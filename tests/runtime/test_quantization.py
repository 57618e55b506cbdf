"""Layers with fewer bits: near the exact ones, indifferent to neighbours, small as promised, and none left unnamed."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import random_models
from benchmarks.random_models import save_hollow_model
from diffserve.api.errors import ConfigError
from diffserve.api.types import DiffusionParams, GenerationRequest, ImageResult
from diffserve.disk_cache import DiskCache
from diffserve.engine import Engine
from diffserve.models.model_files import read_json
from diffserve.runtime import DiffusionModel, choose_device, load_model
from diffserve.runtime.dry_run import DryRun, ListIndices
from diffserve.runtime.loading import checkpoint
from diffserve.runtime.loading.checkpoint import Checkpoint
from diffserve.runtime.loading.components import build_unet, load_component
from diffserve.runtime.precision import QUANTIZED, _refuse_absent_unit, tensor_bytes, weights_bytes
from diffserve.runtime.quantization import find_unquantized, quantize_layer, scheme_for, schemes
from diffserve.runtime.quantized_layers import (
    InputRange,
    Int8DynamicLinear,
    Int8StaticConv2d,
    Int8WeightConv2d,
    Int8WeightLinear,
    become_static,
    weight_in_float32,
)
from diffserve.runtime.threads import computing_on
from diffserve.runtime.unet.layers import RowLinear, use_steady_layers
from diffserve.settings.config import EngineConfig
from tests.device import DEVICE
from tests.hardware import needs_int8
from tests.runtime.conftest import LoadTiny

MULTIPLIED = [pytest.param(name, marks=needs_int8) for name in ("int8_dynamic", "int8_static")]
TOLERANCE = {"int8": 0.01, "int8_dynamic": 0.015}
"""Scheme -> largest relative error (in the norm) of a layer's output for normal activations and weights."""


def linear(scheme: str | None = None, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(1)
    layer = nn.Linear(64, 48).requires_grad_(False).to(DEVICE, dtype)
    if scheme is not None:
        quantize_layer(layer, scheme)
    return layer


@pytest.mark.parametrize("scheme", [None, "int8", "int8_dynamic"])
def test_weight_is_given_in_float32_whatever_it_is_held_in(scheme: str | None) -> None:
    exact, weight = linear().weight, weight_in_float32(linear(scheme))
    assert weight is not None
    assert weight.dtype == torch.float32
    assert (weight - exact).norm() <= 0.03 * exact.norm()


def test_packed_and_offloaded_weights_are_not_given() -> None:
    static = linear("int8_static")
    become_static(static, InputRange(-1.0, 1.0))
    assert weight_in_float32(static) is None
    assert weight_in_float32(nn.Linear(8, 8, device="meta")) is None


def tokens(rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """(rows, 9, 64), of which some are small and some large, and one token is zero."""
    activations = torch.randn(rows, 9, 64, generator=torch.Generator().manual_seed(2))
    activations *= torch.logspace(-3, 2, rows)[:, None, None]
    activations[0, 3] = 0
    return activations.to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", ["int8", "int8_dynamic"])
def test_a_quantized_layer_comes_near_the_exact_one_for_every_token(scheme: str, dtype: torch.dtype) -> None:
    inputs = tokens(5, dtype)
    exact, actual = linear(dtype=dtype)(inputs).float(), linear(scheme, dtype)(inputs)
    assert actual.dtype == dtype
    assert actual.isfinite().all()
    error = (actual.float() - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert float(error.max()) < TOLERANCE[scheme] + 2 * torch.finfo(dtype).eps


def test_a_token_has_the_same_bytes_alone_and_in_any_batch() -> None:
    layer, inputs = linear("int8_dynamic"), tokens(6)
    together = layer(inputs)
    assert torch.equal(torch.cat([layer(inputs[row : row + 1]) for row in range(6)]), together)
    assert torch.equal(layer(inputs.flip(0)).flip(0), together)
    assert torch.equal(layer(inputs[2, 4]), together[2, 4])


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(64, 48),
    "3x3": lambda: nn.Conv2d(16, 24, 3, padding=1),
    "3x3 of stride 2, without bias": lambda: nn.Conv2d(16, 24, 3, stride=2, padding=1, bias=False),
    "1x1": lambda: nn.Conv2d(16, 24, 1),
}


def static(kind: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """Return a layer, its int8 version, and one-sided activations as after SiLU."""
    torch.manual_seed(3)
    layer = LAYERS[kind]().to(dtype).requires_grad_(False)
    inputs = nn.functional.silu(torch.randn((5, 9, 64) if kind == "linear" else (5, 16, 12, 12)) + 0.5).to(dtype)
    narrow = copy.deepcopy(layer)
    quantize_layer(narrow, "int8_static")
    assert (narrow(inputs).float() - layer(inputs).float()).norm() / layer(inputs).float().norm() < 0.02
    become_static(narrow, InputRange(float(inputs.min()), float(inputs.max())))
    return layer, narrow, inputs


@needs_int8
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_of_measured_ranges_comes_near_the_exact_one_whoever_shares_the_call(
    kind: str, dtype: torch.dtype
) -> None:
    layer, narrow, inputs = static(kind, dtype)
    exact, actual = layer(inputs).float(), narrow(inputs)
    assert actual.dtype == dtype
    assert (actual.float() - exact).norm() / exact.norm() < 0.02
    with computing_on(1):  # oneDNN rounds differently on several threads of some CPUs, which an engine measures
        assert torch.equal(torch.cat([narrow(inputs[row : row + 1]) for row in range(5)]), narrow(inputs))


@needs_int8
@pytest.mark.parametrize("kind", LAYERS)
def test_zeros_stay_exact_and_what_is_out_of_range_is_cut_off(kind: str) -> None:
    layer, narrow, inputs = static(kind)
    zeros = torch.zeros_like(inputs)
    torch.testing.assert_close(narrow(zeros), layer(zeros), atol=1e-5, rtol=0)
    input_range = narrow.__dict__["range"]
    torch.testing.assert_close(narrow(inputs * 100), narrow((inputs * 100).clamp(input_range.low, input_range.high)))


@needs_int8
def test_ranges_are_measured_over_whole_trajectories_once_and_kept(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = DiskCache(tmp_path)
    first = load_model(tiny_model("sd15"), dtype="int8_static", device=DEVICE, cache=cache)
    kinds = {name: type(part) for name, part in network_of(first).named_modules()}
    assert {kind for name, kind in kinds.items() if name.endswith(("conv1", "conv2"))} == {Int8StaticConv2d}
    assert (kinds["conv_in"], kinds["conv_out"]) == (nn.Conv2d, nn.Conv2d)
    ranges = [part.__dict__["range"] for part in network_of(first).modules() if "range" in part.__dict__]
    assert all(input_range.low <= 0 <= input_range.high for input_range in ranges)
    assert len({input_range.high for input_range in ranges}) > 1

    def measured_again(*_: object) -> None:
        raise AssertionError("ranges that are kept were measured again")

    monkeypatch.setattr("diffserve.runtime.model.measure_ranges", measured_again)
    again = load_model(tiny_model("sd15"), dtype="int8_static", device=DEVICE, cache=cache)
    assert [part.__dict__["range"] for part in network_of(again).modules() if "range" in part.__dict__] == ranges
    left = "\n".join(again.unquantized_layers())
    assert "conv_in (1), conv_out (1)" in left
    assert "resnets.*.conv1" not in left


def test_measured_ranges_are_refused_where_convolutions_have_no_kernel() -> None:
    with pytest.raises(ConfigError, match="int8_static, whose convolutions have a kernel on CPUs only, not on cuda"):
        _refuse_absent_unit(torch.device("cuda"), "int8_static")


def painted(result: ImageResult) -> tuple[bytes, bytes]:
    assert result.latents is not None
    return result.latents.data, result.picture.data


@pytest.mark.parametrize("dtype", ["int8", *MULTIPLIED])
def test_a_mixed_batch_is_neighbour_proof(tiny_model: Callable[[str], Path], dtype: str) -> None:
    model = load_model(tiny_model("sd15"), dtype=dtype, device=DEVICE)
    samplers = ("ddim", "euler_a", "heun", "dpmpp_2m")

    def requests() -> list[GenerationRequest]:
        return [
            GenerationRequest(
                prompt=("cat", "the red fox", "dog on the cat")[place % 3],
                seed=place,
                width_px=64,
                height_px=64,
                diffusion=DiffusionParams(sampler=name, num_steps=2 + place % 2, guidance_scale=1.0 + 4 * (place % 2)),
                return_latents=True,
            )
            for place, name in enumerate(samplers)
        ]

    crowd = Engine(model, EngineConfig(max_rows=16, deterministic=True))
    together = crowd.generate(requests())
    assert crowd.is_deterministic
    assert max(len(set(tick.request_ids)) for tick in crowd.trace) == len(samplers)
    solo = Engine(model, EngineConfig(max_rows=16, deterministic=True))
    for mixed, request in zip(together, requests(), strict=True):
        [alone] = solo.generate(request)
        assert painted(alone) == painted(mixed)


def network_of(model: DiffusionModel) -> nn.Module:
    network: nn.Module = model.unet.network
    return network


@needs_int8
def test_int8_dynamic_multiplies_tokens_in_int8_and_holds_the_rest_as_it_says(
    tiny_model: Callable[[str], Path], tiny: LoadTiny
) -> None:
    model = load_model(tiny_model("sdxl"), dtype="int8_dynamic", device=DEVICE)
    kinds = {name: type(part) for name, part in network_of(model).named_modules() if isinstance(part, nn.Linear)}
    dynamic = {name for name, kind in kinds.items() if kind is Int8DynamicLinear}
    assert any(name.endswith("attn2.to_k") for name in dynamic)
    assert {name.split(".")[-1] for name in set(kinds) - dynamic} == {"linear_1", "linear_2", "time_emb_proj"}
    assert model.info.num_parameters == tiny("sdxl").info.num_parameters
    assert weights_bytes(network_of(model)) < 0.45 * weights_bytes(tiny("sdxl").unet.network)
    assert not any(
        isinstance(part, Int8DynamicLinear) for encoder in model.text.encoders for part in encoder.network.modules()
    )


@pytest.mark.parametrize("dtype", ["int8", MULTIPLIED[0]])
def test_every_layer_that_is_left_is_named_with_a_reason(tiny_model: Callable[[str], Path], dtype: str) -> None:
    model = load_model(tiny_model("sd15"), dtype=dtype, device=DEVICE)
    left = find_unquantized(network_of(model), dtype)
    convolutions = [part for part in network_of(model).modules() if isinstance(part, nn.Conv2d)]
    convolution_entries = [
        entry for entry in left if entry.reason == f"{dtype} is for linear layers; convolutions stay"
    ]
    assert sum(entry.num_layers for entry in convolution_entries) == len(convolutions)
    assert sum(entry.num_parameters for entry in convolution_entries) == sum(
        part.weight.numel() for part in convolutions
    )
    other_entries = [entry for entry in left if entry not in convolution_entries]
    assert bool(other_entries) == (dtype == "int8_dynamic")
    assert all(entry.holds == "int8" and "one vector per row" in entry.reason for entry in other_entries)
    message = "\n".join(model.unquantized_layers())
    assert "down_blocks.*.resnets.*.conv1" in message
    assert "vae: every layer keeps its float dtype" in message
    assert load_model(tiny_model("sd15"), dtype="float32", device=DEVICE).unquantized_layers() == []


def test_an_odd_layer_falls_back_and_says_why() -> None:
    assert scheme_for("to_q", nn.Linear(60, 64), "int8_dynamic") == (
        "int8",
        "is 60 x 64, and the kernel needs multiples of 8",
    )


@pytest.mark.parametrize("dtype", MULTIPLIED)
def test_quantizing_while_loading_never_holds_more_than_the_model_and_one_tensor(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    path, choice = tiny_model("sdxl") / "unet", choose_device("cpu", dtype)
    checkpoint = Checkpoint.open([path / "diffusion_pytorch_model.safetensors"])
    network = build_unet(read_json(path / "config.json"), "unet", choice)
    allocations: list[int] = []
    read = Checkpoint.read

    def watched(self: Checkpoint, key: str) -> torch.Tensor:
        allocations.append(sum(tensor_bytes(part) for part in network.parameters() if not part.is_meta))
        return read(self, key)

    monkeypatch.setattr(Checkpoint, "read", watched)
    load_component(network, checkpoint, choice, quantize=choice.unet_scheme)
    assert max(allocations) <= weights_bytes(network)
    assert len(allocations) == len(checkpoint.entries)
    ready = {"int8_dynamic": Int8DynamicLinear, "int8_static": Int8WeightLinear | Int8WeightConv2d}[dtype]
    narrow = {name for name, scheme in schemes(network, dtype).items() if scheme == dtype or dtype == "int8_static"}
    assert narrow == {name for name, part in network.named_modules() if isinstance(part, ready)}
    assert dtype != "int8_static" or weights_bytes(network) < 1.2 * sum(
        parameter.numel() for parameter in network.parameters()
    )


@pytest.mark.slow
def test_the_int8_unet_of_sdxl_takes_at_most_2_95_gb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_sha256", lambda file: file.name)  # gigabytes of holes
    for shape in (random_models.CLIP_L, random_models.BIG_G):  # the UNet is what counts
        monkeypatch.setitem(shape, "num_hidden_layers", 2)
    path = save_hollow_model("sdxl-random", tmp_path, dtype=torch.float16)
    for dtype in ("int8", "int8_dynamic"):
        model = load_model(path, device="meta", dtype=dtype)
        if model.dtype == torch.float32:
            pytest.skip("the convolutions of a CPU without bfloat16 are in float32")
        (unet,) = [part for part in model.memory_report() if part.component == "unet"]
        assert unet.num_parameters == pytest.approx(2.567e9, rel=1e-3)
        assert unet.weights_bytes <= 2.95e9, dtype


@pytest.mark.parametrize("dtype", ["int8", "int8_dynamic"])
def test_a_tick_of_a_quantized_model_waits_for_no_device(tmp_path: Path, dtype: str) -> None:
    path = save_hollow_model("tiny-random", tmp_path, dtype=torch.float16)
    config = EngineConfig(max_rows=8, deterministic=False)
    engine = Engine.from_pretrained(str(path), device="meta", dtype=dtype, config=config)
    engine.submit(GenerationRequest(prompt="a fox", seed=1, diffusion=DiffusionParams(sampler="ddim", num_steps=4)))
    for _ in range(3):
        with torch.inference_mode(), DryRun() as counted, ListIndices(counted.work):
            engine.tick()
    products = {"int8": "linear", "int8_dynamic": "_int_mm"}
    launched = [kernel for kernel in counted.work.kernels if kernel.name == products[dtype]]
    if dtype == "int8_dynamic":
        layers = [part for part in network_of(engine.model).modules() if type(part) is Int8DynamicLinear]
        messages = [
            name for name, _ in network_of(engine.model).named_modules() if name.endswith(("attn2.to_k", "attn2.to_v"))
        ]
        assert len(launched) == len(layers) - len(messages)  # keys and values of the text are made once, not in a tick
    assert launched
    assert all(kernel.flops > 0 for kernel in launched)


@pytest.mark.parametrize(("dtype", "device"), [("int8", "cpu"), ("int8_dynamic", "meta")])
def test_8_bit_precisions_of_image_models_need_no_torchao(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, dtype: str, device: str
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchao"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchao", None)
    model = load_model(tiny_model("sd15"), dtype=dtype, device=device)
    assert torch.int8 in {part.dtype for part in network_of(model).parameters()}


def test_int8_weights_do_not_overflow_in_float16_where_the_products_are_large() -> None:
    layer = nn.Linear(4096, 8, bias=False).half().requires_grad_(False)
    layer.weight.fill_(0.01)
    quantize_layer(layer, "int8")
    output = layer(torch.full((1, 4096), 16.0, dtype=torch.float16))
    assert torch.allclose(output.float(), torch.tensor(0.01 * 16 * 4096), rtol=0.01)


def test_layers_of_one_vector_a_row_stay_steady_in_int8() -> None:
    """A row of a CPU's call has the same bytes whatever the number of rows, with int8 weights as with others."""
    torch.manual_seed(5)
    network = nn.ModuleDict({"linear_1": nn.Linear(320, 1280)}).bfloat16().requires_grad_(False)
    use_steady_layers(network, torch.bfloat16)
    layer = network["linear_1"]
    quantize_layer(layer, "int8")
    rows = torch.randn(5, 320).bfloat16()
    assert isinstance(layer, RowLinear)
    assert torch.equal(torch.cat([layer(row[None]) for row in rows]), layer(rows))


@pytest.mark.parametrize("dtype", ["float8", "fp8"])
def test_the_removed_dtype_float8_warns_and_loads_bfloat16(
    dtype: str, tiny_model: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    assert load_model(tiny_model("sd15"), dtype=dtype, device="meta").choice.dtype == "bfloat16"
    assert caplog.messages == [
        f"dtype is {dtype}, which was removed in 0.2; bfloat16 is used. Set bfloat16, or int8 where memory is short."
    ]


def test_int8_dynamic_is_refused_where_the_cpu_has_no_int8_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffserve.runtime.precision.cpu_int8_unit", lambda: None)
    with pytest.raises(
        ConfigError, match=r"int8_dynamic, and this CPU does not multiply int8 in hardware.*choose int8"
    ):
        choose_device("cpu", "int8_dynamic")


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_a_quantized_precision_says_what_is_in_it(dtype: str) -> None:
    choice = choose_device("meta", dtype)
    assert dtype in choice.reason
    assert choice.unet_scheme == dtype
