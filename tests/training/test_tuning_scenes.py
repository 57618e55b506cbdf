"""Scenes of the tune stage."""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice

import pytest

from diffserve.training.latents import TUNING_SHARES, tuning_scenes
from diffserve.world.captions import ABOVE_WORDS, OBJECTS_ONLY_SHARE, loose_caption
from diffserve.world.checker import check
from diffserve.world.prompt_reading import parse_prompt
from diffserve.world.render import render
from diffserve.world.scenes import OVERFLOWN, Scene, is_held_out, is_legible, scenes


@pytest.fixture(scope="module")
def drawn() -> list[Scene]:
    return list(islice(tuning_scenes(7), 1500))


def test_tuning_scenes_follow_their_shares_and_none_is_held_out(drawn: list[Scene]) -> None:
    assert sum(TUNING_SHARES.values()) == pytest.approx(1)
    kinds = Counter(
        "high" if scene.is_high else scene.size if scene.kind == "one object" else scene.kind for scene in drawn
    )
    for kind, share in TUNING_SHARES.items():
        assert kinds[kind] / len(drawn) == pytest.approx(share, abs=0.035), kind
    assert all(is_legible(scene) and not is_held_out(scene) for scene in drawn)
    assert drawn == list(islice(tuning_scenes(7), len(drawn)))


def test_single_objects_stand_in_the_middle_as_near_as_the_grid_lets_their_size(drawn: list[Scene]) -> None:
    spots = {
        (scene.size, placed.x_px, placed.y_px)
        for scene in drawn
        if scene.kind == "one object" and not scene.is_high
        for placed in scene.objects
    }
    off_center = {(size, x, 68) for size in ("small", "plain") for x in (60, 68)}
    assert spots == off_center | {("large", 64, 64)}


def test_objects_named_in_a_row_stand_from_left_to_right(drawn: list[Scene]) -> None:
    rows = {"three objects": (0, 1, 2), "between": (1, 0, 2)}
    in_rows = [scene for scene in drawn if scene.kind in rows]
    assert len(in_rows) > 200
    for scene in in_rows:
        across = [scene.objects[index].x_px for index in rows[scene.kind]]
        assert across == sorted(across)
        heights = [placed.y_px for placed in scene.objects]
        assert max(heights) - min(heights) <= 8


def test_what_hangs_over_a_place_is_worded_so_alone_and_reads_back(drawn: list[Scene]) -> None:
    high = [scene for scene in drawn if scene.is_high]
    assert {scene.background for scene in high} == set(OVERFLOWN) == set(ABOVE_WORDS)
    rng = random.Random(1)
    for scene in high:
        words = loose_caption(scene, rng)
        assert any(phrase in words for phrase in ABOVE_WORDS[scene.background])
        wish = parse_prompt(words)
        assert (wish.names, wish.relation, wish.background) == (scene.names, None, scene.background)
    for scene in high[:10]:
        assert check(render(scene), scene).exact


def test_captions_say_above_a_place_only_for_high_objects() -> None:
    rng = random.Random(2)
    phrases = {phrase for words in ABOVE_WORDS.values() for phrase in words}
    for scene in islice(scenes(3, held_out=False), 2000):
        assert not scene.is_high
        assert not any(phrase in loose_caption(scene, rng) for phrase in phrases)


def test_captions_of_a_single_object_often_omit_the_background(drawn: list[Scene]) -> None:
    rng = random.Random(3)
    source = [scene for scene in drawn if scene.kind == "one object" and not scene.is_high]
    alone = sum(parse_prompt(loose_caption(scene, rng)).background is None for scene in source)
    assert alone / len(source) > 1.6 * OBJECTS_ONLY_SHARE
