"""The least time a GPU can take for counted work: each kernel by its arithmetic or its traffic, whichever is slower.

Williams, Waterman and Patterson 2009, with the makers' figures for dense arithmetic and memory. Eager UNet
calls of 16 rows reach 0.37 (SD 1.5) to 0.57 (SDXL) of it on an H200; small calls take the time of their launches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from diffserve.api.errors import ConfigError
from diffserve.runtime.dry_run import Work


@dataclass(frozen=True)
class GPU:
    """tflops_16 and tflops_32: 10^12 operations a second in float16 or bfloat16 with float32 sums, and in float32."""

    name: str
    memory_gb: float
    gb_per_s: float
    tflops_16: float
    tflops_32: float

    def seconds(self, work: Work, dtype: torch.dtype) -> float:
        """The least that ``work`` in ``dtype`` takes here."""
        flops_per_s = 1e12 * (self.tflops_32 if dtype == torch.float32 else self.tflops_16)
        bytes_per_s = 1e9 * self.gb_per_s
        return sum(max(one.flops / flops_per_s, one.moved_bytes / bytes_per_s) for one in work.kernels)


GPUS: Final = {
    gpu.name: gpu
    for gpu in (
        GPU("h200", 141, 4800, 989, 67),
        GPU("h100", 80, 3350, 989, 67),
        GPU("h100-pcie", 80, 2000, 756, 51),
        GPU("a100", 80, 2039, 312, 19.5),
        GPU("l40s", 48, 864, 362, 91.6),
        GPU("a10", 24, 600, 125, 31.2),
        GPU("l4", 24, 300, 121, 30.3),
        GPU("v100", 32, 900, 125, 15.7),
        GPU("t4", 16, 320, 65, 8.1),
        GPU("rtx4090", 24, 1008, 165, 82.6),
        GPU("rtx3090", 24, 936, 71, 35.6),
        GPU("rtx3060", 12, 360, 25.5, 12.7),
    )
}


def find_gpu(name: str) -> GPU:
    """The GPU called ``name``. Raises ConfigError with those there are."""
    gpu = GPUS.get(name.lower().replace(" ", ""))
    if gpu is None:
        raise ConfigError(f"gpu is {name!r}; choose one of {', '.join(GPUS)}.", param="gpu")
    return gpu
