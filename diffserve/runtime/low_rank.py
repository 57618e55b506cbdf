"""LoRA for single rows: hooks on layers that add low-rank products of each row's own factors.

A row x of a layer gets y + (x @ down) @ up: down (in, rank), up (rank, out), scaled (Hu et al. 2021, arXiv 2106.09685).
The rows' factors are stacked, padded to one of ``RANKS``, and applied by two batched products (Punica, MLSys 2024).
Several adapters of a row are concatenated; ``WholeChange`` has changes without low-rank form, applied row by row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diffserve.models.lora_layers import MAX_RANK, WHOLE

KEYS_VALUES: Final = (".attn2.to_k", ".attn2.to_v")
"""Layers of a UNet that process texts, not images."""

RANKS: Final = (16, 64, MAX_RANK)
"""Padded ranks: at most four times the work, and three kinds of calls. Rows of different ranks do not share calls."""

KEPT_BYTES: Final = 1 << 28
"""Limit of stacked factors that are kept from call to call; further layers are stacked in every call."""

ALIGNED: Final = 128
"""Alignment in numbers: 256 bytes in 16 bits, 512 in 32."""


class Factors(NamedTuple):
    """Change of a layer for one row, or stacked for R rows, in the layer's compute dtype.

    Attributes:
        down: (rank, in, kh, kw) for a convolution, or (kh * kw * rank, in) for one by cells; (in, rank) for a linear
            layer.
        up: (out, rank) for a convolution, (rank, out) for a linear layer.
    """

    down: Tensor
    up: Tensor


class WholeChange(NamedTuple):
    """Differences of a layer's weight and bias for one row, in the layer's compute dtype; ``None``: no difference.

    The output of linear layers, convolutions and norms is linear in both, so the output for the differences is added.
    """

    weight: Tensor | None
    bias: Tensor | None

    def apply(self, layer: nn.Module, input: Tensor) -> Tensor:
        """Return the addition to the output of ``layer`` for its ``input`` (N, ...), the rows of one set."""
        weight, bias = (None if tensor is None else tensor.to(input.device) for tensor in self)
        if weight is None:
            assert bias is not None
            has_channels = isinstance(layer, nn.Conv2d | nn.GroupNorm)
            return bias.view(-1, *[1] * (input.ndim - 2)) if has_channels else bias
        if isinstance(layer, nn.GroupNorm):
            return F.group_norm(input, layer.num_groups, weight, bias, layer.eps)
        if isinstance(layer, nn.LayerNorm):
            return F.layer_norm(input, layer.normalized_shape, weight, bias, layer.eps)
        if isinstance(layer, nn.Linear):
            return F.linear(input, weight, bias)
        assert isinstance(layer, nn.Conv2d)
        padding: Any = layer.padding
        return F.conv2d(input, weight, bias, layer.stride, padding, layer.dilation, layer.groups)


@dataclass(frozen=True, eq=False)
class LoRASet:
    """Changes of one row by one or several adapters.

    Attributes:
        rank: Rank of the factors of all layers; ``WHOLE`` for whole changes.
        layers: Factors by layer, for a set with a rank.
        text_digest: Digest of the changes of keys and values of texts; empty without any.
        whole_changes: Whole changes by layer, for a set without a rank.
    """

    rank: int
    layers: Mapping[nn.Module, Factors]
    text_digest: bytes = b""
    whole_changes: Mapping[nn.Module, WholeChange] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Size of all changes in bytes."""
        changes = (*self.layers.values(), *self.whole_changes.values())
        return sum(tensor.nbytes for change in changes for tensor in change if tensor is not None)


class RowLoRAs:
    """The sets of a call's rows, all of one rank, stacked layer by layer on demand.

    Attributes:
        memory: Flat buffer of at most ``KEPT_BYTES`` for the stacked factors of several rows. It is ``spare`` if that
            is large enough, else allocated for the first layer: new pages cost more than the copies.
    """

    def __init__(self, sets: Sequence[LoRASet], spare: Tensor | None = None) -> None:
        self.sets = sets
        self.rank = sets[0].rank if sets else 0
        self.layers = tuple(
            sorted({layer for lora_set in sets for layer in (*lora_set.layers, *lora_set.whole_changes)}, key=id)
        )  # however sets are ordered
        self.memory = spare
        self._taken: int | None = None
        self._kept: dict[nn.Module, Factors] = {}
        self._nothing: dict[tuple[int, ...], Factors] = {}

    @classmethod
    def of_factors(cls, factors: Mapping[nn.Module, Factors], rank: int = 0) -> RowLoRAs:
        """Make rows of the stacked ``factors`` of each layer; ``rank`` is needed for :meth:`of_all` only."""
        rows = cls(())
        rows.rank = rank
        rows.layers = tuple(factors)
        rows._kept = dict(factors)
        return rows

    @property
    def num_bytes(self) -> int:
        """Memory that the stacked factors take."""
        zeros = sum(tensor.nbytes for factors in self._nothing.values() for tensor in factors)
        return zeros + (0 if self.memory is None else self.memory.nbytes)

    @cached_property
    def _num_stacked(self) -> int:
        """Count of the stacked factors' values in all layers, with gaps for alignment."""
        changed = (next(rows.layers[layer] for rows in self.sets if layer in rows.layers) for layer in self.layers)
        return len(self.sets) * sum(_aligned(tensor.numel()) for factors in changed for tensor in factors)

    @property
    def is_kept(self) -> bool:
        """Whether the stacked factors of all layers are at most ``KEPT_BYTES``, so that all stay from call to call.

        Only such calls are recorded, for a recording holds the factors a second time. In 16 bits a row of rank 16 has
        4.6 MiB for the attention of SD 1.5 and 31 MiB for all its layers; of SDXL 30 and 80 MiB. So calls of up to 56
        or 8 rows of SD 1.5 are recorded, and of up to 8 or 3 rows of SDXL. Whole changes are never stacked.
        """
        if self.rank == WHOLE:
            return False
        like = next((factors.down for lora_set in self.sets for factors in lora_set.layers.values()), None)
        return like is None or self._num_stacked * like.itemsize <= KEPT_BYTES

    def of_all(self, layers: Iterable[nn.Module]) -> tuple[Factors, ...]:
        """Return the factors of all rows for each of ``layers``; unchanged layers of one shape share zeros."""
        changed = frozenset(self.layers)
        return tuple(self.stacked(layer) if layer in changed else self._zeros(layer) for layer in layers)

    def stacked(self, layer: nn.Module) -> Factors:
        """Return the factors of all rows for ``layer``; zeros for a row that does not change it."""
        if layer in self._kept:
            return self._kept[layer]
        row_factors = [lora_set.layers.get(layer) for lora_set in self.sets]
        nothing = None if all(row_factors) else Factors(*map(torch.zeros_like, next(filter(None, row_factors))))
        downs, ups = zip(*(factors or nothing for factors in row_factors), strict=True)
        memory = self._take(len(row_factors) * downs[0].numel()), self._take(len(row_factors) * ups[0].numel())
        stacked = Factors(*(_stack(*both) for both in zip((downs, ups), memory, strict=True)))
        if None not in memory or len(row_factors) == 1:
            self._kept[layer] = stacked
        return stacked

    def _take(self, size: int) -> Tensor | None:
        """Return ``size`` values of the memory, aligned; ``None`` if it is full."""
        if len(self.sets) == 1:
            return None
        if self._taken is None:
            self._taken = 0
            like = next(iter(self.sets[0].layers.values())).down
            needed = min(self._num_stacked, KEPT_BYTES // like.itemsize)
            if self.memory is None or self.memory.numel() < needed or self.memory.dtype != like.dtype:
                self.memory = like.new_empty(needed)
        assert self.memory is not None
        start, self._taken = self._taken, self._taken + _aligned(size)
        if start + size > len(self.memory):
            self._taken = start
            return None
        return self.memory[start : start + size]

    def _zeros(self, layer: nn.Module) -> Factors:
        stacked = next(iter(self._kept.values()), None)
        like = stacked.down if stacked else next(iter(self.sets[0].layers.values())).down
        num_rows = len(self.sets) or len(like)
        shape = shape_of(layer)
        key = (*shape, _is_by_cells(layer, like))
        if key not in self._nothing:
            empty = like.new_empty((0, *shape[1:])), like.new_empty((shape[0], 0))  # on the device: may be recorded
            none = joined(layer, [empty], self.rank, like)
            self._nothing[key] = Factors(*(tensor.new_zeros((num_rows, *tensor.shape)) for tensor in none))
        return self._nothing[key]

    def add(self, layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Return ``output`` (R, ...) of ``layer`` plus the products of the rows' factors with its input (R, ...).

        The output is changed in place if it is contiguous: as a hook's argument it has no other user.
        """
        if self.rank == WHOLE:
            return self._add_whole(layer, args[0], output)
        down, up = (factor.to(output.device) for factor in self.stacked(layer))  # a layer may be on another device
        if isinstance(layer, nn.Conv2d):
            by_cells = down.ndim == 3
            hidden = _summed(layer, args[0], down) if by_cells else _convolved(layer, args[0], down)
            there = output.contiguous().flatten(2)
            return there.baddbmm_(up, hidden).view(output.shape)
        num_rows = down.shape[0]
        tokens = args[0].reshape(num_rows, -1, layer.in_features)  # (R, T, in)
        there = output.contiguous().view(num_rows, -1, output.shape[-1])
        return there.baddbmm_(torch.bmm(tokens, down), up).view(output.shape)

    def _add_whole(self, layer: nn.Module, input: Tensor, output: Tensor) -> Tensor:
        there = output.contiguous()
        num_rows = len(self.sets)
        inputs = input.reshape(num_rows, -1, *input.shape[1:])
        outputs = there.view(num_rows, -1, *output.shape[1:])
        for row, lora_set in enumerate(self.sets):
            if layer in lora_set.whole_changes:
                alone = inputs[row].clone(memory_format=torch.contiguous_format)  # products round by where rows begin
                outputs[row].add_(lora_set.whole_changes[layer].apply(layer, alone))
        return there


@contextmanager
def adapting(rows: RowLoRAs | None) -> Iterator[None]:
    """Apply ``rows`` to calls of the layers in the block; ``None``: change nothing."""
    handles = [layer.register_forward_hook(rows.add) for layer in rows.layers] if rows is not None else []
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def adaptable(network: nn.Module) -> dict[str, nn.Module]:
    """Return the layers that can be changed, by name: linear ones and convolutions without groups, quantized or not."""
    return {
        name: layer
        for name, layer in network.named_modules()
        if isinstance(layer, nn.Linear) or (isinstance(layer, nn.Conv2d) and layer.groups == 1)
    }


def norms(network: nn.Module) -> dict[str, nn.Module]:
    """Return the norm layers with weights, by name."""
    return {
        name: layer
        for name, layer in network.named_modules()
        if isinstance(layer, nn.LayerNorm | nn.GroupNorm) and layer._parameters.get("weight") is not None
    }


def of_pictures(network: nn.Module, *, has_keys_values: bool) -> tuple[nn.Module, ...]:
    """Return the layers of a UNet that run in its calls, in order; without paged keys and values all layers."""
    layers = adaptable(network).items()
    return tuple(layer for name, layer in layers if not (has_keys_values and name.endswith(KEYS_VALUES)))


def shape_of(layer: nn.Module) -> tuple[int, ...]:
    """Return the shape of the weight of ``layer``, however it is stored."""
    if isinstance(layer, nn.Conv2d):
        return (layer.out_channels, layer.in_channels, *layer.kernel_size)
    if isinstance(layer, nn.LayerNorm | nn.GroupNorm):
        return tuple(layer.weight.shape)
    assert isinstance(layer, nn.Linear)
    return layer.out_features, layer.in_features


def joined(layer: nn.Module, changes: Sequence[tuple[Tensor, Tensor]], rank: int, like: torch.Tensor) -> Factors:
    """Concatenate ``changes`` of ``layer`` and pad them with zeros to ``rank``.

    Args:
        layer: The layer.
        changes: Pairs of down (r, in, ...) and up (out, r) in float32.
        rank: The padded rank.
        like: Gives dtype and device of the result.
    """
    downs, ups = zip(*changes, strict=True)
    shape = shape_of(layer)
    down = torch.cat([part.reshape(len(part), *shape[1:]) for part in downs])
    up = torch.cat(ups, dim=1)
    missing = rank - len(down)
    down = torch.cat([down, down.new_zeros((missing, *shape[1:]))])
    up = F.pad(up, (0, missing))
    if not isinstance(layer, nn.Conv2d):
        down, up = down.t(), up.t()
    elif _is_by_cells(layer, like):
        down = down.permute(2, 3, 0, 1).flatten(0, 2)
    return Factors(*(tensor.to(like.device, like.dtype).contiguous() for tensor in (down, up)))


def padded_rank(rank: int) -> int | None:
    """Return the least of ``RANKS`` that is at least ``rank``; ``None`` if there is none."""
    return next((padded for padded in RANKS if rank <= padded), None)


def factor_bytes(shapes: Iterable[tuple[int, ...]], rank: int, itemsize: int) -> int:
    """Return the bytes of one row's stacked factors for layers of ``shapes``."""
    return rank * itemsize * sum(shape[0] + math.prod(shape[1:]) for shape in shapes)


def random_set(layers: Iterable[nn.Module], rank: int, like: torch.Tensor) -> LoRASet:
    """Return a reproducible random change of all ``layers``, to measure the rounding and cost of calls."""
    rng = torch.Generator(like.device).manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, device=like.device) / 16

    factors = {
        layer: joined(layer, [(randn(rank, *shape_of(layer)[1:]), randn(shape_of(layer)[0], rank))], rank, like)
        for layer in layers
    }
    return LoRASet(rank, factors)


def _stack(tensors: Sequence[Tensor], memory: Tensor | None) -> Tensor:
    """Stack ``tensors`` to (R, ...), in ``memory`` if given; a single one is not copied."""
    if len(tensors) == 1:
        return tensors[0][None]
    shape = len(tensors), *tensors[0].shape
    return torch.stack(list(tensors), out=None if memory is None else memory.view(shape))


def _aligned(size: int) -> int:
    """Return ``size`` rounded up to the alignment: rounding of products depends on the alignment of their inputs."""
    return -(-size // ALIGNED) * ALIGNED


def _is_by_cells(layer: nn.Module, like: Tensor) -> bool:
    """Return whether a convolution's ``down`` is applied as one product, shifted and summed.

    Only if the size of the image stays the same, and for larger kernels only in float32 on a CPU, where a grouped
    convolution takes 1.2 to 1.6 times as long. In 16 bits it does not, and the sums would be rounded.
    """
    if not isinstance(layer, nn.Conv2d):
        return False
    rows, columns = layer.kernel_size
    is_same = bool(rows % 2 and columns % 2) and layer.padding == (rows // 2, columns // 2)
    is_same &= (layer.stride, layer.dilation) == ((1, 1), (1, 1))
    return is_same and (math.prod(layer.kernel_size) == 1 or (like.device.type, like.dtype) == ("cpu", torch.float32))


def _summed(layer: nn.Conv2d, images: Tensor, down: Tensor) -> Tensor:
    """Return (R, rank, h * w) for ``images`` (R, in, h, w) and the kernels ``down`` (R, kh * kw * rank, in)."""
    num_rows, _, height, width = images.shape
    (rows, columns), cells = layer.kernel_size, images.flatten(2)
    products = torch.bmm(down, cells).view(num_rows, rows, -1, height * width)
    total = products[:, rows // 2]  # (R, kw * rank, h * w); what other lines of the kernel add stands some lines off
    for line in range(rows):
        _add_shifted(total, products[:, line], (line - rows // 2) * width)
    products = total.view(num_rows, columns, -1, height, width)
    total = products[:, columns // 2]
    for column in range(columns):
        _add_shifted(total, products[:, column], column - columns // 2)
    return total.flatten(2)


def _add_shifted(total: Tensor, values: Tensor, places: int) -> None:
    """Add to each of the last dimension of ``total`` the value ``places`` further in ``values``."""
    if places > 0:
        total[..., :-places].add_(values[..., places:])
    elif places < 0:
        total[..., -places:].add_(values[..., :places])


def _convolved(layer: nn.Conv2d, images: Tensor, down: Tensor) -> Tensor:
    """Return (R, rank, h' * w') for ``images`` (R, in, h, w) and the kernels ``down`` (R, rank, in, kh, kw)."""
    num_rows: Any = images.shape[0]
    channels = images.shape[1]
    if isinstance(num_rows, torch.SymInt):  # for a compiler that is to make it for any number
        padding: Any = layer.padding
        cells = F.unfold(images, layer.kernel_size, layer.dilation, padding, layer.stride)
        return torch.bmm(down.flatten(2), cells)
    side_by_side = images.reshape(1, num_rows * channels, *images.shape[2:])
    hidden = F.conv2d(
        side_by_side, down.flatten(0, 1), None, layer.stride, layer.padding, layer.dilation, groups=num_rows
    )
    return hidden.view(num_rows, down.shape[1], -1)
