"""Tensors as values, which travel from who computes them to who goes on: what they are, and their bytes.

No torch here: who computes wraps and unwraps them (``runtime.text.handover``).
"""

from __future__ import annotations

from math import prod
from typing import Final

import msgspec

from diffserve.api.bounds import check

ITEM_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}
MOST_TENSORS: Final = 256
"""Of the texts of one request: of every window of a long prompt there are two."""


class TensorValue(msgspec.Struct, frozen=True, array_like=True):
    """``data``: the numbers of a tensor of ``shape``, the last axis first, little-endian, as torch calls ``dtype``."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def __post_init__(self) -> None:
        expected = prod(self.shape) * ITEM_BYTES.get(self.dtype, -1)
        is_whole = min(self.shape, default=0) >= 0 and len(self.data) == expected
        said = f"{len(self.data)} bytes are no {self.dtype} tensor of {list(self.shape)}."
        check(is_whole, said, "encodings", "invalid_value")


class Encodings(msgspec.Struct, frozen=True, kw_only=True):
    """What text encoders made of the texts of one request, by names that both sides work out.

    base     for the model's own UNet
    refiner  for that of its refiner, where that goes on with it
    """

    base: dict[bytes, TensorValue]
    refiner: dict[bytes, TensorValue] = {}

    def __post_init__(self) -> None:
        num = len(self.base) + len(self.refiner)
        check(num <= MOST_TENSORS, f"{num} tensors; at most {MOST_TENSORS} are taken.", "encodings", "invalid_value")

    @property
    def num_bytes(self) -> int:
        """Of all numbers."""
        return sum(len(value.data) for part in (self.base, self.refiner) for value in part.values())
