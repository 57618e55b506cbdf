"""Vocabulary of wishes from the tables ``words.toml``, ``phrases.toml`` and ``languages.toml`` in this directory.

Each string of a table holds several wordings, separated by "|"; here they are tuples.
"""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from diffserve.world.captions import COLOR_SYNONYMS, PLURALS, SYNONYMS, plural

Table = TypeVar("Table")
Wordings = tuple[str, ...]

IRREGULAR = {"cactus": "cacti", "fungus": "fungi", "goldfish": "goldfish", "great white": "great whites"}
HEADS = (" of ", " with ", " for ", " in ", " on ", " you ", " that ", " monkeys ")


class Phrases(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Wordings for training, and wordings reserved for the test."""

    training: Wordings
    held_out: Wordings

    def side(self, *, held_out: bool) -> Wordings:
        """Return the wordings for training or for the test."""
        return self.held_out if held_out else self.training


class Sentences(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of ``phrases.toml``."""

    verbs: Wordings
    relations: dict[str, Phrases]
    together: Phrases
    counts: dict[int, Phrases]
    openings: Phrases
    closings: Phrases
    boosters: Phrases
    frames: Phrases
    tag_frames: Phrases
    vague_pairs: Phrases
    vague_singles: Phrases
    vague_moods: Phrases
    vague_places: Phrases
    vague_anythings: Phrases


class Words(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of ``words.toml``; the keys of ``categories`` and ``moods`` are wordings joined by "|"."""

    adjectives: Wordings
    color_phrases: Wordings
    default_homes: Wordings
    names: dict[str, Wordings]
    natural_colors: dict[str, Wordings]
    sizes: dict[str, Wordings]
    colors: dict[str, Wordings]
    color_associations: dict[str, Wordings]
    places: dict[str, Wordings]
    tags: dict[str, Wordings]
    homes: dict[str, Wordings]
    categories: dict[str, Wordings]
    moods: dict[str, tuple[Wordings, Wordings]]


class Languages(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of ``languages.toml``: openings by language, and each word in all languages in that order."""

    openings: dict[str, Wordings]
    objects: dict[str, Wordings]
    backgrounds: dict[str, Wordings]
    relations: dict[str, Wordings]


@cache
def split(wordings: str) -> Wordings:
    """Split a string at "|" into its wordings."""
    return tuple(wordings.split("|"))


def _split_all(value: Any) -> Any:
    match value:
        case dict():
            return {key: _split_all(part) for key, part in value.items()}
        case list():
            return [_split_all(part) for part in value]
    return split(value)


def _read(name: str, kind: type[Table]) -> Table:
    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    return msgspec.convert(_split_all(tomllib.loads(text)), kind, str_keys=True)


@cache
def sentences() -> Sentences:
    """Return the sentence patterns of wishes."""
    return _read("phrases.toml", Sentences)


@cache
def words() -> Words:
    """Return the informal words for the world's content, in addition to those of its captions."""
    return _read("words.toml", Words)


@cache
def languages() -> Languages:
    """Return the vocabulary of other languages."""
    return _read("languages.toml", Languages)


@cache
def names_for(name: str) -> Wordings:
    """Return every wording of an object: its own name and the captions' synonyms first, then the informal ones."""
    return tuple(dict.fromkeys((name, *SYNONYMS.get(name, ()), *words().names[name])))


@cache
def colors_for(color: str) -> Wordings:
    """Return every name of a color."""
    return tuple(dict.fromkeys((color, *COLOR_SYNONYMS.get(color, ()), *words().colors[color])))


@cache
def homes_of(name: str) -> Wordings:
    """Return the backgrounds that suit an object, the likeliest first."""
    listed = [background for background, names in words().homes.items() if name in names]
    return tuple(dict.fromkeys((*listed, *words().default_homes)))


@cache
def many(wording: str) -> str:
    """Return the plural of a wording, formed on its head noun."""
    if wording in PLURALS or wording in IRREGULAR:
        return IRREGULAR.get(wording) or plural(wording)
    cut = min((at for head in HEADS if (at := wording.find(head)) > 0), default=len(wording))
    return plural(wording[:cut]) + wording[cut:]


@cache
def countable_names(name: str) -> Wordings:
    """Return the countable wordings of an object; grapes and cherries come in bunches."""
    if name in PLURALS:
        return (f"bunch of {name}",)
    return tuple(word for word in names_for(name) if not word.startswith("*"))
