"""Transfers between main memory and a device without waiting, by page-locked memory and a second stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diffserve.runtime.accelerators import device_module, has_streams


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy ``tensor`` from main memory to ``device``, without waiting where the device has streams."""
    if not has_streams(device):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def send_together(parts: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy ``parts`` in main memory, of one dtype, to ``device`` by one transfer; the results are contiguous."""
    if device.type == "cpu":
        return [part.contiguous() for part in parts]
    pieces = send(torch.cat([part.reshape(-1) for part in parts]), device).split([part.numel() for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


class SideQueue:
    """Context manager that queues work in a second stream of a CUDA or XPU device.

    The work starts after what the current stream holds on entry, and the current stream does not wait for it. Tensors
    that the work reads must be kept until it is done. On other devices nothing changes.
    """

    def __init__(self, device: torch.device) -> None:
        self._module: Any = device_module(device) if has_streams(device) else None
        self._stream: Any = self._module.Stream(device) if self._module else None
        self._entered: list[Any] = []

    def __enter__(self) -> None:
        if self._stream is not None:
            self._stream.wait_stream(self._module.current_stream(self._stream.device))
            self._entered.append(self._module.stream(self._stream))
            self._entered[-1].__enter__()

    def __exit__(self, *raised: Any) -> None:
        if self._entered:
            self._entered.pop().__exit__(*raised)


@dataclass(frozen=True, eq=False)
class Fetched:
    """A tensor on its way to main memory."""

    _host: Tensor
    _event: Any = None

    @property
    def is_here(self) -> bool:
        """Whether ``read`` returns without waiting."""
        return self._event is None or bool(self._event.query())

    def read(self) -> Tensor:
        """Return the tensor, waiting for it if needed."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


def fetch(tensor: Tensor) -> Fetched:
    """Copy ``tensor`` to main memory, without waiting if its device has streams; meta tensors give ones."""
    device = tensor.device
    if not has_streams(device) and device.type != "meta":
        return Fetched(tensor.cpu())
    host = torch.ones(tensor.shape, dtype=tensor.dtype, pin_memory=has_streams(device))
    host.copy_(tensor, non_blocking=True)
    if not has_streams(device):
        return Fetched(host)
    module = device_module(device)
    event = module.Event()
    event.record(module.current_stream(device))  # the tensor's device need not be the current one
    return Fetched(host, event)
