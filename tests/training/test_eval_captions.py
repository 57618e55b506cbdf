"""Evaluation on held-out captions: the categories of a scene, and what appears where an object is missing."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import islice

import numpy as np
from PIL import Image, ImageFilter

from diffserve.training.eval.captions import (
    CATEGORIES,
    NOTHING,
    SMEAR,
    Confusion,
    Judged,
    categories,
    confusions,
    score,
    scores,
)
from diffserve.world.captions import held_out
from diffserve.world.checker import check
from diffserve.world.render import background, render
from diffserve.world.scenes import KIND_SHARES, PAIR_PX, Placed, Scene, has_unseen_pair, scenes

PAIR = Scene((Placed("fox", PAIR_PX, 32, 64), Placed("owl", PAIR_PX, 96, 64)), "blue", "left of")
TWINS = Scene((Placed("cat", PAIR_PX, 32, 64), Placed("cat", PAIR_PX, 96, 64)), "white")


def judged(requested: Scene, shown: Scene) -> Judged:
    return requested, check(render(shown), requested)


def test_the_held_out_list_is_the_one_that_all_published_scores_are_of() -> None:
    digest = hashlib.sha256(repr(held_out(300)).encode()).hexdigest()
    assert digest == "a04b621676ede0fd3014b119438c770a79c9fa8cc8518582af637f68d7c5c2e7"


def test_every_category_has_held_out_scenes_and_every_scene_its_kind_and_background() -> None:
    category_sets = [categories(scene) for scene, _ in held_out(300)]
    assert set().union(*category_sets) == set(CATEGORIES)
    for words in category_sets:
        assert len(words & set(KIND_SHARES)) == 1
        assert len(words & {"plain colour", "place"}) == 1


def test_pairs_and_directions_are_counted_over_two_different_objects_alone() -> None:
    pairs = {"seen pairs", "unseen pairs"}
    for scene in islice(scenes(3, held_out=True), 300):
        words = categories(scene)
        assert (len(words & pairs) == 1) == (scene.kind == "two objects")
        assert ("unseen pairs" in words) == (scene.kind == "two objects" and has_unseen_pair(scene))
        assert len(words & {"left or right", "above or below", "next to"}) == int(scene.kind == "two objects")
        assert ("small or large" in words) == (scene.size != "plain")


def test_scores_add_up_over_the_kinds() -> None:
    right = [judged(scene, scene) for scene in islice(scenes(8, held_out=True), 10)]
    wrong = [judged(PAIR, replace(PAIR, objects=PAIR.objects[:1])), judged(PAIR, replace(PAIR, background="red"))]
    table = scores([*right, *wrong])
    assert (table["all"].count, table["all"].exact, table["all"].background, table["all"].objects) == (12, 10, 11, 11)
    assert sum(table[kind].count for kind in KIND_SHARES) == 12
    assert sum(table[kind].exact for kind in KIND_SHARES) == 10
    assert table["plain colour"].count + table["place"].count == 12


def test_the_share_of_zero_images_is_zero() -> None:
    assert score([]).exact_share == 0


def test_a_substituted_object_is_reported_by_name() -> None:
    swapped = replace(PAIR, objects=(replace(PAIR.objects[0], name="panda"), PAIR.objects[1]))
    table = confusions([judged(PAIR, PAIR), judged(PAIR, swapped)])
    assert table == {"fox": Confusion(2, 1, {"panda": 1}), "owl": Confusion(2, 2, {})}


def test_a_missing_object_is_nothing_and_a_blurred_one_a_smear() -> None:
    one_cat = replace(TWINS, objects=TWINS.objects[:1])
    blurred = np.asarray(Image.fromarray(render(PAIR)).filter(ImageFilter.GaussianBlur(3.5)))
    bare = background("white")
    table = confusions([judged(TWINS, one_cat), (TWINS, check(bare, TWINS)), (PAIR, check(blurred, PAIR))])
    assert table["cat"] == Confusion(4, 1, {NOTHING: 2})
    assert table["fox"] == table["owl"] == Confusion(1, 0, {SMEAR: 1})


def test_confusions_come_the_most_frequent_first_and_at_most_three() -> None:
    def shown(name: str) -> Judged:
        return judged(PAIR, replace(PAIR, objects=(PAIR.objects[0], replace(PAIR.objects[1], name=name))))

    names = ["bear", "cat", "cat", "cat", "pig", "pig", "duck", "pizza", "pizza"]
    (owl,) = [row for name, row in confusions([shown(name) for name in names]).items() if name == "owl"]
    assert (owl.requested, owl.recognized) == (9, 0)
    assert next(iter(owl.instead.items())) == ("cat", 3)
    assert len(owl.instead) == 3
