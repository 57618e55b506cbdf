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
#: Canonical dtype name -> the torch dtype the networks compute in. What is quantized computes in whatever the device
#: likes best, where it does not multiply in 8 bits.
TORCH_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
#: Canonical name of a precision with fewer bits -> what is said of it.
QUANTIZED: Final = {
    INT8: "int8 weights, {best} arithmetic",
    INT8_DYNAMIC: "int8_dynamic: linear layers of the UNet in int8, {best} elsewhere",
    INT8_STATIC: "int8_static: linear layers and convolutions of the UNet in int8, {best} elsewhere",
}
DTYPE_NAMES: Final = DTYPES
RESTS: Final = {
    "auto": "weights for which it has no room rest in main memory or on disk",
    "cpu": "weights rest in main memory until a layer runs",
    "disk": "weights rest on disk until a layer runs",
}
CPU_BF16_FLAGS: Final = {"avx512_bf16": "AVX512-BF16", "amx_bf16": "AMX", "bf16": "Arm BF16"}
CPU_INT8_FLAGS: Final = {"avx512_vnni": "AVX512-VNNI", "avx_vnni": "AVX-VNNI", "amx_int8": "AMX", "i8mm": "Arm I8MM"}


Rooms = tuple[tuple[str, int], ...]
"""Devices, and bytes that weights may take of each."""


class Spread(NamedTuple):
    """Where the parts of a model go that has several devices; one that has one of them is whole there."""

    text: Rooms
    unet: Rooms
    vae: Rooms


@dataclass(frozen=True)
class DeviceChoice:
    """Where and how precisely the networks run.

    dtype          canonical name: float32, bfloat16, float16, or one of ``QUANTIZED``
    compute_dtype  what activations are held in (for int8: the dtype that weights are expanded to)
    reason         one sentence for the log and for ``diffserve doctor``
    offload        where weights rest while their layer does not run: none (on the device), auto, cpu or disk
    vae_dtype      what the VAE computes in, where that was asked for
    hollow         parts that another process runs, of "text", "unet" and "vae": here they have shapes and no numbers
    spread         where the parts go of a model that has several devices; ``device`` is that of latents and pages
    rooms          of one such part (see ``of``): what it may take of which device

    Raises ConfigError for weights that are quantized at load and should rest elsewhere.
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
        """For ``part``: the same, or on the meta device where another process runs it; of a model that is spread with
        the part's ``rooms``, and for its VAE, which is handed latents and hands out pictures, with its own device.
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
        """All on which weights are, ``device`` first."""
        rooms = () if self.spread is None else (*self.spread.unet, *self.spread.text, *self.spread.vae)
        return tuple(dict.fromkeys((self.device, *(torch.device(name) for name, _ in rooms))))

    @property
    def painting_devices(self) -> tuple[torch.device, ...]:
        """Those on which steps or pictures are computed, ``device`` first."""
        rooms = () if self.spread is None else (*self.spread.unet, *self.spread.vae)
        return tuple(dict.fromkeys((self.device, *(torch.device(name) for name, _ in rooms))))

    @property
    def unet_scheme(self) -> str | None:
        """What layers of the UNet are to hold, a name of ``QUANTIZED``; ``None``: ``compute_dtype``."""
        return self.dtype if self.dtype in QUANTIZED else None

    @property
    def text_scheme(self) -> str | None:
        """The same of text encoders, which run once a prompt."""
        return INT8 if self.dtype in QUANTIZED else None


def choose_device(
    device: str = "auto", dtype: str = "auto", offload: str = "none", best: tuple[str, str] | None = None
) -> DeviceChoice:
    """Resolve ``auto`` and check what was asked for. Raises ConfigError for an unknown name or an absent device.

    ``best``: the float dtype that is the best here and why, where that is known; otherwise the device's flags say.
    """
    if offload not in OFFLOADS:
        raise ConfigError(f"offload is {offload!r}; choose one of {', '.join(OFFLOADS)}.", param="offload")
    chosen, device_reason = _choose_device(device)
    dtype = replace_removed_dtype(dtype)
    name = DTYPE_ALIASES.get(dtype, dtype)
    if name not in DTYPE_NAMES:
        raise ConfigError(f"dtype is {dtype!r}; choose one of {', '.join(DTYPE_NAMES)}.")
    best_name, best_reason = best or _best_dtype(chosen)
    rests = f"; {RESTS[offload]}." if offload in RESTS else "."
    if name == "auto":
        said = f"{best_name}, {best_reason}{rests}"
        return DeviceChoice(chosen, best_name, TORCH_DTYPES[best_name], f"{device_reason}; {said}", offload)
    if name not in QUANTIZED:
        return DeviceChoice(chosen, name, TORCH_DTYPES[name], f"{device_reason}; {name}, as asked{rests}", offload)
    _refuse_absent_unit(chosen, name)
    said = f"{QUANTIZED[name].format(best=best_name)}, {best_reason}, as asked{rests}"
    return DeviceChoice(chosen, name, TORCH_DTYPES[best_name], f"{device_reason}; {said}", offload)


def _refuse_absent_unit(device: torch.device, name: str) -> None:
    """Raise ConfigError where ``device`` cannot multiply as the quantized precision ``name`` asks."""
    if name in (INT8_DYNAMIC, INT8_STATIC) and device.type == "cpu" and cpu_int8_unit() is None:
        raise ConfigError(
            f"dtype is {name}, and this CPU does not multiply int8 in hardware ({', '.join(CPU_INT8_FLAGS)}); "
            "choose int8, which only holds it, or auto.",
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
        return _given_device(device), f"{device}, as asked"
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
    """Return what names the hardware of ``device``: rounding and costs depend on it."""
    if has_streams(device):
        return str(device_module(device).get_device_name(device))
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
    flags = _cpu_flags(cpuinfo)
    if flags is None:
        supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
        return "AVX512-BF16" if supported is not None and supported() else None
    return next((name for flag, name in CPU_BF16_FLAGS.items() if flag in flags), None)


@lru_cache(maxsize=1)
def cpu_int8_unit(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """Name of the unit with which the CPU sums products of int8 exactly, or ``None``. Linux is asked, elsewhere
    torch.
    """
    flags = _cpu_flags(cpuinfo)
    if flags is None:
        supported = getattr(torch.cpu, "_is_vnni_supported", None)
        return "VNNI" if supported is not None and supported() else None
    return next((name for flag, name in CPU_INT8_FLAGS.items() if flag in flags), None)


def _cpu_flags(cpuinfo: Path) -> set[str] | None:
    """What Linux says the CPU can; ``None`` where there is no Linux to ask."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return set(found.group(1).split()) if found else set()


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes that ``tensor`` really holds; for a quantized weight the sum of its parts."""
    names = getattr(tensor, "tensor_data_names", None)
    if names is None:
        return tensor.numel() * tensor.element_size()
    parts = [getattr(tensor, name, None) for name in (*names, *getattr(tensor, "optional_tensor_data_names", ()))]
    return sum(tensor_bytes(part) for part in parts if part is not None)


def weights_bytes(network: nn.Module) -> int:
    """Bytes of the weights of ``network``, scales of quantized ones included."""
    scales = (buffer for name, buffer in network.named_buffers() if name.endswith("weight_scales"))
    return sum(map(tensor_bytes, (*network.parameters(), *scales)))
