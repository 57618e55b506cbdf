"""Between what a setting makes sense: one sentence for a number that is out of bounds, before anything is allocated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from diffserve.errors import ConfigError


class Between(NamedTuple):
    """The least and the most a setting may be, and what to say of one that is not ("" says nothing more)."""

    low: float
    high: float
    why: str = ""


def check_bounds(settings: Any, bounds: Mapping[str, Between]) -> None:
    """ConfigError for the first of ``settings``' fields in ``bounds`` that lies outside; ``None`` passes."""
    for name, (low, high, why) in bounds.items():
        value = getattr(settings, name)
        if value is not None and not (math.isfinite(value) and low <= value <= high):
            reason = f": {why}" if why else ""
            raise ConfigError(f"{name} is {value}; it must lie between {low:,} and {high:,}{reason}.", param=name)
