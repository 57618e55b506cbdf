"""JSON request bodies: strict parsing, limits on the JSON's shape, and error messages of one sentence.

Values are checked strictly (``"2"``, ``1.5`` and ``true`` are not whole numbers). Unknown fields produce a warning;
fields that would change the result in an unsupported way are refused. The shape (depth, numbers of keys and values) is
checked on the bytes in linear time before anything is built: about ten milliseconds per megabyte.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Final, TypedDict, TypeVar, get_args

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from diffserve.api.errors import InvalidRequest
from diffserve.api.types import Priority

MAX_SHOWN_FIELDS = 10

MAX_JSON_DEPTH: Final = 32
MAX_KEYS: Final = 10_000
MAX_VALUES: Final = 262_144  # as many as the token IDs of a long context
LONG_BYTES: Final = 1 << 20
MAX_LONG_QUOTES: Final = 40_000  # of bodies above LONG_BYTES, which are long because of their images
MAX_SHOWN_CHARS: Final = 40
MAX_DEADLINE_S: Final = 1_000_000.0
FLEX: Final = "flex"
DEADLINE_TEXT: Final = "Deadline in seconds from now; the request is rejected if it cannot be finished by then."
_STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)  # also one without a closing quote
_ALL_BUT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))

CHANGES_NOTHING: Final = "Accepted for compatibility; no effect."
Ignored = Annotated[str, Field(max_length=256, description=CHANGES_NOTHING)]
IgnoredFlag = Annotated[bool, Field(description=CHANGES_NOTHING)]
IgnoredObject = Annotated[dict[str, Any], Field(description=CHANGES_NOTHING)]


class Body(BaseModel):
    """Base class of request bodies.

    Attributes:
        hints: Advice for fields that are missing or empty, by field.
        model: Type of the body, for the names of known fields.
        refused: Unsupported fields that would change the result, with the reason; allowed while they are empty.
        ignored: Fields without effect that produce no warning.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    hints: ClassVar[Mapping[str, str]] = {}
    refused: ClassVar[Mapping[str, str]] = {}
    ignored: ClassVar[frozenset[str]] = frozenset()

    @property
    def warnings(self) -> list[str]:
        """Warnings about unknown fields."""
        extra = self.model_extra or {}
        unknown = [show_name(name) for name in extra if name not in self.ignored and name not in self.refused]
        return [f"unknown fields were ignored: {', '.join(unknown[:MAX_SHOWN_FIELDS])}."] if unknown else []


class WorkBody(Body):
    """Body of a request for work, with its priority and deadline."""

    priority: Annotated[Priority, Field(description="batch: runs when no interactive work is waiting.")] | None = None
    service_tier: Annotated[str, Field(max_length=64, description="flex: the same as priority batch.")] | None = None
    deadline_s: Annotated[float, Field(gt=0.0, le=MAX_DEADLINE_S, description=DEADLINE_TEXT)] | None = None

    def urgency(self, timeout_s: float) -> Urgency:
        """Return the engine's priority and deadline; the deadline is at most ``timeout_s``."""
        tier: Priority = "batch" if self.service_tier == FLEX else "interactive"
        return {"priority": self.priority or tier, "deadline_s": min(self.deadline_s or timeout_s, timeout_s)}


class Urgency(TypedDict):
    """Priority and deadline as arguments of engine requests."""

    priority: Priority
    deadline_s: float


BodyT = TypeVar("BodyT", bound=Body)


def parse(kind: type[BodyT], data: bytes) -> BodyT:
    """Parse and check a JSON body.

    Raises:
        InvalidRequest: The body is invalid; the message names the field, the value and what is allowed.
    """
    check_shape(data)
    try:
        body = kind.model_validate_json(data)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)  # the input may have a million entries
        raise explain(problems, partial(_input, error), kind.hints, kind) from None
    extra = body.model_extra or {}
    check_finite(extra)
    for name in sorted(kind.refused.keys() & extra.keys()):
        if not _is_empty(extra[name]):
            raise InvalidRequest(
                f"{name} is not supported: {kind.refused[name]}", param=name, code="unsupported_parameter"
            )
    return body


def _is_empty(value: object) -> bool:
    return value is None or value is False or value == [] or value == {}


def show(value: object) -> str:
    """Return ``value`` as JSON of printable characters, shortened to 60."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = str(value)
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:61])
    return text if len(text) <= 60 else f"{text[:57]}..."


def check_finite(value: Any) -> None:
    """Refuse NaN and infinities in ``value``; its depth was checked before."""
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest("the body is not valid JSON: numbers must be finite.", code="invalid_json")
    if isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            check_finite(item)


def explain(
    problems: Sequence[Mapping[str, Any]],
    read_input: Callable[[int], Any],
    hints: Mapping[str, str],
    model: type[BaseModel] | None = None,
) -> InvalidRequest:
    """Turn pydantic's errors into one error with a message of one sentence.

    The deepest problem is explained: if a value fits no type of a union, that of the type that fits best.

    Args:
        problems: Pydantic's error details, without the inputs.
        read_input: Returns the input of the problem at an index; it may be large.
        hints: Advice for fields that are missing or empty, by field.
        model: Type of the body, for the names of known fields.
    """
    index = max(range(len(problems)), key=lambda i: (problems[i]["type"] in _TOO_LONG, len(problems[i]["loc"])))
    problem = problems[index]
    kind, context = problem["type"], problem.get("ctx", {})
    name = _path(problem["loc"])
    hint = hints.get(name or "", "give it")
    if kind == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON: {context['error']}.", code="invalid_json")
    if name is None:
        return InvalidRequest("the body must be a JSON object.", code="invalid_json")
    if kind == "extra_forbidden":
        field_names = ", ".join(_known_fields(model, problem["loc"]))
        return InvalidRequest(
            f"{name} is an unknown field; {f'use {field_names}' if field_names else 'leave it out'}.", param=name
        )
    if kind == "missing" and isinstance(problem["loc"][-1], int):
        message = f"{_path(problem['loc'][:-1])} has too few values; give two numbers."
        return InvalidRequest(message, param=name, code="missing_required_parameter")
    if kind == "missing":
        return InvalidRequest(f"{name} is missing; {hint}.", param=name, code="missing_required_parameter")
    if kind == "string_too_short":
        label = name if "[" in name else f"the {name}"
        return InvalidRequest(f"{label} is empty; {hint}.", param=name, code=f"empty_{_field_name(name)}")
    if kind == "too_short" and context["min_length"] > 1:
        length, min_length = context["actual_length"], context["min_length"]
        message = f"{name} has {length} entries; at least {min_length} are needed."
        return InvalidRequest(message, param=name, code="empty_array")
    if kind == "too_short":
        hint = hints.get(name, "give at least one entry")
        return InvalidRequest(f"{name} is an empty list; {hint}.", param=name, code="empty_array")
    if kind in _TOO_LONG:
        unit, code = _TOO_LONG[kind]
        limit, length = context["max_length"], context.get("actual_length")
        if limit == 0:
            return InvalidRequest(f"{name} is not supported; leave it out.", param=name, code="unsupported_parameter")
        length = len(read_input(index)) if length is None else length
        return InvalidRequest(f"{name} has {length} {unit}; at most {limit} are allowed.", param=name, code=code)
    return InvalidRequest(f"{name} is {show(read_input(index))}; {_requirement(kind, context)}.", param=name)


def _input(error: ValidationError, index: int) -> Any:
    return error.errors(include_url=False)[index]["input"]


_TOO_LONG: Final = {
    "string_too_long": ("characters", "string_above_max_length"),
    "too_long": ("entries", "array_above_max_length"),
}
_KIND: Final = re.compile(r"[A-Z][A-Za-z0-9]*")
_BRANCHES: Final = frozenset({"str", "int", "float", "bool", "none"})


def _path(loc: tuple[int | str, ...]) -> str | None:
    """Format a location without the types that pydantic tried: ``("messages", 3, "str")`` is ``messages[3]``."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in _BRANCHES and not _KIND.fullmatch(part) and not any(mark in part for mark in "[]-"):
            path += f".{show_name(part)}" if path else show_name(part)
    return path or None


def _known_fields(model: type[BaseModel] | None, loc: Sequence[int | str]) -> list[str]:
    """Return the fields of the model inside ``model`` that has the location ``loc``, without its last part."""
    models = [] if model is None else [model]
    for part in loc[:-1]:
        annotations = [item.model_fields[part].annotation for item in models if part in item.model_fields]
        if annotations:
            models = [item for annotation in annotations for item in _models_in(annotation)]
        elif any(item.__name__ == part for item in models):
            models = [item for item in models if item.__name__ == part]
    return list(dict.fromkeys(name for item in models for name in item.model_fields))


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the models in ``annotation``, which may be a union, a list or annotated."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]


def _field_name(path: str) -> str:
    """Return the last field of ``path`` without list indices."""
    return re.sub(r"\[\d+\]", "", path).rpartition(".")[2]


def _requirement(kind: str, context: dict[str, Any]) -> str:
    requirements = {
        "int_type": "it must be a whole number",
        "int_parsing": "it must be a whole number",
        "int_from_float": "it must be a whole number",
        "float_parsing": "it must be a number",
        "bool_parsing": "it must be true or false",
        "int_parsing_size": "the number is too large",
        "float_type": "it must be a number",
        "finite_number": "it must be a finite number",
        "string_type": "it must be text",
        "bool_type": "it must be true or false",
        "list_type": "it must be a list",
        "tuple_type": "it must be a list",
        "dict_type": "it must be an object",
        "model_type": "it must be an object",
        "model_attributes_type": "it must be an object",
        "string_pattern_mismatch": "it must not contain control characters",
        "greater_than": "it must be more than {gt:g}",
        "greater_than_equal": "it must be at least {ge}",
        "less_than_equal": "it must be at most {le}",
        "literal_error": "it must be {expected}",
    }
    if kind == "string_pattern_mismatch" and str(context.get("pattern", "")).startswith("^[0-9]"):
        return "it must be a whole number of 0 or more"
    return requirements.get(kind, "it is not valid").format_map(context)


def check_shape(data: bytes) -> None:
    """Refuse JSON that is nested too deeply, has too many keys or values, or repeats a key in one object.

    Invalid JSON may pass; the parser reports it with a better message.

    Raises:
        InvalidRequest: A limit is exceeded or a key is repeated.
    """
    num_quotes = data.count(b'"') - data.count(b'\\"')
    if num_quotes > (4 * MAX_VALUES if len(data) <= LONG_BYTES else MAX_LONG_QUOTES):
        raise _too_many("values", num_quotes // 2, MAX_VALUES)
    if data.count(b"{") + data.count(b"[") > MAX_JSON_DEPTH or data.count(b":") + data.count(b",") > MAX_KEYS:
        _check_counts(_STRING.sub(b"", data))
    _check_keys(data)


def check_strict(data: bytes) -> None:
    """Check the shape, and refuse invalid JSON, including NaN, lone surrogates and bad UTF-8."""
    check_shape(data)
    try:
        msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        raise InvalidRequest(f"the body is not valid JSON: {reason}.", code="invalid_json") from None


def show_name(name: str) -> str:
    """Return a client's field name in a form that is safe in a message and a header."""
    return re.sub(r"[^\w.\-]", "?", name, flags=re.ASCII)[:MAX_SHOWN_CHARS]


def _check_counts(marks: bytes) -> None:
    """Check the numbers of keys and values and the depth of ``marks``, the JSON without its strings."""
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
        json.loads(data.decode(), object_pairs_hook=_refuse_repeated_keys, parse_int=float)
    except (ValueError, RecursionError):
        return  # invalid JSON


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> None:
    if len({name for name, _ in pairs}) == len(pairs):
        return
    names: set[str] = set()
    for name, _ in pairs:
        if name in names:
            shown = show_name(name)
            raise InvalidRequest(
                f"{shown} is given twice in one object; give it once.", param=shown, code="duplicate_parameter"
            )
        names.add(name)


def _too_many(unit: str, count: int, limit: int) -> InvalidRequest:
    return InvalidRequest(f"the body has {count} {unit}; at most {limit} are allowed.", code="body_too_complex")
