"""Models larger than the device: weights rest in main memory or in their files, and come when their layer runs.

accelerate does it: a device map says which module rests where, and hooks bring its weights before each forward and let
go of them after it. What rests on disk is read from the checkpoint itself, nothing is written.
"""

from __future__ import annotations

import logging
from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from diffserve.runtime.accelerators import has_streams
from diffserve.runtime.loading.library_imports import hushed, import_quietly
from diffserve.runtime.loading.spread import WEIGHTS_SHARE, spread_map
from diffserve.runtime.memory import keep_heap_small
from diffserve.runtime.precision import DeviceChoice

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
