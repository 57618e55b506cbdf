"""Prompts are counted as the image model counts them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from diffserve.rewriting.judging import TextWindow
from diffserve.runtime import load_model
from tests.device import DEVICE


@pytest.mark.parametrize(("kind", "room"), [("sd15", 75), ("sdxl", 75), ("embedded", 30)])
def test_a_prompt_fits_exactly_when_it_fills_one_window(
    kind: str, room: int, tiny_model: Callable[[str], Path]
) -> None:
    text = load_model(tiny_model(kind), device=DEVICE, dtype="float32").text
    window = TextWindow.of(text)
    assert window.num_tokens == room
    for count in (1, room - 1, room, room + 1, 2 * room):
        for prompt in (" ".join(["cat"] * count), f"(({' '.join(['cat'] * count)}:1.2)"):
            assert window.count(prompt) == count
            assert window.fits(prompt) == (text.count_chunks(prompt) == 1)
