"""Validation of JSON Schemas for structured output, which llguidance enforces token by token.

Texts contain no optional white space: a model that may indent could do so without end.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Final

from diffserve.api.bounds import check, check_chars
from diffserve.api.errors import InvalidRequest
from diffserve.api.json_limits import Schema, length_of, limited

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_SCHEMA_CHARS: Final = 65_536
MAX_SCHEMA_DEPTH: Final = 64
MAX_LEXER_STATES: Final = 20_000
MAX_PROBES, MAX_PROBED_CHARS = 2000, 1_000_000
"""Limits of the search for the place of an error: number of parts, and characters of all parts."""

MAX_REASON_CHARS: Final = 200
MAX_CACHED_SCHEMAS: Final = 32

ANY_OBJECT: Final = '{"type":"object"}'
"""The schema of a request for any JSON object."""

MAPS: Final = ("$defs", "definitions", "properties", "patternProperties")
LISTS: Final = ("prefixItems", "anyOf", "oneOf", "allOf")
SINGLE: Final = ("items", "additionalProperties")
"""Keywords that contain subschemas."""


def check_text(text: str, param: str) -> dict[str, Any]:
    """Parse the schema ``text`` and check its size.

    Raises:
        InvalidRequest: It is too long, too deep, or not a JSON object; about the field ``param``.
    """
    check(isinstance(text, str), f"{param} is not a string; give the schema as JSON.", param)
    check_chars(text, MAX_SCHEMA_CHARS, param)
    try:
        schema = json.loads(text)
        is_deep = _depth(schema) > MAX_SCHEMA_DEPTH
    except RecursionError:
        is_deep = True
    except ValueError as error:
        raise InvalidRequest(f"{param} is not valid JSON ({error}).", param=param) from None
    check(not is_deep, f"{param} is nested more than {MAX_SCHEMA_DEPTH} deep; flatten it.", param, "schema_too_deep")
    check(isinstance(schema, dict), f'{param} must be an object, such as {{"type": "object"}}.', param)
    check("x-guidance" not in schema, f"{param} has the key x-guidance, which is reserved; leave it out.", param)
    checked_schema: dict[str, Any] = schema
    return checked_schema


def check_schema(text: str, param: str) -> None:
    """Check that texts can be constrained to the schema ``text``. Takes a few milliseconds; the time is bounded.

    Keywords that depend on a complete value, such as ``not``, ``uniqueItems`` and ``if``, are not supported.

    Raises:
        InvalidRequest: The schema cannot be enforced; the message names the place in it.
    """
    schema = check_text(text, param)
    _, reason = _schema_or_reason(text)
    if reason:
        place = _failing_path(schema, reason)
        raise InvalidRequest(
            f"{param}{place}: {reason}; change this part, or leave it out.",
            param=f"{param}{place}",
            code="invalid_json_schema",
        )
    for place, node in _walk(schema):
        required = node.get("required", [])
        minimum, num_required = node.get("minProperties", 0), len(required) if isinstance(required, list) else 0
        if isinstance(minimum, int) and minimum > num_required:
            raise InvalidRequest(
                f"{param}{place}: minProperties is {minimum} and {num_required} are required; list that many in "
                "required.",
                param=f"{param}{place}.minProperties",
                code="invalid_json_schema",
            )


def has_llguidance() -> bool:
    """Return whether llguidance can be imported; only structured output needs it."""
    try:
        import llguidance  # noqa: F401
    except ImportError:
        return False
    return True


def no_json(model_id: str, param: str) -> InvalidRequest:
    """Return the error for a schema that this installation or this model's tokenizer cannot enforce."""
    if not has_llguidance():
        return InvalidRequest(
            f"{param}: structured output needs the package llguidance, which cannot be imported here; install it with "
            f"'pip install llguidance' and restart, or leave {param} out.",
            param=param,
            code="unsupported_value",
        )
    return InvalidRequest(
        f"{param}: the tokenizer of {model_id!r} cannot be constrained to JSON token by token; "
        "leave it out, or load a model with a byte-level or byte-fallback tokenizer.",
        param=param,
        code="unsupported_value",
    )


def grammar(schema: Schema) -> str:
    """Convert ``schema`` to a grammar of llguidance.

    Raises:
        ValueError: llguidance cannot read it.
    """
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_flexible": False})


@lru_cache(maxsize=MAX_CACHED_SCHEMAS)
def _schema_or_reason(text: str) -> tuple[Schema, str]:
    """Return the schema to enforce for the schema ``text``, and the reason if it cannot be enforced, else ""."""
    schema: Schema = json.loads(text)
    try:
        with_limits = limited(schema)
    except (AttributeError, OverflowError, StopIteration, TypeError, ValueError):
        return schema, _problem(schema)  # the message of llguidance
    if not _problem(with_limits):
        return with_limits, ""
    return schema, _problem(schema)


def followed(text: str) -> Schema:
    """Return the schema to enforce for the schema ``text``: with default limits, if it can be satisfied with them."""
    return _schema_or_reason(text)[0]


def max_tokens_of(text: str | None, max_tokens: int) -> int:
    """Return the maximum number of tokens of a text that follows the schema ``text``, at most ``max_tokens``."""
    if text is None:
        return max_tokens
    longest = length_of(followed(text)).longest
    return max_tokens if math.isinf(longest) else min(max_tokens, int(longest) + 1)


def matcher(tokenizer: LLTokenizer, text: str) -> LLMatcher:
    """Return a matcher that tracks a text of the schema ``text`` token by token.

    Its ``is_error`` tells whether the schema cannot be enforced. llguidance releases the GIL.
    """
    from llguidance import LLMatcher

    return LLMatcher(tokenizer, grammar(followed(text)), log_level=0, limits=_limits())


@cache
def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)


@cache
def _byte_tokenizer() -> LLTokenizer:
    """Return a tokenizer of single bytes."""
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


def _problem(schema: Schema) -> str:
    """Return the reason why no text can follow ``schema``; "" if one can."""
    from llguidance import LLMatcher

    try:
        trial = LLMatcher(_byte_tokenizer(), grammar(schema), log_level=0, limits=_limits())
    except ValueError as error:
        return _shorten(str(error))
    if trial.is_error():
        return _shorten(trial.get_error())
    trial.compute_bitmask()
    is_dead = trial.is_stopped() and not trial.is_accepting()
    return "no JSON text can match it" if is_dead else ""


def _failing_path(schema: dict[str, Any], reason: str) -> str:
    """Return the path of the innermost part that fails by itself for the same reason; the search is bounded."""
    shared: dict[str, Any] = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    place, parts, num_left, chars_left = "", _parts(schema), MAX_PROBES, MAX_PROBED_CHARS
    while num_left > 0 and chars_left > 0 and (candidate := next(parts, None)) is not None:
        step, part = candidate
        probe = {**shared, **part}
        num_left, chars_left = num_left - 1, chars_left - len(json.dumps(probe))
        if _problem(probe) == reason:
            place, parts = place + step, _parts(part)
    return _shorten(place)


def _walk(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ``schema`` and all schemas in it, each with its path."""
    pending = [("", schema)]
    while pending:
        place, node = pending.pop()
        yield _shorten(place), node
        pending += [(_shorten(place) + step, part) for step, part in _parts(node)]


def _parts(node: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the direct subschemas of ``node``, each with its path."""
    for key in MAPS:
        if isinstance(node.get(key), dict):
            yield from ((f".{key}.{name}", part) for name, part in node[key].items() if isinstance(part, dict))
    for key in LISTS:
        if isinstance(node.get(key), list):
            yield from ((f".{key}[{at}]", part) for at, part in enumerate(node[key]) if isinstance(part, dict))
    for key in SINGLE:
        if isinstance(node.get(key), dict):
            yield f".{key}", node[key]


def _depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(_depth, value.values()), default=0)
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list) else 0


def _shorten(reason: str) -> str:
    """Return ``reason`` on one line, truncated to ``MAX_REASON_CHARS``."""
    line = " ".join(reason.split()).rstrip(".")
    return line if len(line) <= MAX_REASON_CHARS else f"{line[:MAX_REASON_CHARS]}..."
