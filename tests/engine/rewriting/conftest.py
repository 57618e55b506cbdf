"""Rewriters on scripted models, whose answers are written down."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diffserve.api.text_types import TextConfig
from diffserve.engine.rewriter import Rewriter
from diffserve.engine.text import TextEngine
from diffserve.rewriting import TextWindow
from diffserve.runtime.language import LanguageModel, load_language_model
from tests.device import DEVICE
from tests.engine.rewriting import scripted

MakeRewriter = Callable[..., Rewriter]

WINDOW_TOKENS = 30
SCRIPT: scripted.Script = {
    "winter": ("a red fox", ", deep snow", ", warm evening light"),
    "sorry": "I'm sorry, but I can't help with that.",
    "nothing": "...",
    "sign": 'a shop window, a sign that says "Open", night',
    "Lisbon": "an old tram on a hill",
    "thoughts": ("<think>", "they want a cat", "</think>", "\n\nHere is your prompt: a cat, moonlight"),
    "either": ("a boat", "a ship", "a raft"),
    "unsure": ("an apple", "a pear", "a plum", "a peach", "a lemon", "a fig", "a lime", "a date"),
    "circles": "a cat and a cat and a cat and a cat and a cat and a cat",
    "long": "an oak, an elm, a yew, a fir, a pine, an ash, a lime tree, a beech, a larch, an alder, a hazel, a willow",
    "wordy": " ".join(f"word{number}" for number in range(40)),
}
FORKS = {"either": 0.5, "unsure": 0.1}


def count_words(prompt: str) -> int:
    """Count words and commas, as the image model of these tests reads them."""
    return len(prompt.replace(",", " , ").split())


@pytest.fixture(scope="session")
def scripted_model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    directory: Path = tmp_path_factory.mktemp("scripted")
    scripted.save(directory, SCRIPT, forks=FORKS)
    return load_language_model(directory, dtype="float32", device=DEVICE)


@pytest.fixture
def make_rewriter(scripted_model: LanguageModel) -> Iterator[MakeRewriter]:
    """``make_rewriter(style="tags", max_entropy=None, **config)``: afterwards all pages must be back."""
    rewriters: list[Rewriter] = []

    def make(style: str = "tags", *, max_entropy: float | None = None, **config: Any) -> Rewriter:
        texts = TextEngine.from_model(scripted_model, TextConfig(**config), pool_bytes=8 << 20)
        window = TextWindow(WINDOW_TOKENS, count_words)
        rewriters.append(Rewriter(texts, style=style, window=window, max_entropy=max_entropy))
        return rewriters[-1]

    yield make
    for rewriter in rewriters:
        rewriter.texts.check_integrity()
        if not rewriter.texts.has_work:
            assert rewriter.num_live == 0
            assert rewriter.texts.pool.stats().held_pages == 0
