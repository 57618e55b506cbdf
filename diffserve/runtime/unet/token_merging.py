"""Token merging: self-attention at the UNet's highest resolution, on fewer tokens.

Neighbouring positions of a picture are much alike, and self-attention takes work in the square of their number. So one
token of every 2 x 2 stays; of the others those that are most like one of these are merged into it before the layer, by
their mean, and get what it gets after it. (Bolya and Hoffman, "Token Merging for Fast Stable Diffusion", CVPRW 2023;
theirs draws the token of every 2 x 2, here it is always the first, so that equal rows give equal bytes.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

CELL: Final = 2


class MergingProcessor:
    """In place of ``plain``, diffusers' own processor of a self-attention layer over height x width positions: merges
    ``share`` of them, as far as there are so many beside those that stay."""

    def __init__(self, plain: Any, height: int, width: int, share: float) -> None:
        self.plain = plain
        self.size = height, width
        self.num_merged = min(int(share * height * width), height * width - -(-height // CELL) * -(-width // CELL))

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
    ) -> Tensor:
        """(R, N, C) from ``hidden_states`` (R, N, C), positions row by row."""
        stays = staying(*self.size, hidden_states.device)
        order = stays.argsort(stable=True)  # (N,) those that may be merged first
        num_free = len(order) - -(-self.size[0] // CELL) * -(-self.size[1] // CELL)
        free, fixed = hidden_states.index_select(1, order).tensor_split([num_free], dim=1)
        likeness = F.normalize(free, dim=-1) @ F.normalize(fixed, dim=-1).transpose(1, 2)  # (R, free, fixed)
        most, nearest = likeness.max(dim=-1)
        ranked = most.argsort(dim=-1, descending=True, stable=True)  # (R, free) those that are merged first
        into = nearest.gather(1, ranked[:, : self.num_merged])  # (R, merged) places among ``fixed``
        merged, kept = rows_at(free, ranked).tensor_split([self.num_merged], dim=1)
        # a product and no scatter: sums in one order, on every device
        pulls = (into[..., None] == torch.arange(fixed.shape[1], device=into.device)).to(fixed.dtype)
        sums = fixed + pulls.transpose(1, 2) @ merged
        counts = 1 + pulls.sum(dim=1, dtype=torch.float32)[..., None]
        means = (sums / counts).to(fixed.dtype)
        attended = self.plain(attn, torch.cat([kept, means], dim=1), encoder_hidden_states, attention_mask, temb)
        of_kept, of_fixed = attended.tensor_split([kept.shape[1]], dim=1)
        of_free = torch.cat([rows_at(of_fixed, into), of_kept], dim=1)
        placed = rows_at(of_free, ranked.argsort(dim=-1))
        output: Tensor = torch.cat([placed, of_fixed], dim=1).index_select(1, order.argsort())
        return output


def staying(height: int, width: int, device: torch.device) -> Tensor:
    """bool (height * width,): the first of every 2 x 2."""
    rows, columns = (torch.arange(count, device=device) % CELL == 0 for count in (height, width))
    return (rows[:, None] & columns[None, :]).flatten()


def rows_at(tokens: Tensor, places: Tensor) -> Tensor:
    """(R, n, C) of ``tokens`` (R, N, C) at each row's own ``places`` (R, n)."""
    return tokens.gather(1, places[..., None].expand(-1, -1, tokens.shape[-1]))


@contextmanager
def merging(network: Any, height: int, width: int, share: float) -> Iterator[None]:
    """Calls of ``network``, a ``UNet2DConditionModel``, on latents of ``height`` x ``width`` merge ``share`` of the
    tokens in the self-attention of its highest resolution that has any; of 0 they are as ever."""
    if share == 0.0:
        yield
        return
    layers, level = highest_layers(network)
    for _ in range(level):
        height, width = -(-height // 2), -(-width // 2)
    plain = [layer.processor for layer in layers]
    try:
        for layer in layers:
            layer.processor = MergingProcessor(layer.processor, height, width, share)
        yield
    finally:
        for layer, processor in zip(layers, plain, strict=True):
            layer.processor = processor


def highest_layers(network: Any) -> tuple[list[Any], int]:
    """The self-attention layers of the highest resolution that has any, and how often the latents' is halved to it."""
    pairs = zip(network.down_blocks, reversed(network.up_blocks), strict=True)
    for level, blocks in enumerate(pairs):
        modules = chain.from_iterable(block.named_modules() for block in blocks)
        layers = [module for name, module in modules if name.endswith("attn1")]
        if layers:
            return layers, level
    raise ValueError("this UNet has no self-attention whose tokens could be merged")
