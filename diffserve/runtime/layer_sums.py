"""What a row's bytes are in the middle of a network: sums over every layer's output, to be compared between calls.

In 16 bits two kernels that sum in another order give the same numbers nearly always, for the sum is rounded after it;
once in a hundred thousand numbers it falls on the other side. A small network's output may miss that for hundreds of
calls, while among the outputs of all its layers it shows at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

PERIOD = 8191
"""Weights repeat after so many numbers: neighbours that change places, or by opposite amounts, change the sum."""


def with_layer_sums(network: nn.Module, run: Callable[[], Tensor]) -> Tensor:
    """(R, N) int64: the bits of what ``run`` gives, (R, ...), and after them a sum of the bits of each layer's output,
    weighted by place. ``run`` calls ``network`` once. 16 bits.
    """
    sums: list[Tensor] = []

    def add(_module: nn.Module, _arguments: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.element_size() == 2:
            sums.append(_sum(output))

    leaves = [module for module in network.modules() if next(module.children(), None) is None]
    hooks = [leaf.register_forward_hook(add) for leaf in leaves]
    try:
        output = run()
    finally:
        for hook in hooks:
            hook.remove()
    bits = output.contiguous().view(torch.int32 if output.element_size() == 4 else torch.int16).flatten(1)
    return torch.cat([bits.to(torch.int64), *(made for made in sums if len(made) == len(bits))], dim=1)


def bit_sums(outputs: Sequence[Tensor]) -> Tensor:
    """(R, len(outputs)) int64: of each, (R, ...), a sum of its bits weighted by place."""
    return torch.cat([_sum(output) for output in outputs], dim=1)


def _sum(output: Tensor) -> Tensor:
    kind = torch.int32 if output.element_size() == 4 else torch.int16
    bits = output.contiguous().view(kind).flatten(1).to(torch.int32)
    weights = torch.arange(bits.shape[1], dtype=torch.int32, device=bits.device) % PERIOD + 1
    return (bits * weights).sum(1, keepdim=True, dtype=torch.int64).cpu()
