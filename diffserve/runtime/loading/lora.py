"""Load LoRA files: pairs of matrices by component and layer.

A LoRA (Hu et al., 2021, arXiv 2106.09685) holds a pair for each layer that it changes. The layer's weight W, a matrix
(out, in) or a kernel (out, in, kh, kw), is read as

    W + alpha / rank * up @ down        up (out, rank), down (rank, in) or (rank, in * kh * kw)

Files may also hold changes without a low-rank form: differences of weights and biases, LoKr and DoRA.
``diffserve.models.lora_layers`` reads the names. Here a change is merged into a network that loads, in float32,
and then cast or quantized like any other tensor; ``runtime.low_rank`` has it for single rows instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from diffserve.api.errors import ModelLoadError
from diffserve.models.lora_layers import UNET, InvalidLoRAError, LayerChange, LoRALayers, flat_name, read_layers
from diffserve.runtime.loading.checkpoint import Checkpoint
from diffserve.runtime.loading.single_file_layout import UNET_PREFIX, keys_of_diffusers
from diffserve.runtime.loading.weight_loading import TensorSource


class Deltas(NamedTuple):
    """Differences of a layer's weight and bias, in their shapes; ``None`` without a difference."""

    weight: torch.Tensor | None
    bias: torch.Tensor | None


@dataclass
class LoRAFile:
    """Changes stored in one adapter file."""

    checkpoint: Checkpoint
    content: LoRALayers
    _used: set[str] = field(default_factory=set)

    @classmethod
    def open(cls, files: Iterable[Path]) -> LoRAFile:
        """Read the names and shapes in ``files``. Raises ModelLoadError for what is not a LoRA that can be used."""
        checkpoint = Checkpoint.open(files)
        shapes = {key: entry.shape for key, entry in checkpoint.entries.items()}
        try:
            return cls(checkpoint, read_layers(shapes, checkpoint.metadata))
        except InvalidLoRAError as error:
            raise ModelLoadError(f"{checkpoint.where()} {error}.") from None

    @property
    def layers(self) -> dict[str, dict[str, LayerChange]]:
        """The changes by component and by layer, whose name has underscores for dots."""
        return self.content.layers

    def adapt(self, component: str, source: TensorSource) -> None:
        """Merge this file's changes into the tensors that ``source`` reads.

        Raises ModelLoadError if a layer is not in the network, or has another shape.
        """
        weights = (name for name in source.readers if name.endswith(".weight"))
        shapes = {name.removesuffix(".weight"): source.readers[name][1] for name in weights}
        biases = {name.removesuffix(".bias") for name in source.readers if name.endswith(".bias")}
        for name, change in self.matched(component, shapes, biases, source.checkpoint.where()).items():
            if change.changes_weight:
                key, shape, read = source.readers[f"{name}.weight"]
                source.readers[f"{name}.weight"] = key, shape, partial(self._read_merged, change, read)
            if change.bias_delta:
                key, shape, read = source.readers[f"{name}.bias"]
                source.readers[f"{name}.bias"] = key, shape, partial(self._read_merged_bias, change, read)
        self._used.add(component)

    def matched(
        self, component: str, shapes: dict[str, tuple[int, ...]], biases: Collection[str], where: str
    ) -> dict[str, LayerChange]:
        """Return the changes of ``component`` by the names of its layers.

        Args:
            component: UNet or text encoder.
            shapes: The shapes of the layers' weights by the layers' names.
            biases: The names of the layers that have a bias.
            where: The name of the network in error messages.

        Raises:
            ModelLoadError: A layer is not in the network, or has another shape or no bias.
        """
        changes = self.layers.get(component, {})
        names = {flat_name(name): name for name in shapes}
        if component == UNET and not changes.keys() <= names.keys():
            names |= original_names(shapes)
        for layer, change in changes.items():
            if layer not in names:
                raise self._misfit(change, f"there is no such layer in the {component} of {where}")
            self._check_shapes(change, shapes[names[layer]], has_bias=names[layer] in biases)
        return {names[layer]: change for layer, change in changes.items()}

    def check_all_used(self) -> None:
        """Raise ModelLoadError when the file changes a component that was not there to adapt."""
        for component in self.layers.keys() - self._used:
            raise ModelLoadError(f"{self.checkpoint.where()} changes a {component}, which the base does not have.")

    def read(self, change: LayerChange, shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the change of a layer whose weight has ``shape`` (out, in) or (out, in, kh, kw).

        Returns down (rank, in) or (rank, in, kh, kw), and up (out, rank) times its scale, in float32. Element (i, j) of
        a LoHa's change is sum_p u1[i,p] d1[p,j] * sum_q u2[i,q] d2[q,j], so that each pair (p, q) is a rank of its own:
        u1[i,p] u2[i,q] times d1[p,j] d2[q,j].
        """
        down, up = (self.checkpoint.read(key).float().flatten(1) for key in change.pairs[0])
        for pair in change.pairs[1:]:
            other_down, other_up = (self.checkpoint.read(key).float().flatten(1) for key in pair)
            down = (down[:, None] * other_down[None]).flatten(0, 1)
            up = (up[:, :, None] * other_up[:, None]).flatten(1)
        return down.view(-1, *shape[1:]), self._scale(change) * up

    def read_deltas(self, change: LayerChange, shape: Sequence[int], read_weight: Callable[[], torch.Tensor]) -> Deltas:
        """Read the change of a layer as what is added to its weight, which has ``shape``, and to its bias, in float32.

        ``read_weight`` gives the layer's own weight, which is only needed for DoRA.
        """
        weight = self._weight_delta(change, shape) if change.changes_weight else None
        if weight is not None and change.dora:
            weight = self._with_magnitudes(change, read_weight().float(), weight)
        return Deltas(weight, self.checkpoint.read(change.bias_delta).float() if change.bias_delta else None)

    def _weight_delta(self, change: LayerChange, shape: Sequence[int]) -> torch.Tensor:
        total = torch.zeros(tuple(shape))
        if change.pairs:
            down, up = self.read(change, shape)
            total += (up @ down.flatten(1)).view_as(total)
        if change.lokr:
            total += self._scale(change) * self._kronecker_product(change).view_as(total)
        if change.weight_delta:
            total += self.checkpoint.read(change.weight_delta).float().view_as(total)
        return total

    def _kronecker_product(self, change: LayerChange) -> torch.Tensor:
        """Return w1 (a, c) times w2 (b, d * kh * kw) as (a * b, c * d * kh * kw)."""
        parts = {part: self.checkpoint.read(name).float() for part, name in change.lokr.items()}
        w1 = parts["w1"] if "w1" in parts else parts["w1_a"] @ parts["w1_b"]
        if "w2" in parts:
            w2 = parts["w2"]
        elif "t2" in parts:
            w2 = torch.einsum("pqyx,po,qi->oiyx", parts["t2"], parts["w2_a"], parts["w2_b"])
        else:
            w2 = parts["w2_a"] @ parts["w2_b"].flatten(1)
        return torch.kron(w1, w2.flatten(1).contiguous())  # strided factors fail on CUDA

    def _with_magnitudes(self, change: LayerChange, weight: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """Return the difference to ``weight`` of ``weight + delta`` with the magnitudes of a DoRA."""
        changed = weight + delta.to(weight.device)
        dim = 0 if self._is_by_output(change, tuple(weight.shape)) else 1
        norm_dims = tuple(index for index in range(weight.ndim) if index != dim)
        norms = torch.linalg.vector_norm(changed, dim=norm_dims, keepdim=True)
        magnitudes = self.checkpoint.read(change.dora).float().to(weight.device).view_as(norms)
        difference: torch.Tensor = changed * (magnitudes / norms.clamp_min(torch.finfo(norms.dtype).tiny)) - weight
        return difference

    def _is_by_output(self, change: LayerChange, shape: tuple[int, ...]) -> bool:
        """Whether the magnitudes are one for each output, not each input. Raises ModelLoadError for another shape."""
        size = self.checkpoint.entries[change.dora].shape
        if math.prod(size) == shape[0] and (change.output_magnitude or size[:2] == (shape[0], 1)):
            return True
        if math.prod(size) == shape[1] and not change.output_magnitude and size[:2] == (1, shape[1]):
            return False
        raise self._misfit(change, f"magnitudes {list(size)} do not fit a weight {list(shape)}")

    def _check_shapes(self, change: LayerChange, shape: tuple[int, ...], *, has_bias: bool) -> None:
        needs_matrix = bool(change.pairs or change.lokr or change.dora)
        if needs_matrix and len(shape) not in (2, 4):
            raise self._misfit(change, f"its layer's weight has shape {list(shape)}, neither matrix nor kernel")
        size = (shape[0], math.prod(shape[1:]))
        if change.pairs:
            down, up = (self.checkpoint.entries[name].shape for name in (change.down, change.up))
            if (up[0], math.prod(down[1:])) != size:
                raise self._misfit(change, f"down {list(down)} and up {list(up)} do not fit a weight {list(shape)}")
        if change.lokr:
            factors = {part: self.checkpoint.entries[name].shape for part, name in change.lokr.items()}
            if _kronecker_size(factors) != size:
                sizes = {part: list(factor) for part, factor in factors.items()}
                raise self._misfit(change, f"the factors {sizes} do not fit a weight {list(shape)}")
        if change.weight_delta:
            delta = self.checkpoint.entries[change.weight_delta].shape
            if (*delta[:1], math.prod(delta[1:])) != size:
                raise self._misfit(change, f"a difference {list(delta)} does not fit a weight {list(shape)}")
        if change.dora:
            self._is_by_output(change, shape)
        if change.bias_delta:
            if not has_bias:
                raise self._misfit(change, f"{change.bias_delta!r} changes a bias, but its layer has no bias")
            delta = self.checkpoint.entries[change.bias_delta].shape
            if delta != shape[:1]:
                raise self._misfit(change, f"a difference {list(delta)} does not fit a bias {list(shape[:1])}")

    def _misfit(self, change: LayerChange, problem: str) -> ModelLoadError:
        return ModelLoadError(
            f"tensor {change.first_tensor!r} of {self.checkpoint.where()}: {problem}; this adapter was made for "
            "another base."
        )

    def _read_merged(self, change: LayerChange, read: Callable[[], torch.Tensor]) -> torch.Tensor:
        weight = read().float()
        delta = self.read_deltas(change, weight.shape, lambda: weight).weight
        assert delta is not None
        return weight + self._finite(delta, change)

    def _read_merged_bias(self, change: LayerChange, read: Callable[[], torch.Tensor]) -> torch.Tensor:
        return read().float() + self._finite(self.checkpoint.read(change.bias_delta).float(), change)

    def _finite(self, delta: torch.Tensor, change: LayerChange) -> torch.Tensor:
        """Return ``delta``. Raises ModelLoadError where it holds a number that is not finite."""
        if not bool(torch.isfinite(delta).all()):
            raise ModelLoadError(
                f"{self.checkpoint.where()}: the change by {change.first_tensor!r} has non-finite numbers; "
                "the file is damaged."
            )
        return delta

    def _scale(self, change: LayerChange) -> float:
        """Return alpha / rank of a pair or of a LoKr; 1 for a LoKr whose factors are both whole, as LyCORIS has it."""
        alpha = float(self.checkpoint.read(change.alpha)) if change.alpha else change.declared_alpha
        inner = change.down or change.lokr.get("w2_b") or change.lokr.get("w1_b")
        rank = self.checkpoint.entries[inner].shape[0] if inner else 0
        scale = 1.0 if alpha is None or not rank else alpha / (math.sqrt(rank) if change.is_stabilized else rank)
        if not math.isfinite(scale):
            raise ModelLoadError(
                f"{self.checkpoint.where()}: the alpha of {change.first_tensor!r} is {alpha}; it is damaged."
            )
        return scale


def _kronecker_size(factors: dict[str, tuple[int, ...]]) -> tuple[int, int]:
    """Return rows and columns of the product of a LoKr's ``factors``, by their shapes."""
    rows, columns = factors["w1"] if "w1" in factors else (factors["w1_a"][0], factors["w1_b"][1])
    if "w2" in factors:
        size = factors["w2"][0], math.prod(factors["w2"][1:])
    elif "t2" in factors:
        size = factors["w2_a"][1], factors["w2_b"][1] * math.prod(factors["t2"][2:])
    else:
        size = factors["w2_a"][0], math.prod(factors["w2_b"][1:])
    return rows * size[0], columns * size[1]


def original_names(layers: Iterable[str]) -> dict[str, str]:
    """Return the names of a UNet's ``layers`` by their flat names in the original layout."""
    keys = keys_of_diffusers(f"{layer}." for layer in layers)
    return {flat_name(key.removeprefix(UNET_PREFIX).rstrip(".")): name.rstrip(".") for name, key in keys.items()}
