"""From what a model said to the prompt in it: without thoughts, fences, introductions, marks and afterthoughts."""

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
_AFTERTHOUGHT: Final = re.compile(
    r"\(?(?:note|explanation|let me know|i hope|feel free|this (?:prompt|rewrite|version)|i (?:have |'ve )?added)\b",
    re.IGNORECASE,
)
_BULLET: Final = re.compile(r"^\s*(?:[-*•]|\d{1,2}[.)])\s+")
_MARKS: Final = re.compile(r"\*\*|__|`|^#+\s+", re.MULTILINE)
_PAIRS: Final = ('""', "''", "“”", "‘’", "«»")
MAX_OPENINGS = 3
LEAST_OF_MANY: Final = 4
NUMBER_WORDS: Final = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_NUMBER: Final = re.compile(
    rf"(?<![\w.,])({'|'.join(NUMBER_WORDS)}|pair of|[2-9]|1[0-2])(?=\s+[^\W\d_])", re.IGNORECASE
)
"""Before a word: what is wanted so many times."""


def clean(answer: str, parts: Parts) -> str:
    """The prompt in ``answer`` on one line; empty when there is none. Lines of a list become tags where those are."""
    text = without_thoughts(answer).strip()
    fenced = _FENCE.search(text)
    text = (fenced.group(1) if fenced else text).strip()
    text = _without_openings(_MARKS.sub("", text))
    paragraph = re.split(r"\n\s*\n", text)[0].splitlines()
    lines = [
        _BULLET.sub("", line).strip()
        for line in takewhile(lambda line: not _AFTERTHOUGHT.match(line.strip()), paragraph)
    ]
    if parts == "tags":
        return _without_quotes(", ".join(line.strip(" ,.") for line in lines if line.strip(" ,.")))
    return _without_quotes(" ".join(" ".join(lines).split()))


def without_thoughts(answer: str) -> str:
    """What follows the last thought; nothing while one is still going on."""
    _, ended, after = answer.rpartition(THOUGHT)
    before, begun, _ = (after if ended else answer).partition(THINK)
    return before if begun else (after if ended else answer)


def _without_openings(text: str) -> str:
    for _ in range(MAX_OPENINGS):
        found = _OPENING.match(text)
        if found is None or not text[found.end() :].strip():
            break
        text = text[found.end() :].strip()
    return text


def _without_quotes(text: str) -> str:
    """Without quotation marks around all of it."""
    for pair in _PAIRS:
        if len(text) > 1 and text[0] == pair[0] and text[-1] == pair[1] and not set(pair) & set(text[1:-1]):
            return text[1:-1].strip()
    return text


_QUOTED: Final = re.compile(
    r'(?<!\w)"([^"\n]+)"(?!\w)'
    r"|[“„]([^“”„\n]+)[”“]"
    r"|«([^«»\n]+)»"
    r"|(?<!\w)['‘](\w(?:[^'’\n]|['’](?=\w))*)['’](?!\w)"  # an apostrophe stands inside a word
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
    """Every text in quotation marks, of whatever kind, without them and without a closing comma or full stop."""
    found = ("".join(match.groups("")) for match in _QUOTED.finditer(wish))
    return tuple(dict.fromkeys(text for one in found if (text := _plain(one).rstrip(".,"))))


def find_names(wish: str) -> tuple[str, ...]:
    """Every name: a capitalised word, not all in capitals, that does not begin a sentence; none in title case."""
    unquoted = _QUOTED.sub(" , ", wish)
    words = [word for sentence in _SENTENCE_END.split(unquoted) for word in _WORD.findall(sentence)[1:]]
    if any(word[0].isupper() and word.casefold() in SMALL_WORDS for word in words):
        return ()
    names = (_POSSESSIVE.sub("", word) for word in words if word[0].isupper() and word[1:2].islower())
    return tuple(dict.fromkeys(names))


def find_lost(prompt: str, quotes: Iterable[str], names: Iterable[str]) -> tuple[str, ...]:
    """Those of ``quotes`` and ``names`` that ``prompt`` does not hold; capitals matter in quotes alone."""
    exact, folded = _plain(prompt), _plain(prompt).casefold()
    missing = [text for text in quotes if text not in exact]
    missing += [name for name in names if not re.search(rf"(?<!\w){re.escape(_plain(name).casefold())}(?!\w)", folded)]
    return tuple(missing)


def find_lost_numbers(wish: str, prompt: str) -> tuple[str, ...]:
    """How many of something ``wish`` wants, as it says it, where ``prompt`` says another number of it, or none although
    it is of four and more: two or three things may as well be told one by one."""
    said = {_value(found) for found in _NUMBER.finditer(prompt)}
    wanted = {found[1]: _value(found) for found in _NUMBER.finditer(wish)}
    return tuple(word for word, value in wanted.items() if value not in said and (said or value >= LEAST_OF_MANY))


def _value(found: re.Match[str]) -> int:
    word = found[1].casefold()
    return int(word) if word.isdecimal() else 2 if word == "pair of" else NUMBER_WORDS.index(word) + 2


def _plain(text: str) -> str:
    """One kind of apostrophe, single blanks."""
    return _BLANKS.sub(" ", text.replace("’", "'").replace("‘", "'")).strip()
