"""Synthetic wishes (loosely worded prompts), each with a reference caption: the training data of the prompt rewriter.

Held-out wishes are separated from training by their scenes (:func:`~diffserve.world.scenes.is_held_out`), by their
sentences (the second part of every :class:`~diffserve.training.wishes.words.Phrases`) and by their combinations of
words (:func:`~diffserve.training.wishes.writer.is_kept_combination`). Single words are shared, since an unseen word
cannot be understood. Some of the held-out wishes are written by hand.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, permutations, product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from diffserve.training.wishes.noise import as_typed, misspell
from diffserve.training.wishes.vague import vague_wish
from diffserve.training.wishes.writer import Writer
from diffserve.world.captions import Content, Requirements, caption, sentence
from diffserve.world.checker import SceneSpec, judge, read_picture
from diffserve.world.prompt_reading import parse_sentence
from diffserve.world.scenes import BACKGROUNDS, RELATIONS, SIZES_PX, Scene, is_held_out, scenes

HELD_OUT_SEED = 41_970
BY_HAND = Path(__file__).parent / "by_hand.txt"
BY_HAND_SHARE = 0.4
"""Largest share of the held-out wishes that are written by hand."""

# the image model's captions, loose sentences, lists of tags, another language, vague wishes
SHARES: dict[str, float] = {"caption": 0.16, "free": 0.56, "tags": 0.06, "foreign": 0.04, "vague": 0.18}
HELD_OUT_SHARES: dict[str, float] = {"free": 0.7, "tags": 0.08, "foreign": 0.02, "vague": 0.2}


@dataclass(frozen=True)
class LooseWish:
    """A wish as typed, its reference caption, what it settles, and one scene that satisfies it.

    For a complete wish (``requirements.complete``) the scene is the truth except for jitter; for a vague one it is an
    example.
    """

    text: str
    caption: str
    requirements: Requirements
    scene: Scene

    @classmethod
    def complete(cls, text: str, scene: Scene) -> LooseWish:
        """Return a wish that states everything about ``scene``."""
        content = Content.by(scene)
        return cls(text, sentence(content), Requirements.exactly(content), scene)

    def is_granted_by(self, prompt: str) -> bool:
        """Whether ``prompt`` states everything that the wish settles, in a canonical sentence."""
        content = parse_sentence(prompt)
        return content is not None and self.requirements.allows(content)


def wishes(seed: int, *, held_out: bool, shares: Mapping[str, float] | None = None) -> Iterator[LooseWish]:
    """Yield an endless, seeded stream of training or held-out wishes."""
    shares = shares or (HELD_OUT_SHARES if held_out else SHARES)
    rng = random.Random(seed)
    writer = Writer(rng, held_out=held_out)
    source = scenes(seed, held_out=held_out)
    while True:
        kind = rng.choices(list(shares), weights=list(shares.values()))[0]
        if kind == "vague":
            yield _vague(writer)
        elif kind == "foreign":
            yield _foreign(source, writer)
        else:
            yield _complete(kind, next(source), writer)


def _complete(kind: str, scene: Scene, writer: Writer) -> LooseWish:
    if kind == "caption":
        text = caption(scene, writer.rng)
        return LooseWish.complete(misspell(text, writer.rng) if writer.chance(0.2) else text, scene)
    can_be_listed = scene.relation in (None, "next to")
    content = Content.by(scene)
    text = writer.tags(content) if kind == "tags" and can_be_listed else writer.free(content)
    return LooseWish.complete(as_typed(text, writer.rng), scene)


def _foreign(source: Iterator[Scene], writer: Writer) -> LooseWish:
    """Return a wish for the next scene whose words exist in the foreign language."""
    while (text := writer.foreign(Content.by(scene := next(source)))) is None:
        pass
    return LooseWish.complete(as_typed(text, writer.rng), scene)


def _vague(writer: Writer) -> LooseWish:
    while True:
        text, settled, content = vague_wish(writer)
        scene = content.stage(writer.rng)
        if writer.held_out or not is_held_out(scene):
            return LooseWish(as_typed(text, writer.rng), sentence(content), settled, scene)


def held_out_wishes(count: int) -> list[LooseWish]:
    """Return the fixed list of held-out wishes: at most BY_HAND_SHARE written by hand, the others generated."""
    written = wishes_by_hand()[: round(count * BY_HAND_SHARE)]
    return [*written, *islice(wishes(HELD_OUT_SEED, held_out=True), count - len(written))]


def wishes_by_hand() -> list[LooseWish]:
    """Return the wishes of ``by_hand.txt``."""
    lines = BY_HAND.read_text(encoding="utf-8").splitlines()
    return [_by_hand(line) for line in lines if line and not line.startswith("#")]


def _by_hand(line: str) -> LooseWish:
    text, objects, relation, background, size = (part.strip() for part in line.split(" | "))
    names = tuple(frozenset(choices.replace("_", " ").split("/")) for choices in objects.split(" "))
    relations = {"-": (None,), "*": RELATIONS}.get(relation, (relation,))
    backgrounds = BACKGROUNDS if background == "*" else (background,)
    settled = Requirements(
        names, frozenset(relations), frozenset(SIZES_PX if size == "*" else (size,)), frozenset(backgrounds)
    )
    picks = tuple(min(choices) for choices in names)
    content = Content(picks, relations[0], "plain" if size == "*" else size, backgrounds[0])
    return LooseWish(text, sentence(content), settled, content.stage(random.Random(0)))


def in_groups(wishes: Sequence[LooseWish]) -> dict[str, list[int]]:
    """Return the indices in ``wishes`` of all, complete, vague and handwritten wishes."""
    by_hand = {wish.text for wish in wishes_by_hand()}
    belongs: dict[str, Callable[[LooseWish], bool]] = {
        "all": lambda wish: True,
        "complete": lambda wish: wish.requirements.complete,
        "vague": lambda wish: not wish.requirements.complete,
        "by hand": lambda wish: wish.text in by_hand,
    }
    return {name: [at for at, wish in enumerate(wishes) if test(wish)] for name, test in belongs.items()}


def shows(pixels: NDArray[np.uint8], settled: Requirements) -> bool:
    """Whether the (height, width, 3) image satisfies a wish in every part, with any choice for what was left open."""
    reading = read_picture(pixels)
    names = [placed.name for placed in reading.objects]
    orders = set(permutations(names)) if len(names) == len(settled.names) else set()
    sizes = settled.sizes if len(names) == 1 else settled.sizes & {"plain"}  # sizes apply to single objects only
    options = (Content(*parts, reading.background) for parts in product(orders, settled.relations, sizes))
    return any(judge(reading, SceneSpec.of(content)).exact for content in options if settled.allows(content))
