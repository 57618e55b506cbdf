"""English captions of scenes: varied wordings for training, and one canonical sentence for each content.

The rewriter answers in canonical sentences: "a cat to the left of a dog on a red background", "two bunches of grapes in
the snow", "the moon between a fox and an owl in the night sky".
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import islice, permutations

from diffserve.world.scenes import COLORS, Scene, place_one, place_three, place_two, scenes

SIZE_WORDS: dict[str, tuple[str, ...]] = {
    "small": ("small", "small", "tiny", "little"),
    "large": ("large", "large", "big", "huge", "giant"),
}

# {a} is the first object, {b} and {c} are the others
RELATION_WORDS: dict[str, tuple[str, ...]] = {
    "left of": ("{a} to the left of {b}", "{a} left of {b}", "{a} on the left of {b}", "{a} with {b} on its right"),
    "right of": ("{a} to the right of {b}", "{a} right of {b}", "{a} on the right of {b}", "{a} with {b} on its left"),
    "above": ("{a} above {b}", "{a} above {b}", "{a} over {b}", "{a} on top of {b}"),
    "below": ("{a} below {b}", "{a} below {b}", "{a} under {b}", "{a} beneath {b}", "{a} underneath {b}"),
    "next to": ("{a} next to {b}", "{a} next to {b}", "{a} beside {b}", "{a} and {b}", "{a} with {b} beside it"),
    "between": ("{a} between {b} and {c}", "{a} between {b} and {c}", "{a} in between {b} and {c}"),
}
TOGETHER: tuple[str, ...] = ("{a}, {b} and {c}", "{a}, {b} and {c}", "{a} and {b} and {c}", "{a} with {b} and {c}")
NUMBER_WORDS: dict[int, tuple[str, ...]] = {2: ("two", "two", "two", "a pair of"), 3: ("three", "three", "three", "3")}

PLACE_WORDS: dict[str, tuple[str, ...]] = {
    "beach": ("on the beach", "on a beach", "at the beach", "on a sandy beach"),
    "meadow": ("in a meadow", "in the meadow", "on a meadow", "on the grass", "in a green field"),
    "night sky": ("in the night sky", "at night", "under the stars", "in a starry night"),
    "desert": ("in the desert", "in a desert", "among sand dunes"),
    "snow": ("in the snow", "in a snowy landscape", "in the winter snow"),
    "ocean": ("in the ocean", "at sea", "in the sea", "on the ocean"),
    "city": ("in the city", "in a city", "in a big city", "in front of a city"),
    "mountains": ("in the mountains", "in front of mountains", "near the mountains"),
}

ABOVE_WORDS: dict[str, tuple[str, ...]] = {
    "beach": ("above the beach", "over the beach", "above a beach", "over a sandy beach"),
    "meadow": ("above the meadow", "over the meadow", "above a meadow", "over a green field", "above the grass"),
    "desert": ("above the desert", "over the desert", "above a desert", "over sand dunes"),
    "snow": ("above the snow", "over the snow", "above a snowy landscape"),
    "ocean": ("above the ocean", "over the ocean", "above the sea", "over the sea"),
    "city": ("above the city", "over the city", "above a city", "over a city", "above a big city"),
    "mountains": ("above the mountains", "over the mountains", "above mountains", "over mountains"),
}
"""Wordings for an object above a place; see :attr:`Scene.is_high`."""

COLOR_WORDS: tuple[str, ...] = (
    "on a {} background",
    "on a {} background",
    "on {}",
    "in front of a {} background",
    "against a {} background",
    "with a {} background",
)
COLOR_SYNONYMS: dict[str, tuple[str, ...]] = {
    "gray": ("gray", "gray", "grey"),
    "purple": ("purple", "purple", "violet"),
    "light blue": ("light blue", "light blue", "sky blue", "pale blue"),
}

OPENINGS: tuple[str, ...] = (
    "a picture of", "an illustration of", "a drawing of", "a scene with", "an image of", "a painting of", "there is",
)  # fmt: skip

SYNONYMS: dict[str, tuple[str, ...]] = {
    "bicycle": ("bicycle", "bike"),
    "burger": ("burger", "hamburger"),
    "cake": ("cake", "cake", "birthday cake"),
    "car": ("car", "car", "red car"),
    "cat": ("cat", "cat", "kitty"),
    "chicken": ("chicken", "chicken", "hen"),
    "diamond": ("diamond", "diamond", "gem"),
    "dog": ("dog", "dog", "puppy"),
    "donut": ("donut", "doughnut"),
    "fire": ("fire", "fire", "flame"),
    "moon": ("moon", "moon", "crescent moon"),
    "pine tree": ("pine tree", "pine tree", "fir tree"),
    "sailboat": ("sailboat", "sailboat", "boat"),
    "soccer ball": ("soccer ball", "soccer ball", "football"),
    "top hat": ("top hat", "top hat", "black hat"),
}

PLURALS: dict[str, str] = {"grapes": "bunches of grapes", "cherries": "bunches of cherries"}
MASSES: dict[str, str] = {"corn": "ears of corn"}
IRREGULAR: dict[str, str] = {"fish": "fish", "cactus": "cactuses", "octopus": "octopuses", "bus": "buses"}
UNIQUE: frozenset[str] = frozenset({"sun", "moon"})

BACKWARD = "on its"
"""Marks wordings such as "with a cat on its right", where the second object is placed relative to the first."""
BACKWARD_EXTRA = 3

HELD_OUT_SEED = 20_260
BACKGROUND_ONLY_SHARE = 0.02
OBJECTS_ONLY_SHARE = 0.08
ALONE_SHARE = 0.2  # share of single-object training captions without a background, like most users' first prompts


def article_for(words: str) -> str:
    """Return "a" or "an" depending on the first letter."""
    return "an" if words[0] in "aeiou" else "a"


def plural(word: str) -> str:
    """Return the plural of an object's name or synonym."""
    if word in PLURALS or word in MASSES or word in IRREGULAR:
        return (PLURALS | MASSES | IRREGULAR)[word]
    if word.endswith(("x", "ch", "sh")):
        return f"{word}es"
    if word.endswith("y") and word[-2] not in "aeiou":
        return f"{word[:-1]}ies"
    return f"{word}s"


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


def _what(scene: Scene, rng: random.Random, *, is_lesson: bool = False) -> str:
    names = scene.names
    if scene.kind == "count":
        word = rng.choice(SYNONYMS.get(names[0], names[:1]))
        return f"{rng.choice(NUMBER_WORDS[len(names)])} {plural(word)}"
    if scene.kind == "one object":
        return _noun(names[0], scene.size, rng)
    nouns = {letter: _noun(name, "plain", rng) for letter, name in zip("abc", names, strict=False)}
    patterns = TOGETHER if scene.relation is None else RELATION_WORDS[scene.relation]
    if is_lesson:
        patterns += tuple(pattern for pattern in patterns if BACKWARD in pattern) * BACKWARD_EXTRA
    pattern = rng.choice(patterns)
    return pattern.format(**nouns)


def words_of_background(background: str) -> str:
    """Return the canonical words for a background: "on a red background", "on the beach"."""
    return _on_color(COLOR_WORDS[0], background) if background in COLORS else PLACE_WORDS[background][0]


def _on_color(pattern: str, color: str) -> str:
    return pattern.format(color).replace(" a orange", " an orange")


def _where(scene: Scene, rng: random.Random) -> str:
    background = scene.background
    if background in COLORS:
        color = rng.choice(COLOR_SYNONYMS.get(background, (background,)))
        return _on_color(rng.choice(COLOR_WORDS), color)
    return rng.choice((ABOVE_WORDS if scene.is_high else PLACE_WORDS)[background])


def caption(scene: Scene, rng: random.Random, *, is_lesson: bool = False) -> str:
    """Write a random complete caption of ``scene``; ``is_lesson`` favors wordings that are hard to learn."""
    what, where = _what(scene, rng, is_lesson=is_lesson), _where(scene, rng)
    style = rng.random()
    if style < 0.08:
        return f"{where}, {what}"
    if style < 0.16:
        return f"{what}, {where}"
    if style < 0.28:
        return f"{rng.choice(OPENINGS)} {what} {where}"
    return f"{what} {where}"


def held_out(count: int) -> list[tuple[Scene, str]]:
    """Return the first ``count`` held-out scenes with their captions, from a fixed list."""
    rng = random.Random(HELD_OUT_SEED)
    return [(scene, caption(scene, rng)) for scene in islice(scenes(HELD_OUT_SEED, held_out=True), count)]


def loose_caption(scene: Scene, rng: random.Random) -> str:
    """Write a training caption that sometimes omits the background or the objects.

    Users often do the same, and negative prompts consist of such single words.
    """
    if scene.is_high:
        return caption(scene, rng, is_lesson=True)
    share = rng.random()
    if share < BACKGROUND_ONLY_SHARE:
        return _where(scene, rng)
    if share < BACKGROUND_ONLY_SHARE + (ALONE_SHARE if scene.kind == "one object" else OBJECTS_ONLY_SHARE):
        return _what(scene, rng, is_lesson=True)
    return caption(scene, rng, is_lesson=True)


INVERSE: dict[str, str] = {
    "left of": "right of", "right of": "left of", "above": "below", "below": "above", "next to": "next to",
}  # fmt: skip


@dataclass(frozen=True)
class Content:
    """Content of a caption, with the fields of :class:`~diffserve.world.scenes.Scene` but without positions.

    Attributes:
        names: Objects in order.
        relation: Relation of the first object to the others.
        size: Size of a single object.
        background: Color or place.
    """

    names: tuple[str, ...]
    relation: str | None
    size: str
    background: str

    @classmethod
    def by(cls, scene: Scene) -> Content:
        """Return the content of ``scene``."""
        return cls(scene.names, scene.relation, scene.size, scene.background)

    def same(self) -> frozenset[Content]:
        """Return all equivalent contents: "a left of b" equals "b right of a", and unordered objects are permuted."""
        if len(self.names) == 2 and self.relation is not None:
            other = Content(self.names[::-1], INVERSE[self.relation], self.size, self.background)
            return frozenset((self, other))
        inside, outside = (self.names[:1], self.names[1:]) if self.relation == "between" else ((), self.names)
        orders = (inside + order for order in permutations(outside))
        return frozenset(Content(order, self.relation, self.size, self.background) for order in orders)

    def stage(self, rng: random.Random) -> Scene:
        """Sample a scene with this content and random positions."""
        match self.names:
            case (one,):
                return place_one(one, self.size, self.background, rng)
            case (one, two):
                return place_two(one, two, self.relation, self.background, rng)
            case (one, two, three):
                return place_three((one, two, three), self.relation, self.background, rng)
        raise ValueError(f"a scene holds one to three objects, not {len(self.names)}: {', '.join(self.names)}")


@dataclass(frozen=True)
class Requirements:
    """Constraints of a loose prompt: the acceptable choices for each part of a caption's content."""

    names: tuple[frozenset[str], ...]
    relations: frozenset[str | None]
    sizes: frozenset[str]
    backgrounds: frozenset[str]

    @classmethod
    def exactly(cls, content: Content) -> Requirements:
        """Build constraints that accept exactly the given content."""
        names = tuple(frozenset((name,)) for name in content.names)
        return cls(names, frozenset((content.relation,)), frozenset((content.size,)), frozenset((content.background,)))

    @property
    def complete(self) -> bool:
        """Whether every part has exactly one choice."""
        return all(len(part) == 1 for part in (*self.names, self.relations, self.sizes, self.backgrounds))

    def allows(self, content: Content) -> bool:
        """Return whether the content, in any equivalent order, satisfies all constraints and adds no object."""
        return any(self._fits(equivalent) for equivalent in content.same())

    def _fits(self, content: Content) -> bool:
        return (
            len(content.names) == len(self.names)
            and all(name in names for name, names in zip(content.names, self.names, strict=True))
            and content.relation in self.relations
            and content.size in self.sizes
            and content.background in self.backgrounds
        )


def noun(name: str, size: str = "plain") -> str:
    """Return an object with its article and size: "a small cat", "the sun", "grapes"."""
    words = name if size == "plain" else f"{size} {name}"
    if name in UNIQUE:
        return f"the {words}"
    return words if name in PLURALS or name in MASSES else f"{article_for(words)} {words}"


def sentence(content: Content) -> str:
    """Write the canonical sentence of a content."""
    return f"{objects_of(content.names, content.relation, content.size)} {words_of_background(content.background)}"


def objects_of(names: tuple[str, ...], relation: str | None, size: str) -> str:
    """Name the objects of a scene, without its background."""
    if len(names) > 1 and len(set(names)) == 1:
        return f"{NUMBER_WORDS[len(names)][0]} {plural(names[0])}"
    if len(names) == 1:
        return noun(names[0], size)
    pattern = "{a}, {b} and {c}" if relation is None else RELATION_WORDS[relation][0]
    return pattern.format(**dict(zip("abc", map(noun, names), strict=False)))
