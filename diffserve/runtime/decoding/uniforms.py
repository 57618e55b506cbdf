"""Random numbers of one sequence, and tokens drawn with them.

Each sequence has a generator of its own and uses one number for each token it says, so its draws do not depend on
neighbours, on its place in the batch, or on whether a draft was right.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Sequence
from functools import cached_property
from itertools import islice
from typing import Final

import torch
from torch import Tensor

from diffserve.runtime.accelerators import float64_device
from diffserve.runtime.transfer import send

BLOCK: Final = 32


class Uniforms:
    """An endless row of numbers from [0, 1) in double precision; the same ``seed`` gives the same row.

    ``seed`` None takes one from the system.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = secrets.randbits(63) if seed is None else seed
        self._waiting: deque[float] = deque()

    def peek(self, count: int) -> list[float]:
        """The next ``count`` numbers, which stay in the row."""
        while len(self._waiting) < count:
            self._waiting.extend(torch.rand(BLOCK, generator=self._generator, dtype=torch.float64).tolist())
        return list(islice(self._waiting, count))

    def take(self, count: int) -> list[float]:
        """The next ``count`` numbers, which are used up."""
        numbers = self.peek(count)
        for _ in range(count):
            self._waiting.popleft()
        return numbers

    @cached_property
    def _generator(self) -> torch.Generator:  # made when first needed: greedy rows need none
        return torch.Generator("cpu").manual_seed(self.seed)


def draw(weights: Tensor, numbers: Sequence[float]) -> list[int]:
    """The same as ``invert``, waited for."""
    tokens: list[int] = invert(weights, numbers).tolist()
    return tokens


def invert(weights: Tensor, numbers: Sequence[float]) -> Tensor:
    """Draw one token id (n,) for each line of ``weights`` (n, V), not negative, by inverse transform sampling.

    Line i's token is the first whose cumulative weight exceeds ``numbers[i]`` times the line's sum, so a token of
    weight zero is never drawn. A device without float64 has the CPU draw, so that the tokens are the same everywhere.
    """
    place = float64_device(weights.device)
    cumulative = weights.to(place).cumsum(-1, dtype=torch.float64)  # (n, V)
    total = cumulative[:, -1:]
    level = send(torch.tensor(numbers, dtype=torch.float64), place)[:, None] * total
    below = torch.nextafter(total, torch.zeros_like(total))
    found = torch.searchsorted(cumulative, torch.minimum(level, below), right=True)  # (n, 1)
    return found[:, 0].clamp_(max=weights.shape[-1] - 1).to(weights.device)
