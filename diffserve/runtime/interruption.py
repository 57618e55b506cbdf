"""Network calls that stop early: a measurement in an idle moment ends as soon as a request arrives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn.modules.module import register_module_forward_pre_hook


class InterruptedCallError(Exception):
    """A network call was given up between two of its layers."""


@contextmanager
def interrupted_by(has_arrived: Callable[[], bool]) -> Iterator[None]:
    """Raise InterruptedCallError before the next layer of a network inside, once ``has_arrived`` returns true.

    Compiled calls run to their end.
    """

    def check(*_: Any) -> None:
        if has_arrived():
            raise InterruptedCallError

    handle = register_module_forward_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()
