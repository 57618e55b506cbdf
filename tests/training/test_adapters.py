"""The adapters stage: training scenes of gifts and sepia, saving of a change, and the shipped files."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from diffserve.api.types import Accepted, DiffusionParams, GenerationRequest
from diffserve.engine import Engine
from diffserve.models.loras import Lora
from diffserve.models.vocabulary import EMBEDDED_DIRECTORY
from diffserve.runtime.loading.lora import LoRAFile
from diffserve.runtime.model import OWN_LORAS
from diffserve.training import card
from diffserve.training.adapters import (
    GIFT,
    LESSONS,
    SEPIA,
    DenoiserChange,
    gift_scenes,
    lessons_held_out,
    plain_gifts,
)
from diffserve.training.denoiser_training import Denoiser
from diffserve.training.eval.adapters import drawn_in_sepia, gift_score
from diffserve.training.eval.captions import TEACHER
from diffserve.world.checker import check
from diffserve.world.picture_reading import read_picture
from diffserve.world.render import render, sepia
from diffserve.world.scenes import OBJECTS, is_held_out

RESULTS = json.loads((card.RESULTS / "adapters.json").read_text(encoding="utf-8"))


class Small(nn.Module):
    """Small stand-in for a denoiser: a text encoder and a UNet of one or two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.text_encoder = nn.Sequential(nn.Linear(6, 6))
        self.unet = nn.Sequential(nn.Conv2d(6, 8, 3, 2, 1), nn.Conv2d(8, 4, 1))


def test_the_checker_reads_a_gift_only_if_the_scene_has_one() -> None:
    scene, words = lessons_held_out(GIFT, 1)[0]
    assert "gift" in words
    assert is_held_out(scene)
    picture = render(scene)
    assert check(picture, scene).exact
    assert GIFT not in {detected.name for detected in read_picture(picture).objects} <= set(OBJECTS)


def test_gifts_stand_for_other_objects_in_three_of_four_scenes() -> None:
    drawn = list(islice(gift_scenes(1), 200))
    assert 0.6 < sum(GIFT in scene.names for scene in drawn) / 200 < 0.9
    assert not any(is_held_out(scene) or (GIFT in scene.names and scene.background == "red") for scene in drawn)


def test_an_old_photograph_keeps_brightness_alone() -> None:
    picture = np.array([[(0, 0, 0), (214, 48, 49), (50, 190, 50), (255, 255, 255)]], np.uint8)
    [black, red, green, white] = sepia(picture)[0].astype(int)
    assert (*black, *white) == (44, 26, 12, 255, 238, 205)
    assert all(color[0] > color[1] > color[2] for color in (black, red, green, white))
    assert black.sum() < red.sum() < green.sum() < white.sum()


def test_a_change_gives_the_same_output_as_hooks_as_merged_weights_and_as_a_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    small: Denoiser = Small()  # type: ignore[assignment]
    change = DenoiserChange(small, 2, of_text=True)
    for component in change.changes:
        for up in change.of(component).up:
            nn.init.normal_(up)
    x = torch.randn(2, 6, 4, 4)
    with change.of("unet").added_to(small.unet):
        added = small.unet(x)
    merged = change.merge_into(small)
    torch.testing.assert_close(added, merged.unet(x))
    assert not torch.equal(added, small.unet(x))
    change.save(tmp_path / "own.safetensors", "gift gifts")
    file = LoRAFile.open([tmp_path / "own.safetensors"])
    assert (file.content.rank, file.content.words, set(file.layers)) == (2, "gift gifts", {"unet", "text_encoder"})


def test_the_files_are_small_and_the_model_takes_them() -> None:
    for name in LESSONS:
        assert (EMBEDDED_DIRECTORY / OWN_LORAS / f"{name}.safetensors").stat().st_size < 1_000_000
    assert RESULTS["gift_alone"]["read"] >= 0.8 * RESULTS["gift_alone"]["count"]
    assert RESULTS["sepia"]["nearer_to_sepia"] >= 0.8 * RESULTS["sepia"]["count"]


@pytest.mark.slow
def test_they_do_what_they_were_trained_for_and_their_words_are_known() -> None:
    engine = Engine.from_pretrained("embedded")
    shelf = engine.runners.loras
    assert shelf.folder.names() == (GIFT, SEPIA)
    few = msgspec.structs.replace(TEACHER, num_steps=10)
    assert gift_score(engine, plain_gifts()[:3], few)["read"] >= 2
    drawn = drawn_in_sepia(engine, 2, few)
    assert drawn["nearer_to_sepia"] == 2
    for loras, num_tokens in (((), 1), ((Lora(GIFT),), 0)):
        how = DiffusionParams(num_steps=1, loras=loras)
        events = list(engine.stream(GenerationRequest(prompt="two gifts in the snow", diffusion=how)))
        [accepted] = [event for event in events if isinstance(event, Accepted)]
        assert sum("does not know" in warning for warning in accepted.warnings) == num_tokens
