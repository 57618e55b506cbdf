"""Memory that torch holds on to although nobody uses it."""

from __future__ import annotations

import torch


def give_memory_back(device: torch.device) -> None:
    """Return cached blocks to the device, so that pieces become one again. Nothing to do on a CPU."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()


def without_frames(error: BaseException) -> None:
    """Let go of what the frames of ``error`` hold: the tensors for which there was no room any more."""
    error.__traceback__ = None
    error.__context__ = None
    error.__cause__ = None
