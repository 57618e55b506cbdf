"""LoRA for single rows: layers of a network that add a product of their own for each row of a call.

The base layer computes as it always does, in whatever precision its weight has; then a row x of it gets

    y + (x @ down) @ up        down (in, rank), up (rank, out), scaled by alpha / rank and the row's own weight

(Hu et al., 2021, arXiv 2106.09685; rows of different adapters in one product: Chen et al., "Punica: Multi-Tenant LoRA
Serving", MLSys 2024.) The factors of a call's rows are stacked, padded with zeros to one rank, so it is two batched
products, or a convolution of as many groups as rows and one product. Outside of :func:`adapting` nothing is there of
it: a call without adapters is the network's own.

Several adapters of a row are one, their factors side by side: the work is that of the sum of their ranks, in no more
products than for one, and a row's bytes are decided by its own set. They depend on the rank that is padded to, so that
is one of few (``RANKS``), and rows of different ones do not share calls.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

KEYS_VALUES: Final = (".attn2.to_k", ".attn2.to_v")
"""Layers of a UNet that are applied to texts and not to pictures."""

RANKS: Final = (16, 64, 256)
"""Ranks that factors are padded to: at most four times the work, and three kinds of calls."""

KEPT_BYTES: Final = 1 << 28
"""Of stacked factors that are kept from call to call; beyond them layers are stacked anew each time."""


class Factors(NamedTuple):
    """A layer's change for one row, or stacked for R rows, in the dtype that the layer computes in.

    down  (rank, in, kh, kw) for a convolution, (in, rank) for a linear layer
    up    (out, rank) for a convolution, (rank, out) for a linear layer
    """

    down: Tensor
    up: Tensor


@dataclass(frozen=True, eq=False)
class LoRASet:
    """What one row is changed by, one adapter or several: a change of some layers, all of one ``rank``.

    text_digest  of what changes the keys and values of texts, empty where nothing does
    """

    rank: int
    layers: Mapping[nn.Module, Factors]
    text_digest: bytes = b""

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return sum(tensor.nbytes for factors in self.layers.values() for tensor in factors)


class RowLoRAs:
    """The sets of the rows of a call, one for each, of one rank; ``stacked`` layer by layer where they are wanted."""

    def __init__(self, sets: Sequence[LoRASet]) -> None:
        self.sets = sets
        self.layers = tuple(dict.fromkeys(layer for one in sets for layer in one.layers))
        self._kept: dict[nn.Module, Factors] = {}
        self._nothing: dict[tuple[int, ...], Factors] = {}
        self.num_bytes = 0

    @classmethod
    def of_factors(cls, factors: Mapping[nn.Module, Factors]) -> RowLoRAs:
        """Those whose stacked ``factors`` are at hand."""
        made = cls(())
        made.layers = tuple(factors)
        made._kept = dict(factors)
        return made

    def of_all(self, layers: Iterable[nn.Module]) -> tuple[Factors, ...]:
        """The factors of all rows for each of ``layers``; where nobody changes any of one shape, zeros that they
        share."""
        changed = frozenset(self.layers)
        return tuple(self.stacked(layer) if layer in changed else self._zeros(layer) for layer in layers)

    def stacked(self, layer: nn.Module) -> Factors:
        """The factors of all rows for ``layer``; zeros for a row that does not change it."""
        if layer in self._kept:
            return self._kept[layer]
        first = next(one.layers[layer] for one in self.sets if layer in one.layers)
        nothing = Factors(*map(torch.zeros_like, first))
        found = Factors(*map(torch.stack, zip(*(one.layers.get(layer, nothing) for one in self.sets), strict=True)))
        num_bytes = sum(tensor.nbytes for tensor in found)
        if self.num_bytes + num_bytes <= KEPT_BYTES:
            self._kept[layer] = found
            self.num_bytes += num_bytes
        return found

    def _zeros(self, layer: nn.Module) -> Factors:
        shape = shape_of(layer)
        if shape not in self._nothing:
            like = next(iter(self.sets[0].layers.values())).down
            none = joined(layer, [(torch.zeros(0, *shape[1:]), torch.zeros(shape[0], 0))], self.sets[0].rank, like)
            self._nothing[shape] = Factors(*(tensor.new_zeros((len(self.sets), *tensor.shape)) for tensor in none))
            self.num_bytes += sum(tensor.nbytes for tensor in self._nothing[shape])
        return self._nothing[shape]

    def add(self, layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """``output`` (R, ...) of ``layer``, and what the rows' own factors make of its input (R, ...): in the place of
        the output, which nobody else has, where it lies in order."""
        down, up = (factor.to(output.device) for factor in self.stacked(layer))  # a layer may be on another device
        if isinstance(layer, nn.Conv2d):
            hidden = _convolved(layer, args[0], down)  # (R, rank, h * w)
            there = output.contiguous().flatten(2)
            return there.baddbmm_(up, hidden).view(output.shape)
        tokens = args[0].reshape(len(down), -1, layer.in_features)  # (R, T, in)
        there = output.contiguous().view(len(down), -1, output.shape[-1])
        return there.baddbmm_(torch.bmm(tokens, down), up).view(output.shape)


@contextmanager
def adapting(rows: RowLoRAs | None) -> Iterator[None]:
    """While it lasts, calls of the layers have these rows; ``None``: nothing is changed."""
    handles = [layer.register_forward_hook(rows.add) for layer in rows.layers] if rows is not None else []
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def adaptable(network: nn.Module) -> dict[str, nn.Module]:
    """The layers that may be changed, by name: linear ones and convolutions without groups, quantised or not."""
    return {
        name: layer
        for name, layer in network.named_modules()
        if isinstance(layer, nn.Linear) or (isinstance(layer, nn.Conv2d) and layer.groups == 1)
    }


def of_pictures(network: nn.Module, *, has_keys_values: bool) -> tuple[nn.Module, ...]:
    """Those of a UNet that run in its calls, in order; where these are told no keys and values, those of texts, too."""
    layers = adaptable(network).items()
    return tuple(layer for name, layer in layers if not (has_keys_values and name.endswith(KEYS_VALUES)))


def shape_of(layer: nn.Module) -> tuple[int, ...]:
    """Of the weight of one of them, however it is stored."""
    if isinstance(layer, nn.Conv2d):
        return (layer.out_channels, layer.in_channels, *layer.kernel_size)
    assert isinstance(layer, nn.Linear)
    return layer.out_features, layer.in_features


def joined(layer: nn.Module, changes: Sequence[tuple[Tensor, Tensor]], rank: int, like: torch.Tensor) -> Factors:
    """``changes`` of ``layer``, each down (r, in, ...) and up (out, r) in float32, side by side, padded with zeros to
    ``rank``, with dtype and device of ``like``."""
    downs, ups = zip(*changes, strict=True)
    shape = shape_of(layer)
    down = torch.cat([one.reshape(len(one), *shape[1:]) for one in downs])
    up = torch.cat(ups, dim=1)
    missing = rank - len(down)
    down = torch.cat([down, down.new_zeros((missing, *shape[1:]))])
    up = F.pad(up, (0, missing))
    if not isinstance(layer, nn.Conv2d):
        down, up = down.t(), up.t()
    return Factors(*(tensor.to(like.device, like.dtype).contiguous() for tensor in (down, up)))


def padded_rank(rank: int) -> int | None:
    """The least of ``RANKS`` that holds ``rank``; ``None`` where that is too much."""
    return next((known for known in RANKS if rank <= known), None)


def factor_bytes(shapes: Iterable[tuple[int, ...]], rank: int, itemsize: int) -> int:
    """What the factors of one row take that changes layers of all these ``shapes``, as stacked for a call."""
    return rank * itemsize * sum(shape[0] + math.prod(shape[1:]) for shape in shapes)


def random_set(layers: Iterable[nn.Module], rank: int, like: torch.Tensor) -> LoRASet:
    """A change of all ``layers`` in random numbers, the same every time: to find out how calls round, and what they
    cost."""
    rng = torch.Generator(like.device).manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, device=like.device) / 16

    made = {
        layer: joined(layer, [(randn(rank, *shape_of(layer)[1:]), randn(shape_of(layer)[0], rank))], rank, like)
        for layer in layers
    }
    return LoRASet(rank, made)


def _convolved(layer: nn.Conv2d, images: Tensor, down: Tensor) -> Tensor:
    """(R, rank, h * w) of ``images`` (R, in, h, w), each by its own kernel of ``down`` (R, rank, in, kh, kw)."""
    num_rows, channels = images.shape[:2]
    if layer.kernel_size == (1, 1) and layer.stride == (1, 1) and layer.padding == (0, 0):
        return torch.bmm(down.flatten(2), images.flatten(2))
    side_by_side = images.reshape(1, num_rows * channels, *images.shape[2:])
    found = F.conv2d(
        side_by_side, down.flatten(0, 1), None, layer.stride, layer.padding, layer.dilation, groups=num_rows
    )
    return found.view(num_rows, down.shape[1], -1)
