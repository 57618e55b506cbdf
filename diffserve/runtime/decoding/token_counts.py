"""TokenCounts: which tokens a sequence holds, and how often it said them, ready to become tensors."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Self

import torch
from torch import Tensor


class TokenCounts:
    """Every token of prompt and output once, with how often it stands in the output; those of the prompt alone: 0."""

    __slots__ = ("_counts", "_ids", "_places")

    def __init__(self, prompt_ids: Iterable[int]) -> None:
        self._ids = array("q", dict.fromkeys(prompt_ids))
        self._counts = array("f", bytes(4 * len(self._ids)))
        self._places = {token_id: place for place, token_id in enumerate(self._ids)}

    def add(self, token_id: int) -> None:
        """Count one more ``token_id`` in the output."""
        place = self._places.setdefault(token_id, len(self._ids))
        if place == len(self._ids):
            self._ids.append(token_id)
            self._counts.append(0.0)
        self._counts[place] += 1.0

    def copy(self) -> Self:
        """Counts that go their own way from here."""
        twin = object.__new__(type(self))
        twin._ids, twin._counts, twin._places = self._ids[:], self._counts[:], self._places.copy()
        return twin

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Token ids (n,) int64 and counts (n,) float32: views, to be copied before the next ``add``."""
        return torch.frombuffer(self._ids, dtype=torch.int64), torch.frombuffer(self._counts, dtype=torch.float32)
