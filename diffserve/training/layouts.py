"""Auxiliary loss that teaches the text encoder which of two objects stands first.

The denoising loss hardly separates "a fox with a cat on its right" from "a fox to the right of a cat": the encoder is
causal, so in the first caption neither noun knows where it stands, and the fox is generated on either side. Reading the
layout off the last tokens, which attend to the whole caption, takes some hundred iterations to learn, and the UNet
attends to those tokens too. The head is not exported.
"""

from __future__ import annotations

from typing import Final

import torch.nn.functional as F
from torch import Tensor, nn

from diffserve.world.scenes import OBJECTS, Scene

DIRECTIONS: Final = frozenset({"left of", "right of", "above", "below"})
UNSAID: Final = (-100, -100)
"""Layout of a caption without a direction; the loss ignores it."""

READ_TOKENS: Final = 4
WEIGHT: Final = 0.03
_INDEX: Final = {name: index for index, name in enumerate(OBJECTS)}


def layout(scene: Scene) -> tuple[int, int]:
    """Return the indices of the left (or upper) and the right (or lower) object.

    UNSAID if the scene has no direction or an object that is not in OBJECTS.
    """
    if scene.relation not in DIRECTIONS or not _INDEX.keys() >= set(scene.names):
        return UNSAID
    first, second = (_INDEX[name] for name in scene.names)
    return (first, second) if scene.relation in ("left of", "above") else (second, first)


class LayoutHead(nn.Linear):
    """Linear layer that predicts both objects from the last tokens of hidden states (B, tokens, width)."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 2 * len(OBJECTS))

    def loss(self, context: Tensor, layouts: Tensor) -> Tensor:
        """Compute the cross-entropy in nats over the layouts (B, 2) that are not UNSAID; zero if there is none."""
        scores = self(context[:, -READ_TOKENS:]).float().mean(dim=1).view(2 * len(layouts), -1)
        num_known = (layouts >= 0).sum().clamp(min=1)
        return F.cross_entropy(scores, layouts.flatten(), reduction="sum") / num_known
