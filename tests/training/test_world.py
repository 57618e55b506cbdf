"""The image world: scenes of every kind, their captions, and their separation into training and held-out."""

from __future__ import annotations

import random
import re
from itertools import combinations, islice

import numpy as np
import pytest

from diffserve.world.captions import (
    COLOR_SYNONYMS,
    NUMBER_WORDS,
    PLACE_WORDS,
    RELATION_WORDS,
    SIZE_WORDS,
    SYNONYMS,
    TOGETHER,
    caption,
    loose_caption,
    plural,
)
from diffserve.world.render import background, render
from diffserve.world.scenes import (
    BACKGROUNDS,
    CANVAS_PX,
    COLORS,
    GRID_PX,
    KIND_SHARES,
    OBJECTS,
    PAIR_PX,
    PLACES,
    RELATIONS,
    SIZES_PX,
    TRIO_PX,
    Placed,
    Scene,
    has_unseen_pair,
    is_held_out,
    is_legible,
    scenes,
)

CANVASES = [(128, 128), (192, 128), (128, 192)]


def drawn(seed: int, count: int, *, held_out: bool = False) -> list[Scene]:
    return list(islice(scenes(seed, held_out=held_out), count))


def of_kind(kind: str, seed: int, count: int) -> list[Scene]:
    return list(islice(scenes(seed, held_out=False, shares={kind: 1}), count))


def test_the_world_has_sixty_objects_twelve_colours_and_eight_places() -> None:
    assert (len(OBJECTS), len(COLORS), len(PLACES)) == (60, 12, 8)
    assert len(set(OBJECTS.values())) == 60


def test_kinds_are_drawn_in_their_shares() -> None:
    kinds = [scene.kind for scene in drawn(2, 3000)]
    for kind, share in KIND_SHARES.items():
        # five standard errors, and what holding scenes back takes from the kinds with pairs
        assert abs(kinds.count(kind) / 3000 - share) < 0.08, kind


def test_every_relation_size_count_and_background_occurs() -> None:
    many = drawn(9, 1500)
    assert {scene.relation for scene in many} == {*RELATIONS, "between", None}
    assert {scene.size for scene in many} == set(SIZES_PX)
    assert {scene.background for scene in many} == set(BACKGROUNDS)
    assert {name for scene in many for name in scene.names} == set(OBJECTS)
    assert {len(scene.objects) for scene in many if scene.kind == "count"} == {2, 3}


def test_training_and_held_out_scenes_never_share_a_key() -> None:
    train = {scene.key for scene in drawn(1, 4000)}
    held_out_keys = {scene.key for scene in drawn(1, 1000, held_out=True)}
    assert held_out_keys
    assert not train & held_out_keys


def test_a_pair_of_objects_is_either_seen_in_training_or_unseen() -> None:
    def pairs(many: list[Scene]) -> set[tuple[str, str]]:
        return {(a, b) for scene in many for a, b in combinations(sorted(set(scene.names)), 2)}

    train, held_out = drawn(11, 4000), drawn(11, 1500, held_out=True)
    unseen = [scene for scene in held_out if has_unseen_pair(scene)]
    assert not any(has_unseen_pair(scene) for scene in train)
    assert {scene.kind for scene in unseen} == {"two objects", "three objects", "between"}
    assert pairs([scene for scene in unseen if len(set(scene.names)) == 2]).isdisjoint(pairs(train))
    every = [Scene((Placed(a, 56, 32, 64), Placed(b, 56, 96, 64)), "red") for a, b in combinations(OBJECTS, 2)]
    assert 0.07 < sum(map(has_unseen_pair, every)) / len(every) < 0.13


def test_a_pair_is_unseen_in_any_order_and_a_count_is_no_pair() -> None:
    for scene in drawn(12, 300, held_out=True):
        turned = Scene(scene.objects[::-1], scene.background, scene.relation, scene.size)
        assert has_unseen_pair(turned) == has_unseen_pair(scene)
        assert not (scene.kind == "count" and has_unseen_pair(scene))
        assert is_held_out(scene)


def test_the_stream_of_scenes_depends_on_the_seed_alone() -> None:
    first, second, other = (drawn(seed, 50) for seed in (3, 3, 4))
    assert first == second != other


def test_objects_stay_on_the_canvas_on_its_grid_and_stand_out_from_the_background() -> None:
    for scene in drawn(5, 600):
        assert is_legible(scene)
        for placed in scene.objects:
            assert placed.size_px % GRID_PX == 0
            for centre in (placed.x_px, placed.y_px):
                near, far = centre - placed.size_px / 2, centre + placed.size_px / 2
                assert near >= 0
                assert far <= CANVAS_PX
                assert near % GRID_PX == 0


def test_objects_do_not_overlap_on_any_canvas() -> None:
    for scene in drawn(13, 600):
        for width, height in CANVASES:
            for first, second in combinations(scene.objects, 2):
                apart_x = abs(first.x_px - second.x_px) * width / CANVAS_PX
                apart_y = abs(first.y_px - second.y_px) * height / CANVAS_PX
                assert max(apart_x, apart_y) >= first.size_px, scene


def test_each_kind_has_its_size_of_objects() -> None:
    for scene in drawn(14, 600):
        sides = {placed.size_px for placed in scene.objects}
        expected = {1: SIZES_PX[scene.size], 2: PAIR_PX, 3: TRIO_PX}[len(scene.objects)]
        assert sides == {expected}


def test_relations_are_true_of_where_the_objects_stand() -> None:
    for scene in of_kind("two objects", 15, 300):
        first, second = scene.objects
        right, down = second.x_px - first.x_px, second.y_px - first.y_px
        assert scene.relation is not None
        assert {
            "left of": right >= PAIR_PX > abs(down),
            "right of": -right >= PAIR_PX > abs(down),
            "above": down >= PAIR_PX > abs(right),
            "below": -down >= PAIR_PX > abs(right),
            "next to": abs(right) >= PAIR_PX > abs(down),
        }[scene.relation], scene
    for scene in of_kind("between", 16, 100):
        inner, *outer = scene.objects
        assert min(placed.x_px for placed in outer) < inner.x_px < max(placed.x_px for placed in outer)
        assert max(abs(placed.y_px - inner.y_px) for placed in outer) <= 2 * GRID_PX


def wordings(name: str) -> tuple[str, ...]:
    return (name, *SYNONYMS.get(name, ()))


def contains_phrase(phrase: str, words: str) -> bool:
    return re.search(rf"\b{re.escape(phrase)}\b", words) is not None


def test_every_caption_names_every_object_its_number_and_the_background() -> None:
    rng = random.Random(0)
    for scene in drawn(6, 1200):
        words = caption(scene, rng)
        if scene.kind == "count":
            counts = [
                f"{n} {plural(noun)}" for n in NUMBER_WORDS[len(scene.names)] for noun in wordings(scene.names[0])
            ]
            assert any(contains_phrase(count, words) for count in counts), words
        else:
            for name in scene.names:
                assert any(contains_phrase(word, words) for word in wordings(name)), words
        colors = COLOR_SYNONYMS.get(scene.background, (scene.background,))
        assert any(contains_phrase(phrase, words) for phrase in PLACE_WORDS.get(scene.background, colors)), words


def test_every_caption_says_the_relation_and_the_size() -> None:
    rng = random.Random(1)
    for scene in drawn(7, 1200):
        words = caption(scene, rng)
        if scene.relation is not None or scene.kind == "three objects":
            patterns = RELATION_WORDS[scene.relation] if scene.relation else TOGETHER
            shapes = [re.sub(r"{\w}", r"(.+)", pattern) for pattern in patterns]
            assert any(re.search(shape, words) for shape in shapes), words
        for size, adjectives in SIZE_WORDS.items():
            has_adjective = any(
                contains_phrase(adjective, words.replace("in a big city", "")) for adjective in adjectives
            )
            assert has_adjective == (scene.size == size), words


def test_articles_and_plurals_are_english() -> None:
    rng = random.Random(2)
    many = "\n".join(loose_caption(scene, rng) for scene in drawn(8, 6000))
    assert "an apple" in many
    assert "an orange" in many
    assert not re.search(r"\ba [aeiou]", many)
    assert not re.search(r"\ban [^aeiou]", many)
    assert not re.search(r"\b(a|an|one|the) (grapes|cherries)\b", many)
    assert "  " not in many


@pytest.mark.parametrize(
    ("singular", "plural_form"),
    [
        ("fox", "foxes"), ("peach", "peaches"), ("butterfly", "butterflies"), ("strawberry", "strawberries"),
        ("monkey", "monkeys"), ("bus", "buses"), ("cactus", "cactuses"), ("fish", "fish"), ("corn", "ears of corn"),
        ("grapes", "bunches of grapes"), ("cherries", "bunches of cherries"), ("pine tree", "pine trees"),
        ("kitty", "kitties"), ("doughnut", "doughnuts"),
    ],
)  # fmt: skip
def test_plurals(singular: str, plural_form: str) -> None:
    assert plural(singular) == plural_form


def test_captions_of_one_scene_vary() -> None:
    rng = random.Random(0)
    for kind in KIND_SHARES:
        scene = of_kind(kind, 7, 1)[0]
        assert len({caption(scene, rng) for _ in range(100)}) >= 20, kind


@pytest.mark.parametrize("name", BACKGROUNDS)
@pytest.mark.parametrize("size", CANVASES)
def test_every_background_fills_every_canvas(name: str, size: tuple[int, int]) -> None:
    pixels = background(name, *size)
    assert pixels.shape == (size[1], size[0], 3)
    if name != "black":
        assert pixels.max(axis=2).min() > 0, "a black gap"


@pytest.mark.parametrize("canvas", CANVASES)
def test_a_scene_differs_from_its_bare_background_in_the_grid_cells_of_its_objects_alone(
    canvas: tuple[int, int],
) -> None:
    width, height = canvas
    for scene in drawn(8, 25):
        pixels = render(scene, width, height)
        assert pixels.shape == (height, width, 3)
        changed = np.abs(pixels.astype(int) - background(scene.background, width, height)).sum(axis=2) > 0
        inside = np.zeros((height, width), dtype=bool)
        for placed in scene.objects:
            left = GRID_PX * round((placed.x_px * width / CANVAS_PX - placed.size_px / 2) / GRID_PX)
            top = GRID_PX * round((placed.y_px * height / CANVAS_PX - placed.size_px / 2) / GRID_PX)
            square = (slice(top, top + placed.size_px), slice(left, left + placed.size_px))
            inside[square] = True
            assert changed[square].mean() > 0.2
        assert not (changed & ~inside).any()
