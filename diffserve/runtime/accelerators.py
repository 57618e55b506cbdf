"""What a device offers beyond tensors: streams, events, free memory, float64, and NVIDIA's compute capability.

CUDA and XPU have the same calls in their torch modules, so code for both goes through ``device_module``. ROCm builds of
torch call their devices ``cuda``.
"""

from __future__ import annotations

from typing import Any, Final

import torch

ACCELERATORS: Final = ("cuda", "xpu", "mps")
"""Device types that ``auto`` may choose."""

STREAM_DEVICES: Final = ("cuda", "xpu")
"""Device types with several streams, events that are timed, and figures of free memory."""


def has_streams(device: torch.device) -> bool:
    """Return whether work on ``device`` can be queued in a second stream and awaited by events."""
    return device.type in STREAM_DEVICES


def device_module(device: torch.device) -> Any:
    """Return torch's module for ``device``, such as ``torch.cuda``; only for an accelerator."""
    return torch.get_device_module(device)


def synchronize(device: torch.device) -> None:
    """Wait for all work that was queued on ``device``. Do nothing on a CPU, where none is queued."""
    if device.type in ACCELERATORS:
        torch.accelerator.synchronize(device)


def device_count(device_type: str) -> int:
    """Return the number of devices of ``device_type`` that torch finds here."""
    module = torch.get_device_module(device_type)
    return int(module.device_count()) if module.is_available() else 0


def has_float64(device: torch.device) -> bool:
    """Return whether ``device`` computes in float64: Apple's GPUs and some of Intel's do not."""
    if device.type == "xpu":
        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return device.type != "mps"


def float64_device(device: torch.device) -> torch.device:
    """Return ``device`` where it computes in float64, else the CPU."""
    return device if has_float64(device) else torch.device("cpu")


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of an NVIDIA GPU; ``None`` for any other device.

    ROCm answers the same call with the version of its instruction set, which says nothing about NVIDIA's features.
    """
    if device.type != "cuda" or torch.version.hip:
        return None
    return torch.cuda.get_device_capability(device)
