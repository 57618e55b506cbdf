"""Image sizes from Python: every size that the HTTP API accepts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from diffserve import DiffusionParams, Engine, GenerationRequest
from diffserve.api.errors import InvalidRequest
from diffserve.api.types import Accepted, ImageFinished, Picture

ONE = DiffusionParams(num_steps=1)


@pytest.fixture(scope="module")
def engine(tiny_model: Callable[[str], Path]) -> Engine:
    return Engine.from_pretrained(tiny_model("sd15"))


def test_a_size_off_the_grid_comes_back_as_it_was_asked_for(engine: Engine) -> None:
    (result,) = engine.generate([GenerationRequest(prompt="a fox", width_px=333, height_px=201, seed=1, diffusion=ONE)])
    assert result.pixels.shape == (201, 333, 3)
    assert any("resized to 333x201" in warning for warning in result.warnings)


def test_a_stream_delivers_the_same(engine: Engine) -> None:
    request = GenerationRequest(prompt="a fox", width_px=1024, height_px=1024, seed=1, diffusion=ONE)
    events = list(engine.stream(request))
    (accepted,) = (event for event in events if isinstance(event, Accepted))
    (painted,) = (event for event in events if isinstance(event, ImageFinished))
    assert any("resized to 1024x1024" in warning for warning in accepted.warnings)
    assert painted.result.pixels.shape == (1024, 1024, 3)


def test_one_side_alone_goes_with_the_native_other_one(engine: Engine) -> None:
    native = engine.info.good_sizes[0]
    (result,) = engine.generate([GenerationRequest(prompt="a fox", width_px=300, seed=1, diffusion=ONE)])
    assert result.pixels.shape == (native[1], 300, 3)


def test_a_size_on_the_grid_is_painted_as_it_is(engine: Engine) -> None:
    (result,) = engine.generate([GenerationRequest(prompt="a fox", width_px=72, height_px=56, seed=1, diffusion=ONE)])
    assert result.pixels.shape == (56, 72, 3)
    assert result.warnings == ()


def test_what_no_door_takes_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="each side must lie between 64 and 2048"):
        engine.generate(GenerationRequest(prompt="a fox", width_px=5000, height_px=512))
    grey = Picture.from_array(np.full((50, 50, 3), 9, dtype=np.uint8))
    with pytest.raises(InvalidRequest, match="must be a multiple of"):
        engine.generate(GenerationRequest(prompt="a fox", init_image=grey))
