"""Prompt match: pictures in, verdicts and shares out, without torch."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from PIL import Image

import diffserve.experiments
from diffserve.api.errors import InvalidRequest
from diffserve.experiments import SceneSpec, match_prompts
from diffserve.world.captions import caption
from diffserve.world.render import render
from diffserve.world.scenes import PAIR_PX, Placed, Scene, scenes

SCENES = list(islice(scenes(31, held_out=True), 12))
PAIR = Scene((Placed("fox", PAIR_PX, 32, 64), Placed("owl", PAIR_PX, 96, 64)), "blue", "left of")


def test_clean_pictures_match_their_captions_scenes_and_wishes() -> None:
    rng = random.Random(0)
    pictures = [render(scene) for scene in SCENES]
    for prompts in ([caption(scene, rng) for scene in SCENES], SCENES, [SceneSpec.of(scene) for scene in SCENES]):
        match = match_prompts(pictures, prompts)
        assert (match.exact.hits, match.exact.count) == (12, 12)
        assert match.wishes == tuple(SceneSpec.of(scene) for scene in SCENES)


def test_pil_images_are_read_like_arrays_whatever_their_mode() -> None:
    pixels = render(PAIR)
    images = [Image.fromarray(pixels), Image.fromarray(pixels).convert("RGBA")]
    prompts = ["a fox left of an owl on a blue background"] * 3
    match = match_prompts([pixels, *images], prompts)
    assert len(set(match.verdicts)) == 1
    assert match.exact.hits == 3


def test_parts_are_shares_of_the_pictures_that_were_asked_for_them() -> None:
    swapped = replace(PAIR, relation="right of")
    large = Scene((Placed("cake", 96, 64, 64),), "white", size="large")
    pictures = [render(PAIR), render(PAIR), render(large), render(large)]
    prompts: list[str | Scene] = [PAIR, swapped, "a large cake on red", "a small cake"]
    match = match_prompts(pictures, prompts)
    counts = {part: (share.hits, share.count) for part, share in match.parts.items()}
    assert counts == {"background": (2, 3), "objects": (4, 4), "relation": (1, 2), "size": (1, 2)}
    assert (match.exact.hits, match.exact.count) == (1, 4)


def test_a_part_that_nobody_asked_for_has_no_share() -> None:
    match = match_prompts([render(PAIR)], ["on blue"])
    assert list(match.parts) == ["background"]
    assert match.exact.share == 1


def test_pictures_of_one_prompt_are_resampled_together() -> None:
    bare = replace(PAIR, objects=PAIR.objects[:1], relation=None)
    pictures = [render(PAIR)] * 4 + [render(bare)] * 4
    prompts = ["a fox left of an owl"] * 4 + ["an owl right of a fox"] * 4
    match = match_prompts(pictures, prompts)
    assert (match.exact.share, match.exact.low, match.exact.high) == (0.5, 0.0, 1.0)


def test_pictures_and_prompts_come_in_pairs() -> None:
    with pytest.raises(InvalidRequest, match="2 prompts for 1 images"):
        match_prompts([render(PAIR)], ["a fox", "an owl"])
    with pytest.raises(InvalidRequest, match="0 prompts"):
        match_prompts([], [])


def test_a_picture_of_another_scale_or_a_prompt_of_another_world_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="512x512"):
        match_prompts([np.zeros((512, 512, 3), np.uint8)], ["a fox"])
    with pytest.raises(InvalidRequest, match="zebra"):
        match_prompts([render(PAIR)], ["a zebra"])


def test_the_room_offers_what_it_lists_and_loads_no_torch() -> None:
    assert diffserve.experiments.__all__ == sorted(diffserve.experiments.__all__)
    assert all(hasattr(diffserve.experiments, name) for name in diffserve.experiments.__all__)
    heavy = ("torch", "diffusers", "fastapi")
    code = f"import sys, diffserve.experiments; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
