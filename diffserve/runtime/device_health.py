"""Detection of lost devices, and fault injection for tests.

After some errors ("sticky" in CUDA's documentation) every call of the process fails. Any other unexpected error is a
reason for a small UNet call that worked when the process started.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

import torch

from diffserve.api.errors import DeviceLost
from diffserve.faults import FAULTS_VARIABLE, Fault, parse_faults
from diffserve.runtime import DiffusionModel
from diffserve.runtime.unet.random_rows import random_rows

PROBE_CELLS: Final = 8

STICKY_CODES: Final = frozenset({214, 220, 700, 702, *range(710, 720), 721, 911})
"""cudaError_t values after which the context is lost.

Uncorrectable memory (214, 220), an illegal address (700), a kernel timeout (702), an assertion (710), kernel exceptions
(714 to 719), a leak, a link.
"""

STICKY_WORDS: Final = re.compile(
    r"device-side assert|illegal memory access|illegal instruction|unspecified launch failure|misaligned address"
    r"|hardware stack error|invalid program counter|operation not supported on global/shared address space"
    r"|launch timed out|uncorrectable (ECC|NVLink) error|CU(BLAS|SOLVER)_STATUS_(NOT_INITIALIZED|EXECUTION_FAILED)"
    r"|CUDNN_STATUS_(NOT_INITIALIZED|EXECUTION_FAILED)|command buffer exited|kIOGPUCommandBufferCallbackError"
    r"|DEVICE_LOST|device lost",
    re.IGNORECASE,
)
"""Messages of CUDA, ROCm, MPS and XPU for lost devices, in torch's wording."""

logger = logging.getLogger(__name__)


def is_sticky(error: BaseException) -> bool:
    """Return whether ``error``, or a cause of it, makes the device unusable; lack of memory does not."""
    for cause in _chain(error):
        if not isinstance(cause, torch.OutOfMemoryError) and isinstance(cause, RuntimeError):
            code = getattr(cause, "error_code", None)
            if code in STICKY_CODES if isinstance(code, int) else STICKY_WORDS.search(str(cause)):
                return True
    return False


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` is, or comes from, a lack of device memory."""
    return any(isinstance(cause, torch.OutOfMemoryError) for cause in _chain(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error`` and its causes."""
    visited: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in visited:
        visited.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__


def raise_if_sticky(error: Exception) -> None:
    """Raise DeviceLost if ``error`` is sticky; call this before an error is attributed to a single image or text."""
    if is_sticky(error):
        raise DeviceLost(f"{type(error).__name__}: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """Return the first line of the message, shortened."""
    return str(error).partition("\n")[0][:200]


class DeviceProbe:
    """A UNet call of one row of the smallest size, used if it works at the start and while the model is loaded."""

    def __init__(self, model: DiffusionModel) -> None:
        side_px = PROBE_CELLS * model.info.vae_factor
        self._shape = side_px, side_px, model.text.window_tokens
        self._model = ref(model)
        is_local = not model.unet.is_hollow  # else only error messages show a lost device
        self.is_of_use = is_local and self._trouble() is None
        if is_local and not self.is_of_use:
            logger.warning(
                "the UNet cannot generate an image of %d pixels: a lost device is only recognized by its error "
                "messages",
                side_px,
            )

    @property
    def is_gone(self) -> bool:
        """Whether the model was unloaded."""
        return self._model() is None

    def check(self) -> None:
        """Raise DeviceLost if the device no longer computes. Running out of memory is not a loss."""
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


if TYPE_CHECKING:
    from diffserve.runtime.unet.unet import UNetRunner

STICKY_TEXT: Final = "CUDA error: device-side assert triggered"


def install_faults(unet: UNetRunner) -> None:
    """Make ``unet`` fail as the environment variable says. Raises ConfigError if that is invalid."""
    faults = parse_faults(os.environ.get(FAULTS_VARIABLE, ""))
    faults = tuple(fault for fault in faults if fault.place == "unet")
    if faults:
        logger.warning("%s is set: this engine injects faults", FAULTS_VARIABLE)
        unet.predict = with_faults(unet.predict, faults)  # type: ignore[method-assign]


def with_faults(predict: Callable[..., Any], faults: Sequence[Fault]) -> Callable[..., Any]:
    """Return ``predict`` with ``faults``."""
    calls = itertools.count(1)

    @wraps(predict)
    def call(*arguments: Any, **keywords: Any) -> Any:
        number = next(calls)
        for _, kind, at in faults:
            if kind == "hang" and number == at:
                while True:
                    time.sleep(3600.0)
            if kind == "error" and number == at:
                raise RuntimeError("an injected fault")
            if kind == "sticky" and number >= at:
                raise RuntimeError(STICKY_TEXT)
            if kind == "broken" and number >= at:
                raise RuntimeError("an injected, permanent fault")
        return predict(*arguments, **keywords)

    return call
