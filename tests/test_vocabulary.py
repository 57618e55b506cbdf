"""Closed vocabulary of a model, and warnings about unknown words."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from diffserve.api.errors import ModelLoadError
from diffserve.models.vocabulary import MOST_NAMED, WORLD_FILE, Vocabulary, read_vocabulary, warn_of_unknown
from diffserve.runtime.loading.family import BUILT_IN
from diffserve.world.captions import caption
from diffserve.world.prompt_reading import known_world, write_world
from diffserve.world.scenes import scenes

WORLD = known_world()


@pytest.mark.parametrize(
    ("prompt", "unknown"),
    [
        ("an astronaut riding a horse", ("astronaut", "riding", "horse")),
        ("four dogs", ("four",)),
        ("Two DOGS on the Beach!", ()),
        ("a (fox:1.3), [cactus] next to (a cat:0.8)", ()),
        ("a fox, a fox and a wolf, wolf", ("wolf",)),
        ("a fox-cactus and a were-wolf", ("were-wolf",)),
        ("ein Fuchs 狐狸 🦊 — ✨", ("ein", "fuchs", "狐狸", "🦊", "✨")),
        ("a_fox_on_the_beach", ()),
        ("...", ()),
        ("a fox BREAK a cactus", ()),
        ("a (fox:-1) and a (wolf:-.5) next to a (cat: +1.5 )", ("wolf",)),
        ("a fox <hypernet:ink:0.5>", ()),
        (r"a \(fox\) \BREAK", ("break",)),
        ("a break and a cat at 1:2", ("break", "1", "2")),
    ],
)
def test_unknown_words_are_found(prompt: str, unknown: tuple[str, ...]) -> None:
    assert WORLD.unknown_words(prompt) == unknown


def test_words_of_textual_inversions_are_known() -> None:
    extended = WORLD.learning(("easynegative", "<cat-toy>"))
    assert extended.unknown_words("a fox, EasyNegative, <cat-toy>, wolf") == ("wolf",)
    assert extended.objects == WORLD.objects


def test_captions_have_no_unknown_words() -> None:
    rng = random.Random(3)
    for scene in itertools.islice(scenes(3, held_out=True), 2000):
        assert WORLD.unknown_words(caption(scene, rng)) == ()


def test_the_vocabulary_of_the_embedded_model_matches_the_captions() -> None:
    shipped = read_vocabulary(BUILT_IN["embedded"])
    assert shipped == WORLD, "run diffserve.world.prompt_reading.write_world on the weights"
    assert (len(WORLD.objects), len(WORLD.places), len(WORLD.colors)) == (60, 8, 12)


def test_an_invalid_vocabulary_file_is_an_error_with_its_name(tmp_path: Path) -> None:
    assert read_vocabulary(tmp_path) is None
    write_world(tmp_path)
    assert read_vocabulary(tmp_path) == WORLD
    (tmp_path / WORLD_FILE).write_text('{"objects": 1}')
    with pytest.raises(ModelLoadError, match=r"world\.json"):
        read_vocabulary(tmp_path)


def test_warning_lists_some_words_and_counts_the_others() -> None:
    words = tuple(f"word{number}" for number in range(MOST_NAMED + 2))
    assert "'word0'" in warn_of_unknown("embedded", words)
    assert "and 2 more" in warn_of_unknown("embedded", words)
    assert len(warn_of_unknown("embedded", ("x" * 30_000,))) < 200


def test_words_are_lower_case_sorted_and_unique() -> None:
    assert list(WORLD.words) == sorted({word.lower() for word in WORLD.words})
    assert isinstance(WORLD, Vocabulary)
