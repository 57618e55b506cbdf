"""Device and precision of the networks: chosen once at start, with the reason in one sentence.

Which layers a quantized precision is for is in ``runtime.quantization``.
"""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import nn

from diffserve.api.errors import ConfigError
from diffserve.runtime.accelerators import (
    ACCELERATORS,
    STREAM_DEVICES,
    compute_capability,
    device_count,
    device_module,
    has_streams,
)
from diffserve.settings.config import DTYPE_ALIASES, DTYPES, OFFLOADS, replace_removed_dtype

INT8, INT8_DYNAMIC, INT8_STATIC = "int8", "int8_dynamic", "int8_static"
#: Canonical dtype name -> compute dtype of the networks. Quantized networks use the device's best one outside of int8.
TORCH_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
#: Canonical name of a quantized precision -> description.
QUANTIZED: Final = {
    INT8: "int8 weights, {best} arithmetic",
    INT8_DYNAMIC: "int8_dynamic: linear layers of the UNet in int8, {best} elsewhere",
    INT8_STATIC: "int8_static: linear layers and convolutions of the UNet in int8, {best} elsewhere",
}
RESTS: Final = {
    "auto": "weights that do not fit on the device are in main memory or on disk",
    "cpu": "weights are in main memory until a layer runs",
    "disk": "weights are on disk until a layer runs",
}
CPU_BF16_FLAGS: Final = {"avx512_bf16": "AVX512-BF16", "amx_bf16": "AMX", "bf16": "Arm BF16"}
CPU_INT8_FLAGS: Final = {"avx512_vnni": "AVX512-VNNI", "avx_vnni": "AVX-VNNI", "amx_int8": "AMX", "i8mm": "Arm I8MM"}


Rooms = tuple[tuple[str, int], ...]
"""Devices, and bytes that weights may take of each."""


class Spread(NamedTuple):
    """Devices of the parts of a model over several devices; a part with one device is complete there."""

    text: Rooms
    unet: Rooms
    vae: Rooms


@dataclass(frozen=True)
class DeviceChoice:
    """Device and precision of the networks.

    Attributes:
        device: Device of latents and pages, and of all parts without a ``spread``.
        dtype: Canonical name: float32, bfloat16, float16, or one of ``QUANTIZED``.
        compute_dtype: Dtype of activations (for int8: the dtype that weights are expanded to).
        reason: One sentence for the log and for ``diffserve doctor``.
        offload: Where weights are stored while their layer does not run: none (on the device), auto, cpu or disk.
        vae_dtype: Configured dtype of the VAE, if any.
        hollow: Parts that another process runs, of "text", "unet" and "vae": they have shapes and no values.
        spread: Devices of the parts of a model over several devices.
        rooms: For one part of such a model (see ``of``): bytes that it may take of each device.

    Raises:
        ConfigError: Quantization is combined with offloading or with several devices.
    """

    device: torch.device
    dtype: str
    compute_dtype: torch.dtype
    reason: str
    offload: str = "none"
    vae_dtype: torch.dtype | None = None
    hollow: frozenset[str] = frozenset()
    spread: Spread | None = None
    rooms: Rooms = ()

    def __post_init__(self) -> None:
        if self.spread is not None and self.dtype not in TORCH_DTYPES:
            raise ConfigError(
                f"a device_map is set with dtype {self.dtype}, whose layers stay on one device; set it to none, or "
                f"choose a dtype of {', '.join(TORCH_DTYPES)}.",
                param="device_map",
            )
        if self.offload != "none" and self.dtype not in TORCH_DTYPES:
            raise ConfigError(
                f"offload is {self.offload!r} with dtype {self.dtype}, whose weights stay on the device; "
                f"set offload to none, or choose a dtype of {', '.join(TORCH_DTYPES)}.",
                param="offload",
            )

    def of(self, part: str) -> DeviceChoice:
        """Return the choice for ``part``.

        A part that another process runs is on the meta device. In a spread model a part has its ``rooms``; the VAE,
        whose inputs and outputs are moved by its runner, has its device instead.
        """
        if part in self.hollow:
            return replace(self, device=torch.device("meta"), offload="none", spread=None)
        if self.spread is None:
            return self
        rooms: Rooms = getattr(self.spread, part)
        if part == "vae":
            return replace(self, device=torch.device(rooms[0][0]), spread=None)
        return replace(self, rooms=rooms, spread=None)

    @property
    def is_unet_whole(self) -> bool:
        """Whether the UNet's weights are on ``device``, and stay there."""
        elsewhere = self.spread is not None and any(torch.device(name) != self.device for name, _ in self.spread.unet)
        return self.offload == "none" and not elsewhere

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All devices with weights, ``device`` first."""
        rooms = () if self.spread is None else (*self.spread.unet, *self.spread.text, *self.spread.vae)
        return tuple(dict.fromkeys((self.device, *(torch.device(name) for name, _ in rooms))))

    @property
    def painting_devices(self) -> tuple[torch.device, ...]:
        """All devices that run steps or decode images, ``device`` first."""
        rooms = () if self.spread is None else (*self.spread.unet, *self.spread.vae)
        return tuple(dict.fromkeys((self.device, *(torch.device(name) for name, _ in rooms))))

    @property
    def unet_scheme(self) -> str | None:
        """Quantization of the UNet's layers, a name of ``QUANTIZED``; ``None``: none."""
        return self.dtype if self.dtype in QUANTIZED else None

    @property
    def text_scheme(self) -> str | None:
        """Quantization of text encoders: int8 weights only, because they run once per prompt."""
        return INT8 if self.dtype in QUANTIZED else None


def choose_device(
    device: str = "auto", dtype: str = "auto", offload: str = "none", best: tuple[str, str] | None = None
) -> DeviceChoice:
    """Resolve ``auto`` and check the settings. Raises ConfigError for an unknown name or an absent device.

    ``best``: the best float dtype and the reason, if known; by default the device's features decide.
    """
    if offload not in OFFLOADS:
        raise ConfigError(f"offload is {offload!r}; choose one of {', '.join(OFFLOADS)}.", param="offload")
    torch_device, device_reason = _choose_device(device)
    dtype = replace_removed_dtype(dtype)
    name = DTYPE_ALIASES.get(dtype, dtype)
    if name not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; choose one of {', '.join(DTYPES)}.")
    best_name, best_reason = best or _best_dtype(torch_device)
    rests = f"; {RESTS[offload]}." if offload in RESTS else "."
    compute_dtype = TORCH_DTYPES.get(name, TORCH_DTYPES[best_name])
    if name == "auto":
        name, description = best_name, f"{best_name}, {best_reason}"
    elif name in QUANTIZED:
        _refuse_absent_unit(torch_device, name)
        description = f"{QUANTIZED[name].format(best=best_name)}, {best_reason}, as configured"
    else:
        description = f"{name}, as configured"
    return DeviceChoice(torch_device, name, compute_dtype, f"{device_reason}; {description}{rests}", offload)


def _refuse_absent_unit(device: torch.device, name: str) -> None:
    """Raise ConfigError if ``device`` does not support the arithmetic of the quantized precision ``name``."""
    if name in (INT8_DYNAMIC, INT8_STATIC) and device.type == "cpu" and cpu_int8_unit() is None:
        raise ConfigError(
            f"dtype is {name}, and this CPU does not multiply int8 in hardware ({', '.join(CPU_INT8_FLAGS)}); "
            "choose int8, which only stores weights in int8, or auto.",
            param="dtype",
        )
    if name == INT8_DYNAMIC and device.type == "mps":
        raise ConfigError(f"dtype is {name}, and torch has no int8 product on mps; choose int8 or auto.", param="dtype")
    if name == INT8_STATIC and device.type not in ("cpu", "meta"):
        raise ConfigError(
            f"dtype is {name}, whose convolutions have a kernel on CPUs only, not on {device}; choose int8_dynamic, "
            "int8 or auto.",
            param="dtype",
        )


def _choose_device(device: str) -> tuple[torch.device, str]:
    if device != "auto":
        return _given_device(device), f"{device}, as configured"
    for kind in ACCELERATORS:
        if device_count(kind):
            accelerator = torch.device(kind, 0) if kind in STREAM_DEVICES else torch.device(kind)
            name = f" ({device_module(accelerator).get_device_name(0)})" if kind in STREAM_DEVICES else ""
            return accelerator, f"{kind}{name} was found"
    return torch.device("cpu"), "cpu, since no accelerator was found"


def _given_device(device: str) -> torch.device:
    if not re.fullmatch(r"cpu|mps|meta|(cuda|xpu)(:\d+)?", device):
        raise ConfigError(f"device is {device!r}; choose auto, cpu, mps, cuda, cuda:N, xpu or xpu:N.")
    kind, _, index = device.partition(":")
    if kind == "mps" and not device_count(kind):
        raise ConfigError("device is 'mps', but torch finds no Apple GPU here; use cpu or auto.")
    if kind in STREAM_DEVICES:
        count = device_count(kind)
        if int(index or 0) >= count:
            raise ConfigError(
                f"device is {device!r}, but torch finds {count} {kind.upper()} device(s) here; use cpu or auto."
            )
        return torch.device(kind, int(index or 0))
    return torch.device(kind)


def _best_dtype(device: torch.device) -> tuple[str, str]:
    capability = compute_capability(device)
    if capability is not None and capability < (7, 0):
        return "float32", "since this GPU is slow in 16 bits"
    if device.type in STREAM_DEVICES:
        return "float16", "the precision that checkpoints are published in"
    if device.type == "mps":
        return "float16", "half the memory traffic of float32"
    kind = cpu_bf16_unit()
    if kind:
        return "bfloat16", f"since this CPU multiplies it in hardware ({kind})"
    return "float32", "since this CPU has no bfloat16 unit"


@lru_cache(maxsize=4)
def hardware_name(device: torch.device) -> str:
    """Return a name of the hardware of ``device``, on which rounding and costs depend."""
    if has_streams(device):
        return str(device_module(device).get_device_name(device))
    name = f"{device.type} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return f"{name} {platform.processor()}"
    parts = re.findall(r"^(?:model name|cpu family|model|CPU part)\s*:(.*)$", text, re.MULTILINE)
    return " ".join([name, *dict.fromkeys(part.strip() for part in parts)])


@lru_cache(maxsize=1)
def cpu_bf16_unit(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """Return the name of the CPU's bfloat16 unit, or ``None``. Without /proc/cpuinfo torch's detection is used."""
    flags = _cpu_flags(cpuinfo)
    if flags is None:
        supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
        return "AVX512-BF16" if supported is not None and supported() else None
    return next((name for flag, name in CPU_BF16_FLAGS.items() if flag in flags), None)


@lru_cache(maxsize=1)
def cpu_int8_unit(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """Return the name of the CPU's exact int8 dot product unit, or ``None``.

    Without /proc/cpuinfo torch's detection is used.
    """
    flags = _cpu_flags(cpuinfo)
    if flags is None:
        supported = getattr(torch.cpu, "_is_vnni_supported", None)
        return "VNNI" if supported is not None and supported() else None
    return next((name for flag, name in CPU_INT8_FLAGS.items() if flag in flags), None)


def _cpu_flags(cpuinfo: Path) -> set[str] | None:
    """Return the CPU's flags from Linux; ``None`` on other systems."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return set(match.group(1).split()) if match else set()


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of ``tensor``; for a quantized weight the sum of its parts."""
    names = getattr(tensor, "tensor_data_names", None)
    if names is None:
        return tensor.numel() * tensor.element_size()
    parts = [getattr(tensor, name, None) for name in (*names, *getattr(tensor, "optional_tensor_data_names", ()))]
    return sum(tensor_bytes(part) for part in parts if part is not None)


def weights_bytes(network: nn.Module) -> int:
    """Return the bytes of the weights of ``network``, including scales of quantized ones."""
    scales = (buffer for name, buffer in network.named_buffers() if name.endswith("weight_scales"))
    return sum(map(tensor_bytes, (*network.parameters(), *scales)))
