"""Memory that gathered keys and values are copied to, kept from call to call."""

from __future__ import annotations

import torch
from torch import Tensor


class Workspace:
    """Memory that gathered keys and values are copied to; it grows to the largest forward and is used by all layers."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def gather(self, name: str, source: Tensor, pages: Tensor) -> Tensor:
        """``source[pages]`` for source (num_pages, page_tokens, heads, head_dim), in a buffer of its own ``name``."""
        shape = (len(pages), *source.shape[1:])
        count = len(pages) * source[0].numel()
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < count or buffer.dtype != source.dtype:
            buffer = self._buffers[name] = torch.empty(count + count // 4, dtype=source.dtype, device=source.device)
        return torch.index_select(source, 0, pages, out=buffer[:count].view(shape))
