"""Tensors as serializable values, sent between processes.

This module does not import torch; ``runtime.text.handover`` converts to and from torch tensors.
"""

from __future__ import annotations

from math import prod
from typing import Final

import msgspec

from diffserve.api.bounds import check

ITEM_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}
MOST_TENSORS: Final = 256
"""Maximum number of tensors of a request; each window of a long prompt has two."""


class TensorValue(msgspec.Struct, frozen=True, array_like=True):
    """A tensor: its torch ``dtype``, its ``shape``, and little-endian ``data`` with the last axis contiguous."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def __post_init__(self) -> None:
        expected = prod(self.shape) * ITEM_BYTES.get(self.dtype, -1)
        has_size = min(self.shape, default=0) >= 0 and len(self.data) == expected
        message = f"{len(self.data)} bytes are no {self.dtype} tensor of {list(self.shape)}."
        check(has_size, message, "encodings", "invalid_value")


class Encodings(msgspec.Struct, frozen=True, kw_only=True):
    """Text encodings of one request, by keys that both processes compute.

    Attributes:
        base: Encodings for the UNet of the model.
        refiner: Encodings for the UNet of the refiner, if it is used.
    """

    base: dict[bytes, TensorValue]
    refiner: dict[bytes, TensorValue] = {}

    def __post_init__(self) -> None:
        num = len(self.base) + len(self.refiner)
        check(num <= MOST_TENSORS, f"{num} tensors; at most {MOST_TENSORS} are allowed.", "encodings", "invalid_value")

    @property
    def num_bytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(len(value.data) for part in (self.base, self.refiner) for value in part.values())
