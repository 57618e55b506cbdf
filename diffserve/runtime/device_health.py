"""Does the device still compute? Some errors say that it does not: after one, every call in this process fails, whoever
makes it (CUDA's documentation calls these "sticky": the process must end). Any other that nobody expected is a reason
to ask: a small call of the UNet, which was seen to work when the process began.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Final
from weakref import ref

import torch

from diffserve.api.errors import DeviceLost
from diffserve.runtime import DiffusionModel
from diffserve.runtime.unet.random_rows import random_rows

PROBE_CELLS: Final = 8

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

logger = logging.getLogger(__name__)


def is_sticky(error: BaseException) -> bool:
    """Whether ``error``, or what it came of, leaves the device useless to this process. Too little memory does not."""
    for one in _chain(error):
        if not isinstance(one, torch.OutOfMemoryError) and isinstance(one, RuntimeError):
            code = getattr(one, "error_code", None)
            if code in STICKY_CODES if isinstance(code, int) else STICKY_WORDS.search(str(one)):
                return True
    return False


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` is, or comes of, a lack of device memory: what is cleaned up after one may fail, too."""
    return any(isinstance(one, torch.OutOfMemoryError) for one in _chain(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """``error`` and the errors that it came of."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or one.__context__


def raise_if_sticky(error: Exception) -> None:
    """DeviceLost where ``error`` sticks; to be asked wherever an error is put down to a single image or text."""
    if is_sticky(error):
        raise DeviceLost(f"{type(error).__name__}: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """What it says, in short."""
    return str(error).partition("\n")[0][:200]


class DeviceProbe:
    """One row of the smallest size through the UNet of ``model``; of use where that works at the beginning, and while
    the model is there.
    """

    def __init__(self, model: DiffusionModel) -> None:
        side_px = PROBE_CELLS * model.info.vae_factor
        self._shape = side_px, side_px, model.text.window_tokens
        self._model = ref(model)
        is_here = not model.unet.is_hollow  # else a lost device is known by its words alone
        self.is_of_use = is_here and self._trouble() is None
        if is_here and not self.is_of_use:
            logger.warning("the UNet takes no picture of %d pixels: a lost device is known by its words only", side_px)

    @property
    def is_gone(self) -> bool:
        """Whether the model was unloaded."""
        return self._model() is None

    def check(self) -> None:
        """DeviceLost where the device computes nothing any more. One that is out of memory for a moment is not lost."""
        trouble = self._trouble() if self.is_of_use else None
        if trouble is not None:
            raise DeviceLost(f"a trial call failed, too: {trouble}")

    def _trouble(self) -> str | None:
        model = self._model()
        if model is None:
            return None
        try:
            output = random_rows(model, self._shape, 1)(range(1))
            return None if bool(torch.isfinite(output).all()) else "its result is not finite"
        except torch.OutOfMemoryError:
            return None
        except Exception as error:
            return f"{type(error).__name__}: {first_line(error)}"
