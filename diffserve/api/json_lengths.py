"""Length of the JSON texts that match a schema: shortest, longest, and what may be missing from a truncated one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from diffserve.api.json_limits import BOUNDED_DECIMALS, DECIMALS, Schema, bounds_of, types_of

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
