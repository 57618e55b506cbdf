"""Quality measures of an experiment's images."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from diffserve.experiments.measure import ImageMeasures, PromptCheck
from diffserve.experiments.metrics.fidelity import psnr_db
from diffserve.experiments.plan import Cell, PlannedImage
from diffserve.experiments.prompts import draw_pictures, read_wishes
from diffserve.experiments.records import Distance, FinishedImage, StoredImage
from ui.create.examples import EXAMPLES
from ui.experiment.layout import DEFAULT_PROMPTS

FOX = "a fox next to a cactus on the beach"


@pytest.fixture(scope="module")
def drawn() -> NDArray[np.uint8]:
    """Return an image that shows exactly what FOX describes."""
    (pixels,) = draw_pictures(read_wishes([FOX]), 128, 128, each=1)
    return pixels


def is_exact(check: PromptCheck, pixels: NDArray[np.uint8], prompt_index: int = 0) -> bool | None:
    parts = check.parts(check.prompts[prompt_index], pixels)
    return None if parts is None else parts.exact


def test_an_image_is_exact_only_for_its_own_prompt(drawn: NDArray[np.uint8]) -> None:
    check = PromptCheck("embedded", [FOX, "two apples"])
    assert check.why_not is None
    assert (is_exact(check, drawn, 0), is_exact(check, drawn, 1)) == (True, False)


def test_prompts_that_cannot_be_checked_have_a_reason(drawn: NDArray[np.uint8]) -> None:
    other, strange = PromptCheck("sd15", [FOX]), PromptCheck("embedded", ["a zebra"])
    assert (is_exact(other, drawn), is_exact(strange, drawn)) == (None, None)
    assert "embedded model" in (other.why_not or "")
    assert "zebra" in (strange.why_not or "")


def test_every_example_of_the_page_can_be_checked() -> None:
    examples = (*EXAMPLES, *DEFAULT_PROMPTS.splitlines())
    assert len(examples) > 2
    assert PromptCheck("embedded", examples).why_not is None


def test_an_image_of_another_scale_cannot_be_checked() -> None:
    assert is_exact(PromptCheck("embedded", [FOX]), np.zeros((16, 16, 3), np.uint8)) is None


def test_without_a_network_images_of_equal_size_get_the_other_measures() -> None:
    measures, image = ImageMeasures(PromptCheck("sd15", [FOX])), PlannedImage(Cell("ddim", 2, 1.0), 0, 0)
    grey, dark = np.full((8, 8, 3), 10, np.uint8), np.zeros((8, 8, 3), np.uint8)
    record = measures.measure(FinishedImage(image, grey, 0, "leading", 2), StoredImage(dark, None))
    assert record.distance == Distance(psnr_db=psnr_db(grey, dark))
    assert (record.features, record.parts, record.thumbnail) == ((), None, None)
    wide = StoredImage(np.zeros((8, 9, 3), np.uint8), None)
    assert measures.measure(FinishedImage(image, grey, 0, "leading", 2), wide).distance is None
