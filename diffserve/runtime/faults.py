"""Faults on purpose, so that tests break a real engine process: ``DIFFSERVE_FAULTS=unet.sticky@20,unet.hang@50``.

``unet.KIND@N``, several divided by commas, counts the calls of the UNet from when the engine is ready, the first is 1::

    error    call N raises, the next one works
    sticky   call N and all after it raise what CUDA says after a failed assertion
    broken   call N and all after it raise something that no table knows
    hang     call N never returns, while other threads live on

The variable is read once, as the process begins to serve. Without it nothing is wrapped and nothing is asked.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from diffserve.api.errors import ConfigError

if TYPE_CHECKING:
    from diffserve.runtime.unet.unet import UNetRunner

VARIABLE: Final = "DIFFSERVE_FAULTS"
KINDS: Final = ("error", "sticky", "broken", "hang")
FORM: Final = re.compile(rf"unet\.({'|'.join(KINDS)})@([1-9]\d{{0,8}})")
STICKY_TEXT: Final = "CUDA error: device-side assert triggered"

logger = logging.getLogger(__name__)


class Fault(NamedTuple):
    """``kind`` at call ``at`` of the UNet."""

    kind: str
    at: int


def parse(text: str) -> tuple[Fault, ...]:
    """The faults that ``text`` names. ConfigError for what is none."""
    found = []
    for word in filter(None, text.replace(" ", "").split(",")):
        match = FORM.fullmatch(word)
        if match is None:
            raise ConfigError(f"{VARIABLE} holds {word!r}; a fault is unet.KIND@CALL, KIND of {', '.join(KINDS)}.")
        found.append(Fault(match[1], int(match[2])))
    return tuple(found)


def install(unet: UNetRunner) -> None:
    """Break ``unet`` as the environment says. ConfigError where that is said wrongly."""
    faults = parse(os.environ.get(VARIABLE, ""))
    if faults:
        logger.warning("%s is set: this engine breaks on purpose", VARIABLE)
        unet.predict = broken(unet.predict, faults)  # type: ignore[method-assign]


def broken(predict: Callable[..., Any], faults: Sequence[Fault]) -> Callable[..., Any]:
    """``predict`` with ``faults``."""
    calls = itertools.count(1)

    @wraps(predict)
    def call(*arguments: Any, **named: Any) -> Any:
        number = next(calls)
        for kind, at in faults:
            if kind == "hang" and number == at:
                while True:
                    time.sleep(3600.0)
            if kind == "error" and number == at:
                raise RuntimeError("a fault on purpose")
            if kind == "sticky" and number >= at:
                raise RuntimeError(STICKY_TEXT)
            if kind == "broken" and number >= at:
                raise RuntimeError("a fault on purpose, and for good")
        return predict(*arguments, **named)

    return call
