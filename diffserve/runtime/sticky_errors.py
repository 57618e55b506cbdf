"""Some errors stick: after one, every call in this process fails, whoever makes it.

CUDA's documentation calls these "sticky": the process must end.
"""

from __future__ import annotations

import re
from typing import Final

import torch

from diffserve.errors import DeviceLost

STICKY_CODES: Final = frozenset({214, 220, 700, 702, *range(710, 720), 721, 911})
"""cudaError_t after which the context is lost: memory that cannot be corrected (214, 220), an illegal address (700), a
kernel that ran too long (702), an assertion (710) and what a kernel trips over (714 to 719), a leak, a link."""

STICKY_WORDS: Final = re.compile(
    r"device-side assert|illegal memory access|illegal instruction|unspecified launch failure|misaligned address"
    r"|hardware stack error|invalid program counter|operation not supported on global/shared address space"
    r"|launch timed out|uncorrectable (ECC|NVLink) error|CU(BLAS|SOLVER)_STATUS_(NOT_INITIALIZED|EXECUTION_FAILED)"
    r"|CUDNN_STATUS_(NOT_INITIALIZED|EXECUTION_FAILED)|command buffer exited|kIOGPUCommandBufferCallbackError"
    r"|DEVICE_LOST|device lost",
    re.IGNORECASE,
)
"""What CUDA, ROCm, MPS and XPU say in such a case, in torch's wording."""


def is_sticky(error: BaseException) -> bool:
    """Whether ``error``, or what it came of, leaves the device useless to this process. Too little memory does not."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        if not isinstance(one, torch.OutOfMemoryError) and isinstance(one, RuntimeError):
            code = getattr(one, "error_code", None)
            if code in STICKY_CODES if isinstance(code, int) else STICKY_WORDS.search(str(one)):
                return True
        one = one.__cause__ or one.__context__
    return False


def raise_if_sticky(error: Exception) -> None:
    """DeviceLost where ``error`` sticks; to be asked wherever an error is put down to a single image or text."""
    if is_sticky(error):
        raise DeviceLost(f"{type(error).__name__}: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """What it says, in short."""
    return str(error).partition("\n")[0][:200]
