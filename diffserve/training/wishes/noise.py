"""Typing noise for wishes: misspellings, slang, missing articles, capitals, punctuation."""

from __future__ import annotations

import random
import re
from functools import lru_cache

import msgspec

from diffserve.training.wishes.words import IRREGULAR, sentences, words
from diffserve.world import captions

NEIGHBOURS: dict[str, str] = {
    "q": "wa", "w": "qes", "e": "wrd", "r": "etf", "t": "ryg", "y": "tuh", "u": "yij", "i": "uok", "o": "ipl",
    "p": "ol", "a": "qsz", "s": "adw", "d": "sfe", "f": "dgr", "g": "fht", "h": "gjy", "j": "hku", "k": "jli",
    "l": "kop", "z": "xas", "x": "zcs", "c": "xvd", "v": "cbf", "b": "vng", "n": "bmh", "m": "nj",
}  # fmt: skip

SLANG: dict[str, tuple[str, ...]] = {
    "with": ("w/", "wit", "w"), "and": ("n", "&", "nd"), "you": ("u",), "please": ("pls", "plz", "pleeease"),
    "background": ("bg", "backround", "back ground", "bckground"), "picture": ("pic", "pics"), "the": ("da", "teh"),
    "right": ("rite",), "between": ("btw", "betwen"), "next": ("nxt",), "of": ("o",),
    "something": ("smth", "sth", "somethin"), "beautiful": ("beautifull",), "beside": ("besides",), "two": ("2", "tw0"),
    "three": ("3",), "above": ("abov",), "want": ("wanna have",), "there's": ("theres",), "i'd": ("id",),
}  # fmt: skip

MISSPELT_SHARE = 0.2
MIN_LETTERS = 4


@lru_cache(maxsize=1)
def known_words() -> frozenset[str]:
    """Return every word of the captions and of clean wishes; a misspelling must not turn one word into another."""
    tables = (*msgspec.structs.astuple(sentences()), *msgspec.structs.astuple(words()), IRREGULAR)
    sources = [*tables, *(value for name, value in vars(captions).items() if name.isupper())]
    return frozenset(re.findall(r"[a-z]+", str(sources).lower()))


def slip(word: str, rng: random.Random) -> str:
    """Misspell ``word``: swap two letters, or drop, double or replace one by its neighbor on the keyboard.

    A result that is another word of :func:`known_words` is discarded.
    """
    at = rng.randrange(len(word) - 1)
    letter, tail = word[at], word[at + 1 :]
    changed = rng.choice(
        (
            f"{word[:at]}{tail[0]}{letter}{tail[1:]}",
            word[:at] + tail,
            f"{word[:at]}{letter}{letter}{tail}",
            f"{word[:at]}{rng.choice(NEIGHBOURS.get(letter, letter))}{tail}",
        )
    )
    return word if changed in known_words() else changed


def misspell(text: str, rng: random.Random, share: float = MISSPELT_SHARE) -> str:
    """Misspell at most ``share`` of the words, at least one if a word has MIN_LETTERS letters.

    Sometimes a space is removed as well.
    """
    words = text.split(" ")
    long = [index for index, word in enumerate(words) if len(word) >= MIN_LETTERS and word.isalpha()]
    for index in rng.sample(long, min(len(long), rng.randint(1, max(1, int(share * len(words)))))):
        words[index] = slip(words[index], rng)
    if rng.random() < 0.2 and len(words) > 2:
        index = rng.randrange(len(words) - 1)
        words[index : index + 2] = ["".join(words[index : index + 2])]
    return " ".join(words)


def slang(text: str, rng: random.Random, share: float = 0.5) -> str:
    """Replace ``share`` of the words that have a short form."""
    return " ".join(rng.choice(SLANG[w]) if w in SLANG and rng.random() < share else w for w in text.split(" "))


def without_articles(text: str) -> str:
    """Remove "a", "an" and "the"."""
    return " ".join(word for word in text.split(" ") if word not in ("a", "an", "the")) or text


def punctuate(text: str, rng: random.Random) -> str:
    """Add final punctuation or remove all punctuation, at random."""
    style = rng.random()
    if style < 0.15:
        return text + rng.choice((".", "!", "!!!", "...", "?", " ?", " !!", "??"))
    if style < 0.3:
        return re.sub(r"[,.;:'!?]", "", text)
    return text


def in_case(text: str, rng: random.Random) -> str:
    """Change the case at random: unchanged, a capital first letter, Title Case or CAPITALS."""
    style = rng.random()
    if style < 0.05:
        return text.upper()
    if style < 0.08:
        return text.title()
    return text[:1].upper() + text[1:] if style < 0.25 else text


def as_typed(text: str, rng: random.Random) -> str:
    """Apply random typing noise to ``text``; about half of all texts change only in capitals and punctuation."""
    if rng.random() < 0.12:
        text = without_articles(text)
    if rng.random() < 0.12:
        text = slang(text, rng)
    if rng.random() < 0.35:
        text = misspell(text, rng)
    return in_case(punctuate(text, rng), rng)
