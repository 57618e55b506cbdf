"""Fixtures that several rooms share: tiny models on disk, built once a session."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``tiny_model(kind)``: directory of the tiny random model of ``kind`` (see ``tests.tiny_models.KINDS``)."""
    from tests.tiny_models import save_model

    root = tmp_path_factory.mktemp("models")
    built: dict[str, Path] = {}

    def build(kind: str) -> Path:
        if kind not in built:
            built[kind] = save_model(kind, root / kind)
        return built[kind]

    return build
