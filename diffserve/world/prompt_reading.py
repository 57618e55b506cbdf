"""Parses prompts of the embedded model into scene descriptions, and merges them with follow-up messages.

The parser accepts every sentence of :func:`diffserve.world.captions.caption`, and objects or a background alone. Other
prompts are errors, because a metric must not misread its prompts. As in the captions, "a fox and a cat" means next to
each other, and "a rocket above the mountains" does not specify a height.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Final

import msgspec

from diffserve.api.errors import InvalidRequest
from diffserve.models.vocabulary import WORLD_FILE, Vocabulary
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
    Content,
    objects_of,
    plural,
    sentence,
    words_of_background,
)
from diffserve.world.checker import SceneSpec
from diffserve.world.scenes import COLORS, OBJECTS, PLACES

ARTICLES = ("a", "an", "the", "one")
EXAMPLE = "a fox next to a cactus on the beach"
MAX_PROMPT_CHARS = 300
"""Length limit, above that of any caption, because parsing time grows faster than the length."""


def parse_prompt(prompt: str) -> SceneSpec:
    """Parse ``prompt`` into a scene description, ignoring case and a final period.

    Raises:
        InvalidRequest: The prompt is outside the language of the captions; the message names unknown words.
    """
    if len(prompt) > MAX_PROMPT_CHARS:
        raise InvalidRequest(
            f"the prompt {prompt[:40]!r}… cannot be checked: it has {len(prompt)} characters, and no caption has more "
            f"than {MAX_PROMPT_CHARS}.",
            param="prompt",
        )
    if (spec := read_prompt(prompt)) is None:
        raise InvalidRequest(_describe_error(prompt, _words(prompt)), param="prompt")
    return spec


def read_prompt(prompt: str) -> SceneSpec | None:
    """Parse ``prompt`` into a scene description, or return None if it is outside the language of the captions."""
    return _parse(_words(prompt)) if len(prompt) <= MAX_PROMPT_CHARS else None


def _words(prompt: str) -> str:
    return " ".join(prompt.lower().split()).rstrip(" .!")


@lru_cache(maxsize=1)
def caption_words() -> frozenset[str]:
    """Return every word that a caption can contain, in lower case."""
    patterns = (re.sub(r"{\w*}", "", pattern) for part in (TOGETHER, *RELATION_WORDS.values()) for pattern in part)
    phrases = (*ARTICLES, *OPENINGS, *_nouns(), *_counts(), *_backgrounds(), *patterns)
    return frozenset(word for phrase in phrases for word in re.findall(r"[\w-]+", phrase.lower()))


def known_world() -> Vocabulary:
    """Return the vocabulary of the embedded model."""
    words = tuple(sorted(caption_words()))
    return Vocabulary(objects=tuple(OBJECTS), places=PLACES, colors=tuple(COLORS), words=words)


def write_world(directory: Path) -> None:
    """Write the vocabulary file next to the model's weights."""
    content = msgspec.json.format(msgspec.json.encode(known_world()), indent=1)
    (directory / WORLD_FILE).write_bytes(content + b"\n")


def parse_sentence(words: str) -> Content | None:
    """Parse a canonical :func:`~diffserve.world.captions.sentence`, or return None for any other text."""
    spec = _parse(words)
    if spec is None or not spec.names or spec.background is None:
        return None
    content = Content(spec.names, spec.relation, spec.size or "plain", spec.background)
    return content if sentence(content) == words else None


def _parse(words: str) -> SceneSpec | None:
    for what, background in _without_background(words):
        if not what and background is not None:
            return SceneSpec((), background=background)
        if (objects := _parse_objects(what)) is not None:
            return SceneSpec(*objects, background)
    return None


def _without_background(words: str) -> Iterator[tuple[str, str | None]]:
    """Yield every split of a sentence into remaining words and background; the last has no background."""
    for phrase, background in _backgrounds().items():
        if words == phrase:
            yield "", background
        elif words.startswith(f"{phrase}, "):
            yield words.removeprefix(f"{phrase}, "), background
        elif words.endswith(f" {phrase}"):
            yield words.removesuffix(f" {phrase}").rstrip(" ,"), background
    yield words, None


def _parse_objects(what: str) -> tuple[tuple[str, ...], str | None, str | None] | None:
    """Parse "a small fox", "two foxes" or "a fox above a cat" into names, relation and size, or return None."""
    for opening in OPENINGS:
        what = what.removeprefix(f"{opening} ")
    if (noun := _noun(what)) is not None:
        return (noun[0],), None, noun[1]
    if what in _counts():
        return _counts()[what], None, None
    for relation, pattern in _patterns():
        match = pattern.fullmatch(what)
        nouns = [_noun(match[letter]) for letter in sorted(match.groupdict())] if match else [None]
        if all(noun is not None and noun[1] is None for noun in nouns):
            return tuple(noun[0] for noun in nouns if noun is not None), relation, None
    return None


def _noun(words: str) -> tuple[str, str | None] | None:
    """Parse an object with an optional article into name and size, or return None."""
    first, _, remaining = words.partition(" ")
    return _nouns().get(remaining if first in ARTICLES else words)


@lru_cache(maxsize=1)
def _backgrounds() -> dict[str, str]:
    """Return the background of every phrase, the longest phrases first."""
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
    """Return name and size of every wording of an object, without article."""
    sizes = {"": None, **{f"{word} ": size for size, words in SIZE_WORDS.items() for word in words}}
    return {f"{adjective}{word}": (name, size) for name, word in _synonyms() for adjective, size in sizes.items()}


@lru_cache(maxsize=1)
def _counts() -> dict[str, tuple[str, ...]]:
    """Return the repeated names of every wording of a count."""
    numbers = [(word, number) for number, words in NUMBER_WORDS.items() for word in words]
    return {f"{word} {plural(noun)}": (name,) * number for name, noun in _synonyms() for word, number in numbers}


def _synonyms() -> Iterator[tuple[str, str]]:
    return ((name, word) for name in OBJECTS for word in dict.fromkeys((name, *SYNONYMS.get(name, ()))))


@lru_cache(maxsize=1)
def _patterns() -> tuple[tuple[str | None, re.Pattern[str]], ...]:
    """Return the relation and regular expression of every combination of objects, with a named group per object."""
    wordings = [(relation, pattern) for relation, patterns in RELATION_WORDS.items() for pattern in patterns]
    together: list[tuple[str | None, str]] = [(None, pattern) for pattern in TOGETHER]
    return tuple(
        (relation, re.compile(re.sub(r"{(\w)}", r"(?P<\1>.+?)", pattern)))
        for relation, pattern in dict.fromkeys([*wordings, *together])
    )


WORD_OR_SYMBOLS: Final = re.compile(r"[\w-]+|[^\w\s.,;:!?'\"()-]+")
"""A word, or symbols such as emoji, without punctuation marks."""


def _describe_error(prompt: str, words: str) -> str:
    start = f"the prompt {prompt!r} cannot be checked: "
    known_words = caption_words()
    unknown = [word for word in WORD_OR_SYMBOLS.findall(words) if word not in known_words]
    if not any(map(str.isalnum, words)):
        return f"{start}it has no words; write it like {EXAMPLE!r}."
    if not unknown:
        return f"{start}its words are known, but they do not form a caption; write it like {EXAMPLE!r}."
    near = difflib.get_close_matches(unknown[0], sorted(known_words), n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"it holds {', '.join(OBJECTS)}."
    return f"{start}the picture world does not know {', '.join(unknown)}; {hint}"


MAX_OBJECTS: Final = 3
ADDED: Final = re.compile(r"(?:and|add|with|plus) (.+)")
REPLACED: Final = re.compile(r"(.+?) instead")
SIZES: Final = {word: size for size, words in SIZE_WORDS.items() for word in words} | {
    "bigger": "large",
    "larger": "large",
    "smaller": "small",
}
PREPOSITIONS: Final = ("", "on ", "in ", "at ", "in the ", "on the ")


def merge_scenes(prompt: str, change: str) -> str | None:
    """Return ``prompt`` with ``change`` applied, or None if either is outside the language of captions.

    A change is a background ("at night", "the beach"), a size ("bigger"), an object to add ("and a cat"), or an object
    in place of the others ("a cat instead").
    """
    scene = read_prompt(prompt)
    if scene is None:
        return None
    changed = _changed(scene, " ".join(change.lower().split()).strip(" .,!"))
    if changed is None or len(changed.names) > MAX_OBJECTS:
        return None
    objects = objects_of(changed.names, changed.relation, changed.size or "plain") if changed.names else ""
    background = "" if changed.background is None else words_of_background(changed.background)
    return f"{objects} {background}".strip()


def _changed(scene: SceneSpec, change: str) -> SceneSpec | None:
    if change in SIZES:
        return replace(scene, size=SIZES[change]) if len(scene.names) == 1 else None
    instead, added = REPLACED.fullmatch(change), ADDED.fullmatch(change)
    parts = read_prompt(instead[1] if instead else added[1] if added else change)
    if added and parts is not None and parts.names:
        names = (*scene.names, *parts.names)
        relation = "next to" if len(set(names)) == len(names) == 2 else None
        return SceneSpec(names, relation, background=parts.background or scene.background)
    if parts is not None and parts.names:
        return replace(parts, background=parts.background or scene.background)
    for preposition in PREPOSITIONS:
        place = read_prompt(f"{preposition}{instead[1] if instead else change}")
        if place is not None and not place.names and place.background is not None:
            return replace(scene, background=place.background)
    return None
