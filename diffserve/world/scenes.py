"""The picture world of the embedded model: what can stand in a scene, where, and on what background.

A :class:`Scene` is the exact truth behind a picture: the renderer paints it, the caption writer words it, the checker
reads it back. Sizes and positions are pixels of the native 128 x 128 canvas; other canvases scale the layout.

Objects stand on a grid of 8 pixels, the autoencoder's cell, and their sides are whole cells: an object of one size then
has one pattern of latents wherever it stands, instead of sixty-four, and a small network can learn it well.
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

# places that something can be above
OVERFLOWN: tuple[str, ...] = tuple(place for place in PLACES if place != "night sky")

# side of the square that holds an object, by the word for its size
SIZES_PX: dict[str, int] = {"small": 40, "plain": 72, "large": 96}
PAIR_PX = 56
TRIO_PX = 40
HIGH_PX = 56
SPRITE_SIZES_PX: tuple[int, ...] = (TRIO_PX, PAIR_PX, 72, 96)

RELATIONS: tuple[str, ...] = ("left of", "right of", "above", "below", "next to")

# what a scene can say, and how often it is drawn
KIND_SHARES: dict[str, float] = {
    "one object": 0.3,
    "two objects": 0.4,
    "count": 0.14,
    "three objects": 0.08,
    "between": 0.08,
}


@dataclass(frozen=True)
class Placed:
    """One object in a scene: its name, the side of its square and its centre, in native pixels."""

    name: str
    size_px: int
    x_px: int
    y_px: int


@dataclass(frozen=True)
class Scene:
    """``objects`` on ``background``.

    ``relation`` is of the first of two objects to the second, or "between": the first stands between the other two.
    ``size`` words the only object. Several objects of one name are a count.
    """

    objects: tuple[Placed, ...]
    background: str
    relation: str | None = None
    size: str = "plain"

    @property
    def names(self) -> tuple[str, ...]:
        """The objects' names, in the order a caption gives them."""
        return tuple(placed.name for placed in self.objects)

    @property
    def kind(self) -> str:
        """Which of ``KIND_SHARES`` the scene is."""
        if len(self.objects) == 1:
            return "one object"
        if len(set(self.names)) == 1:
            return "count"
        if self.relation == "between":
            return "between"
        return "two objects" if len(self.objects) == 2 else "three objects"

    @property
    def is_high(self) -> bool:
        """Whether its only object hangs over the place: see :func:`place_high`."""
        return len(self.objects) == 1 and self.objects[0].y_px <= HIGH_PX // 2 + GRID_PX

    @property
    def key(self) -> tuple[str, ...]:
        """What the scene says, without jitter: the unit in which training and held-out scenes are kept apart."""
        return (*self.names, self.relation or self.size, self.background)


def _at(name: str, cells: int, left: int, top: int) -> Placed:
    """An object of ``cells`` x ``cells`` with its top left corner at a cell."""
    half = cells * GRID_PX // 2
    return Placed(name, cells * GRID_PX, left * GRID_PX + half, top * GRID_PX + half)


def place_one(name: str, size: str, background: str, rng: random.Random) -> Scene:
    """A scene of one object of a worded size, near the middle, with jitter that never crosses the edge."""
    cells = SIZES_PX[size] // GRID_PX
    room = CANVAS_CELLS - cells
    across, up = min(2.5, room / 2 - 1), min(1.5, room / 2 - 1)
    left = rng.randint(round(room / 2 - across + 0.01), round(room / 2 + across - 0.01))
    top = rng.randint(round(room / 2 - up + 0.01), round(room / 2 + up - 0.01))
    return Scene((_at(name, cells, left, top),), background, size=size)


def place_high(name: str, background: str, rng: random.Random) -> Scene:
    """A scene of one object high up, where "a rocket above the mountains" has it."""
    cells = HIGH_PX // GRID_PX
    left = rng.randint(3, CANVAS_CELLS - cells - 3)
    return Scene((_at(name, cells, left, rng.randint(0, 1)),), background)


def place_two(first: str, second: str, relation: str | None, background: str, rng: random.Random) -> Scene:
    """A scene of two objects in ``relation``; "next to" and no relation (a count) put either one on the left."""
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
    """A scene of three small objects: a row, or without a relation also a triangle; "between" has the first inside."""
    cells = TRIO_PX // GRID_PX
    if relation == "between" or rng.random() < 0.5:
        level = rng.randint(4, 7)
        inner, *outer = ((left, level + rng.randint(-1, 1)) for left in (rng.randint(5, 6), 0, 11))
        if rng.random() < 0.5:
            outer.reverse()
        spots = [inner, *outer]
    else:
        one, two = (1, 10) if rng.random() < 0.5 else (9, 2)
        spots = [(rng.randint(5, 6), one), (rng.randint(1, 2), two), (rng.randint(9, 10), two)]
    if relation is None:
        rng.shuffle(spots)
    placed = tuple(_at(name, cells, *spot) for name, spot in zip(names, spots, strict=True))
    return Scene(placed, background, relation=relation)


def draw_scene(kind: str, rng: random.Random) -> Scene:
    """A random scene of a kind of ``KIND_SHARES``, or "high": one object above a place."""
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
    one, two, three = rng.sample(names, 3)
    return place_three((one, two, three), "between" if kind == "between" else None, background, rng)


def _stable_hash(words: Iterable[str]) -> int:
    total = 0
    for character in "|".join(words):
        total = (total * 131 + ord(character)) % 1_000_003
    return total


def has_unseen_pair(scene: Scene) -> bool:
    """Whether two of its objects are a pair that no training scene shows together: a tenth of all pairs."""
    pairs = combinations(sorted(set(scene.names)), 2)
    return any(_stable_hash(pair) % 10 == 0 for pair in pairs)


def is_held_out(scene: Scene) -> bool:
    """Whether the scene is kept from training: a tenth of all keys, and every scene with an unseen pair of objects."""
    return _stable_hash(scene.key) % 10 == 0 or has_unseen_pair(scene)


def scenes(seed: int, *, held_out: bool, shares: Mapping[str, float] = KIND_SHARES) -> Iterator[Scene]:
    """An endless, seeded stream of training scenes, or of held-out ones, of kinds drawn by ``shares``."""
    rng = random.Random(seed)
    while True:
        kind = rng.choices(list(shares), weights=list(shares.values()))[0]
        scene = draw_scene(kind, rng)
        while is_held_out(scene) != held_out or not is_legible(scene):
            scene = draw_scene(kind, rng)
        yield scene


# An object that all but vanishes into its background teaches nothing and cannot be checked.
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
    """Whether no object of the scene is camouflaged by the background."""
    return all((placed.name, scene.background) not in CAMOUFLAGED for placed in scene.objects)
