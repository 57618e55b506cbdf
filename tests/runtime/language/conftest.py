"""Tiny language models, saved and loaded once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from diffserve.runtime.language import LanguageModel, load_language_model
from tests.device import DEVICE
from tests.runtime.language import tiny

Load = Callable[[str], LanguageModel]


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``directory(kind)``: the saved model of ``kind``."""
    root = tmp_path_factory.mktemp("language")
    return lambda kind: root / kind if (root / kind).is_dir() else tiny.save(root / kind, kind)


@pytest.fixture(scope="session")
def language(directory: Callable[[str], Path]) -> Load:
    """``language(kind)``: the model in float32, loaded."""
    loaded: dict[str, LanguageModel] = {}

    def load(kind: str) -> LanguageModel:
        if kind not in loaded:
            loaded[kind] = load_language_model(directory(kind), dtype="float32", device=DEVICE)
        return loaded[kind]

    return load
