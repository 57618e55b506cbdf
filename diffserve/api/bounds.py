"""One sentence for what is out of bounds, a setting or a field of a request, before anything is allocated."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from diffserve.api.errors import ConfigError, InvalidRequest

LEAST_SHARE: Final = 0.01
MOST_SHARE: Final = 100.0


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


def check(ok: bool, message: str, param: str, code: str = "invalid_value") -> None:
    """InvalidRequest with ``message``, blaming the field ``param``, unless ``ok``."""
    if not ok:
        raise InvalidRequest(message, param=param, code=code)


def is_plain_name(name: str) -> bool:
    """Whether ``name`` is that of one thing in a folder, and leads nowhere else."""
    return bool(name.strip()) and not re.search(r"[/\\<>:\x00-\x1f\x7f]", name) and name not in (".", "..")


def is_relative_name(name: str) -> bool:
    """Return whether ``name`` is a plain name or a path of plain names with slashes, such as ``style/ink``."""
    return all(map(is_plain_name, name.split("/")))


def check_chars(text: str, most: int, param: str, what: str = "") -> None:
    """InvalidRequest where ``text``, called ``what`` or else ``param``, has more than ``most`` characters or half ones.

    Halves come of bytes that are no UTF-8 and were read as text all the same, as a shell's are.
    """
    message = f"{what or param} has {len(text)} characters; at most {most} are taken."
    check(len(text) <= most, message, param, "string_above_max_length")
    try:
        text.encode()
    except UnicodeEncodeError:
        message = f"{param} holds half of a character (a lone surrogate); give text that UTF-8 can hold."
        raise InvalidRequest(message, param=param) from None


def check_num(count: int, most: int, what: str) -> None:
    """InvalidRequest unless 1 to ``most`` of ``what`` are asked for."""
    check(1 <= count <= most, f"n is {count}; ask for 1 to {most} {what} in one request.", "n")


def check_share(share: float) -> None:
    """InvalidRequest for a share of the engine that is none."""
    ok = LEAST_SHARE <= share <= MOST_SHARE
    check(ok, f"share is {share}; give {LEAST_SHARE:g} to {MOST_SHARE:g}, 1 being everybody's.", "share")


def check_deadline(deadline_s: float | None) -> None:
    """InvalidRequest for a deadline that is no positive number of seconds."""
    ok = deadline_s is None or (math.isfinite(deadline_s) and deadline_s > 0)
    check(ok, f"deadline_s is {deadline_s}; it must be a positive number of seconds.", "deadline_s")
