"""What of a wish must not be lost: text in quotation marks, letter by letter, and names inside a sentence. No torch.

A name is a capitalised word that does not begin its sentence: "a Cat" shouts like "a CAT" does not, so words all in
capitals are no names, and a wish In Title Case (where "in" and "the" are capitalised too) has none that can be told.
German capitalises every noun, which cannot be told from names either: such a wish is kept by keeping its nouns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

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


def quoted(wish: str) -> tuple[str, ...]:
    """Every text in quotation marks, of whatever kind, without them and without a closing comma or full stop."""
    found = ("".join(match.groups("")) for match in _QUOTED.finditer(wish))
    return tuple(dict.fromkeys(text for one in found if (text := _plain(one).rstrip(".,"))))


def named(wish: str) -> tuple[str, ...]:
    """Every name: a capitalised word, not all in capitals, that does not begin a sentence; none in title case."""
    unquoted = _QUOTED.sub(" , ", wish)
    words = [word for sentence in _SENTENCE_END.split(unquoted) for word in _WORD.findall(sentence)[1:]]
    if any(word[0].isupper() and word.casefold() in SMALL_WORDS for word in words):
        return ()
    names = (_POSSESSIVE.sub("", word) for word in words if word[0].isupper() and word[1:2].islower())
    return tuple(dict.fromkeys(names))


def lost(prompt: str, quotes: Iterable[str], names: Iterable[str]) -> tuple[str, ...]:
    """Those of ``quotes`` and ``names`` that ``prompt`` does not hold; capitals matter in quotes alone."""
    exact, folded = _plain(prompt), _plain(prompt).casefold()
    missing = [text for text in quotes if text not in exact]
    missing += [name for name in names if not _says(folded, _plain(name).casefold())]
    return tuple(missing)


def _says(text: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text) is not None


def _plain(text: str) -> str:
    """One kind of apostrophe, single blanks."""
    return _BLANKS.sub(" ", text.replace("’", "'").replace("‘", "'")).strip()
