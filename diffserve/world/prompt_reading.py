"""From a prompt of the embedded model's picture world to what it asks for.

Every sentence that :func:`diffserve.world.captions.caption` can write is understood, with all its synonyms, and so
are the objects or the background alone. A prompt outside that language is an error, never a guess: a metric that
misreads its prompts measures nothing. "a fox and a cat" asks for one beside the other, as it does in the captions;
"a rocket above the mountains" for both, not for how high it is.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import msgspec

from diffserve.api.errors import InvalidRequest
from diffserve.models.vocabulary import WORLD_FILE, Vocabulary
from diffserve.world.canonical import Said, sentence
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
from diffserve.world.checker import SceneSpec
from diffserve.world.scenes import COLORS, OBJECTS, PLACES

ARTICLES = ("a", "an", "the", "one")
EXAMPLE = "a fox next to a cactus on the beach"
MAX_PROMPT_CHARS = 300
"""Longer than any caption; to understand a text takes time that grows faster than its length."""


def parse_prompt(prompt: str) -> SceneSpec:
    """What ``prompt`` asks for; what it does not say is None, or no names. Case and a full stop do not matter.

    Raises :class:`InvalidRequest` naming the words that are not understood.
    """
    if len(prompt) > MAX_PROMPT_CHARS:
        raise InvalidRequest(
            f"the prompt {prompt[:40]!r}… cannot be checked: it has {len(prompt)} characters, and no caption has more "
            f"than {MAX_PROMPT_CHARS}.",
            param="prompt",
        )
    if (spec := read_prompt(prompt)) is None:
        raise InvalidRequest(_what_is_wrong(prompt, _words(prompt)), param="prompt")
    return spec


def read_prompt(prompt: str) -> SceneSpec | None:
    """Return what ``prompt`` asks for, None where it is outside the language of the captions."""
    return _parse(_words(prompt)) if len(prompt) <= MAX_PROMPT_CHARS else None


def _words(prompt: str) -> str:
    return " ".join(prompt.lower().split()).rstrip(" .!")


@lru_cache(maxsize=1)
def caption_words() -> frozenset[str]:
    """Every word that a caption of the picture world can hold, in lower case."""
    patterns = (re.sub(r"{\w*}", "", pattern) for part in (TOGETHER, *RELATION_WORDS.values()) for pattern in part)
    phrases = (*ARTICLES, *OPENINGS, *_nouns(), *_counts(), *_backgrounds(), *patterns)
    return frozenset(word for phrase in phrases for word in re.findall(r"[\w-]+", phrase.lower()))


def known_world() -> Vocabulary:
    """What the embedded model can be asked for."""
    words = tuple(sorted(caption_words()))
    return Vocabulary(objects=tuple(OBJECTS), places=PLACES, colors=tuple(COLORS), words=words)


def write_world(directory: Path) -> None:
    """Put it beside the weights, where it tells others what the model knows."""
    content = msgspec.json.format(msgspec.json.encode(known_world()), indent=1)
    (directory / WORLD_FILE).write_bytes(content + b"\n")


def parse_sentence(words: str) -> Said | None:
    """What a canonical :func:`~diffserve.world.canonical.sentence` says; None for any other text."""
    spec = _parse(words)
    if spec is None or not spec.names or spec.background is None:
        return None
    said = Said(spec.names, spec.relation, spec.size or "plain", spec.background)
    return said if sentence(said) == words else None


def _parse(words: str) -> SceneSpec | None:
    for what, background in _without_background(words):
        if not what and background is not None:
            return SceneSpec((), background=background)
        if (objects := _parse_objects(what)) is not None:
            return SceneSpec(*objects, background)
    return None


def _without_background(words: str) -> Iterator[tuple[str, str | None]]:
    """Every way to take a background off a sentence: what is left, and the background; last, all of it."""
    for phrase, background in _backgrounds().items():
        if words == phrase:
            yield "", background
        elif words.startswith(f"{phrase}, "):
            yield words.removeprefix(f"{phrase}, "), background
        elif words.endswith(f" {phrase}"):
            yield words.removesuffix(f" {phrase}").rstrip(" ,"), background
    yield words, None


def _parse_objects(what: str) -> tuple[tuple[str, ...], str | None, str | None] | None:
    """Names, relation and size of "a small fox", "two foxes" or "a fox above a cat"; None for anything else."""
    for opening in OPENINGS:
        what = what.removeprefix(f"{opening} ")
    if (one := _noun(what)) is not None:
        return (one[0],), None, one[1]
    if what in _counts():
        return _counts()[what], None, None
    for relation, pattern in _patterns():
        match = pattern.fullmatch(what)
        nouns = [_noun(match[letter]) for letter in sorted(match.groupdict())] if match else [None]
        if all(noun is not None and noun[1] is None for noun in nouns):
            return tuple(noun[0] for noun in nouns if noun is not None), relation, None
    return None


def _noun(words: str) -> tuple[str, str | None] | None:
    """The object and its size, with any article or none; None for anything else."""
    first, _, rest = words.partition(" ")
    return _nouns().get(rest if first in ARTICLES else words)


@lru_cache(maxsize=1)
def _backgrounds() -> dict[str, str]:
    """Every phrase for a background, the longest first."""
    wordings = (*PLACE_WORDS.items(), *ABOVE_WORDS.items())
    phrases = {phrase: place for place, phrases in wordings for phrase in phrases}
    for color in COLORS:
        for synonym in COLOR_SYNONYMS.get(color, (color,)):
            for pattern in COLOR_WORDS:
                phrase = pattern.format(synonym)
                phrases |= {phrase: color, phrase.replace(" a orange", " an orange"): color}
    return dict(sorted(phrases.items(), key=lambda item: -len(item[0])))


@lru_cache(maxsize=1)
def _nouns() -> dict[str, tuple[str, str | None]]:
    """Every wording of an object of every size, without article."""
    sizes = {"": None, **{f"{word} ": size for size, words in SIZE_WORDS.items() for word in words}}
    return {f"{adjective}{word}": (name, size) for name, word in _synonyms() for adjective, size in sizes.items()}


@lru_cache(maxsize=1)
def _counts() -> dict[str, tuple[str, ...]]:
    """Every wording of several objects of one name."""
    numbers = [(word, number) for number, words in NUMBER_WORDS.items() for word in words]
    return {f"{word} {plural(noun)}": (name,) * number for name, noun in _synonyms() for word, number in numbers}


def _synonyms() -> Iterator[tuple[str, str]]:
    return ((name, word) for name in OBJECTS for word in dict.fromkeys((name, *SYNONYMS.get(name, ()))))


@lru_cache(maxsize=1)
def _patterns() -> tuple[tuple[str | None, re.Pattern[str]], ...]:
    """Every way to put objects together, each object a named group."""
    wordings = [(relation, pattern) for relation, patterns in RELATION_WORDS.items() for pattern in patterns]
    together: list[tuple[str | None, str]] = [(None, pattern) for pattern in TOGETHER]
    return tuple(
        (relation, re.compile(re.sub(r"{(\w)}", r"(?P<\1>.+?)", pattern)))
        for relation, pattern in dict.fromkeys([*wordings, *together])
    )


def _what_is_wrong(prompt: str, words: str) -> str:
    start = f"the prompt {prompt!r} cannot be checked: "
    known = caption_words()
    unknown = [word for word in re.findall(r"[\w-]+", words) if word not in known]
    if not unknown:
        return f"{start}it says nothing that a caption says, or in another order; say it like {EXAMPLE!r}."
    near = difflib.get_close_matches(unknown[0], sorted(known), n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"it holds {', '.join(OBJECTS)}."
    return f"{start}the picture world does not know {', '.join(unknown)}; {hint}"
