"""From what a model said to the prompt in it: without thoughts, fences, introductions, marks and afterthoughts."""

from __future__ import annotations

import re
from itertools import takewhile
from typing import Final

from diffserve.engine.rewriting.style import Parts

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


def clean(answer: str, parts: Parts) -> str:
    """The prompt in ``answer`` on one line; empty when there is none. Lines of a list become tags where those are."""
    text = without_thoughts(answer).strip()
    fenced = _FENCE.search(text)
    text = (fenced.group(1) if fenced else text).strip()
    text = _without_openings(_MARKS.sub("", text))
    paragraph = re.split(r"\n\s*\n", text)[0].splitlines()
    lines = [_BULLET.sub("", line).strip() for line in takewhile(_is_prompt, paragraph)]
    if parts == "tags":
        return _without_quotes(", ".join(line.strip(" ,.") for line in lines if line.strip(" ,.")))
    return _without_quotes(" ".join(" ".join(lines).split()))


def _is_prompt(line: str) -> bool:
    return _AFTERTHOUGHT.match(line.strip()) is None


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
