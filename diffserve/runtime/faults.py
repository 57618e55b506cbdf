"""Fault injection for tests of real engine processes: ``DIFFSERVE_FAULTS=unet.sticky@20,unet.hang@50``.

``unet.KIND@N`` counts UNet calls from 1 once the engine is ready. error: call N raises. sticky, broken: call N and all
later ones raise CUDA's message of a failed assertion, or an unknown error. hang: call N never returns. The variable is
read once when the process starts to serve.
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
    """A fault of ``kind`` at call ``at`` of the UNet."""

    kind: str
    at: int


def parse(text: str) -> tuple[Fault, ...]:
    """Parse the faults in ``text``. Raises ConfigError for an invalid one."""
    faults = []
    for word in filter(None, text.replace(" ", "").split(",")):
        match = FORM.fullmatch(word)
        if match is None:
            raise ConfigError(f"{VARIABLE} holds {word!r}; a fault is unet.KIND@CALL, KIND of {', '.join(KINDS)}.")
        faults.append(Fault(match[1], int(match[2])))
    return tuple(faults)


def install(unet: UNetRunner) -> None:
    """Make ``unet`` fail as the environment variable says. Raises ConfigError if that is invalid."""
    faults = parse(os.environ.get(VARIABLE, ""))
    if faults:
        logger.warning("%s is set: this engine breaks on purpose", VARIABLE)
        unet.predict = with_faults(unet.predict, faults)  # type: ignore[method-assign]


def with_faults(predict: Callable[..., Any], faults: Sequence[Fault]) -> Callable[..., Any]:
    """Return ``predict`` with ``faults``."""
    calls = itertools.count(1)

    @wraps(predict)
    def call(*arguments: Any, **keywords: Any) -> Any:
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
        return predict(*arguments, **keywords)

    return call
