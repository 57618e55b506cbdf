"""Merges a prompt for the embedded model with the change of a follow-up message into one canonical sentence."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from diffserve.world.canonical import objects_of
from diffserve.world.captions import SIZE_WORDS, words_of_background
from diffserve.world.checker import SceneSpec
from diffserve.world.prompt_reading import read_prompt

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
