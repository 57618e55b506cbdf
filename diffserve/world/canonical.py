"""Canonical captions: one sentence for each scene content, and partial constraints on such content.

The rewriter answers in this form, which is part of the image model's captions: "a cat to the left of a dog on a red
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
    def by(cls, scene: Scene) -> Said:
        """Return the content of ``scene``."""
        return cls(scene.names, scene.relation, scene.size, scene.background)

    def same(self) -> frozenset[Said]:
        """Return all equivalent contents: "a left of b" equals "b right of a", and unordered objects are permuted."""
        if len(self.names) == 2 and self.relation is not None:
            other = Said(self.names[::-1], INVERSE[self.relation], self.size, self.background)
            return frozenset((self, other))
        inside, outside = (self.names[:1], self.names[1:]) if self.relation == "between" else ((), self.names)
        orders = (inside + order for order in permutations(outside))
        return frozenset(Said(order, self.relation, self.size, self.background) for order in orders)

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
class Asked:
    """Constraints of a loose prompt: the acceptable choices for each part of a caption's content."""

    names: tuple[frozenset[str], ...]
    relations: frozenset[str | None]
    sizes: frozenset[str]
    backgrounds: frozenset[str]

    @classmethod
    def exactly(cls, content: Said) -> Asked:
        """Build constraints that accept exactly the given content."""
        names = tuple(frozenset((name,)) for name in content.names)
        return cls(names, frozenset((content.relation,)), frozenset((content.size,)), frozenset((content.background,)))

    @property
    def complete(self) -> bool:
        """Whether every part has exactly one choice."""
        return all(len(part) == 1 for part in (*self.names, self.relations, self.sizes, self.backgrounds))

    def allows(self, content: Said) -> bool:
        """Return whether the content, in any equivalent order, satisfies all constraints and adds no object."""
        return any(self._fits(equivalent) for equivalent in content.same())

    def _fits(self, content: Said) -> bool:
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


def sentence(content: Said) -> str:
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
