"""The picture world: scenes, captions and their separation into training and held-out."""

from __future__ import annotations

import random
from itertools import islice

import numpy as np
import pytest

from diffserve.embedded.backgrounds import background
from diffserve.embedded.captions import PLACE_WORDS, RELATION_WORDS, SYNONYMS, caption
from diffserve.embedded.render import render
from diffserve.embedded.world import BACKGROUNDS, CANVAS_PX, COLORS, OBJECTS, PLACES, RELATIONS, is_legible, scenes


def test_the_world_has_sixty_objects_twelve_colours_and_eight_places() -> None:
    assert (len(OBJECTS), len(COLORS), len(PLACES)) == (60, 12, 8)
    assert len(set(OBJECTS.values())) == 60


def test_training_and_held_out_scenes_never_share_a_key() -> None:
    train = {scene.key for scene in islice(scenes(1, held_out=False), 4000)}
    kept = {scene.key for scene in islice(scenes(1, held_out=True), 1000)}
    assert kept
    assert not train & kept


def test_the_stream_of_scenes_depends_on_the_seed_alone() -> None:
    one, two, other = (list(islice(scenes(seed, held_out=False), 50)) for seed in (3, 3, 4))
    assert one == two != other


def test_objects_stay_on_the_canvas_and_stand_out_from_the_background() -> None:
    for scene in islice(scenes(5, held_out=False), 500):
        assert is_legible(scene)
        for placed in scene.objects:
            half = placed.size_px / 2
            assert half <= placed.x_px <= CANVAS_PX - half
            assert half <= placed.y_px <= CANVAS_PX - half


def test_every_caption_names_every_object_the_background_and_the_relation() -> None:
    rng = random.Random(0)
    for scene in islice(scenes(6, held_out=False), 800):
        words = caption(scene, rng)
        for placed in scene.objects:
            assert any(word in words for word in SYNONYMS.get(placed.name, (placed.name,))), words
        places = PLACE_WORDS.get(scene.background, (scene.background,))
        assert any(place in words for place in places), words
        if scene.relation:
            assert any(f" {phrase} " in words for phrase in RELATION_WORDS[scene.relation]), words
        assert " a a" not in words.replace(" a apple", " a a")
        assert " a orange" not in words


def test_captions_of_one_scene_vary() -> None:
    scene = next(scenes(7, held_out=False))
    rng = random.Random(0)
    assert len({caption(scene, rng) for _ in range(50)}) >= 20


@pytest.mark.parametrize("name", BACKGROUNDS)
@pytest.mark.parametrize("size", [(128, 128), (192, 128), (128, 192)])
def test_every_background_fills_every_canvas(name: str, size: tuple[int, int]) -> None:
    pixels = background(name, *size)
    assert pixels.shape == (size[1], size[0], 3)
    if name != "black":
        assert pixels.max(axis=2).min() > 0, "a black gap"


def test_a_scene_differs_from_its_bare_background_where_the_object_stands_and_only_there() -> None:
    scene = next(s for s in scenes(8, held_out=False) if len(s.objects) == 1)
    changed = np.abs(render(scene).astype(int) - background(scene.background)).sum(axis=2) > 0
    placed = scene.objects[0]
    rows, columns = np.nonzero(changed)
    assert np.abs(rows - placed.y_px).max() <= placed.size_px / 2 + 1
    assert np.abs(columns - placed.x_px).max() <= placed.size_px / 2 + 1
    assert changed.sum() > 0.2 * placed.size_px**2


def test_both_relations_and_directions_occur() -> None:
    seen = {scene.relation for scene in islice(scenes(9, held_out=False), 300)}
    assert seen == {*RELATIONS, None}
