"""All that captions can say, as the file that tells others what the model knows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import msgspec

from diffserve.vocabulary import WORLD_FILE, Vocabulary
from diffserve.world.captions import (
    ABOVE_WORDS,
    COLOR_SYNONYMS,
    COLOR_WORDS,
    NUMBER_WORDS,
    OPENINGS,
    PLACE_WORDS,
    RELATION_WORDS,
    SIZE_WORDS,
    SYNONYMS,
    TOGETHER,
    plural,
)
from diffserve.world.scenes import COLORS, OBJECTS, PLACES

ARTICLES = ("a", "an", "the", "one")


def caption_words() -> frozenset[str]:
    """Every word that a caption of the picture world can hold, in lower case."""
    return frozenset(word for phrase in _phrases() for word in re.findall(r"[\w-]+", phrase.lower()))


def known_world() -> Vocabulary:
    """What the embedded model can be asked for."""
    return Vocabulary(objects=tuple(OBJECTS), places=PLACES, colors=tuple(COLORS), words=tuple(sorted(caption_words())))


def write_world(directory: Path) -> None:
    """Put it beside the weights."""
    content = msgspec.json.format(msgspec.json.encode(known_world()), indent=1)
    (directory / WORLD_FILE).write_bytes(content + b"\n")


def _phrases() -> Iterator[str]:
    nouns = [word for name in OBJECTS for word in (name, *SYNONYMS.get(name, ()))]
    yield from (*ARTICLES, *OPENINGS, *nouns, *map(plural, nouns))
    yield from chain(COLORS, *COLOR_SYNONYMS.values(), *SIZE_WORDS.values(), *NUMBER_WORDS.values())
    yield from chain(*PLACE_WORDS.values(), *ABOVE_WORDS.values())
    patterns = chain(COLOR_WORDS, TOGETHER, *RELATION_WORDS.values())
    yield from (re.sub(r"{\w*}", "", pattern) for pattern in patterns)
