"""One model over several devices: which part of it goes where, and what passes between.

What is asked for has the words of diffusers and accelerate. "balanced": the UNet on the first device, text encoders
and VAE where there is most room beside it. "auto": all of it on the first device where that has room, else the same.
Only a UNet that no device has room for is split, by accelerate's ``infer_auto_device_map``, between its blocks. Hooks
of accelerate bring what goes into a module on another device there, and what comes out of it back: between modules all
is on the first device, whoever calls them.
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
"""Of the memory that is free before a network is loaded; the rest is for activations, the page pool and other parts."""
SLACK: Final = 1.1
"""Of an even share of a network that is split: what one device cannot have, for blocks are whole."""
WHOLE: Final = ("BasicTransformerBlock", "ResnetBlock2D")
"""Modules of a UNet that are not split."""


def devices_of(choice: DeviceChoice) -> tuple[torch.device, ...]:
    """Return the chosen device and all others of its type."""
    return (choice.device, *(device for device in _same_type(choice.device) if device != choice.device))


def free_over(device: torch.device, device_map: str) -> int | None:
    """Bytes that are free on ``device``, or, with a ``device_map``, on all that a model may have; ``None`` where nobody
    says.
    """
    if device_map == "none" or not has_streams(device):
        return free_bytes(device)
    return sum(free_bytes(each) or 0 for each in _same_type(device))


def _same_type(device: torch.device) -> list[torch.device]:
    """Return all devices of the type of ``device``, where torch numbers them."""
    if not has_streams(device):
        return []
    return [torch.device(device.type, index) for index in range(device_count(device.type))]


def with_spread(choice: DeviceChoice, report: Iterable[tuple[str, int, int]], device_map: str) -> DeviceChoice:
    """``choice`` for a model of which a dry run has this memory ``report`` (component, numbers and bytes), over all
    devices as they have room now.

    Raises ConfigError where there is one device, or the model has a refiner, InsufficientMemory where all together have
    too little room.
    """
    if device_map == "none":
        return choice
    report = list(report)
    if any(component.startswith("refiner") for component, _, _ in report):
        raise ConfigError(
            f"device_map is {device_map!r} and there is a refiner, which has to be on one device with its base; "
            "leave out one of them.",
            param="device_map",
        )
    devices = devices_of(choice)
    if len(devices) < 2 and device_map == "auto":  # it spreads where it has to; that nothing fits is said elsewhere
        return choice
    if len(devices) < 2:
        raise ConfigError(
            f"device_map is {device_map!r}, and torch finds one device here, {choice.device}; it spreads a model over "
            "several GPUs. Set it to none; for less memory there is offload.",
            param="device_map",
        )
    rooms = {str(one): int(WEIGHTS_SHARE * (free_bytes(one) or 0)) for one in devices}
    spread = spread_over(part_bytes(report), rooms, device_map)
    return replace(choice, spread=spread, reason=f"{choice.reason.removesuffix('.')}; {said_of(spread)}.")


def part_bytes(report: Iterable[tuple[str, int, int]]) -> dict[str, int]:
    """What text encoders, UNet and VAE of a model take, and whatever else is with it, which stays beside the UNet."""
    parts = dict.fromkeys(("text", "unet", "vae", "else"), 0)
    for component, _, weights_bytes in report:
        name = "text" if component.startswith("text_encoder") else component
        parts[name if name in parts else "else"] += weights_bytes
    return parts


def spread_over(sizes: Mapping[str, int], rooms: Mapping[str, int], device_map: str) -> Spread:
    """Where the parts go, by what they take and by what weights may take of each device, the first of which is that of
    latents and pages. InsufficientMemory where it is too little.
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
    """What a network of ``size`` bytes may take of each device: "balanced" equal shares, as far as there is room, and
    of the last one whatever is left then; else as much as there is.
    """
    if device_map != "balanced":
        return tuple(left.items())
    level = size / len(left)
    for _ in left:  # what one has no room for the others take
        short = [room for room in left.values() if room < level]
        level = (size - sum(short)) / max(1, len(left) - len(short))
    *first, (last, rest) = left.items()
    return *((name, min(room, int(SLACK * level))) for name, room in first), (last, rest)


def _too_little(sizes: Mapping[str, int], rooms: Mapping[str, int]) -> InsufficientMemory:
    takes = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in sizes.items() if size)
    has = ", ".join(f"{room / 2**30:.2f} on {name}" for name, room in rooms.items())
    return InsufficientMemory(
        f"the weights take more GiB ({takes}) than there are for them ({has}); choose a dtype of fewer bits or a "
        "smaller model, or set device_map to none and offload to auto."
    )


def said_of(spread: Spread) -> str:
    """One clause."""
    return ", ".join(f"{part} on {' and '.join(name for name, _ in rooms)}" for part, rooms in spread._asdict().items())


def spread_map(network: nn.Module, choice: DeviceChoice) -> dict[str, torch.device]:
    """Module names of ``network`` -> devices, for a part's ``choice``. InsufficientMemory where it cannot be cut so."""
    names = [name for name, _ in choice.rooms]
    if len(names) == 1 and torch.device(names[0]) == choice.device:
        return {"": choice.device}
    if len(names) == 1:  # each layer by itself: who runs a text encoder over pages calls its layers, and not it
        own = {name: part for name, part in network.named_modules() if any(True for _ in part.parameters(False))}
        return dict.fromkeys(own, torch.device(names[0]))
    infer = import_quietly("accelerate", "infer_auto_device_map")
    most = {index: num_bytes for index, (_, num_bytes) in enumerate(choice.rooms)}
    most[0] += _largest(network) * choice.compute_dtype.itemsize  # which it keeps free there, for weights that rest
    with hushed("accelerate.utils.modeling"):  # it says of every device whether it is there
        found = infer(network, max_memory=most, no_split_module_classes=list(WHOLE), dtype=choice.compute_dtype)
    if "disk" in found.values():
        has = ", ".join(f"{num_bytes / 2**30:.2f} on {name}" for name, num_bytes in choice.rooms)
        said = f"the UNet cannot be cut so that its blocks find room (GiB: {has}); choose a dtype of fewer bits"
        raise InsufficientMemory(f"{said}, or set device_map to none and offload to auto.")
    return {name: torch.device(names[place]) for name, place in found.items()}


def _largest(network: nn.Module) -> int:
    """Numbers in the largest piece of ``network`` that is not split."""
    sizes = (
        sum(one.numel() for one in part.parameters(recurse=type(part).__name__ in WHOLE)) for part in network.modules()
    )
    return max(sizes)


def straddle(network: nn.Module, device_map: Mapping[str, torch.device], main: torch.device) -> None:
    """Have every module of ``network`` that ``device_map`` puts elsewhere run there, for callers on ``main``."""
    hook, add = (import_quietly("accelerate.hooks", name) for name in ("AlignDevicesHook", "add_hook_to_module"))
    for name, device in device_map.items():
        for part in _called(network.get_submodule(name)) if device != main else ():
            own: Any = hook(execution_device=device, io_same_device=True, place_submodules=True)
            add(part, own)


def _called(part: nn.Module) -> Iterator[nn.Module]:
    """``part``, or what it lists where it is a list, which nobody calls."""
    if isinstance(part, nn.ModuleList):
        for one in part:
            yield from _called(one)
    else:
        yield part


Place = torch.device | int | str
"""A device, or "disk"."""

logger = logging.getLogger(__name__)


class RestingWeights(UserDict[str, Any]):
    """Parameters by name, each made by the reader that was given for it whenever it is asked for."""

    def __getitem__(self, name: str) -> torch.Tensor:
        made: torch.Tensor = self.data[name]()
        return made


def max_memory(choice: DeviceChoice) -> dict[int | str, int]:
    """Bytes that weights may take of the device and of main memory, as accelerate and transformers want them told."""
    device = choice.device
    device_key = (device.index or 0) if has_streams(device) else device.type
    free = import_quietly("accelerate.utils", "get_max_memory")()
    return {place: int(WEIGHTS_SHARE * num_bytes) for place, num_bytes in free.items() if place in (device_key, "cpu")}


def make_device_map(network: nn.Module, choice: DeviceChoice) -> dict[str, Place]:
    """Module names -> where their weights rest, "" for all that no other says; ``network`` may be empty."""
    if choice.rooms:
        return {**spread_map(network, choice)}
    if choice.offload in ("cpu", "disk"):
        return {"": choice.offload}
    if choice.offload == "none":
        return {"": choice.device}
    infer = import_quietly("accelerate", "infer_auto_device_map")
    found: dict[str, Place] = infer(network, max_memory=max_memory(choice), dtype=choice.compute_dtype)
    return found


def place_of(name: str, device_map: Mapping[str, Place]) -> Place:
    """Where the parameter ``name`` rests: what the map says of the innermost module that it names."""
    while name and name not in device_map:
        name = name.rpartition(".")[0]
    return device_map[name]


def dispatch(
    network: nn.Module, device_map: Mapping[str, Place], readers: Mapping[str, Callable[[], torch.Tensor]], device: str
) -> None:
    """Put accelerate's hooks on ``network``, which from then on runs on ``device``, wherever its weights rest.

    ``readers`` give the parameters that do not rest there.
    """
    if readers:
        keep_heap_small()
    with hushed("accelerate.big_modeling"):  # it says of every parameter's absence that it was meant
        import_quietly("accelerate", "dispatch_model")(
            network,
            device_map=dict(device_map),
            main_device=device,
            state_dict=RestingWeights(readers),
            offload_index={},
            force_hooks=True,
        )
    logger.info("%s: %d of its tensors rest until they are used", type(network).__name__, len(readers))


def from_pretrained_places(choice: DeviceChoice) -> dict[str, Any]:
    """What transformers' ``from_pretrained`` is told; the weights that it is not told of it leaves in main memory."""
    if choice.offload == "auto":
        return {"device_map": "auto", "max_memory": max_memory(choice)}
    return {"device_map": {"": "disk"}} if choice.offload == "disk" else {}


def run_on(network: nn.Module, choice: DeviceChoice) -> None:
    """Have ``network``, loaded so, run on the device: transformers takes the CPU for one whose weights all rest."""
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
