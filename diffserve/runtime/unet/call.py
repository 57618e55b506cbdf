"""Arguments of a UNet call, and the types of functions that make calls."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, Final, NamedTuple

from torch import Tensor

from diffserve.runtime.low_rank import Factors
from diffserve.runtime.unet.cross_attention import Contexts, KeysValues, Pair

GUIDANCE: Final = "timestep_cond"
"""diffusers' name of the guidance embedding."""

Kind = tuple[tuple[int, ...], ...]
"""Shapes of a call's tensors without their first dimension, the rows."""


class UNetArguments(NamedTuple):
    """Arguments of one call of diffusers' UNet, prepared by ``UNetRunner``.

    Attributes:
        sample: (R, C, h, w) in the network's dtype.
        timesteps: (R,) float32.
        contexts: Embeddings (R, tokens, dim), or keys and values made of them.
        added: Pooled texts (R, P), time_ids (R, 6) and ``GUIDANCE`` (R, dim) by diffusers' names, or ``None``.
        factors: LoRA factors for each row, in the layer order of ``low_rank.of_pictures``; compiled calls only, else
            empty.
        residuals: ControlNet residuals (R, C, h, w) for the skip connections, and last for the middle block.
        features: (R, F, h, w) of the last full call; then only the shallow part runs (DeepCache).
    """

    sample: Tensor
    timesteps: Tensor
    contexts: Contexts
    added: dict[str, Tensor] | None
    factors: tuple[Factors, ...] = ()
    residuals: tuple[Tensor, ...] = ()
    features: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, in the same order for all calls."""
        first = [self.sample, self.timesteps, *(self.added.values() if self.added else ())]
        return [*first, *self.row_tensors, *self.residuals, *([] if self.features is None else [self.features])]

    @property
    def row_tensors(self) -> list[Tensor]:
        """Texts and adapters, which stay the same from step to step while the same rows share calls."""
        pairs = () if isinstance(self.contexts, Tensor) else self.contexts.layers
        texts = [self.contexts] if isinstance(self.contexts, Tensor) else [each for pair in pairs for each in pair]
        return [*texts, *(each for pair in self.factors for each in pair)]

    @property
    def step_tensors(self) -> list[Tensor]:
        """Tensors that change with every step."""
        return self._replace(contexts=KeysValues(()), factors=()).tensors

    def map(self, function: Callable[[Tensor], Tensor]) -> UNetArguments:
        """Apply ``function`` to every tensor. Texts must have equal lengths."""
        contexts = self.contexts
        return UNetArguments(
            function(self.sample),
            function(self.timesteps),
            function(contexts)
            if isinstance(contexts, Tensor)
            else KeysValues(tuple(Pair(*map(function, pair)) for pair in contexts.layers)),
            None if self.added is None else {name: function(tensor) for name, tensor in self.added.items()},
            tuple(Factors(*map(function, pair)) for pair in self.factors),
            tuple(map(function, self.residuals)),
            None if self.features is None else function(self.features),
        )

    @property
    def is_whole(self) -> bool:
        """Whether it is a full call without ControlNets, which a package can make."""
        return self.features is None and not self.residuals

    @property
    def kind(self) -> Kind | None:
        """The shapes without the number of rows; ``None`` if texts of different lengths share the call.

        There are no packages for the latter.
        """
        if isinstance(self.contexts, KeysValues) and self.contexts.mask is not None:
            return None
        return tuple(tuple(tensor.shape[1:]) for tensor in self.tensors)


def conditions(added: Mapping[str, Tensor] | None) -> dict[str, Any]:
    """Return ``UNetArguments.added`` as the keyword arguments of diffusers' UNet."""
    arguments = dict(added or {})
    return {GUIDANCE: arguments.pop(GUIDANCE, None), "added_cond_kwargs": arguments or None}


Compiled = Callable[[UNetArguments], Tensor | None]
"""Makes a call in the network's place, (R, C, h, w) in its dtype; ``None`` if it cannot."""

Outputs = tuple[Tensor, ...]
"""The network's output (R, C, h, w), and the features (R, F, h, w) of a full call if requested."""

Make = Callable[[UNetArguments], Outputs]

Recorder = Callable[[UNetArguments, Make, Hashable], Outputs | None]
"""Makes a call by replaying a recording of what a function does for such calls; ``None`` if it cannot.

The last argument names the function: those of two calls with one name launch the same kernels.
"""
