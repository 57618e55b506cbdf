"""Between main memory and the device without waiting: page-locked memory and copies that run beside the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` of main memory on ``device``; a CUDA device gets it when its queue comes to it."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def send_together(parts: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """``parts`` of main memory, of one dtype, on ``device`` and contiguous: by one transfer."""
    if device.type == "cpu":
        return [part.contiguous() for part in parts]
    pieces = send(torch.cat([part.reshape(-1) for part in parts]), device).split([part.numel() for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


class SideQueue:
    """Inside its block work is laid into a CUDA device's second queue, behind what the first holds by then; the first
    does not wait for it. What goes in must be kept until it is done. On other devices nothing changes."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._entered: list[Any] = []

    def __enter__(self) -> None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            self._entered.append(torch.cuda.stream(self._stream))
            self._entered[-1].__enter__()

    def __exit__(self, *raised: Any) -> None:
        if self._entered:
            self._entered.pop().__exit__(*raised)


@dataclass(frozen=True, eq=False)
class Fetched:
    """Numbers on their way to main memory."""

    _host: Tensor
    _event: Any = None

    @property
    def is_here(self) -> bool:
        """Whether reading them waits for nothing."""
        return self._event is None or bool(self._event.query())

    def read(self) -> Tensor:
        """They themselves, waited for where they are not here yet."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


def fetch(tensor: Tensor) -> Fetched:
    """``tensor`` to main memory: at once, and from a CUDA device when its queue comes to it; ones from meta."""
    if tensor.device.type not in ("cuda", "meta"):
        return Fetched(tensor.cpu())
    host = torch.ones(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    host.copy_(tensor, non_blocking=True)
    if not tensor.is_cuda:
        return Fetched(host)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))  # which need not be the one that is current
    return Fetched(host, event)
