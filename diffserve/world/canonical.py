"""One sentence for everything a scene can say, and what a wish settles of it.

The rewriter answers in this one style, which the image model's captions contain: "a cat to the left of a dog on a red
background", "two bunches of grapes in the snow", "the moon between a fox and an owl in the night sky".
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import permutations

from diffserve.world.captions import (
    MASSES,
    NUMBER_WORDS,
    PLURALS,
    RELATION_WORDS,
    UNIQUE,
    article_for,
    plural,
    words_of_background,
)
from diffserve.world.scenes import Scene, place_one, place_three, place_two

INVERSE: dict[str, str] = {
    "left of": "right of", "right of": "left of", "above": "below", "below": "above", "next to": "next to",
}  # fmt: skip


@dataclass(frozen=True)
class Said:
    """What a sentence says: objects in order, the relation of the first to the others, the only object's size, and the
    background. The fields mean what they mean in :class:`~diffserve.world.scenes.Scene`."""

    names: tuple[str, ...]
    relation: str | None
    size: str
    background: str

    @classmethod
    def by(cls, scene: Scene) -> Said:
        """What the captions of ``scene`` say."""
        return cls(scene.names, scene.relation, scene.size, scene.background)

    def same(self) -> frozenset[Said]:
        """Every way to say the same: "a left of b" is "b right of a"; what has no order may come in any."""
        if len(self.names) == 2 and self.relation is not None:
            other = Said(self.names[::-1], INVERSE[self.relation], self.size, self.background)
            return frozenset((self, other))
        inside, outside = (self.names[:1], self.names[1:]) if self.relation == "between" else ((), self.names)
        orders = (inside + order for order in permutations(outside))
        return frozenset(Said(order, self.relation, self.size, self.background) for order in orders)

    def stage(self, rng: random.Random) -> Scene:
        """A scene that says this, with random jitter."""
        match self.names:
            case (one,):
                return place_one(one, self.size, self.background, rng)
            case (one, two):
                return place_two(one, two, self.relation, self.background, rng)
            case (one, two, three):
                return place_three((one, two, three), self.relation, self.background, rng)
        raise ValueError(f"a scene holds one to three objects, not {len(self.names)}: {', '.join(self.names)}")


@dataclass(frozen=True)
class Asked:
    """What a wish settles: for every part the choices that would do. One choice each: the wish is complete."""

    names: tuple[frozenset[str], ...]
    relations: frozenset[str | None]
    sizes: frozenset[str]
    backgrounds: frozenset[str]

    @classmethod
    def exactly(cls, said: Said) -> Asked:
        """A wish that leaves nothing open."""
        names = tuple(frozenset((name,)) for name in said.names)
        return cls(names, frozenset((said.relation,)), frozenset((said.size,)), frozenset((said.background,)))

    @property
    def complete(self) -> bool:
        """Whether nothing is left to choose."""
        return all(len(part) == 1 for part in (*self.names, self.relations, self.sizes, self.backgrounds))

    def allows(self, said: Said) -> bool:
        """Whether ``said``, in any of its orders, grants everything that was asked, and adds no object."""
        return any(self._fits(one) for one in said.same())

    def _fits(self, said: Said) -> bool:
        return (
            len(said.names) == len(self.names)
            and all(name in names for name, names in zip(said.names, self.names, strict=True))
            and said.relation in self.relations
            and said.size in self.sizes
            and said.background in self.backgrounds
        )


def noun(name: str, size: str = "plain") -> str:
    """An object with its article and size: "a small cat", "the sun", "grapes"."""
    words = name if size == "plain" else f"{size} {name}"
    if name in UNIQUE:
        return f"the {words}"
    return words if name in PLURALS or name in MASSES else f"{article_for(words)} {words}"


def sentence(said: Said) -> str:
    """The one sentence that says it."""
    return f"{objects_of(said.names, said.relation, said.size)} {words_of_background(said.background)}"


def objects_of(names: tuple[str, ...], relation: str | None, size: str) -> str:
    """Name the objects of a scene, without its background."""
    if len(names) > 1 and len(set(names)) == 1:
        return f"{NUMBER_WORDS[len(names)][0]} {plural(names[0])}"
    if len(names) == 1:
        return noun(names[0], size)
    pattern = "{a}, {b} and {c}" if relation is None else RELATION_WORDS[relation][0]
    return pattern.format(**dict(zip("abc", map(noun, names), strict=False)))
