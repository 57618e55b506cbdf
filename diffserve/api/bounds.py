"""Checks of settings and request fields, with error messages that name the value and the limits."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from diffserve.api.errors import ConfigError, InvalidRequest

LEAST_SHARE: Final = 0.01
MOST_SHARE: Final = 100.0


class Between(NamedTuple):
    """The allowed range of a setting, and an optional reason for the error message."""

    low: float
    high: float
    why: str = ""


def check_bounds(settings: Any, bounds: Mapping[str, Between]) -> None:
    """Check that the fields of ``settings`` named in ``bounds`` are in range; ``None`` is allowed.

    Raises:
        ConfigError: A field is out of range.
    """
    for name, (low, high, why) in bounds.items():
        value = getattr(settings, name)
        if value is not None and not (math.isfinite(value) and low <= value <= high):
            reason = f": {why}" if why else ""
            raise ConfigError(f"{name} is {value}; it must lie between {low:,} and {high:,}{reason}.", param=name)


def check(ok: bool, message: str, param: str, code: str = "invalid_value") -> None:
    """Check a condition of a request field.

    Raises:
        InvalidRequest: ``ok`` is false; with ``message``, about the field ``param``.
    """
    if not ok:
        raise InvalidRequest(message, param=param, code=code)


def is_plain_name(name: str) -> bool:
    """Return whether ``name`` is a single file name that cannot leave its folder."""
    return bool(name.strip()) and not re.search(r"[/\\<>:\x00-\x1f\x7f]", name) and name not in (".", "..")


def is_relative_name(name: str) -> bool:
    """Return whether ``name`` is a plain name or a path of plain names with slashes, such as ``style/ink``."""
    return all(map(is_plain_name, name.split("/")))


def check_chars(text: str, limit: int, param: str, what: str = "") -> None:
    """Check the length and encoding of ``text``.

    Args:
        text: The text.
        limit: Maximum number of characters.
        param: The request field.
        what: Name of the text in the error message; "": ``param``.

    Raises:
        InvalidRequest: The text is too long, or has lone surrogates (from bytes that are not UTF-8).
    """
    message = f"{what or param} has {len(text)} characters; at most {limit} are allowed."
    check(len(text) <= limit, message, param, "string_above_max_length")
    try:
        text.encode()
    except UnicodeEncodeError:
        message = f"{param} has a lone surrogate, which is half of a character; give valid Unicode text."
        raise InvalidRequest(message, param=param) from None


def check_num(count: int, limit: int, what: str) -> None:
    """Check that 1 to ``limit`` results are requested.

    Raises:
        InvalidRequest: ``count`` is out of range.
    """
    check(1 <= count <= limit, f"n is {count}; ask for 1 to {limit} {what} in one request.", "n")


def check_share(share: float) -> None:
    """Check the weight of a client in fair sharing.

    Raises:
        InvalidRequest: ``share`` is out of range.
    """
    ok = LEAST_SHARE <= share <= MOST_SHARE
    check(ok, f"share is {share}; give {LEAST_SHARE:g} to {MOST_SHARE:g} (default: 1).", "share")


def check_deadline(deadline_s: float | None) -> None:
    """Check that a deadline is ``None`` or a positive number of seconds.

    Raises:
        InvalidRequest: It is not.
    """
    ok = deadline_s is None or (math.isfinite(deadline_s) and deadline_s > 0)
    check(ok, f"deadline_s is {deadline_s}; it must be a positive number of seconds.", "deadline_s")
