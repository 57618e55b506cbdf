"""What a call of diffusers' UNet is made with."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from diffserve.runtime.unet.cross_attention import Contexts, KeysValues

Kind = tuple[tuple[int, ...], ...]
"""Shapes of a call's tensors less their first dimension, the rows."""


class UNetArguments(NamedTuple):
    """Arguments of one call of diffusers' UNet, as ``UNetRunner`` has them ready.

    sample     (R, C, h, w) in the network's dtype
    timesteps  (R,) float32
    contexts   embeddings (R, tokens, dim), or keys and values made of them
    added      pooled texts (R, P) and time_ids (R, 6) by diffusers' names, or ``None``
    """

    sample: Tensor
    timesteps: Tensor
    contexts: Contexts
    added: dict[str, Tensor] | None

    @property
    def tensors(self) -> list[Tensor]:
        """All of them, in one order for all calls."""
        tensors = [self.sample, self.timesteps, *(self.added.values() if self.added else ())]
        if isinstance(self.contexts, Tensor):
            return [*tensors, self.contexts]
        return [*tensors, *(tensor for pair in self.contexts.layers for tensor in pair)]

    @property
    def kind(self) -> Kind | None:
        """What calls have in common that differ in their rows' number and numbers alone; ``None`` where texts of
        different lengths share the call: there is no package for that."""
        if isinstance(self.contexts, KeysValues) and self.contexts.mask is not None:
            return None
        return tuple(tuple(tensor.shape[1:]) for tensor in self.tensors)


Compiled = Callable[[UNetArguments], Tensor | None]
"""Makes a call in the network's place, (R, C, h, w) in its dtype; ``None`` where it cannot."""
