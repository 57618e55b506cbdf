"""Device and dtype: what is chosen, why, and what each precision costs in exactness and memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from diffserve.api.errors import ConfigError
from diffserve.disk_cache import DiskCache
from diffserve.models.model_files import read_json
from diffserve.runtime import DiffusionModel, auto_precision, choose_device, choose_for, load_model
from diffserve.runtime.loading.checkpoint import Checkpoint
from diffserve.runtime.loading.components import build_unet, load_component
from diffserve.runtime.loading.weight_loading import vae_precision
from diffserve.runtime.precision import cpu_bf16_unit, tensor_bytes
from diffserve.settings.config import DTYPES
from tests.hardware import needs_int8
from tests.runtime.conftest import LoadTiny

#: dtype -> largest relative error (in the norm) of a tiny random UNet's output against float32
UNET_TOLERANCE = {
    "float32": 0.0,
    "bfloat16": 0.15,
    "float16": 0.15,
    "int8": 0.2,
    "int8_dynamic": 0.2,
    "int8_static": 0.3,
}
INT8_SHARE = 0.45 if cpu_bf16_unit() else 0.62
"""Of a tiny SDXL's bytes in float32 at most: what is not in int8 is in what this CPU computes in."""


def test_a_device_and_dtype_that_are_given_are_taken() -> None:
    choice = choose_device("cpu", "float32")
    assert (choice.device, choice.dtype, choice.compute_dtype) == (torch.device("cpu"), "float32", torch.float32)
    assert choice.reason == "cpu, as configured; float32, as configured."


@pytest.mark.parametrize(("short", "name"), [("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")])
def test_short_names_of_dtypes_mean_the_long_ones(short: str, name: str) -> None:
    assert choose_device("cpu", short).dtype == name


def test_auto_says_what_it_chose_and_why_in_one_sentence() -> None:
    choice = choose_device()
    assert choice.dtype in DTYPES
    assert str(choice.device.type) in choice.reason
    assert choice.dtype in choice.reason
    assert choice.reason.count(".") == 1


def test_int8_computes_in_the_best_dtype_of_the_device() -> None:
    choice = choose_device("cpu", "int8")
    assert (choice.unet_scheme, choice.text_scheme) == ("int8", "int8")
    assert choice.compute_dtype == choose_device("cpu", "auto").compute_dtype
    assert "int8 weights" in choice.reason


@pytest.mark.parametrize(
    ("flags", "unit"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16 sse", "AVX512-BF16"),
        ("flags\t\t: fpu amx_bf16 amx_tile", "AMX"),
        ("Features\t: fp asimd bf16", "Arm BF16"),
        ("flags\t\t: fpu avx2 avx512f", None),
        ("", None),
    ],
)
def test_a_cpus_bfloat16_unit_is_read_from_its_flags(tmp_path: Path, flags: str, unit: str | None) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor : 0\n{flags}\n")
    assert cpu_bf16_unit(cpuinfo) == unit


def test_a_cpu_without_a_bfloat16_unit_computes_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffserve.runtime.precision.cpu_bf16_unit", lambda: None)
    choice = choose_device("cpu", "auto")
    assert (choice.dtype, choice.compute_dtype) == ("float32", torch.float32)
    assert "no bfloat16 unit" in choice.reason


@pytest.mark.parametrize(
    ("ratio", "room_bytes", "auto"),
    [(1.5, 1 << 40, "float32"), (1.1, 1 << 40, "bfloat16"), (0.4, None, "bfloat16"), (1.5, 1 << 20, "bfloat16")],
)
def test_auto_of_a_model_is_the_arithmetic_that_is_clearly_faster_where_its_weights_find_room(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[[str], Path], ratio: float, room_bytes: int, auto: str
) -> None:
    monkeypatch.setattr("diffserve.runtime.precision.cpu_bf16_unit", lambda: "AVX512-BF16")
    monkeypatch.setattr(auto_precision, "bfloat16_over_float32", lambda: ratio)
    monkeypatch.setattr(auto_precision, "free_bytes", lambda device: room_bytes)
    path = tiny_model("sd15")
    choice = load_model(path, device="cpu").choice
    assert (choice.dtype, choice.compute_dtype) == (auto, getattr(torch, auto))
    assert ("takes 1.5 times as long in bfloat16" in choice.reason) == (auto == "float32")
    assert {choose_for(path, "cpu", name).compute_dtype for name in ("bf16", "int8")} == {torch.bfloat16}


def test_the_next_start_chooses_alike(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    monkeypatch.setattr("diffserve.runtime.precision.cpu_bf16_unit", lambda: "AVX512-BF16")
    for ratio, expected in ((1.3, "float32"), (1.1, "float32")):  # the second is not asked for
        monkeypatch.setattr(auto_precision, "bfloat16_over_float32", lambda ratio=ratio: ratio)
        assert choose_for(tiny_model("sd15"), "cpu", cache=DiskCache(tmp_path)).dtype == expected
    assert choose_for(tiny_model("sd15"), "cpu").dtype == "bfloat16"


def test_both_kinds_of_arithmetic_are_tried_on_one_thread_and_the_others_come_back() -> None:
    num_threads = torch.get_num_threads()
    assert 0.01 < auto_precision.bfloat16_over_float32.__wrapped__() < 100
    assert torch.get_num_threads() == num_threads


def test_what_a_model_holds_on_disk_is_counted_with_its_base(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    stored = auto_precision.stored_bytes(tiny_model("sd15"))
    assert stored == sum(file.stat().st_size for file in tiny_model("sd15").rglob("*.safetensors")) > 0
    assert auto_precision.stored_bytes("embedded-turbo") > auto_precision.stored_bytes("embedded") > 20_000_000
    assert auto_precision.stored_bytes(tmp_path / "none.safetensors") == 0


@pytest.mark.parametrize("dtype", ["int4", "float64", "", "Float32"])
def test_an_unknown_dtype_lists_the_known_ones(dtype: str) -> None:
    with pytest.raises(ConfigError, match=f"dtype is '{dtype}'; choose one of auto, float32, bfloat16, float16, int8"):
        choose_device("cpu", dtype)


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "tpu", ""])
def test_an_unknown_device_lists_the_known_ones(device: str) -> None:
    with pytest.raises(ConfigError, match=f"device is '{device}'; choose auto, cpu, mps, cuda"):
        choose_device(device)


def test_a_device_that_is_absent_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"device is 'cuda:99', but torch finds \d+ CUDA device"):
        choose_device("cuda:99")


def predict(model: DiffusionModel) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    sample, contexts = torch.randn(2, 4, 8, 8, generator=generator), torch.randn(2, 77, 64, generator=generator)
    return model.unet.predict(sample, torch.tensor([40, 900]), contexts)


@pytest.mark.parametrize(
    "dtype", [pytest.param(name, marks=needs_int8 if name[:5] == "int8_" else ()) for name in UNET_TOLERANCE]
)
def test_every_dtype_comes_near_float32(tiny_model: Callable[[str], Path], tiny: LoadTiny, dtype: str) -> None:
    model = load_model(tiny_model("sd15"), dtype=dtype, device="cpu")
    exact, actual = predict(tiny("sd15")), predict(model)
    assert actual.dtype == torch.float32
    assert float((actual - exact).norm() / exact.norm()) <= UNET_TOLERANCE[dtype]
    assert model.info.dtype == dtype
    assert model.vae.decode(torch.zeros(1, 4, 8, 8)).shape == (1, 64, 64, 3)


def test_int8_adds_little_to_the_error_of_its_arithmetic(tiny_model: Callable[[str], Path]) -> None:
    arithmetic = choose_device("cpu", "auto").dtype
    plain, quantized = (
        predict(load_model(tiny_model("sd15"), dtype=name, device="cpu")) for name in (arithmetic, "int8")
    )
    assert float((quantized - plain).norm() / plain.norm()) < 0.1


def test_int8_holds_a_byte_for_each_linear_weight(tiny_model: Callable[[str], Path], tiny: LoadTiny) -> None:
    model = load_model(tiny_model("sdxl"), dtype="int8", device="cpu")
    linears = [part for part in model.unet.network.modules() if isinstance(part, torch.nn.Linear)]
    for layer in linears:
        values, scales = layer.weight.numel(), layer.out_features
        assert tensor_bytes(layer.weight) == values
        assert layer.weight_scales.nbytes == 4 * scales
    assert model.info.weights_bytes < INT8_SHARE * tiny("sdxl").info.weights_bytes
    assert model.info.num_parameters == tiny("sdxl").info.num_parameters


def test_quantizing_while_loading_never_holds_more_than_the_model_and_one_tensor(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model("sdxl") / "unet"
    checkpoint = Checkpoint.open([path / "diffusion_pytorch_model.safetensors"])
    network = build_unet(read_json(path / "config.json"), "unet", choose_device("cpu", "int8"))
    allocations: list[int] = []
    read = Checkpoint.read

    def watched(self: Checkpoint, key: str) -> torch.Tensor:
        allocations.append(sum(tensor_bytes(part) for part in network.parameters() if not part.is_meta))
        return read(self, key)

    monkeypatch.setattr(Checkpoint, "read", watched)
    load_component(network, checkpoint, choose_device("cpu", "int8"), quantize="int8")
    final = sum(tensor_bytes(part) for part in network.parameters())
    in_float32 = sum(4 * part.numel() for part in network.parameters())
    assert max(allocations) <= final < INT8_SHARE * in_float32
    assert len(allocations) == len(checkpoint.entries)


def test_a_profile_says_what_the_vae_computes_in(tiny_model: Callable[[str], Path], tiny: LoadTiny) -> None:
    profile = msgspec.structs.replace(tiny("sdxl").profile, vae_dtype="bf16")
    model = load_model(tiny_model("sdxl"), dtype="float16", device="cpu", profile=profile)
    assert (model.vae.dtype, model.dtype) == (torch.bfloat16, torch.float16)
    half, full = choose_device("cpu", "float16"), choose_device("cpu", "bfloat16")
    for choice in (half, full):
        changed_choice = replace(choice, vae_dtype=torch.float32)
        assert vae_precision(changed_choice, {}, is_sdxl=False).compute_dtype == torch.float32


def test_only_sdxl_s_vae_is_kept_in_float32_by_a_float16_model() -> None:
    half, full = choose_device("cpu", "float16"), choose_device("cpu", "bfloat16")
    says, mended = {"force_upcast": True}, {"force_upcast": False}
    for config in (says, {}):
        assert vae_precision(half, config, is_sdxl=True).compute_dtype == torch.float32
        assert vae_precision(full, config, is_sdxl=True) is full
    assert vae_precision(half, mended, is_sdxl=True) is half
    for config in (says, mended, {}):  # diffusers writes true into every file, and never reads it here
        assert vae_precision(half, config, is_sdxl=False) is half


@pytest.mark.parametrize(("kind", "dtype"), [("sd15", torch.float16), ("sd2", torch.float16), ("sdxl", torch.float32)])
def test_vae_of_a_float16_model_has_the_dtype_that_diffusers_gives_it(
    tiny_model: Callable[[str], Path], kind: str, dtype: torch.dtype
) -> None:
    path = tiny_model(kind)
    assert json.loads((path / "vae/config.json").read_text())["force_upcast"] is True
    vae = load_model(path, dtype="float16", device="cpu").vae
    assert vae.dtype == dtype
    assert {parameter.dtype for parameter in vae.network.parameters()} == {dtype}
