"""Prompts are read as what they ask for, or refused."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from diffserve.api.errors import InvalidRequest
from diffserve.experiments import parse_prompt
from diffserve.world.captions import (
    COLOR_SYNONYMS,
    NUMBER_WORDS,
    OPENINGS,
    PLACE_WORDS,
    RELATION_WORDS,
    SIZE_WORDS,
    SYNONYMS,
    caption,
    plural,
)
from diffserve.world.checker import SceneSpec
from diffserve.world.prompt_reading import MAX_PROMPT_CHARS
from diffserve.world.scenes import BACKGROUNDS, KIND_SHARES, OBJECTS, scenes


@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize("kind", KIND_SHARES)
def test_every_caption_is_read_as_its_scene(kind: str, held_out: bool) -> None:
    rng = random.Random(4)
    for scene in islice(scenes(4, held_out=held_out, shares={kind: 1}), 600):
        for _ in range(2):
            words = caption(scene, rng)
            assert parse_prompt(words) == SceneSpec.of(scene), words


def test_every_wording_of_every_object_is_known_alone_sized_and_counted() -> None:
    for name in OBJECTS:
        for word in (name, *SYNONYMS.get(name, ())):
            assert parse_prompt(f"a {word}") == parse_prompt(word) == SceneSpec((name,))
            for size, adjectives in SIZE_WORDS.items():
                assert {parse_prompt(f"the {adjective} {word}") for adjective in adjectives} == {
                    SceneSpec((name,), size=size)
                }
            for number, numbers in NUMBER_WORDS.items():
                assert {parse_prompt(f"{n} {plural(word)}") for n in numbers} == {SceneSpec((name,) * number)}


def test_every_wording_of_every_background_is_known_alone() -> None:
    phrases = [(place, phrase) for place, phrases in PLACE_WORDS.items() for phrase in phrases]
    phrases += [(color, f"on a {word} background") for color, words in COLOR_SYNONYMS.items() for word in words]
    for background, phrase in phrases:
        assert parse_prompt(phrase) == SceneSpec((), background=background)
    assert {background for background, _ in phrases} <= set(BACKGROUNDS)


@pytest.mark.parametrize(
    ("prompt", "wish"),
    [
        ("a fox next to a cactus on the beach", SceneSpec(("fox", "cactus"), "next to", None, "beach")),
        ("A Fox  with a cat on its right.", SceneSpec(("fox", "cat"), "left of")),
        ("an orange on an orange background", SceneSpec(("orange",), None, None, "orange")),
        ("an orange on top of an orange balloon", None),
        ("two fish on orange", SceneSpec(("fish", "fish"), None, None, "orange")),
        ("in the sea, a tiny black hat", SceneSpec(("top hat",), None, "small", "ocean")),
        ("a star under the stars", SceneSpec(("star",), None, None, "night sky")),
        ("a rocket under a star at night", SceneSpec(("rocket", "star"), "below", None, "night sky")),
        ("there is a sun in between a house and a castle", SceneSpec(("sun", "house", "castle"), "between")),
        ("a cat, a dog and a pig in a big city", SceneSpec(("cat", "dog", "pig"), None, None, "city")),
        ("a red car on red", SceneSpec(("car",), None, None, "red")),
        ("a rocket above the mountains", SceneSpec(("rocket",), None, None, "mountains")),
        ("a rocket above a house in the mountains", SceneSpec(("rocket", "house"), "above", None, "mountains")),
        ("the sun over the sea", SceneSpec(("sun",), None, None, "ocean")),
        ("3 ears of corn", SceneSpec(("corn",) * 3)),
    ],
)
def test_prompts_are_read_as_a_person_means_them(prompt: str, wish: SceneSpec | None) -> None:
    if wish is None:
        with pytest.raises(InvalidRequest):
            parse_prompt(prompt)
    else:
        assert parse_prompt(prompt) == wish


def test_an_opening_says_nothing() -> None:
    for opening in OPENINGS:
        assert parse_prompt(f"{opening} a fox in the snow") == SceneSpec(("fox",), background="snow")


def test_every_relation_has_its_wordings() -> None:
    for relation, patterns in RELATION_WORDS.items():
        names = ("fox", "owl", "pine tree") if relation == "between" else ("fox", "owl")
        for pattern in patterns:
            words = pattern.format(a="a fox", b="an owl", c="a fir tree")
            assert parse_prompt(words) == SceneSpec(names, relation), words


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("a zebra on the beach", "zebra"),
        ("a foxx on the beach", "did you mean fox"),
        ("a fox inside a castle", "inside"),
        ("a fox on the moonlit beach", "moonlit"),
        ("cactus fox", "cactus fox"),
        ("a small fox next to a cat", "a small fox next to a cat"),
        ("four foxes", "four"),
        ("", "''"),
        ("on", "'on'"),
        ("\U0001f98a", "it has no words"),
        ("a fox \U0001f335", "does not know \U0001f335; it holds"),
    ],
)
def test_a_prompt_outside_the_language_is_refused_and_says_why(prompt: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        parse_prompt(prompt)
    assert refused.value.param == "prompt"


def test_what_is_longer_than_any_caption_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(1)
    longest = max(len(caption(scene, rng)) for scene in islice(scenes(1, held_out=False), 2000))
    assert 2 * longest < MAX_PROMPT_CHARS
    monkeypatch.setattr("diffserve.world.prompt_reading._without_background", None)
    with pytest.raises(InvalidRequest, match="it has 24000 characters, and no caption has more than 300"):
        parse_prompt("a fox above " * 2000)
