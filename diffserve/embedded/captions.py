"""Word a scene in English, in many ways: synonyms, articles, word order, styles of sentence."""

from __future__ import annotations

import random

from diffserve.embedded.world import COLORS, Scene

SIZE_WORDS: dict[str, tuple[str, ...]] = {
    "small": ("small", "small", "tiny", "little"),
    "large": ("large", "large", "big", "huge"),
}

RELATION_WORDS: dict[str, tuple[str, ...]] = {
    "left of": ("to the left of", "left of", "on the left of"),
    "right of": ("to the right of", "right of", "on the right of"),
    "above": ("above", "above", "over", "on top of"),
    "below": ("below", "below", "under", "beneath"),
    "next to": ("next to", "next to", "beside", "and"),
}

PLACE_WORDS: dict[str, tuple[str, ...]] = {
    "beach": ("on the beach", "on a beach", "at the beach"),
    "meadow": ("in a meadow", "in the meadow", "on a meadow"),
    "night sky": ("in the night sky", "at night", "under the stars"),
    "desert": ("in the desert", "in a desert"),
    "snow": ("in the snow", "in a snowy landscape"),
    "ocean": ("in the ocean", "at sea", "in the sea"),
    "city": ("in the city", "in a city"),
    "mountains": ("in the mountains", "in front of mountains"),
}

COLOR_WORDS: tuple[str, ...] = (
    "on a {} background",
    "on a {} background",
    "on {}",
    "in front of a {} background",
    "against a {} background",
)

OPENINGS: tuple[str, ...] = ("a picture of", "an illustration of", "a drawing of", "a scene with", "an image of")

SYNONYMS: dict[str, tuple[str, ...]] = {
    "donut": ("donut", "doughnut"),
    "burger": ("burger", "hamburger"),
    "bicycle": ("bicycle", "bike"),
    "sailboat": ("sailboat", "boat"),
    "pine tree": ("pine tree", "pine tree", "fir tree"),
    "soccer ball": ("soccer ball", "soccer ball", "football"),
    "car": ("car", "red car"),
    "diamond": ("diamond", "gem"),
    "fire": ("fire", "flame"),
    "top hat": ("top hat", "black hat"),
}

PLURALS: frozenset[str] = frozenset({"grapes", "cherries"})
UNIQUE: frozenset[str] = frozenset({"sun", "moon"})
MASSES: frozenset[str] = frozenset({"corn"})


def article_for(words: str) -> str:
    """ "a" or "an", by the first letter."""
    return "an" if words[0] in "aeiou" else "a"


def _noun(name: str, size: str, rng: random.Random) -> str:
    word = rng.choice(SYNONYMS.get(name, (name,)))
    words = f"{rng.choice(SIZE_WORDS[size])} {word}" if size in SIZE_WORDS else word
    if name in PLURALS or (name in MASSES and rng.random() < 0.5):
        return words
    if name in UNIQUE and rng.random() < 0.5:
        return f"the {words}"
    if rng.random() < 0.06:
        return words if rng.random() < 0.5 else f"one {words}"
    return f"{article_for(words)} {words}"


def _where(background: str, rng: random.Random) -> str:
    if background in COLORS:
        return rng.choice(COLOR_WORDS).format(background).replace("a orange", "an orange")
    return rng.choice(PLACE_WORDS[background])


def caption(scene: Scene, rng: random.Random) -> str:
    """One of many sentences that are true of ``scene`` and name all it holds."""
    first = _noun(scene.objects[0].name, scene.size, rng)
    if scene.relation is None:
        what = first
    else:
        second = _noun(scene.objects[1].name, "plain", rng)
        what = f"{first} {rng.choice(RELATION_WORDS[scene.relation])} {second}"
    where = _where(scene.background, rng)
    style = rng.random()
    if style < 0.08:
        return f"{where}, {what}"
    if style < 0.16:
        return f"{what}, {where}"
    if style < 0.28:
        return f"{rng.choice(OPENINGS)} {what} {where}"
    return f"{what} {where}"
