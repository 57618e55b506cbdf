"""Muon for networks with convolutions: momentum, orthogonalized by a few Newton-Schulz products.

Jordan et al., 2024 ("Muon: an optimizer for hidden layers"), with the update scaled to AdamW's size as in Liu et al.,
2025 (arXiv 2502.16982, eq. 4). ``torch.optim.Muon`` takes matrices only; here a convolution's kernel (out, in, kh, kw)
is the matrix (out, in * kh * kw). All other parameters use AdamW.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from diffserve.runtime.precision import cpu_bf16_unit

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5


def orthogonalise(matrix: Tensor) -> Tensor:
    """Return the nearest matrix (rows, columns) with singular values around one.

    Products are in bf16 where the device is fast at it.
    """
    a, b, c = NEWTON_SCHULZ
    x = matrix if matrix.device.type == "cpu" and cpu_bf16_unit() is None else matrix.bfloat16()
    wide: Tensor = x if x.shape[0] <= x.shape[1] else x.T
    wide = wide / (wide.norm() + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = wide @ wide.T
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return (wide if x.shape[0] <= x.shape[1] else wide.T).to(matrix.dtype)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum with orthogonal updates for every parameter of two or more dimensions."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Apply one update from the current gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                trace = state.setdefault("trace", torch.zeros_like(parameter))
                trace.lerp_(parameter.grad, 1 - group["momentum"])
                looking_ahead = parameter.grad.lerp(trace, group["momentum"])
                update = orthogonalise(looking_ahead.flatten(1))
                scale = 0.2 * max(update.shape) ** 0.5
                parameter.add_(update.view_as(parameter), alpha=-group["lr"] * scale)


def hidden_matrices(net: nn.Module) -> list[nn.Parameter]:
    """Return the parameters for Muon: every matrix or kernel except embeddings and the first and last layer."""
    outer = ("embedding", "conv_in", "conv_out", "layout_head")
    return [
        parameter
        for name, parameter in net.named_parameters()
        if parameter.requires_grad and parameter.ndim >= 2 and not any(word in name for word in outer)
    ]
