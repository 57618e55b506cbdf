"""Normal random numbers as a function of seed, draw and position, like torch's CUDA generator.

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") with the counters of that generator
and the Box-Muller transform of cuRAND: the noise that A1111 calls "GPU" on NVIDIA and "NV" elsewhere. Numbers do not
depend on other draws of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from diffserve.runtime.accelerators import float64_device
from diffserve.runtime.transfer import send

ROUNDS: Final = 10
MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
WEYL: Final = (0x9E3779B9, 0xBB67AE85)
WORD: Final = 0xFFFFFFFF
UNIT: Final = 2.0**-32
ANGLE: Final = float(np.float32(2.3283064e-10 * 6.2831855))
"""2 pi / 2**32 in float32, as cuRAND has it."""


class Draw(NamedTuple):
    """The ``number``-th draw (from 0) of ``seed``."""

    seed: int
    number: int


def normals(draws: Sequence[Draw], num: int, device: torch.device) -> Tensor:
    """Return (len(draws), num) float32 on ``device``, by one transfer and one sequence of launches."""
    place = float64_device(device)
    seeds = send(torch.tensor(draws, dtype=torch.int64), place)  # (B, 2)
    first, second = _philox(seeds[:, :1], seeds[:, 1:], torch.arange(num, device=place)[None])
    radius = torch.sqrt(-2.0 * torch.log(first.double() * UNIT + UNIT / 2))
    numbers = radius * torch.sin(second.double() * ANGLE + ANGLE / 2)
    return numbers.float().to(device)


def _philox(seed: Tensor, number: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first two of four 32-bit words, int64, at counter (number, 0, index, 0)."""
    key = [seed & WORD, seed >> 32 & WORD]
    words = [number, torch.zeros_like(number), index, torch.zeros_like(index)]
    for _ in range(ROUNDS):
        first, second = words[0] * MULTIPLIERS[0], words[2] * MULTIPLIERS[1]  # modulo 2**64
        words = [
            (second >> 32 & WORD) ^ words[1] ^ key[0],
            second & WORD,
            (first >> 32 & WORD) ^ words[3] ^ key[1],
            first & WORD,
        ]
        key = [(part + step) & WORD for part, step in zip(key, WEYL, strict=True)]
    return words[0], words[1]
