"""Schemas that a text must follow: JSON Schema as llguidance reads it, within bounds, and where one of them is wrong.

Texts are written without white space between their parts, as OpenAI's are: a model that may indent may do so for ever.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Final

from diffserve.api.bounds import check, check_chars
from diffserve.api.errors import InvalidRequest
from diffserve.api.json_lengths import length_of
from diffserve.api.json_limits import Schema, limited

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_SCHEMA_CHARS: Final = 65_536
MAX_SCHEMA_DEPTH: Final = 64
MAX_LEXER_STATES: Final = 20_000
MAX_PROBES, MAX_PROBED_CHARS = 2000, 1_000_000
"""How long the place of a mistake is looked for: so many parts, of so many characters together."""

MAX_REASON_CHARS: Final = 200
MAX_CACHED_SCHEMAS: Final = 32

ANY_OBJECT: Final = '{"type":"object"}'
"""The schema of whoever asks for any JSON object."""

MAPS: Final = ("$defs", "definitions", "properties", "patternProperties")
LISTS: Final = ("prefixItems", "anyOf", "oneOf", "allOf")
SINGLE: Final = ("items", "additionalProperties")
"""Where in a schema further ones stand."""


def check_text(text: str, param: str) -> dict[str, Any]:
    """The schema in ``text``. InvalidRequest about ``param`` for what is too long, too deep, or no object of JSON."""
    check(isinstance(text, str), f"{param} is no text; give the schema as JSON.", param)
    check_chars(text, MAX_SCHEMA_CHARS, param)
    try:
        schema = json.loads(text)
        is_deep = _depth(schema) > MAX_SCHEMA_DEPTH
    except RecursionError:
        is_deep = True
    except ValueError as error:
        raise InvalidRequest(f"{param} is no JSON ({error}).", param=param) from None
    check(not is_deep, f"{param} is nested more than {MAX_SCHEMA_DEPTH} deep; flatten it.", param, "schema_too_deep")
    check(isinstance(schema, dict), f'{param} must be an object, such as {{"type": "object"}}.', param)
    check("x-guidance" not in schema, f"{param} has the key x-guidance, which is nobody's to set; leave it out.", param)
    found: dict[str, Any] = schema
    return found


def check_schema(text: str, param: str) -> None:
    """InvalidRequest for a schema that no text can be held to, naming the place in it; a few ms, bounded.

    Held to every token a schema must be simple to follow: ``not``, ``uniqueItems``, ``if`` and other keys that look
    at a whole value are refused by name.
    """
    schema = check_text(text, param)
    _, reason = _checked(text)
    if reason:
        place = _blame(schema, reason)
        raise InvalidRequest(
            f"{param}{place}: {reason}; say it otherwise, or leave it out.",
            param=f"{param}{place}",
            code="invalid_json_schema",
        )
    for place, node in _walk(schema):
        required = node.get("required", [])
        least, named = node.get("minProperties", 0), len(required) if isinstance(required, list) else 0
        if isinstance(least, int) and least > named:  # a name said twice counts once
            raise InvalidRequest(
                f"{param}{place}: minProperties is {least} and {named} are required; name as many in required.",
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
    """Return the error for a schema that this installation or this model's tokenizer cannot follow."""
    if not has_llguidance():
        return InvalidRequest(
            f"{param}: structured output needs the package llguidance, which cannot be imported here; install it with "
            f"'pip install llguidance' and restart, or leave {param} out.",
            param=param,
            code="unsupported_value",
        )
    return InvalidRequest(
        f"{param}: the tokenizer of {model_id!r} spells text in a way that cannot be held to JSON token by token; "
        "leave it out, or load a model with a byte-level or byte-fallback tokenizer.",
        param=param,
        code="unsupported_value",
    )


def grammar(schema: Schema) -> str:
    """Write ``schema`` as a grammar of llguidance.

    Raises:
        ValueError: llguidance cannot read it at all.
    """
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_flexible": False})


@lru_cache(maxsize=MAX_CACHED_SCHEMAS)
def _checked(text: str) -> tuple[Schema, str]:
    """Return the schema that texts of the schema ``text`` are held to, and why there is none where that is so."""
    schema: Schema = json.loads(text)
    try:
        with_limits = limited(schema)
    except (AttributeError, OverflowError, StopIteration, TypeError, ValueError):  # llguidance says what is wrong
        return schema, _problem(schema)
    if not _problem(with_limits):
        return with_limits, ""
    return schema, _problem(schema)


def followed(text: str) -> Schema:
    """Return the schema that texts of the schema ``text`` are held to: with default limits, where it has texts then."""
    return _checked(text)[0]


def max_tokens_of(text: str | None, max_tokens: int) -> int:
    """Return how many tokens a text of the schema ``text`` takes at most; ``max_tokens`` where that is less."""
    if text is None:
        return max_tokens
    longest = length_of(followed(text)).longest
    return max_tokens if math.isinf(longest) else min(max_tokens, int(longest) + 1)


def matcher(tokenizer: LLTokenizer, text: str) -> LLMatcher:
    """What follows a text of the schema ``text`` token by token. ``is_error`` says where it cannot; the GIL is free."""
    from llguidance import LLMatcher

    return LLMatcher(tokenizer, grammar(followed(text)), log_level=0, limits=_limits())


@cache
def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)


@cache
def _bytes_alone() -> LLTokenizer:
    """A vocabulary of single bytes."""
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


def _problem(schema: Schema) -> str:
    """Return why no text can be held to ``schema``, empty where one can."""
    from llguidance import LLMatcher

    try:
        trial = LLMatcher(_bytes_alone(), grammar(schema), log_level=0, limits=_limits())
    except ValueError as error:
        return _shown(str(error))
    if trial.is_error():
        return _shown(trial.get_error())
    trial.compute_bitmask()
    is_dead = trial.is_stopped() and not trial.is_accepting()
    return "nothing can follow it" if is_dead else ""


def _blame(schema: dict[str, Any], reason: str) -> str:
    """The innermost part that fails for the same reason by itself, as a path; looked for in a bounded time."""
    shared: dict[str, Any] = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    place, parts, num_left, chars_left = "", _parts(schema), MAX_PROBES, MAX_PROBED_CHARS
    while num_left > 0 and chars_left > 0 and (found := next(parts, None)) is not None:
        step, part = found
        probe = {**shared, **part}
        num_left, chars_left = num_left - 1, chars_left - len(json.dumps(probe))
        if _problem(probe) == reason:
            place, parts = place + step, _parts(part)
    return _shown(place)


def _walk(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    pending = [("", schema)]
    while pending:
        place, node = pending.pop()
        yield _shown(place), node
        pending += [(_shown(place) + step, part) for step, part in _parts(node)]


def _parts(node: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas that stand in ``node``, each with the way there."""
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


def _shown(reason: str) -> str:
    line = " ".join(reason.split()).rstrip(".")
    return line if len(line) <= MAX_REASON_CHARS else f"{line[:MAX_REASON_CHARS]}..."
