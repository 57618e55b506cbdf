"""Default limits for texts that follow a JSON Schema, so that every value ends.

Limits are added only if the schema sets none. ``docs/http.md`` states them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

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
