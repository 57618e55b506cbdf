"""Device and precision: one decision, taken once, with a reason that is said at start. And int8 weights, by torchao."""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

import torch
from torch import nn

from diffserve.config import OFFLOADS
from diffserve.errors import ConfigError
from diffserve.runtime.loading.library_imports import import_quietly

#: Canonical dtype name -> the torch dtype the networks compute in. int8 computes in whatever the device likes best.
TORCH_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPE_NAMES: Final = ("auto", *TORCH_DTYPES, "int8")
ALIASES: Final = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
RESTS: Final = {
    "auto": "weights for which it has no room rest in main memory or on disk",
    "cpu": "weights rest in main memory until a layer runs",
    "disk": "weights rest on disk until a layer runs",
}
CPU_BF16_FLAGS: Final = {"avx512_bf16": "AVX512-BF16", "amx_bf16": "AMX", "bf16": "Arm BF16"}


@dataclass(frozen=True)
class DeviceChoice:
    """Where and how precisely the networks run.

    dtype          canonical name: float32, bfloat16, float16 or int8
    compute_dtype  what activations are held in (for int8: the dtype that weights are expanded to)
    reason         one sentence for the log and for ``diffserve doctor``
    offload        where weights rest while their layer does not run: none (on the device), auto, cpu or disk

    Raises ConfigError for weights that are quantised at load and should rest elsewhere.
    """

    device: torch.device
    dtype: str
    compute_dtype: torch.dtype
    reason: str
    offload: str = "none"

    def __post_init__(self) -> None:
        if self.offload != "none" and self.dtype not in TORCH_DTYPES:
            raise ConfigError(
                f"offload is {self.offload!r} with dtype {self.dtype}, whose weights stay on the device; "
                f"set offload to none, or choose a dtype of {', '.join(TORCH_DTYPES)}.",
                param="offload",
            )

    @property
    def is_int8(self) -> bool:
        """Whether linear weights are held as int8."""
        return self.dtype == "int8"


def choose_device(device: str = "auto", dtype: str = "auto", offload: str = "none") -> DeviceChoice:
    """Resolve ``auto`` and check what was asked for. Raises ConfigError for an unknown name or an absent device."""
    if offload not in OFFLOADS:
        raise ConfigError(f"offload is {offload!r}; choose one of {', '.join(OFFLOADS)}.", param="offload")
    chosen, device_reason = _choose_device(device)
    name = ALIASES.get(dtype, dtype)
    if name not in DTYPE_NAMES:
        raise ConfigError(f"dtype is {dtype!r}; choose one of {', '.join(DTYPE_NAMES)}.")
    best, best_reason = _best_dtype(chosen)
    rests = f"; {RESTS[offload]}." if offload in RESTS else "."
    if name == "auto":
        return DeviceChoice(chosen, best, TORCH_DTYPES[best], f"{device_reason}; {best}, {best_reason}{rests}", offload)
    compute = TORCH_DTYPES[best if name == "int8" else name]
    detail = f" weights, {best} arithmetic, {best_reason}" if name == "int8" else ""
    return DeviceChoice(chosen, name, compute, f"{device_reason}; {name}{detail}, as asked{rests}", offload)


def _choose_device(device: str) -> tuple[torch.device, str]:
    if device != "auto":
        return _given_device(device), f"{device}, as asked"
    if torch.cuda.is_available():
        return torch.device("cuda", 0), f"cuda ({torch.cuda.get_device_name(0)}) was found"
    if torch.backends.mps.is_available():
        return torch.device("mps"), "mps was found"
    return torch.device("cpu"), "cpu, since no accelerator was found"


def _given_device(device: str) -> torch.device:
    if not re.fullmatch(r"cpu|mps|meta|cuda(:\d+)?", device):
        raise ConfigError(f"device is {device!r}; choose auto, cpu, mps, cuda or cuda:N.")
    kind, _, index = device.partition(":")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("device is 'mps', but torch finds no Apple GPU here; use cpu or auto.")
    if kind == "cuda":
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(index or 0) >= found:
            raise ConfigError(f"device is {device!r}, but torch finds {found} CUDA device(s) here; use cpu or auto.")
        return torch.device("cuda", int(index or 0))
    return torch.device(kind)


def _best_dtype(device: torch.device) -> tuple[str, str]:
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device)[0] < 7:
            return "float32", "since this GPU is slow in 16 bits"
        return "float16", "the precision that checkpoints are published in"
    if device.type == "mps":
        return "float16", "half the memory traffic of float32"
    kind = cpu_bf16_unit()
    if kind:
        return "bfloat16", f"since this CPU multiplies it in hardware ({kind})"
    return "float32", "since this CPU has no bfloat16 unit"


@lru_cache(maxsize=4)
def hardware_name(device: torch.device) -> str:
    """What rounding and costs on ``device`` depend on, as far as it has a name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    named = f"{device.type} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return f"{named} {platform.processor()}"
    found = re.findall(r"^(?:model name|cpu family|model|CPU part)\s*:(.*)$", text, re.MULTILINE)
    return " ".join([named, *dict.fromkeys(part.strip() for part in found)])


@lru_cache(maxsize=1)
def cpu_bf16_unit(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """Name of the CPU's bfloat16 matrix unit, or ``None``. Linux is asked, elsewhere torch."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
        return "AVX512-BF16" if supported is not None and supported() else None
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    flags = set(found.group(1).split()) if found else set()
    return next((name for flag, name in CPU_BF16_FLAGS.items() if flag in flags), None)


def quantise_linear(layer: nn.Module) -> None:
    """Replace ``layer.weight`` (out, in) by int8 values and a scale per output row; arithmetic stays in its float
    dtype.

    Raises ConfigError when torchao is not installed.
    """
    try:
        quantize = import_quietly("torchao.quantization", "quantize_")
        config = import_quietly("torchao.quantization", "Int8WeightOnlyConfig")
    except ImportError as error:
        raise ConfigError(
            "dtype is int8, which needs torchao: pip install torchao, or choose another dtype."
        ) from error
    quantize(layer, config(set_inductor_config=False))


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes that ``tensor`` really holds; for a quantised weight the sum of its parts."""
    names = getattr(tensor, "tensor_data_names", None)
    if names is None:
        return tensor.numel() * tensor.element_size()
    parts = [getattr(tensor, name) for name in names]
    return sum(tensor_bytes(part) for part in parts)
