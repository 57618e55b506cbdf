"""Loaded tiny models and diffusers' own pipelines of the same weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diffserve.runtime import DiffusionModel, load_model
from diffserve.runtime.loading.library_imports import hushed, import_quietly
from tests.device import DEVICE

LoadTiny = Callable[[str], DiffusionModel]
TinyPipeline = Callable[[str], Any]

PIPELINES = {
    "sdxl": "StableDiffusionXLPipeline",
    "refiner": "StableDiffusionXLImg2ImgPipeline",
    "inpaint9": "StableDiffusionInpaintPipeline",
}


@pytest.fixture(scope="session")
def tiny(tiny_model: Callable[[str], Path]) -> LoadTiny:
    """``tiny(kind)``: the tiny model in float32, loaded once a session."""
    loaded: dict[str, DiffusionModel] = {}

    def load(kind: str) -> DiffusionModel:
        if kind not in loaded:
            loaded[kind] = load_model(tiny_model(kind), dtype="float32", device=DEVICE)
        return loaded[kind]

    return load


@pytest.fixture
def fresh_tiny(tiny_model: Callable[[str], Path]) -> LoadTiny:
    """Return ``fresh_tiny(kind)``, which loads a new copy of the tiny model in float32."""
    return lambda kind: load_model(tiny_model(kind), dtype="float32", device=DEVICE)


@pytest.fixture(scope="session")
def tiny_pipeline(tiny_model: Callable[[str], Path]) -> TinyPipeline:
    """``tiny_pipeline(kind)``: diffusers' pipeline loaded from the same directory."""
    loaded: dict[str, Any] = {}

    def load(kind: str) -> Any:
        if kind not in loaded:
            optional = (
                {} if "XL" in PIPELINES.get(kind, "") else {"safety_checker": None, "requires_safety_checker": False}
            )
            cls = import_quietly("diffusers", PIPELINES.get(kind, "StableDiffusionPipeline"))
            with hushed("transformers", "diffusers"):
                loaded[kind] = cls.from_pretrained(str(tiny_model(kind)), **optional).to(DEVICE)
        return loaded[kind]

    return load
