"""What JSON may look like at all, found out in linear time before anything is built of it.

Counting is done on the bytes, without the strings, by functions that pass over them once: a body of a megabyte costs
some ten milliseconds, whatever it holds.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

import msgspec

from diffserve.errors import InvalidRequest

MAX_JSON_DEPTH: Final = 32
MAX_KEYS: Final = 10_000
MAX_VALUES: Final = 262_144  # the token ids of a long context are as many
MAX_SHOWN_CHARS: Final = 40

_STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)  # one that does not end is one, too
_ALL_BUT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))


def check_shape(data: bytes) -> None:
    """Refuse JSON that is nested too deeply, has too many keys or values, or names a key twice in one object.

    InvalidRequest says which. What is no JSON at all may pass: whoever parses it says that better.
    """
    num_quotes = data.count(b'"') - data.count(b'\\"')
    if num_quotes > 4 * MAX_VALUES:
        raise _too_many("values", num_quotes // 2, MAX_VALUES)
    if data.count(b"{") + data.count(b"[") > MAX_JSON_DEPTH or data.count(b":") + data.count(b",") > MAX_KEYS:
        _check_counts(_STRING.sub(b"", data))
    _check_keys(data)


def check_strict(data: bytes) -> None:
    """Refuse what :func:`check_shape` refuses and what is no JSON; NaN, lone surrogates and bad UTF-8 are none."""
    check_shape(data)
    try:
        msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        raise InvalidRequest(f"the body is not valid JSON: {reason}.", code="invalid_json") from None


def show_name(name: str) -> str:
    """``name`` as it may stand in an answer and a header."""
    return re.sub(r"[^\w.\-]", "?", name, flags=re.ASCII)[:MAX_SHOWN_CHARS]


def _check_counts(marks: bytes) -> None:
    """``marks``: the JSON without its strings."""
    num_keys, brackets = marks.count(b":"), marks.translate(None, _ALL_BUT_BRACKETS)
    num_values = num_keys + marks.count(b",") + len(brackets)
    if num_keys > MAX_KEYS:
        raise _too_many("keys", num_keys, MAX_KEYS)
    if num_values > MAX_VALUES:
        raise _too_many("values", num_values, MAX_VALUES)
    depth = 0
    for bracket in brackets:
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_JSON_DEPTH:
            raise InvalidRequest(f"the body is nested deeper than {MAX_JSON_DEPTH} levels.", code="invalid_json")


def _check_keys(data: bytes) -> None:
    try:
        json.loads(data.decode(), object_pairs_hook=_once_each, parse_int=float)
    except (ValueError, RecursionError):
        return  # no JSON


def _once_each(pairs: list[tuple[str, Any]]) -> None:
    if len({name for name, _ in pairs}) == len(pairs):
        return
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            shown = show_name(name)
            raise InvalidRequest(
                f"{shown} is given twice in one object; give it once.", param=shown, code="duplicate_parameter"
            )
        seen.add(name)


def _too_many(what: str, has: int, most: int) -> InvalidRequest:
    return InvalidRequest(f"the body has {has} {what}; at most {most} are taken.", code="body_too_complex")
