"""Prompts of a sweep and the scenes that they ask for."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from diffserve.api.errors import InvalidRequest
from diffserve.experiments.prompts import (
    MAX_DRAWN,
    draw_pictures,
    held_out_prompts,
    num_drawn_per_prompt,
    read_prompts,
    read_wishes,
    scene_like,
)
from diffserve.world.captions import held_out
from diffserve.world.checker import SceneSpec, judge, read_picture
from diffserve.world.scenes import BACKGROUNDS, scenes

WIDE = ("utf-16", "utf-16-le", "utf-16-be", "utf-32")


def test_the_prompts_are_the_held_out_captions_of_the_evaluation() -> None:
    assert list(held_out_prompts(40)) == [words for _, words in held_out(40)]
    assert held_out_prompts(5) == held_out_prompts(40)[:5]


def test_every_held_out_prompt_is_understood() -> None:
    assert list(read_wishes(held_out_prompts(60))) == [SceneSpec.of(scene) for scene, _ in held_out(60)]


def test_a_scene_like_a_wish_shows_exactly_that_wish() -> None:
    rng = random.Random(1)
    for scene in islice(scenes(12, held_out=True), 300):
        assert SceneSpec.of(scene_like(SceneSpec.of(scene), rng)) == SceneSpec.of(scene)


def test_what_a_wish_leaves_open_is_drawn() -> None:
    rng = random.Random(2)
    drawn = [scene_like(SceneSpec(("fox",)), rng) for _ in range(40)]
    assert {scene.names for scene in drawn} == {("fox",)}
    assert len({scene.background for scene in drawn} & set(BACKGROUNDS)) > 5
    assert len({scene_like(SceneSpec((), background="snow"), rng).names for _ in range(40)}) > 10


def test_drawn_images_pass_the_exact_checker_at_varying_positions() -> None:
    wishes = read_wishes(["a fox next to a cactus on the beach", "three apples on blue", "a small owl in the snow"])
    pictures = list(draw_pictures(wishes, 128, 128, each=3))
    verdicts = [judge(read_picture(picture), wishes[index // 3]).exact for index, picture in enumerate(pictures)]
    assert verdicts == [True] * 9
    assert len({picture.tobytes() for picture in pictures}) > 6
    again = list(draw_pictures(wishes, 128, 128, each=3))
    assert all(np.array_equal(image, other) for image, other in zip(pictures, again, strict=True))


def test_many_prompts_are_drawn_less_often_each() -> None:
    assert num_drawn_per_prompt(1) == num_drawn_per_prompt(64) == 32
    assert num_drawn_per_prompt(1000) * 1000 <= MAX_DRAWN
    assert num_drawn_per_prompt(4000) == 2


def test_prompts_are_read_from_a_file_one_a_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    for encoding in ("utf-8", "utf-8-sig"):
        file.write_text("a fox\n\n  two apples \n", encoding=encoding)
        assert read_prompts(file) == ("a fox", "two apples")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"\n \n", "has no prompts; "),
        *(("a fox\n".encode(name), "is not UTF-8 text; save it as UTF-8") for name in WIDE),
        *(("a café\n".encode(name), "is not UTF-8 text; save it as UTF-8") for name in (*WIDE, "latin-1", "cp437")),
    ],
)
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "prompts.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InvalidRequest, match=message):
        read_prompts(file)
