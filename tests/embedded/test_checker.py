"""The exact checker, validated on clean renderings and on spoiled ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from PIL import Image, ImageFilter

from diffserve.embedded.backgrounds import background
from diffserve.embedded.checker import check, read_picture
from diffserve.embedded.render import render
from diffserve.embedded.world import BACKGROUNDS, OBJECTS, Placed, Scene, scenes

SCENES = list(islice(scenes(123, held_out=True), 60))
PAIRS = [scene for scene in SCENES if scene.relation not in (None, "next to")]


@pytest.mark.parametrize("held_out", [True, False])
def test_clean_renderings_pass(held_out: bool) -> None:
    chosen = list(islice(scenes(55, held_out=held_out), 60))
    assert sum(check(render(scene), scene).exact for scene in chosen) == len(chosen)


def test_objects_are_found_where_they_stand() -> None:
    for scene in SCENES[:20]:
        found = {one.name: one for one in read_picture(render(scene)).objects}
        for placed in scene.objects:
            assert abs(found[placed.name].x_px - placed.x_px) <= 2
            assert abs(found[placed.name].y_px - placed.y_px) <= 2


def test_a_wrong_object_is_rejected() -> None:
    names = list(OBJECTS)
    for scene in SCENES[:30]:
        first = scene.objects[0]
        other = names[(names.index(first.name) + 7) % len(names)]
        spoiled = replace(scene, objects=(replace(first, name=other), *scene.objects[1:]))
        assert not check(render(spoiled), scene).objects


def test_a_missing_and_a_surplus_object_are_rejected() -> None:
    for scene in PAIRS[:20]:
        assert not check(render(replace(scene, objects=scene.objects[:1])), scene).exact
        assert not check(render(scene), replace(scene, objects=scene.objects[:1], relation=None)).exact


def test_swapped_sides_are_rejected() -> None:
    for scene in PAIRS[:20]:
        one, two = scene.objects
        swapped = (replace(one, x_px=two.x_px, y_px=two.y_px), replace(two, x_px=one.x_px, y_px=one.y_px))
        verdict = check(render(replace(scene, objects=swapped)), scene)
        assert verdict.objects
        assert not verdict.relation


def test_a_wrong_background_is_rejected() -> None:
    for scene in SCENES[:30]:
        other = BACKGROUNDS[(BACKGROUNDS.index(scene.background) + 3) % len(BACKGROUNDS)]
        assert not check(render(replace(scene, background=other)), scene).exact


def test_a_picture_blurred_to_mush_is_rejected() -> None:
    for scene in SCENES[:30]:
        mush = np.asarray(Image.fromarray(render(scene)).filter(ImageFilter.GaussianBlur(4)))
        assert not check(mush, scene).exact


@pytest.mark.parametrize("name", BACKGROUNDS)
def test_a_bare_background_is_read_as_itself_and_empty(name: str) -> None:
    reading = read_picture(background(name))
    assert (reading.background, reading.objects) == (name, ())


def test_noise_holds_no_objects() -> None:
    noise = np.random.default_rng(0).integers(0, 255, (128, 128, 3), dtype=np.uint8)
    assert read_picture(noise).objects == ()


def test_two_of_the_same_object_are_counted_twice() -> None:
    twins = Scene((Placed("fox", 54, 34, 64), Placed("fox", 54, 94, 64)), "blue")
    assert [one.name for one in read_picture(render(twins)).objects] == ["fox", "fox"]
