"""Load LoRA files: pairs of matrices by component and layer.

A LoRA (Hu et al., 2021, arXiv 2106.09685) holds a pair for each layer that it changes. The layer's weight W, a matrix
(out, in) or a kernel (out, in, kh, kw), is read as

    W + alpha / rank * up @ down        up (out, rank), down (rank, in) or (rank, in * kh * kw)

``diffserve.lora_layers`` reads the names. Here the pair is merged into a network that loads, in float32, and only then
cast or quantised like any other tensor; ``runtime.low_rank`` has it for single rows instead.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from diffserve.errors import ModelLoadError
from diffserve.lora_layers import UNET, InvalidLoRAError, LoRALayers, LowRank, flat_name, read_layers
from diffserve.runtime.loading.checkpoint import Checkpoint
from diffserve.runtime.loading.single_file_keys import UNET_PREFIX, unet_key
from diffserve.runtime.loading.weight_loading import TensorSource


@dataclass
class LoRAFile:
    """The changes in one file."""

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
    def layers(self) -> dict[str, dict[str, LowRank]]:
        """The changes by component and by layer, whose name has underscores for dots."""
        return self.content.layers

    def adapt(self, component: str, source: TensorSource) -> None:
        """Let the tensors that this file changes be read from ``source`` as changed.

        Raises ModelLoadError where a layer is not in the network, or its shape is another.
        """
        weights = (name for name in source.readers if name.endswith(".weight"))
        shapes = {name.removesuffix(".weight"): source.readers[name][1] for name in weights}
        for name, change in self.matched(component, shapes, source.checkpoint.where()).items():
            key, shape, read = source.readers[f"{name}.weight"]
            source.readers[f"{name}.weight"] = key, shape, partial(self._read_merged, change, read)
        self._used.add(component)

    def matched(self, component: str, shapes: dict[str, tuple[int, ...]], where: str) -> dict[str, LowRank]:
        """The changes of ``component`` by the names of its layers, whose weights have ``shapes``.

        Raises ModelLoadError where a layer is not in the network, which is that of ``where``, or its shape is another.
        """
        asked = self.layers.get(component, {})
        names = {flat_name(name): name for name in shapes}
        if component == UNET and not asked.keys() <= names.keys():
            names |= original_names(shapes)
        for layer, change in asked.items():
            if layer not in names:
                raise self._misfit(change, f"there is no such layer in the {component} of {where}")
            self._check_shapes(change, shapes[names[layer]])
        return {names[layer]: change for layer, change in asked.items()}

    def check_all_used(self) -> None:
        """Raise ModelLoadError when the file changes a component that was not there to adapt."""
        for component in self.layers.keys() - self._used:
            raise ModelLoadError(f"{self.checkpoint.where()} changes a {component}, which the base has not.")

    def read(self, change: LowRank, shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
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

    def _check_shapes(self, change: LowRank, shape: tuple[int, ...]) -> None:
        down, up = (self.checkpoint.entries[key].shape for key in (change.down, change.up))
        if len(shape) not in (2, 4):
            raise self._misfit(change, f"its layer's weight has shape {list(shape)}, neither matrix nor kernel")
        if (up[0], math.prod(down[1:])) != (shape[0], math.prod(shape[1:])):
            raise self._misfit(change, f"down {list(down)} and up {list(up)} do not fit a weight {list(shape)}")

    def _misfit(self, change: LowRank, problem: str) -> ModelLoadError:
        return ModelLoadError(
            f"tensor {change.down!r} of {self.checkpoint.where()}: {problem}; this adapter was made for another base."
        )

    def _read_merged(self, change: LowRank, read: Callable[[], torch.Tensor]) -> torch.Tensor:
        weight = read().float()
        down, up = self.read(change, weight.shape)
        return weight + (up @ down.flatten(1)).view_as(weight)

    def _scale(self, change: LowRank) -> float:
        alpha = float(self.checkpoint.read(change.alpha)) if change.alpha else change.declared_alpha
        rank = self.checkpoint.entries[change.down].shape[0]
        scale = 1.0 if alpha is None else alpha / (math.sqrt(rank) if change.is_stabilized else rank)
        if not math.isfinite(scale):
            raise ModelLoadError(f"{self.checkpoint.where()}: the alpha of {change.down!r} is {alpha}; it is damaged.")
        return scale


def original_names(layers: Iterable[str]) -> dict[str, str]:
    """A UNet's layers as the original code numbers them, dots written as underscores -> their names in ``layers``."""
    names = [*layers]
    per_block = len({name.split(".")[3] for name in names if name.startswith("down_blocks.0.resnets.")})
    attentions = (re.match(r"up_blocks\.(\d+)\.attentions\.", name) for name in names)
    attention_up = frozenset(int(found[1]) for found in attentions if found)
    return {
        flat_name(unet_key(f"{name}.", per_block, attention_up).removeprefix(UNET_PREFIX).rstrip(".")): name
        for name in names
    }
