"""What a call of diffusers' UNet is made with."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, Final, NamedTuple

from torch import Tensor

from diffserve.runtime.low_rank import Factors
from diffserve.runtime.unet.cross_attention import Contexts, KeysValues, Pair

GUIDANCE: Final = "timestep_cond"
"""What diffusers calls guidance that the network is told as a vector."""

Kind = tuple[tuple[int, ...], ...]
"""Shapes of a call's tensors less their first dimension, the rows."""


class UNetArguments(NamedTuple):
    """Arguments of one call of diffusers' UNet, as ``UNetRunner`` has them ready.

    sample     (R, C, h, w) in the network's dtype
    timesteps  (R,) float32
    contexts   embeddings (R, tokens, dim), or keys and values made of them
    added      pooled texts (R, P) and time_ids (R, 6) by diffusers' names, and ``GUIDANCE`` (R, dim), or ``None``
    factors    what changes the network for each row, layer by layer as ``low_rank.of_pictures`` has them; only compiled
               calls are told, and empty where there is nothing
    residuals  what ControlNets add to the skip connections, (R, C, h, w) each, and last to the middle block
    features   (R, F, h, w) of the last full call; with them only the shallow part runs (DeepCache)
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
        """All of them, in one order for all calls."""
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
        """Apply ``function`` to every tensor. Texts must be equally long."""
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
        """Whether it is a full call to which no ControlNet adds, which a package can make."""
        return self.features is None and not self.residuals

    @property
    def kind(self) -> Kind | None:
        """What calls have in common that differ in their rows' number and numbers alone; ``None`` where texts of
        different lengths share the call: there is no package for that.
        """
        if isinstance(self.contexts, KeysValues) and self.contexts.mask is not None:
            return None
        return tuple(tuple(tensor.shape[1:]) for tensor in self.tensors)


def conditions(added: Mapping[str, Tensor] | None) -> dict[str, Any]:
    """``UNetArguments.added`` as the keyword arguments of diffusers' UNet."""
    told = dict(added or {})
    return {GUIDANCE: told.pop(GUIDANCE, None), "added_cond_kwargs": told or None}


Compiled = Callable[[UNetArguments], Tensor | None]
"""Makes a call in the network's place, (R, C, h, w) in its dtype; ``None`` where it cannot."""

Outputs = tuple[Tensor, ...]
"""The network's output (R, C, h, w), and the features (R, F, h, w) of a full call where they are asked for."""

Make = Callable[[UNetArguments], Outputs]

Recorder = Callable[[UNetArguments, Make, Hashable], Outputs | None]
"""Makes a call by replaying a recording of what a function does for such calls; ``None`` where it cannot. The last
argument names the function: those of two calls with one name launch the same kernels."""
