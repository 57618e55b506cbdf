"""Memory that libraries hold on to although nobody uses it."""

from __future__ import annotations

import ctypes

import torch


def give_memory_back(device: torch.device) -> None:
    """Return cached blocks to the device, so that pieces become one again. Nothing to do on a CPU."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()


def give_heap_back() -> None:
    """Return what lies free between used pieces of the heap to the system: glibc keeps it, and grows by what does not
    fit there. Milliseconds; nothing to do where there is no glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def without_frames(error: BaseException) -> None:
    """Let go of what the frames of ``error`` hold: the tensors for which there was no room any more."""
    error.__traceback__ = None
    error.__context__ = None
    error.__cause__ = None
