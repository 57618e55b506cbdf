"""Scenes of the embedded model: objects, positions and backgrounds.

Renderer, caption writer and checker all use a :class:`Scene`. Sizes and positions are pixels of the native 128 x 128
canvas; other canvases scale the layout. Objects are aligned to the autoencoder's grid of 8 pixels, so that an object
has the same latents at every position and a small network can learn it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

CANVAS_PX = 128
GRID_PX = 8
CANVAS_CELLS = CANVAS_PX // GRID_PX

# name -> code point of its glyph in the Noto Color Emoji font
OBJECTS: dict[str, str] = {
    "cat": "🐱", "dog": "🐶", "fox": "🦊", "bear": "🐻", "panda": "🐼", "frog": "🐸", "monkey": "🐵", "chicken": "🐔",
    "penguin": "🐧", "duck": "🦆", "owl": "🦉", "butterfly": "🦋", "turtle": "🐢", "octopus": "🐙", "crab": "🦀",
    "fish": "🐟", "dolphin": "🐬", "whale": "🐳", "shark": "🦈", "pig": "🐷", "lion": "🦁", "cactus": "🌵",
    "pine tree": "🌲", "palm tree": "🌴", "sunflower": "🌻", "rose": "🌹", "mushroom": "🍄", "apple": "🍎",
    "orange": "🍊", "lemon": "🍋", "banana": "🍌", "watermelon": "🍉", "grapes": "🍇", "strawberry": "🍓",
    "cherries": "🍒", "peach": "🍑", "pineapple": "🍍", "carrot": "🥕", "corn": "🌽", "pizza": "🍕", "burger": "🍔",
    "donut": "🍩", "cake": "🎂", "soccer ball": "⚽", "basketball": "🏀", "balloon": "🎈", "car": "🚗", "bus": "🚌",
    "bicycle": "🚲", "rocket": "🚀", "sailboat": "⛵", "house": "🏠", "castle": "🏰", "moon": "🌙", "star": "⭐",
    "sun": "🌞", "fire": "🔥", "diamond": "💎", "crown": "👑", "top hat": "🎩",
}  # fmt: skip

COLORS: dict[str, tuple[int, int, int]] = {
    "red": (214, 48, 49),
    "orange": (240, 140, 30),
    "yellow": (250, 215, 70),
    "green": (60, 160, 80),
    "blue": (50, 90, 200),
    "light blue": (150, 205, 240),
    "purple": (120, 70, 170),
    "pink": (245, 160, 190),
    "brown": (125, 85, 55),
    "gray": (135, 140, 145),
    "white": (245, 245, 242),
    "black": (28, 28, 32),
}

PLACES: tuple[str, ...] = ("beach", "meadow", "night sky", "desert", "snow", "ocean", "city", "mountains")

BACKGROUNDS: tuple[str, ...] = (*COLORS, *PLACES)

# places that an object can be above
OVERFLOWN: tuple[str, ...] = tuple(place for place in PLACES if place != "night sky")

# side of an object's square by size
SIZES_PX: dict[str, int] = {"small": 40, "plain": 72, "large": 96}
PAIR_PX = 56
TRIO_PX = 40
HIGH_PX = 56
SPRITE_SIZES_PX: tuple[int, ...] = (TRIO_PX, PAIR_PX, 72, 96)

RELATIONS: tuple[str, ...] = ("left of", "right of", "above", "below", "next to")

# share of each kind of scene in random scenes
KIND_SHARES: dict[str, float] = {
    "one object": 0.3,
    "two objects": 0.4,
    "count": 0.14,
    "three objects": 0.08,
    "between": 0.08,
}


@dataclass(frozen=True)
class Placed:
    """An object in a scene: its name, the side of its square, and its center in native pixels."""

    name: str
    size_px: int
    x_px: int
    y_px: int


@dataclass(frozen=True)
class Scene:
    """Objects on a background; several objects of one name are a count.

    Attributes:
        objects: The objects with their positions.
        background: Color or place.
        relation: Relation of the first of two objects to the second, or "between": the first is between two others.
        size: Size of a single object.
    """

    objects: tuple[Placed, ...]
    background: str
    relation: str | None = None
    size: str = "plain"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the objects in the order of captions."""
        return tuple(placed.name for placed in self.objects)

    @property
    def kind(self) -> str:
        """Kind of the scene, a key of ``KIND_SHARES``."""
        if len(self.objects) == 1:
            return "one object"
        if len(set(self.names)) == 1:
            return "count"
        if self.relation == "between":
            return "between"
        return "two objects" if len(self.objects) == 2 else "three objects"

    @property
    def is_high(self) -> bool:
        """Whether its single object is above the place; see :func:`place_high`."""
        return len(self.objects) == 1 and self.objects[0].y_px <= HIGH_PX // 2 + GRID_PX

    @property
    def key(self) -> tuple[str, ...]:
        """Content of the scene without positions, used to separate training and held-out scenes."""
        return (*self.names, self.relation or self.size, self.background)


def _at(name: str, cells: int, left: int, top: int) -> Placed:
    """Place an object of ``cells`` x ``cells`` with its top left corner at a grid cell."""
    half = cells * GRID_PX // 2
    return Placed(name, cells * GRID_PX, left * GRID_PX + half, top * GRID_PX + half)


def place_one(name: str, size: str, background: str, rng: random.Random) -> Scene:
    """Sample a scene of one object of the given size near the center, completely inside the canvas."""
    cells = SIZES_PX[size] // GRID_PX
    room = CANVAS_CELLS - cells
    across, up = min(2.5, room / 2 - 1), min(1.5, room / 2 - 1)
    left = rng.randint(round(room / 2 - across + 0.01), round(room / 2 + across - 0.01))
    top = rng.randint(round(room / 2 - up + 0.01), round(room / 2 + up - 0.01))
    return Scene((_at(name, cells, left, top),), background, size=size)


def place_high(name: str, background: str, rng: random.Random) -> Scene:
    """Sample a scene of one object near the top, as in "a rocket above the mountains"."""
    cells = HIGH_PX // GRID_PX
    left = rng.randint(3, CANVAS_CELLS - cells - 3)
    return Scene((_at(name, cells, left, rng.randint(0, 1)),), background)


def place_two(first: str, second: str, relation: str | None, background: str, rng: random.Random) -> Scene:
    """Sample a scene of two objects in ``relation``; "next to" and None (a count) put either object on the left."""
    cells = PAIR_PX // GRID_PX
    low, high = rng.randint(0, 1), CANVAS_CELLS - cells - rng.randint(0, 1)
    if relation in ("right of", "below") or (relation in ("next to", None) and rng.random() < 0.5):
        low, high = high, low
    across = rng.randint(3, CANVAS_CELLS - cells - 3)
    drift = (across, across + rng.choice((-1, 0, 0, 1)))
    spots = [(low, drift[0]), (high, drift[1])]
    if relation in ("above", "below"):
        spots = [(across, along) for along, across in spots]
    placed = tuple(_at(name, cells, *spot) for name, spot in zip((first, second), spots, strict=True))
    return Scene(placed, background, relation=relation)


def place_three(names: tuple[str, str, str], relation: str | None, background: str, rng: random.Random) -> Scene:
    """Sample a scene of three small objects: a row with the first in the middle for "between", else also a triangle."""
    cells = TRIO_PX // GRID_PX
    if relation == "between" or rng.random() < 0.5:
        level = rng.randint(4, 7)
        inner, *outer = ((left, level + rng.randint(-1, 1)) for left in (rng.randint(5, 6), 0, 11))
        if rng.random() < 0.5:
            outer.reverse()
        spots = [inner, *outer]
    else:
        first_top, other_top = (1, 10) if rng.random() < 0.5 else (9, 2)
        spots = [(rng.randint(5, 6), first_top), (rng.randint(1, 2), other_top), (rng.randint(9, 10), other_top)]
    if relation is None:
        rng.shuffle(spots)
    placed = tuple(_at(name, cells, *spot) for name, spot in zip(names, spots, strict=True))
    return Scene(placed, background, relation=relation)


def draw_scene(kind: str, rng: random.Random) -> Scene:
    """Sample a scene of a kind in ``KIND_SHARES``, or of the kind "high": one object above a place."""
    background = rng.choice(BACKGROUNDS)
    names = list(OBJECTS)
    if kind == "high":
        return place_high(rng.choice(names), rng.choice(OVERFLOWN), rng)
    if kind == "one object":
        return place_one(rng.choice(names), rng.choice(list(SIZES_PX)), background, rng)
    if kind == "two objects":
        first, second = rng.sample(names, 2)
        return place_two(first, second, rng.choice(RELATIONS), background, rng)
    if kind == "count":
        name = rng.choice(names)
        if rng.random() < 0.5:
            return place_two(name, name, None, background, rng)
        return place_three((name, name, name), None, background, rng)
    first, second, third = rng.sample(names, 3)
    return place_three((first, second, third), "between" if kind == "between" else None, background, rng)


def _stable_hash(words: Iterable[str]) -> int:
    total = 0
    for character in "|".join(words):
        total = (total * 131 + ord(character)) % 1_000_003
    return total


def has_unseen_pair(scene: Scene) -> bool:
    """Return whether the scene contains a pair of objects excluded from training, which a tenth of all pairs are."""
    pairs = combinations(sorted(set(scene.names)), 2)
    return any(_stable_hash(pair) % 10 == 0 for pair in pairs)


def is_held_out(scene: Scene) -> bool:
    """Return whether the scene is excluded from training: a tenth of all keys, and every scene with an unseen pair."""
    return _stable_hash(scene.key) % 10 == 0 or has_unseen_pair(scene)


def scenes(seed: int, *, held_out: bool, shares: Mapping[str, float] = KIND_SHARES) -> Iterator[Scene]:
    """Yield endless random training or held-out scenes, with kinds sampled by ``shares``."""
    rng = random.Random(seed)
    while True:
        kind = rng.choices(list(shares), weights=list(shares.values()))[0]
        scene = draw_scene(kind, rng)
        while is_held_out(scene) != held_out or not is_legible(scene):
            scene = draw_scene(kind, rng)
        yield scene


# Objects with nearly the color of their background are hard to learn and cannot be checked.
CAMOUFLAGED: frozenset[tuple[str, str]] = frozenset(
    (name, background)
    for background, names in {
        "red": ("apple", "cherries", "strawberry", "crab", "rose", "balloon", "car"),
        "orange": ("orange", "basketball", "carrot", "fox", "peach", "fire", "lion", "octopus", "crab"),
        "yellow": ("lemon", "banana", "star", "sun", "moon", "crown", "corn", "lion", "sunflower"),
        "green": ("cactus", "pine tree", "frog", "turtle", "palm tree"),
        "light blue": ("fish", "dolphin", "whale", "shark", "diamond", "butterfly"),
        "pink": ("pig", "peach", "donut", "octopus"),
        "brown": ("bear", "monkey"),
        "gray": ("shark",),
        "white": ("soccer ball",),
        "black": ("top hat",),
        "meadow": ("cactus", "frog", "turtle"),
        "ocean": ("fish", "dolphin", "whale", "shark", "diamond"),
    }.items()
    for name in names
)


def is_legible(scene: Scene) -> bool:
    """Return whether no object of the scene is camouflaged by the background."""
    return all((placed.name, scene.background) not in CAMOUFLAGED for placed in scene.objects)
