"""Extracts the prompt from a model's answer, without thoughts, fences, introductions, markup and closing remarks."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import takewhile
from typing import Final

from diffserve.rewriting.style import Parts

THINK, THOUGHT = "<think>", "</think>"

_FENCE: Final = re.compile(r"```[^\S\n]*\w*[^\S\n]*\n?(.*?)(?:```|\Z)", re.DOTALL)
_OPENING: Final = re.compile(
    r"""
    (?:(?:sure|certainly|of\ course|okay|ok|absolutely|great|yes)\b [^:\n]{0,60}? [!:.,\n]\s*)?
    (?:
        here(?:['’]s|\ is|\ are|\ you\ go)\b [^:\n]{0,80} :
      | (?:(?:the|your|my|a|an|new|rewritten|revised|improved|enhanced|optimi[sz]ed|detailed|final|short|image|
          stable|diffusion|sdxl|sd|xl|text-to-image)\ )*
        (?:prompt|caption|tags|answer|rewrite|result|output) \b [^:\n]{0,30} :
    )
    [\s*_]*
    """,
    re.VERBOSE | re.IGNORECASE,
)
_CLOSING_REMARK: Final = re.compile(
    r"\(?(?:note|explanation|let me know|i hope|feel free|this (?:prompt|rewrite|version)|i (?:have |'ve )?added)\b",
    re.IGNORECASE,
)
_BULLET: Final = re.compile(r"^\s*(?:[-*•]|\d{1,2}[.)])\s+")
_MARKS: Final = re.compile(r"\*\*|__|`|^#+\s+", re.MULTILINE)
_PAIRS: Final = ('""', "''", "“”", "‘’", "«»")
MAX_OPENINGS = 3
MIN_STRICT_COUNT: Final = 4
NUMBER_WORDS: Final = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_NUMBER: Final = re.compile(
    rf"(?<![\w.,])({'|'.join(NUMBER_WORDS)}|pair of|[2-9]|1[0-2])(?=\s+[^\W\d_])", re.IGNORECASE
)
"""A number word or numeral in front of a word."""


def clean(answer: str, parts: Parts) -> str:
    """Extract the prompt in ``answer`` as one line, empty if there is none; for tags, lines are joined with commas."""
    text = without_thoughts(answer).strip()
    fenced = _FENCE.search(text)
    text = (fenced.group(1) if fenced else text).strip()
    text = _without_openings(_MARKS.sub("", text))
    paragraph = re.split(r"\n\s*\n", text)[0].splitlines()
    lines = [
        _BULLET.sub("", line).strip()
        for line in takewhile(lambda line: not _CLOSING_REMARK.match(line.strip()), paragraph)
    ]
    if parts == "tags":
        return _without_quotes(", ".join(line.strip(" ,.") for line in lines if line.strip(" ,.")))
    return _without_quotes(" ".join(" ".join(lines).split()))


def without_thoughts(answer: str) -> str:
    """Return the text after the last thought, without a thought that has not ended yet."""
    _, end_tag, after = answer.rpartition(THOUGHT)
    text = after if end_tag else answer
    before, start_tag, _ = text.partition(THINK)
    return before if start_tag else text


def _without_openings(text: str) -> str:
    for _ in range(MAX_OPENINGS):
        opening = _OPENING.match(text)
        if opening is None or not text[opening.end() :].strip():
            break
        text = text[opening.end() :].strip()
    return text


def _without_quotes(text: str) -> str:
    """Remove quotation marks that enclose the whole text."""
    for pair in _PAIRS:
        if len(text) > 1 and text[0] == pair[0] and text[-1] == pair[1] and not set(pair) & set(text[1:-1]):
            return text[1:-1].strip()
    return text


_QUOTED: Final = re.compile(
    r'(?<!\w)"([^"\n]+)"(?!\w)'
    r"|[“„]([^“”„\n]+)[”“]"
    r"|«([^«»\n]+)»"
    r"|(?<!\w)['‘](\w(?:[^'’\n]|['’](?=\w))*)['’](?!\w)"  # an apostrophe inside a word ends no quote
)
_SENTENCE_END: Final = re.compile(r"[.!?:;\n]+")
_WORD: Final = re.compile(r"[^\W\d_][\w'’-]*")
_POSSESSIVE: Final = re.compile(r"['’]s?$")
_BLANKS: Final = re.compile(r"\s+")
SMALL_WORDS: Final = frozenset(
    (
        "a", "an", "and", "as", "at", "by", "for", "from", "in", "into", "is", "it", "near", "of", "on", "or", "over",
        "the", "to", "under", "with", "without",
    )
)  # fmt: skip


def find_quotes(wish: str) -> tuple[str, ...]:
    """Find the distinct texts in quotation marks of any kind, without the marks and a trailing comma or period."""
    quotes = ("".join(match.groups("")) for match in _QUOTED.finditer(wish))
    return tuple(dict.fromkeys(text for quote in quotes if (text := _plain(quote).rstrip(".,"))))


def find_names(wish: str) -> tuple[str, ...]:
    """Find names: capitalized words, not in all capitals, that do not start a sentence; none if ``wish`` is a title."""
    unquoted = _QUOTED.sub(" , ", wish)
    words = [word for sentence in _SENTENCE_END.split(unquoted) for word in _WORD.findall(sentence)[1:]]
    if any(word[0].isupper() and word.casefold() in SMALL_WORDS for word in words):
        return ()
    names = (_POSSESSIVE.sub("", word) for word in words if word[0].isupper() and word[1:2].islower())
    return tuple(dict.fromkeys(names))


def find_lost(prompt: str, quotes: Iterable[str], names: Iterable[str]) -> tuple[str, ...]:
    """Find the ``quotes`` and ``names`` that are missing in ``prompt``; only quotes are case-sensitive."""
    exact, folded = _plain(prompt), _plain(prompt).casefold()
    missing = [text for text in quotes if text not in exact]
    missing += [name for name in names if not re.search(rf"(?<!\w){re.escape(_plain(name).casefold())}(?!\w)", folded)]
    return tuple(missing)


def find_lost_numbers(wish: str, prompt: str) -> tuple[str, ...]:
    """Find number words of ``wish`` that ``prompt`` lost.

    A number is lost if ``prompt`` contains only other numbers, or no number although the value is at least
    ``MIN_STRICT_COUNT``. Smaller numbers may also be spelled out object by object.
    """
    prompt_values = {_value(match) for match in _NUMBER.finditer(prompt)}
    wish_values = {match[1]: _value(match) for match in _NUMBER.finditer(wish)}
    return tuple(
        word
        for word, value in wish_values.items()
        if value not in prompt_values and (prompt_values or value >= MIN_STRICT_COUNT)
    )


def _value(match: re.Match[str]) -> int:
    word = match[1].casefold()
    return int(word) if word.isdecimal() else 2 if word == "pair of" else NUMBER_WORDS.index(word) + 2


def _plain(text: str) -> str:
    """Normalize apostrophes and whitespace."""
    return _BLANKS.sub(" ", text.replace("’", "'").replace("‘", "'")).strip()
