"""What a call of diffusers' UNet is made with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from torch import Tensor

from diffserve.runtime.low_rank import Factors
from diffserve.runtime.unet.cross_attention import Contexts, KeysValues

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
    """

    sample: Tensor
    timesteps: Tensor
    contexts: Contexts
    added: dict[str, Tensor] | None
    factors: tuple[Factors, ...] = ()

    @property
    def tensors(self) -> list[Tensor]:
        """All of them, in one order for all calls."""
        tensors = [self.sample, self.timesteps, *(self.added.values() if self.added else ())]
        pairs = () if isinstance(self.contexts, Tensor) else self.contexts.layers
        texts = [self.contexts] if isinstance(self.contexts, Tensor) else [each for pair in pairs for each in pair]
        return [*tensors, *texts, *(each for pair in self.factors for each in pair)]

    @property
    def kind(self) -> Kind | None:
        """What calls have in common that differ in their rows' number and numbers alone; ``None`` where texts of
        different lengths share the call: there is no package for that."""
        if isinstance(self.contexts, KeysValues) and self.contexts.mask is not None:
            return None
        return tuple(tuple(tensor.shape[1:]) for tensor in self.tensors)


def conditions(added: Mapping[str, Tensor] | None) -> dict[str, Any]:
    """``UNetArguments.added`` as the keyword arguments of diffusers' UNet."""
    told = dict(added or {})
    return {GUIDANCE: told.pop(GUIDANCE, None), "added_cond_kwargs": told or None}


Compiled = Callable[[UNetArguments], Tensor | None]
"""Makes a call in the network's place, (R, C, h, w) in its dtype; ``None`` where it cannot."""
