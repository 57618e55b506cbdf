"""JSON bodies: read strictly, and explained in one sentence where they are wrong.

Strict about values (``"2"``, ``1.5`` and ``true`` are no whole numbers), lenient about fields: what OpenAI's clients
send and this server cannot use is taken and ignored, unknown fields are named in a warning, and fields that would
change the answer in a way that is not supported are refused.

What JSON may look like at all is found out in linear time before anything is built of it: counting is done on the
bytes, without the strings, by functions that pass over them once. A body of a megabyte costs some ten milliseconds.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, TypedDict, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from diffserve.api.errors import InvalidRequest
from diffserve.api.types import Priority

MAX_SHOWN_FIELDS = 10

MAX_JSON_DEPTH: Final = 32
MAX_KEYS: Final = 10_000
MAX_VALUES: Final = 262_144  # the token ids of a long context are as many
LONG_BYTES: Final = 1 << 20
MAX_LONG_QUOTES: Final = 40_000  # what is longer is so for its pictures
MAX_SHOWN_CHARS: Final = 40
MAX_DEADLINE_S: Final = 1_000_000.0
FLEX: Final = "flex"
BY_THEN: Final = "Seconds, from now, after which nobody wants it: refused if it cannot be done by then."
_STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)  # one that does not end is one, too
_ALL_BUT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))


CHANGES_NOTHING: Final = "Taken for compatibility; changes nothing."
Ignored = Annotated[str, Field(max_length=256, description=CHANGES_NOTHING)]
IgnoredFlag = Annotated[bool, Field(description=CHANGES_NOTHING)]
IgnoredObject = Annotated[dict[str, Any], Field(description=CHANGES_NOTHING)]


class Body(BaseModel):
    """What may stand in the body of a request.

    hints    what to say where a field is missing or empty
    refused  fields that would change the answer and are not offered, with the reason; harmless while they are empty
    ignored  fields that change nothing here and are worth no warning
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    hints: ClassVar[Mapping[str, str]] = {}
    refused: ClassVar[Mapping[str, str]] = {}
    ignored: ClassVar[frozenset[str]] = frozenset()

    @property
    def warnings(self) -> list[str]:
        """What the caller should know: which fields mean nothing here."""
        extra = self.model_extra or {}
        unknown = [show_name(name) for name in extra if name not in self.ignored and name not in self.refused]
        return [f"unknown fields were ignored: {', '.join(unknown[:MAX_SHOWN_FIELDS])}."] if unknown else []


class WorkBody(Body):
    """What a body may say of how urgent its work is."""

    priority: Annotated[Priority, Field(description="batch: gets what interactive work leaves.")] | None = None
    service_tier: Annotated[str, Field(max_length=64, description="flex means the priority batch.")] | None = None
    deadline_s: Annotated[float, Field(gt=0.0, le=MAX_DEADLINE_S, description=BY_THEN)] | None = None

    def urgency(self, timeout_s: float) -> Urgency:
        """Of its requests, which are given up after ``timeout_s`` in any case."""
        tier: Priority = "batch" if self.service_tier == FLEX else "interactive"
        return {"priority": self.priority or tier, "deadline_s": min(self.deadline_s or timeout_s, timeout_s)}


class Urgency(TypedDict):
    """The same in the words of requests."""

    priority: Priority
    deadline_s: float


BodyT = TypeVar("BodyT", bound=Body)


def parse(kind: type[BodyT], data: bytes) -> BodyT:
    """Read the JSON in ``data``. InvalidRequest names the field, the value and what is taken instead."""
    check_shape(data)
    try:
        body = kind.model_validate_json(data)
    except ValidationError as error:
        raise _explain(error, kind.hints) from None
    extra = body.model_extra or {}
    _check_finite(extra)
    for name in sorted(kind.refused.keys() & extra.keys()):
        if not _says_nothing(extra[name]):
            raise InvalidRequest(
                f"{name} is not supported: {kind.refused[name]}", param=name, code="unsupported_parameter"
            )
    return body


def _says_nothing(value: object) -> bool:
    return value is None or value is False or value == [] or value == {}


def show(value: object) -> str:
    """``value`` as it stood in the JSON, within 60 characters."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _check_finite(value: Any) -> None:
    """Refuse NaN and infinities in ``value``, which is not nested deeply."""
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest("the body is not valid JSON: numbers must be finite.", code="invalid_json")
    if isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            _check_finite(item)


def _explain(error: ValidationError, hints: Mapping[str, str]) -> InvalidRequest:
    """One sentence for the complaint that reaches deepest: of a value that fits no kind, the kind that fitted best."""
    complaints = error.errors(include_url=False, include_input=False)  # the input may be a million entries
    at = max(range(len(complaints)), key=lambda i: (complaints[i]["type"] in _TOO_LONG, len(complaints[i]["loc"])))
    worst = complaints[at]
    kind, context = worst["type"], worst.get("ctx", {})
    name = _path(worst["loc"])
    hint = hints.get(name or "", "give it")
    if kind == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON: {context['error']}.", code="invalid_json")
    if name is None:
        return InvalidRequest("the body must be a JSON object.", code="invalid_json")
    if kind == "missing":
        return InvalidRequest(f"{name} is missing; {hint}.", param=name, code="missing_required_parameter")
    if kind == "string_too_short":
        called = name if "[" in name else f"the {name}"
        return InvalidRequest(f"{called} is empty; {hint}.", param=name, code=f"empty_{_bare(name)}")
    if kind == "too_short":
        return InvalidRequest(f"{name} is an empty list; {hint}.", param=name, code="empty_array")
    if kind in _TOO_LONG:
        unit, code = _TOO_LONG[kind]
        most, has = context["max_length"], context.get("actual_length")
        if most == 0:
            return InvalidRequest(f"{name} is not supported; leave it out.", param=name, code="unsupported_parameter")
        has = len(error.errors(include_url=False)[at]["input"]) if has is None else has
        return InvalidRequest(f"{name} has {has} {unit}; at most {most} are taken.", param=name, code=code)
    value = error.errors(include_url=False)[at]["input"]
    return InvalidRequest(f"{name} is {show(value)}; {_wanted(kind, context)}.", param=name)


_TOO_LONG: Final = {
    "string_too_long": ("characters", "string_above_max_length"),
    "too_long": ("entries", "array_above_max_length"),
}
_KIND: Final = re.compile(r"[A-Z][A-Za-z0-9]*")
_BRANCHES: Final = frozenset({"str", "int", "float", "bool", "none"})


def _path(loc: tuple[int | str, ...]) -> str | None:
    """("messages", 3, "content", "str") as ``messages[3].content``: the kinds that were tried are no part of it."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in _BRANCHES and not _KIND.fullmatch(part) and not any(mark in part for mark in "[]-"):
            path += f".{show_name(part)}" if path else show_name(part)
    return path or None


def _bare(path: str) -> str:
    """The field that ``path`` leads to, without the place in a list."""
    return re.sub(r"\[\d+\]", "", path).rpartition(".")[2]


def _wanted(kind: str, context: dict[str, Any]) -> str:
    wanted = {
        "int_type": "it must be a whole number",
        "int_parsing": "it must be a whole number",
        "int_from_float": "it must be a whole number",
        "float_parsing": "it must be a number",
        "bool_parsing": "it must be true or false",
        "int_parsing_size": "that is too large",
        "float_type": "it must be a number",
        "finite_number": "it must be a finite number",
        "string_type": "it must be text",
        "bool_type": "it must be true or false",
        "list_type": "it must be a list",
        "tuple_type": "it must be a list",
        "dict_type": "it must be an object",
        "model_type": "it must be an object",
        "model_attributes_type": "it must be an object",
        "string_pattern_mismatch": "it must not hold control characters",
        "greater_than": "it must be more than {gt:g}",
        "greater_than_equal": "it must be at least {ge}",
        "less_than_equal": "it must be at most {le}",
        "literal_error": "it must be {expected}",
    }
    if kind == "string_pattern_mismatch" and str(context.get("pattern", "")).startswith("^[0-9]"):
        return "it must be a whole number from 0 on"
    return wanted.get(kind, "that is not taken").format_map(context)


def check_shape(data: bytes) -> None:
    """Refuse JSON that is nested too deeply, has too many keys or values, or names a key twice in one object.

    InvalidRequest says which. What is no JSON at all may pass: whoever parses it says that better.
    """
    num_quotes = data.count(b'"') - data.count(b'\\"')
    if num_quotes > (4 * MAX_VALUES if len(data) <= LONG_BYTES else MAX_LONG_QUOTES):
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
