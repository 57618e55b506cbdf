"""Which of two objects stands first, taught to the text encoder beside denoising.

The denoising loss hardly tells "a fox with a cat on its right" from "a fox to the right of a cat": the encoder is
causal, so in the first neither noun knows where it stands, and it is painted on either side. Reading the layout off the
last tokens, which have seen the whole caption, is a lesson of some hundred iterations; the UNet attends to those tokens
too. The head that reads it is not exported.
"""

from __future__ import annotations

from typing import Final

import torch.nn.functional as F
from torch import Tensor, nn

from diffserve.world.scenes import OBJECTS, Scene

DIRECTIONS: Final = frozenset({"left of", "right of", "above", "below"})
UNSAID: Final = (-100, -100)
"""The layout of a caption that does not say which object is first; the loss passes over it."""

READ_TOKENS: Final = 4
WEIGHT: Final = 0.03
_INDEX: Final = {name: index for index, name in enumerate(OBJECTS)}


def layout(scene: Scene) -> tuple[int, int]:
    """Numbers of the left (or upper) and the right (or lower) object, UNSAID where no direction is asked for
    or an object is none of the world.
    """
    if scene.relation not in DIRECTIONS or not _INDEX.keys() >= set(scene.names):
        return UNSAID
    first, second = (_INDEX[name] for name in scene.names)
    return (first, second) if scene.relation in ("left of", "above") else (second, first)


class LayoutHead(nn.Linear):
    """Reads both objects off the last tokens of (B, tokens, width) hidden states."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 2 * len(OBJECTS))

    def loss(self, context: Tensor, layouts: Tensor) -> Tensor:
        """Cross-entropy in nats, over the layouts (B, 2) that are said; zero where none is."""
        scores = self(context[:, -READ_TOKENS:]).float().mean(dim=1).view(2 * len(layouts), -1)
        said = (layouts >= 0).sum().clamp(min=1)
        return F.cross_entropy(scores, layouts.flatten(), reduction="sum") / said
