"""The picture world of the embedded model: what can stand in a scene, where, and on what background.

A :class:`Scene` is the exact truth behind a picture: the renderer paints it, the caption writer words it, the checker
reads it back. Sizes and positions are pixels of the native 128 x 128 canvas; other canvases scale the layout.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

CANVAS_PX = 128

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

# side of the square that holds an object, by the word for its size
SIZES_PX: dict[str, int] = {"small": 44, "plain": 68, "large": 96}
PAIR_PX = 54
SPRITE_SIZES_PX: tuple[int, ...] = (44, PAIR_PX, 68, 96)

RELATIONS: tuple[str, ...] = ("left of", "right of", "above", "below", "next to")


@dataclass(frozen=True)
class Placed:
    """One object in a scene: its name, the side of its square and its centre, in native pixels."""

    name: str
    size_px: int
    x_px: int
    y_px: int


@dataclass(frozen=True)
class Scene:
    """``objects`` on ``background``. ``relation`` is of the first object to the second; ``size`` words the only one."""

    objects: tuple[Placed, ...]
    background: str
    relation: str | None = None
    size: str = "plain"

    @property
    def key(self) -> tuple[str, ...]:
        """What the scene says, without jitter: the unit in which training and held-out scenes are kept apart."""
        return (*(o.name for o in self.objects), self.relation or self.size, self.background)


def place_one(name: str, size: str, background: str, rng: random.Random) -> Scene:
    """A scene of one object of a worded size, near the middle, with jitter that never crosses the edge."""
    side = SIZES_PX[size]
    reach_x = min(20, (CANVAS_PX - side) // 2 - 2)
    reach_y = min(14, (CANVAS_PX - side) // 2 - 2)
    x = CANVAS_PX // 2 + rng.randint(-reach_x, reach_x)
    y = CANVAS_PX // 2 + rng.randint(-reach_y, reach_y)
    return Scene((Placed(name, side, x, y),), background, size=size)


def place_two(first: str, second: str, relation: str, background: str, rng: random.Random) -> Scene:
    """A scene of two objects in ``relation``; "next to" puts either one on the left."""
    near, far = 35, CANVAS_PX - 35
    low, high = (far, near) if relation in ("right of", "below") else (near, far)
    if relation == "next to" and rng.random() < 0.5:
        low, high = high, low
    along = (low + rng.randint(-5, 5), high + rng.randint(-5, 5))
    across = CANVAS_PX // 2 + rng.randint(-10, 10)
    drift = (across + rng.randint(-4, 4), across + rng.randint(-4, 4))
    spots = zip(drift, along, strict=True) if relation in ("above", "below") else zip(along, drift, strict=True)
    placed = tuple(Placed(name, PAIR_PX, x, y) for name, (x, y) in zip((first, second), spots, strict=True))
    return Scene(placed, background, relation=relation)


def draw_scene(rng: random.Random, *, pair_share: float = 0.6) -> Scene:
    """A random scene: two different objects with probability ``pair_share``, else one."""
    background = rng.choice(BACKGROUNDS)
    names = list(OBJECTS)
    if rng.random() < pair_share:
        first, second = rng.sample(names, 2)
        return place_two(first, second, rng.choice(RELATIONS), background, rng)
    return place_one(rng.choice(names), rng.choice(list(SIZES_PX)), background, rng)


def is_held_out(scene: Scene) -> bool:
    """Whether the scene is kept from training: a tenth of all keys, by a stable hash of the words."""
    total = 0
    for character in "|".join(scene.key):
        total = (total * 131 + ord(character)) % 1_000_003
    return total % 10 == 0


def scenes(seed: int, *, held_out: bool, pair_share: float = 0.6) -> Iterator[Scene]:
    """An endless, seeded stream of training scenes, or of held-out ones."""
    rng = random.Random(seed)
    while True:
        scene = draw_scene(rng, pair_share=pair_share)
        if is_held_out(scene) == held_out and is_legible(scene):
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
