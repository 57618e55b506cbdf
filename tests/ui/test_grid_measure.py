"""What a picture of an experiment is worth."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from diffserve.experiments.prompts import drawn_pictures, read_wishes
from ui.create.layout import EXAMPLES
from ui.experiment.layout import DEFAULT_PROMPTS
from ui.experiment.measure import BEST_PSNR_DB, PromptCheck, psnr_db

FOX = "a fox next to a cactus on the beach"


def save(file: Path, pixels: NDArray[np.uint8]) -> Path:
    Image.fromarray(pixels).save(file)
    return file


@pytest.fixture
def drawn(tmp_path: Path) -> Path:
    """A picture that shows exactly what FOX says."""
    (pixels,) = drawn_pictures(read_wishes([FOX]), 128, 128, each=1)
    return save(tmp_path / "drawn.png", pixels)


def test_a_picture_that_shows_its_prompt_is_exact_and_of_another_prompt_it_is_not(drawn: Path) -> None:
    check = PromptCheck("embedded", [FOX, "two apples"])
    assert check.why_not is None
    assert (check.is_exact(drawn, 0), check.is_exact(drawn, 1)) == (True, False)


def test_prompts_that_cannot_be_checked_say_why(drawn: Path) -> None:
    other, strange = PromptCheck("sd15", [FOX]), PromptCheck("embedded", ["a zebra"])
    assert (other.is_exact(drawn, 0), strange.is_exact(drawn, 0)) == (None, None)
    assert "embedded model" in (other.why_not or "")
    assert "zebra" in (strange.why_not or "")


def test_every_example_of_the_page_can_be_checked() -> None:
    examples = (*EXAMPLES, *DEFAULT_PROMPTS.splitlines())
    assert len(examples) > 2
    assert PromptCheck("embedded", examples).why_not is None


def test_a_picture_of_another_scale_cannot_be_checked(tmp_path: Path) -> None:
    small = save(tmp_path / "small.png", np.zeros((16, 16, 3), np.uint8))
    assert PromptCheck("embedded", [FOX]).is_exact(small, 0) is None


def test_psnr_is_that_of_the_formula_and_bounded_for_equal_pictures(tmp_path: Path) -> None:
    dark = save(tmp_path / "dark.png", np.zeros((8, 8, 3), np.uint8))
    grey = save(tmp_path / "grey.png", np.full((8, 8, 3), 10, np.uint8))
    assert psnr_db(grey, dark) == pytest.approx(10 * np.log10(255**2 / 100))
    assert psnr_db(dark, dark) == BEST_PSNR_DB
    assert psnr_db(dark, save(tmp_path / "wide.png", np.zeros((8, 9, 3), np.uint8))) is None
