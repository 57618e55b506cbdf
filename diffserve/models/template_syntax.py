r"""Syntax of prompt templates: alternatives in braces and wildcards from a folder of text files. No torch.

``{a|b|c}`` chooses an alternative, ``{2::a|b}`` with weights, ``{2$$a|b|c}`` two different ones joined by commas, and
``{1-3$$ and $$a|b|c}`` one to three joined by " and ". ``__colors__`` chooses a line of ``colors.txt``, and
``__style/ink__`` one of ``style/ink.txt``; lines are templates themselves, and empty lines and lines that begin with #
are ignored. ``\{``, ``\}``, ``\|`` and ``\__`` are literal, and so is ``|`` inside square brackets, where it is
alternation (``prompt_schedule``).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from diffserve.api.bounds import check

MAX_DEPTH: Final = 8
"""Braces and wildcards inside one another, those in the lines of wildcards included."""
MAX_PICKED: Final = 16
"""Alternatives that braces with a number may choose."""
SHOWN_CHARS: Final = 60
"""Characters of a template that an error quotes."""

_MARK: Final = re.compile(r"\\__|\\.|\\$|[{}|\[\]]|__[\w\-./](?:[\w\-./ ]{0,126}?[\w\-./])??__", re.DOTALL)
_UNESCAPED: Final = re.compile(r"\\([{}]|__)")
_WEIGHT: Final = re.compile(r"\s*(\d{1,9}(?:\.\d{0,9})?|\.\d{1,9})::")
_COUNT: Final = re.compile(r"\s*(\d{0,4})\s*(-?)\s*(\d{0,4})\s*\$\$")


class Wildcard(NamedTuple):
    """A place for a line of a file, by its name without ``.txt``."""

    name: str


@dataclass(frozen=True)
class Choice:
    """Braces: ``min_picked`` to ``max_picked`` of ``options``, joined by ``separator``."""

    options: tuple[Items, ...]
    weights: tuple[float, ...]
    min_picked: int = 1
    max_picked: int = 1
    separator: str = ", "


Items = tuple["str | Wildcard | Choice", ...]


def parse_template(template: str) -> Items:
    """Parse ``template`` into texts, wildcards and choices.

    Raises:
        InvalidRequest: A brace is not closed or not opened, braces are nested too deep, or a number before ``$$`` is
            out of range.
    """
    stack: list[_Braces] = [_Braces(0)]
    end = 0
    for match in _MARK.finditer(template):
        mark, top = match[0], stack[-1]
        top.options[-1].append(template[end : match.start()])
        end = match.end()
        if mark == "{":
            message = f"the template has braces nested more than {MAX_DEPTH} deep; nest fewer, or write \\{{."
            check(len(stack) <= MAX_DEPTH, message, "prompt")
            stack.append(_Braces(match.start()))
        elif mark == "}":
            place = f"the template closes a brace at character {match.start() + 1}"
            check(len(stack) > 1, f"{place} that it does not open; write \\}} for a brace.", "prompt")
            stack.pop()
            stack[-1].options[-1].append(_choice(top.options, template[top.start : match.end()]))
        elif mark == "|" and len(stack) > 1 and not top.num_square:
            top.options.append([])
        elif mark == "\\|" and len(stack) > 1 and not top.num_square:
            top.options[-1].append("|")
        elif mark.startswith("__"):
            top.options[-1].append(Wildcard(mark[2:-2].strip()))
        else:
            top.num_square = max(0, top.num_square + {"[": 1, "]": -1}.get(mark, 0))
            top.options[-1].append(mark)
    shown = template[stack[-1].start :][:SHOWN_CHARS]
    message = f"the template opens a brace that it does not close: {shown!r}; close it, or write \\{{ for a brace."
    check(len(stack) == 1, message, "prompt")
    return _joined([*stack[0].options[0], template[end:]])


@dataclass
class _Braces:
    """Open braces: their place, their alternatives so far, and the number of open square brackets."""

    start: int
    options: list[list[str | Wildcard | Choice]] = field(default_factory=lambda: [[]])
    num_square: int = 0


def _joined(items: Sequence[str | Wildcard | Choice]) -> Items:
    """Return ``items`` with neighboring texts joined, and escapes of braces and wildcards removed."""
    joined: list[str | Wildcard | Choice] = []
    for is_text, group in itertools.groupby(items, lambda item: isinstance(item, str)):
        if is_text:
            text = _UNESCAPED.sub(r"\1", "".join(map(str, group)))
            joined += [text] * bool(text)
        else:
            joined += group
    return tuple(joined)


def _choice(options: Sequence[list[str | Wildcard | Choice]], shown: str) -> Choice:
    """Return the choice of braces whose source text is ``shown``."""
    min_picked, max_picked, separator = 1, 1, ", "
    options = [list(_joined(option)) for option in options]
    first = options[0][0] if options[0] else ""
    count = _COUNT.match(first) if isinstance(first, str) else None
    if count is not None:
        text = str(options[0][0])[count.end() :] if options[0] else ""
        if "$$" in text:
            separator, _, text = text.partition("$$")
        options[0][:1] = [text]
        low, dash, high = count.groups()
        max_picked = int(high) if high else min(len(options), MAX_PICKED) if dash else int(low or 1)
        min_picked = int(low) if low else 0 if dash else 1
        message = (
            f"the template asks for {count[0].strip('$ ')} of {len(options)} alternatives in {shown[:SHOWN_CHARS]!r}; "
            f"give at most {min(len(options), MAX_PICKED)}, the smaller number first."
        )
        check(min_picked <= max_picked <= min(len(options), MAX_PICKED), message, "prompt")
    weights: list[float] = []
    for option in options:
        weight = 1.0
        if option and isinstance(option[0], str):
            weight, option[0] = split_weight(option[0])
        weights.append(weight)
    check(any(weights), f"all weights in {shown[:SHOWN_CHARS]!r} are 0; give one of them a weight above 0.", "prompt")
    return Choice(tuple(map(tuple, options)), tuple(weights), min_picked, max_picked, separator)


def split_weight(text: str) -> tuple[float, str]:
    """Split an alternative such as "2::red" into its weight and its text; the weight is 1 without a number."""
    match = _WEIGHT.match(text)
    return (1.0, text) if match is None else (float(match[1]), text[match.end() :])
