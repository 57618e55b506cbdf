"""Engines on tiny models, one per kind and session, proven whole after every test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diffserve.config import EngineConfig
from diffserve.engine import Engine

MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="session")
def _models(tiny_model: Callable[[str], Path]) -> Callable[[str], Any]:
    """``_models(kind)``: the loaded tiny model in float32, shared by engines."""
    from diffserve.runtime import load_model

    loaded: dict[str, Any] = {}

    def load(kind: str) -> Any:
        if kind not in loaded:
            loaded[kind] = load_model(tiny_model(kind), dtype="float32", device="cpu")
        return loaded[kind]

    return load


@pytest.fixture
def make_engine(_models: Callable[[str], Any]) -> Iterator[MakeEngine]:
    """``make_engine(kind, **config)``: a fresh engine; afterwards its lanes are counted."""
    made: list[Engine] = []

    def make(kind: str = "sd15", **config: Any) -> Engine:
        made.append(Engine(_models(kind), EngineConfig(**config)))
        return made[-1]

    yield make
    for engine in made:
        engine.check_integrity()
        assert not engine.num_live
        assert engine.num_free_lanes == engine.config.max_lanes
