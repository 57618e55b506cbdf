"""Prompt syntax: A1111's weights, BREAK and LoRA tags, or plain text.

A1111: (red) weighs 1.1, (red:1.3) 1.3, [red] 1 / 1.1; nested weights multiply; BREAK starts a new chunk; a backslash
escapes. Malformed input is text, never an error, as in A1111: an unclosed bracket weighs everything after it. Plain
prompts are converted to this syntax by escaping; metadata contains the escaped form. No torch import.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import Final, Literal, NamedTuple, get_args

from diffserve.api.bounds import check
from diffserve.api.errors import InvalidRequest

PromptSyntax = Literal["a1111", "plain"]
A1111: Final = "a1111"
SYNTAXES: Final[tuple[PromptSyntax, ...]] = get_args(PromptSyntax)
DEFAULT_WEIGHTS: Final = {"(": 1.1, "[": 1 / 1.1}
MAX_WEIGHT = 100.0
MOST_NAMED: Final = 3
MOST_NAMED_CHARS: Final = 60
"""Number of parts of a prompt that a warning quotes, and characters of each."""

_SPECIAL: Final = re.compile(r"[()\[\]\\]|<(?=\w+:)|\b(?:BREAK|AND)\b")
_TOKEN: Final = re.compile(
    r"\\(?:[()\[\]\\<]|(?:BREAK|AND)\b)|<\w+:[^<>]+>|[()\[\]]|:\s*[+-]?(?:\d+(?:\.\d*)?|\.\d+)\s*\)"
    r"|[^\\()\[\]:<]+|[\\:<]"
)
_NETWORK: Final = re.compile(r"<\w+:[^<>]+>")
_BREAK: Final = re.compile(r"(?<!\\)\bBREAK\b")
_ESCAPED_WORD: Final = re.compile(r"\\(BREAK|AND)\b")


def in_a1111(text: str, syntax: str) -> str:
    """Convert ``text`` from ``syntax`` to A1111's syntax.

    Raises:
        InvalidRequest: ``syntax`` is unknown.
    """
    message = f"prompt_syntax is {syntax[:40]!r}; give {' or '.join(SYNTAXES)}."
    check(syntax in SYNTAXES, message, "prompt_syntax")
    return _SPECIAL.sub(r"\\\g<0>", text) if syntax == "plain" else text


class Piece(NamedTuple):
    """A run of text and the weight of its tokens."""

    text: str
    weight: float


def parse_prompt(prompt: str) -> list[list[Piece]]:
    """Split ``prompt`` at BREAKs into sections of pieces; neighbors with equal weight are joined.

    Raises:
        InvalidRequest: A weight is beyond +-100.
    """
    sections: list[list[Piece]] = [[]]
    for text, weight in _weighted_texts(prompt):
        if not math.isfinite(weight) or abs(weight) > MAX_WEIGHT:
            raise InvalidRequest(
                f"the weight of {text[:40]!r} in the prompt is {weight:g}; keep it within {MAX_WEIGHT:g}.",
                param="prompt",
            )
        parts = _BREAK.split(text)
        for index, part in enumerate(parts):  # the white space around a BREAK is removed
            part = _ESCAPED_WORD.sub(r"\1", part)
            trimmed = part if index == len(parts) - 1 else part.rstrip()
            if index:
                sections.append([])
            _append(sections[-1], trimmed.lstrip() if index else trimmed, weight)
    return [section or [Piece("", 1.0)] for section in sections]


def _append(section: list[Piece], text: str, weight: float) -> None:
    if not text:
        return
    if section and section[-1].weight == weight:
        section[-1] = Piece(section[-1].text + text, weight)
    else:
        section.append(Piece(text, weight))


def _weighted_texts(prompt: str) -> Iterator[tuple[str, float]]:
    """Yield the texts of ``prompt`` between brackets, each with its weight.

    The first loop finds the factor of each bracket, which follows from its end; the second one multiplies them.
    """
    tokens = _TOKEN.findall(prompt)
    factors: dict[int, float] = {}  # by the place of the opening bracket
    closed: dict[int, str] = {}  # the kind of a bracket by the place where it closes
    opened: dict[str, list[int]] = {kind: [] for kind in DEFAULT_WEIGHTS}
    for place, token in enumerate(tokens):
        kind = "[" if token == "]" else "("
        if token in DEFAULT_WEIGHTS:
            factors[place] = DEFAULT_WEIGHTS[token]
            opened[token].append(place)
        elif opened[kind] and (token in ("]", ")") or (token[0] == ":" and token[-1] == ")")):
            closed[place] = kind
            start = opened[kind].pop()
            if token[0] == ":":
                factors[start] = float(token[1:-1])
    weights = {kind: [1.0] for kind in DEFAULT_WEIGHTS}  # of all brackets around a place
    for place, token in enumerate(tokens):
        if place in factors:
            weights[token].append(weights[token][-1] * factors[place])
        elif place in closed:
            weights[closed[place]].pop()
        elif not _NETWORK.fullmatch(token):
            text = token[1:] if len(token) == 2 and token[0] == "\\" else token
            yield text, weights["("][-1] * weights["["][-1]


def encoded_text(prompt: str) -> str:
    """Return the words of ``prompt`` for the text encoder: without brackets, weights, BREAK and tags.

    Raises:
        InvalidRequest: A weight is beyond +-100.
    """
    return " ".join(piece.text for section in parse_prompt(prompt) for piece in section)


def unserved_constructs(prompt: str, *, is_negative: bool = False) -> list[str]:
    """Return a warning for each kind of A1111 construct in ``prompt`` that is not supported.

    These are tags of other networks than LoRAs.
    """
    name = "negative prompt" if is_negative else "prompt"
    tags = _quoted(filter(_NETWORK.fullmatch, _TOKEN.findall(prompt)))
    return [f"{tags} in the {name} was ignored; only LoRAs are supported in the prompt."] if tags else []


def _quoted(parts: Iterable[str]) -> str:
    """Return the first ``MOST_NAMED`` distinct parts, quoted, and the number of the others."""
    parts = list(dict.fromkeys(parts))
    texts = ", ".join(repr(part[:MOST_NAMED_CHARS]) for part in parts[:MOST_NAMED])
    return texts + (f" and {len(parts) - MOST_NAMED} more" if len(parts) > MOST_NAMED else "")
