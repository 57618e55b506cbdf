"""Import the model libraries without the noise they make about kernels and formats nobody asked for.

diffusers imports torchao when it is installed; torchao then reports GPU kernels that it could not load, and registers
two enums in a way that torch calls deprecated. None of it concerns int8 weights. Only these loggers are turned down,
and only while the import runs: their later messages are heard.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

NOISY_LOGGERS = ("torchao", "torch.utils._pytree", "diffusers.quantizers.torchao.torchao_quantizer")


@contextmanager
def hushed(*names: str) -> Iterator[None]:
    """Let the loggers called ``names`` say errors only, until the block ends."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def import_quietly(module: str, name: str) -> Any:
    """Attribute ``name`` of ``module``, imported now if it has not been."""
    with hushed(*NOISY_LOGGERS):
        return getattr(import_module(module), name)
