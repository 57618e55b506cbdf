"""Default limits for texts that follow a JSON Schema, so that every value ends, and the length of such texts.

Limits are added only if the schema sets none. ``docs/http.md`` states them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

MAX_CHARS: Final = 1024
"""Maximum number of characters of a string."""

MAX_ITEMS: Final = 64
"""Maximum number of items of an array, and of entries of an object with free keys."""

MAX_CHOICES: Final = 32
"""Maximum number of members of a union that get limits; with more the parser would need too many states."""

MAX_INTEGER: Final = 999_999_999_999_999_872
"""The largest number of 18 digits that a double can represent."""

MAX_NUMBER, DECIMALS, BOUNDED_DECIMALS = 10**15, 7, 9
"""A number has at most 24 characters; it has more decimals if the schema sets bounds."""

ANY_VALUE: Final = "any-value"
COMBINED: Final = ("$ref", "anyOf", "oneOf", "allOf")
KEYWORDS: Final[dict[str, frozenset[str]]] = {
    "object": frozenset({"properties", "required", "additionalProperties", "patternProperties"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
}
"""Keywords that imply a type if the schema names none."""

ANNOTATIONS: Final = frozenset(
    {
        *("$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description", "examples"),
        *("id", "readOnly", "title", "writeOnly"),
    }
)
"""Keywords that do not restrict values."""

UNBOUNDED: Final = re.compile(r"[*+]|\{\d+,\}")
"""Unbounded repetition in a regular expression."""

Schema = dict[str, Any]


def limited(schema: Schema) -> Schema:
    """Return ``schema`` with default limits and without additional properties."""
    changed: Schema = _limited(schema, is_member=False)
    definitions = {name: _limited(part, is_member=False) for name, part in changed.get("$defs", {}).items()}
    return changed | {"$defs": definitions | {ANY_VALUE: _any_value()}}


def _limited(node: Any, *, is_member: bool) -> Any:
    """Limit ``node`` and the schemas in it. A member of a combination only restricts the other members."""
    if node is True or (isinstance(node, dict) and not is_member and node.keys() <= ANNOTATIONS):
        return {"$ref": f"#/$defs/{ANY_VALUE}"}
    if not isinstance(node, dict) or "enum" in node or "const" in node:
        return node
    is_combined = any(name in node for name in COMBINED)
    has_keywords = any(names & node.keys() for names in KEYWORDS.values())
    changed = dict(node)
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(node.get(name), list) and len(node[name]) <= MAX_CHOICES:
            restricts = is_member or has_keywords or (name == "allOf" and len(node[name]) > 1)
            changed[name] = [_limited(part, is_member=restricts) for part in node[name]]
    for name in ("properties", "patternProperties", "definitions"):
        if isinstance(node.get(name), dict):
            changed[name] = {key: _limited(part, is_member=False) for key, part in node[name].items()}
    if isinstance(node.get("prefixItems"), list):
        changed["prefixItems"] = [_limited(part, is_member=False) for part in node["prefixItems"]]
    for name in ("items", "additionalProperties"):
        if name in node:
            changed[name] = _limited(node[name], is_member=False)
    if is_member or is_combined:
        return changed
    if "type" not in node:
        changed["type"] = next(kind for kind, names in KEYWORDS.items() if names & node.keys())
    for kind in types_of(changed):
        if kind in _LIMITS:
            _LIMITS[kind](changed)
    return changed


def types_of(node: Schema) -> tuple[str, ...]:
    """Return the types that ``node`` names."""
    kinds = node.get("type", ())
    return (kinds,) if isinstance(kinds, str) else tuple(kinds)


def _limit_object(node: Schema) -> None:
    if "properties" in node:
        node.setdefault("additionalProperties", False)
    elif "patternProperties" not in node:
        node.setdefault("additionalProperties", {"$ref": f"#/$defs/{ANY_VALUE}"})
    required = node.get("required", ())
    if node.get("additionalProperties") is not False and set(node.get("properties", ())) <= set(required):
        node.setdefault("maxProperties", max(MAX_ITEMS, len(required)))


def _limit_array(node: Schema) -> None:
    if node.get("items") is not False:
        node.setdefault("items", {"$ref": f"#/$defs/{ANY_VALUE}"})
        node.setdefault("maxItems", max(MAX_ITEMS, node.get("minItems", 0), len(node.get("prefixItems", ()))))


def _limit_string(node: Schema) -> None:
    if "pattern" not in node or UNBOUNDED.search(str(node["pattern"])):
        node.setdefault("maxLength", max(MAX_CHARS, node.get("minLength", 0)))


def _limit_integer(node: Schema) -> None:
    _limit_range(node, MAX_INTEGER)


def _limit_number(node: Schema) -> None:
    has_range = any("inimum" in name for name in node) and any("aximum" in name for name in node)
    _limit_range(node, MAX_NUMBER)
    node.setdefault("multipleOf", 10.0 ** -(BOUNDED_DECIMALS if has_range else DECIMALS))


def _limit_range(node: Schema, limit: int) -> None:
    """Add missing bounds; a bound exceeds ``limit`` only if the given bound does."""
    smallest, largest = bounds_of(node)
    if math.isinf(largest):
        node["maximum"] = smallest + limit if smallest >= limit else limit
    if math.isinf(smallest):
        node["minimum"] = largest - limit if largest <= -limit else -limit


def bounds_of(node: Schema) -> tuple[float, float]:
    """Return the smallest and the largest number that ``node`` allows, infinite if it sets no bound."""
    smallest = [node[name] for name in ("minimum", "exclusiveMinimum") if isinstance(node.get(name), int | float)]
    largest = [node[name] for name in ("maximum", "exclusiveMaximum") if isinstance(node.get(name), int | float)]
    return max(smallest, default=-math.inf), min(largest, default=math.inf)


_LIMITS: Final[dict[str, Callable[[Schema], None]]] = {
    "object": _limit_object,
    "array": _limit_array,
    "string": _limit_string,
    "integer": _limit_integer,
    "number": _limit_number,
}


def _any_value() -> Schema:
    """Return the schema of any JSON value, with limits."""
    value = {"$ref": f"#/$defs/{ANY_VALUE}"}
    kinds: Sequence[Schema] = (
        {"type": "string"},
        {"type": "number"},
        {"type": "boolean"},
        {"type": "null"},
        {"type": "array", "items": value},
        {"type": "object", "additionalProperties": value},
    )
    return {"anyOf": [_limited(kind, is_member=False) for kind in kinds]}


BYTES_PER_CHAR: Final = 6
"""Maximum length of one character in a JSON string, as in ``\\u00e9``."""


class Length(NamedTuple):
    """Length of the texts that match a schema, in the unit of ``measure``.

    Attributes:
        shortest: Length of the shortest text.
        longest: Length of the longest text; infinite if there is none.
        closing: Upper bound of what a truncated text lacks if it is then closed as soon as possible.
    """

    shortest: float
    longest: float
    closing: float


UNKNOWN: Final = Length(1, math.inf, 1)
RECURSIVE: Final = Length(math.inf, math.inf, 0)


def length_of(schema: Schema, measure: Callable[[str], int] = len) -> Length:
    """Return the length of the texts that match ``schema``. A part that contains itself counts as endless.

    Args:
        schema: A schema returned by ``limited``.
        measure: The length of a piece of text; the default counts characters.
    """
    try:
        return _Lengths(schema, measure).of(schema)
    except RecursionError:  # thousands of definitions that refer to each other
        return UNKNOWN


class _Lengths:
    """Lengths of the parts of one schema; definitions are computed once."""

    def __init__(self, schema: Schema, measure: Callable[[str], int]) -> None:
        self._schema = schema
        self._measure = measure
        self._defined: dict[str, Length] = {}

    def of(self, node: Any) -> Length:
        """Return the length of the texts that match ``node``, a part of the schema."""
        if not isinstance(node, dict):
            return UNKNOWN
        if "const" in node or "enum" in node:
            sizes = [self._measure(json.dumps(value)) for value in node.get("enum", [node.get("const")])]
            return Length(min(sizes, default=1), max(sizes, default=1), max(sizes, default=1))
        if "$ref" in node:
            return self._of_definition(str(node["$ref"]))
        for name in ("anyOf", "oneOf"):
            if name in node:
                return _union(map(self.of, node[name]))
        if "allOf" in node:
            parts = [self.of(part) for part in node["allOf"]]
            return Length(max(part.shortest for part in parts), math.inf, sum(part.closing for part in parts))
        return _union(self._of_type(kind, node) for kind in types_of(node)) if types_of(node) else UNKNOWN

    def _of_definition(self, name: str) -> Length:
        if name not in self._defined:
            self._defined[name] = RECURSIVE
            key = name.removeprefix("#/$defs/")
            definitions = self._schema.get("definitions", {})
            part = self._schema.get("$defs", {}).get(key, definitions.get(name.rpartition("/")[2]))
            self._defined[name] = self.of(self._schema if name == "#" else part)
        return self._defined[name]

    def _of_type(self, kind: str, node: Schema) -> Length:
        if kind == "object":
            return self._of_object(node)
        if kind == "array":
            return self._of_array(node)
        if kind == "string":
            shortest = 2 + node.get("minLength", 0)
            return Length(shortest, 2 + BYTES_PER_CHAR * node.get("maxLength", math.inf), shortest)
        if kind in ("integer", "number"):
            return _of_number(kind, node)
        return Length(5, 5, 5)

    def _of_object(self, node: Schema) -> Length:
        required, parts = set(node.get("required", ())), node.get("properties", {})
        entries = {name: (self._measure(f"{json.dumps(name)}:,"), self.of(part)) for name, part in parts.items()}
        shortest = 2 + sum(key + part.shortest for name, (key, part) in entries.items() if name in required)
        longest = 2 + sum(key + part.longest for key, part in entries.values())
        closing = max((key + part.closing for key, part in entries.values()), default=0)
        free = node.get("additionalProperties", True)
        if free is not False or "patternProperties" in node:
            longest, closing = math.inf, max(closing, 4 + self.of(free).closing)
        return Length(shortest, longest, shortest + closing)

    def _of_array(self, node: Schema) -> Length:
        first, item = [self.of(part) for part in node.get("prefixItems", ())], self.of(node.get("items"))
        num_least, num_most = node.get("minItems", 0), node.get("maxItems", math.inf)
        if node.get("items") is False:
            num_most = min(num_most, len(first))
        parts_least = sum(part.shortest + 1 for part in first[:num_least])
        if num_least > len(first):
            parts_least += (num_least - len(first)) * (item.shortest + 1)
        num_items = max(0, num_most - len(first))
        longest = sum(part.longest + 1 for part in first) + (num_items * (item.longest + 1) if num_items else 0)
        closing = max([part.closing for part in first] + ([item.closing] if num_items else []), default=0)
        return Length(2 + parts_least, 2 + longest, 2 + parts_least + closing)


def _of_number(kind: str, node: Schema) -> Length:
    smallest, largest = bounds_of(node)
    if math.isinf(smallest) or math.isinf(largest):
        return UNKNOWN
    digits = [len(str(int(bound))) for bound in (smallest, largest)]
    shortest = 1 if smallest <= 0 <= largest else min(digits)
    if kind == "integer":
        return Length(shortest, max(digits), shortest)
    is_limited = node.get("multipleOf") in (10.0**-DECIMALS, 10.0**-BOUNDED_DECIMALS)
    return Length(shortest, max(digits) + 1 + BOUNDED_DECIMALS if is_limited else math.inf, shortest)


def _union(lengths: Iterable[Length]) -> Length:
    alternatives = list(lengths)
    if not alternatives:
        return UNKNOWN
    shortest, longest, closing = zip(*alternatives, strict=True)
    return Length(min(shortest), max(longest), max(closing))
