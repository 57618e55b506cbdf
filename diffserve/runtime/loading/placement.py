"""Placement of weights: a model over several devices, and weights offloaded to RAM or disk.

The names are those of diffusers and accelerate. "balanced": the UNet on the first device, text encoders and VAE where
most memory is free. "auto": all on the first device if it fits, else as "balanced". A UNet that fits on no device is
split between blocks by accelerate, whose hooks move inputs and outputs; between modules all is on the first device.
"""

from __future__ import annotations

import logging
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn

from diffserve.api.errors import ConfigError, InsufficientMemory
from diffserve.runtime.accelerators import device_count, has_streams
from diffserve.runtime.loading.library_imports import hushed, import_quietly
from diffserve.runtime.memory import free_bytes, keep_heap_small
from diffserve.runtime.precision import DeviceChoice, Rooms, Spread

WEIGHTS_SHARE: Final = 0.7
"""Share of the free memory for weights; the remainder is for activations, the page pool and other parts."""
SLACK: Final = 1.1
"""Factor on an even share of a split network: blocks are not divided, so shares are not exactly even."""
UNSPLIT_MODULES: Final = ("BasicTransformerBlock", "ResnetBlock2D")
"""Modules of a UNet that are not split."""


def devices_of(choice: DeviceChoice) -> tuple[torch.device, ...]:
    """Return the chosen device and all others of its type."""
    return (choice.device, *(device for device in _same_type(choice.device) if device != choice.device))


def free_over(device: torch.device, device_map: str) -> int | None:
    """Return the free bytes on ``device``, or with a ``device_map`` on all devices of its type; ``None`` if unknown."""
    if device_map == "none" or not has_streams(device):
        return free_bytes(device)
    return sum(free_bytes(each) or 0 for each in _same_type(device))


def _same_type(device: torch.device) -> list[torch.device]:
    """Return all devices of the type of ``device``, where torch numbers them."""
    if not has_streams(device):
        return []
    return [torch.device(device.type, index) for index in range(device_count(device.type))]


def with_spread(choice: DeviceChoice, report: Iterable[tuple[str, int, int]], device_map: str) -> DeviceChoice:
    """Return ``choice`` with the parts of a model spread over all devices by their current free memory.

    Args:
        choice: Device and precision.
        report: Component, number of parameters and bytes, from a dry run.
        device_map: none, auto or balanced.

    Raises:
        ConfigError: There is only one device, or the model has a refiner.
        InsufficientMemory: The devices together do not have enough memory.
    """
    if device_map == "none":
        return choice
    report = list(report)
    if any(component.startswith("refiner") for component, _, _ in report):
        raise ConfigError(
            f"device_map is {device_map!r} and there is a refiner, which must be on the same device as its base; "
            "leave out one of them.",
            param="device_map",
        )
    devices = devices_of(choice)
    if len(devices) < 2 and device_map == "auto":  # a model that does not fit is reported elsewhere
        return choice
    if len(devices) < 2:
        raise ConfigError(
            f"device_map is {device_map!r}, but torch finds only one device, {choice.device}; it spreads a model over "
            "several GPUs. Set it to none, and set offload to use less memory.",
            param="device_map",
        )
    rooms = {str(device): int(WEIGHTS_SHARE * (free_bytes(device) or 0)) for device in devices}
    spread = spread_over(part_bytes(report), rooms, device_map)
    return replace(choice, spread=spread, reason=f"{choice.reason.removesuffix('.')}; {describe_spread(spread)}.")


def part_bytes(report: Iterable[tuple[str, int, int]]) -> dict[str, int]:
    """Return the bytes of text encoders, UNet and VAE of a model, and of all else, which stays on the UNet's device."""
    parts = dict.fromkeys(("text", "unet", "vae", "else"), 0)
    for component, _, weights_bytes in report:
        name = "text" if component.startswith("text_encoder") else component
        parts[name if name in parts else "else"] += weights_bytes
    return parts


def spread_over(sizes: Mapping[str, int], rooms: Mapping[str, int], device_map: str) -> Spread:
    """Return the placement of the parts, given their sizes and the free bytes for weights by device.

    The first device is that of latents and pages. Raises InsufficientMemory if the parts do not fit.
    """
    main = next(iter(rooms))
    left = dict(rooms)
    left[main] = max(0, left[main] - sizes.get("else", 0))
    if device_map == "auto" and sizes["text"] + sizes["unet"] + sizes["vae"] <= left[main]:
        return Spread(*(((main, sizes[part]),) for part in ("text", "unet", "vae")))
    placed: dict[str, Rooms] = {}
    if sizes["unet"] <= left[main]:
        placed["unet"] = ((main, sizes["unet"]),)
        left[main] -= sizes["unet"]
    for part in ("text", "vae"):
        device = max(left, key=lambda name: (left[name], name != main))
        if sizes[part] > left[device]:
            raise _too_little(sizes, rooms)
        placed[part] = ((device, sizes[part]),)
        left[device] -= sizes[part]
    if "unet" not in placed:
        if sizes["unet"] > sum(left.values()):
            raise _too_little(sizes, rooms)
        placed["unet"] = _shares(sizes["unet"], left, device_map)
    return Spread(**placed)


def _shares(size: int, left: Mapping[str, int], device_map: str) -> Rooms:
    """Return the bytes that a network of ``size`` bytes may take of each device.

    "balanced": equal shares, limited by the free memory, and all of the last device. Otherwise all free memory.
    """
    if device_map != "balanced":
        return tuple(left.items())
    level = size / len(left)
    for _ in left:  # the others take what one device cannot hold
        short = [room for room in left.values() if room < level]
        level = (size - sum(short)) / max(1, len(left) - len(short))
    *first, (last, last_bytes) = left.items()
    return *((name, min(room, int(SLACK * level))) for name, room in first), (last, last_bytes)


def _too_little(sizes: Mapping[str, int], rooms: Mapping[str, int]) -> InsufficientMemory:
    takes = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in sizes.items() if size)
    has = ", ".join(f"{room / 2**30:.2f} on {name}" for name, room in rooms.items())
    return InsufficientMemory(
        f"the weights need more memory (GiB: {takes}) than there is ({has}); choose a dtype of fewer bits or a "
        "smaller model, or set device_map to none and offload to auto."
    )


def describe_spread(spread: Spread) -> str:
    """Describe ``spread`` in a clause."""
    return ", ".join(f"{part} on {' and '.join(name for name, _ in rooms)}" for part, rooms in spread._asdict().items())


def spread_map(network: nn.Module, choice: DeviceChoice) -> dict[str, torch.device]:
    """Return the device of each module of ``network``. Raises InsufficientMemory if the network cannot be split."""
    names = [name for name, _ in choice.rooms]
    if len(names) == 1 and torch.device(names[0]) == choice.device:
        return {"": choice.device}
    if len(names) == 1:  # each layer by itself: a text encoder over pages is run layer by layer
        layers = {name: part for name, part in network.named_modules() if any(True for _ in part.parameters(False))}
        return dict.fromkeys(layers, torch.device(names[0]))
    infer = import_quietly("accelerate", "infer_auto_device_map")
    limits = {index: num_bytes for index, (_, num_bytes) in enumerate(choice.rooms)}
    limits[0] += _largest(network) * choice.compute_dtype.itemsize  # accelerate reserves this for offloaded weights
    with hushed("accelerate.utils.modeling"):  # it logs every device
        device_map = infer(
            network, max_memory=limits, no_split_module_classes=list(UNSPLIT_MODULES), dtype=choice.compute_dtype
        )
    if "disk" in device_map.values():
        has = ", ".join(f"{num_bytes / 2**30:.2f} on {name}" for name, num_bytes in choice.rooms)
        problem = f"the UNet cannot be divided so that its blocks fit (GiB: {has}); choose a dtype of fewer bits"
        raise InsufficientMemory(f"{problem}, or set device_map to none and offload to auto.")
    return {name: torch.device(names[place]) for name, place in device_map.items()}


def _largest(network: nn.Module) -> int:
    """Return the number of parameters in the largest unsplit piece of ``network``."""
    sizes = (
        sum(parameter.numel() for parameter in part.parameters(recurse=type(part).__name__ in UNSPLIT_MODULES))
        for part in network.modules()
    )
    return max(sizes)


def add_device_hooks(network: nn.Module, device_map: Mapping[str, torch.device], main: torch.device) -> None:
    """Run every module of ``network`` on the device that ``device_map`` names, for callers on ``main``."""
    hook, add = (import_quietly("accelerate.hooks", name) for name in ("AlignDevicesHook", "add_hook_to_module"))
    for name, device in device_map.items():
        for part in _called(network.get_submodule(name)) if device != main else ():
            align: Any = hook(execution_device=device, io_same_device=True, place_submodules=True)
            add(part, align)


def _called(part: nn.Module) -> Iterator[nn.Module]:
    """Yield ``part``, or the elements of a list, which has no forward of its own."""
    if isinstance(part, nn.ModuleList):
        for element in part:
            yield from _called(element)
    else:
        yield part


Place = torch.device | int | str
"""A device, or "disk"."""

logger = logging.getLogger(__name__)


class OffloadedWeights(UserDict[str, Any]):
    """Parameters by name, each read again on every access."""

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self.data[name]()
        return tensor


def max_memory(choice: DeviceChoice) -> dict[int | str, int]:
    """Return the bytes that weights may take of the device and of RAM, with accelerate's keys."""
    device = choice.device
    device_key = (device.index or 0) if has_streams(device) else device.type
    free = import_quietly("accelerate.utils", "get_max_memory")()
    return {place: int(WEIGHTS_SHARE * num_bytes) for place, num_bytes in free.items() if place in (device_key, "cpu")}


def make_device_map(network: nn.Module, choice: DeviceChoice) -> dict[str, Place]:
    """Return where the weights of each module are stored, "" for all other modules; ``network`` may be empty."""
    if choice.rooms:
        return {**spread_map(network, choice)}
    if choice.offload in ("cpu", "disk"):
        return {"": choice.offload}
    if choice.offload == "none":
        return {"": choice.device}
    infer = import_quietly("accelerate", "infer_auto_device_map")
    device_map: dict[str, Place] = infer(network, max_memory=max_memory(choice), dtype=choice.compute_dtype)
    return device_map


def place_of(name: str, device_map: Mapping[str, Place]) -> Place:
    """Return where the parameter ``name`` is stored: the entry of its innermost module in the map."""
    while name and name not in device_map:
        name = name.rpartition(".")[0]
    return device_map[name]


def dispatch(
    network: nn.Module, device_map: Mapping[str, Place], readers: Mapping[str, Callable[[], torch.Tensor]], device: str
) -> None:
    """Install accelerate's hooks on ``network``, so that it runs on ``device`` with offloaded weights.

    ``readers`` return the parameters that are offloaded.
    """
    if readers:
        keep_heap_small()
    with hushed("accelerate.big_modeling"):  # it logs that missing parameters are intended
        import_quietly("accelerate", "dispatch_model")(
            network,
            device_map=dict(device_map),
            main_device=device,
            state_dict=OffloadedWeights(readers),
            offload_index={},
            force_hooks=True,
        )
    logger.info("%s: %d of its tensors are offloaded", type(network).__name__, len(readers))


def from_pretrained_places(choice: DeviceChoice) -> dict[str, Any]:
    """Return transformers' ``from_pretrained`` arguments for the placement; without any, weights stay in RAM."""
    if choice.offload == "auto":
        return {"device_map": "auto", "max_memory": max_memory(choice)}
    return {"device_map": {"": "disk"}} if choice.offload == "disk" else {}


def run_on(network: nn.Module, choice: DeviceChoice) -> None:
    """Run the loaded ``network`` on the device: transformers chooses the CPU if all weights are offloaded."""
    if choice.offload == "cpu":
        import_quietly("accelerate", "cpu_offload")(network, execution_device=choice.device)
    if choice.offload != "disk":
        return
    for part in network.modules():
        hook: Any = getattr(part, "_hf_hook", None)
        if hook is not None:
            hook.execution_device = choice.device
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = buffer.to(choice.device)
