"""Vague wishes and a sensible choice for what they leave open: "something cosy with an animal and the moon"."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from diffserve.training.wishes.words import homes_of, sentences, split, words
from diffserve.training.wishes.writer import Writer
from diffserve.world.captions import Content, Requirements
from diffserve.world.scenes import (
    BACKGROUNDS,
    CAMOUFLAGED,
    KIND_SHARES,
    OBJECTS,
    PLACES,
    RELATIONS,
    SIZES_PX,
    draw_scene,
    is_held_out,
)

Choice = TypeVar("Choice")

SHARES: dict[str, float] = {"named": 0.4, "pair": 0.2, "single": 0.22, "mood": 0.08, "place": 0.07, "any": 0.03}
SKY = ("moon", "sun", "star")


@dataclass(frozen=True)
class Slot:
    """One object of a wish: the acceptable names, and its words."""

    names: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Mood:
    """Mood of a wish: its word, and the objects and backgrounds that fit it."""

    text: str = ""
    names: tuple[str, ...] = ()
    backgrounds: tuple[str, ...] = ()


def vague_wish(writer: Writer) -> tuple[str, Requirements, Content]:
    """Return the text of a vague wish, what it settles, and a sensible choice."""
    form = writer.rng.choices(list(SHARES), weights=list(SHARES.values()))[0]
    if form == "named":
        return _wish_by_name(writer)
    mood = _mood(writer)
    if form in ("pair", "single"):
        return _described(writer, mood, 2 if form == "pair" else 1)
    if form == "place":
        return _placed(writer)
    if form == "mood":
        text = writer.pick(sentences().vague_moods).format(mood=mood.text)
        return _settled(writer, text, [Slot(mood.names, "")], mood)
    return _settled(writer, writer.pick(sentences().vague_anythings), [Slot(tuple(OBJECTS), "")], mood)


def _mood(writer: Writer) -> Mood:
    feelings = writer.rng.choice(list(words().moods))
    return Mood(writer.rng.choice(split(feelings)), *words().moods[feelings])


def _wish_by_name(writer: Writer) -> tuple[str, Requirements, Content]:
    """Return a wish with objects and relation but no background."""
    kind = writer.rng.choices(list(KIND_SHARES), weights=list(KIND_SHARES.values()))[0]
    content = Content.by(draw_scene(kind, writer.rng))
    text = writer.around(writer.uncommon(lambda: writer.objects(content)))
    homes = [home for name in content.names for home in homes_of(name)[:3]]
    content = _with_background(content, sorted(homes, key=homes.index), writer)
    return text, replace(Requirements.exactly(content), backgrounds=frozenset(BACKGROUNDS)), content


def _described(writer: Writer, mood: Mood, count: int) -> tuple[str, Requirements, Content]:
    """Return a wish for one or two objects, by name or category, with or without a mood and a place."""
    slots = [_slot(writer) for _ in range(count)]
    while count == 2 and {*slots[0].names} & {*slots[1].names}:
        slots = [_slot(writer) for _ in range(count)]
    pattern = writer.pick(sentences().vague_pairs if count == 2 else sentences().vague_singles)
    text = pattern.format(mood=mood.text, **dict(zip("xy", (slot.text for slot in slots), strict=False)))
    background = writer.rng.choice(BACKGROUNDS) if writer.chance(0.4) else None
    text = f"{text} {writer.where(background)}" if background else text
    return _settled(writer, text, slots, mood if "{mood}" in pattern else Mood(), background)


def _slot(writer: Writer) -> Slot:
    if writer.chance(0.4):
        name = writer.rng.choice(list(OBJECTS))
        return Slot((name,), writer.noun(name, writer.name(name)))
    wordings = writer.rng.choice(list(words().categories))
    return Slot(words().categories[wordings], writer.rng.choice(split(wordings)))


def _placed(writer: Writer) -> tuple[str, Requirements, Content]:
    """Return a wish for a background only."""
    background = writer.rng.choice(PLACES if writer.chance(0.7) else BACKGROUNDS)
    text = writer.pick(sentences().vague_places).format(where=writer.where(background))
    mood = Mood(names=words().homes.get(background, ()))
    return _settled(writer, text, [Slot(tuple(OBJECTS), "")], mood, background)


def _settled(
    writer: Writer, text: str, slots: list[Slot], mood: Mood, background: str | None = None
) -> tuple[str, Requirements, Content]:
    """Choose what is open: by the mood first, then by the objects' usual backgrounds; objects of the sky go above."""
    settled = Requirements(
        tuple(frozenset(slot.names) for slot in slots),
        frozenset(RELATIONS if len(slots) == 2 else (None,)),
        frozenset(SIZES_PX if len(slots) == 1 else ("plain",)),
        frozenset((background,) if background else BACKGROUNDS),
    )
    names: list[str] = []
    for slot in slots:
        clear = [name for name in slot.names if (name, background) not in CAMOUFLAGED] or list(slot.names)
        suited = [name for name in mood.names if name in clear] or clear
        names.append(_likely(suited, writer.rng))
    relation = None if len(names) == 1 else "next to"
    if len(names) == 2 and (names[0] in SKY) != (names[1] in SKY):
        relation = "above" if names[0] in SKY else "below"
    content = Content(tuple(names), relation, "plain", background or "")
    if background is None:
        homes = [*mood.backgrounds, *(home for name in reversed(names) for home in homes_of(name))]
        content = _with_background(content, homes, writer)
    return text, settled, content


def _with_background(content: Content, likely: Sequence[str], writer: Writer) -> Content:
    """Choose a background on which every object is visible, likely ones more often; training skips held-out scenes."""
    options = [replace(content, background=place) for place in dict.fromkeys((*likely, *BACKGROUNDS))]
    clear = [option for option in options if not any((name, option.background) in CAMOUFLAGED for name in option.names)]
    fair = [option for option in clear if writer.held_out or not is_held_out(option.stage(writer.rng))]
    return _likely([*(fair or clear)][:3], writer.rng)


def _likely(options: Sequence[Choice], rng: random.Random) -> Choice:
    """Choose from ``options``, each half as often as the one before it."""
    weights = [2.0**-rank for rank in range(len(options))]
    return rng.choices(options, weights=weights)[0]
