"""Live previews inside the engine: one call a tick, and never at an image's cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from diffserve.api.types import GenerationRequest, ImageFinished, Preview
from diffserve.engine import Engine
from diffserve.runtime import DiffusionModel
from diffserve.runtime.vae.preview import PreviewConfig, PreviewDecoder, PreviewRunner
from diffserve.settings.config import EngineConfig
from tests.engine.conftest import MakeEngine
from tests.engine.pipelines import image_request

SHAPE = PreviewConfig(latent_channels=4, widths=(8,), num_blocks=(1,), factor=8)


def with_previewer(model: DiffusionModel) -> DiffusionModel:
    torch.manual_seed(0)
    network = PreviewDecoder(SHAPE).eval().to(model.device)
    runner = PreviewRunner(network=network, latent_channels=4, factor=8, device=model.device, dtype=model.dtype)
    return replace(model, previewer=runner)


def wishes(count: int = 3) -> list[GenerationRequest]:
    return [image_request("sd15", "ddim", seed=seed, num_steps=4, preview_every=2) for seed in range(count)]


def test_the_previews_of_a_tick_are_one_call(make_engine: MakeEngine) -> None:
    model, sizes = with_previewer(make_engine().model), []
    assert model.previewer is not None
    model.previewer.network.register_forward_pre_hook(lambda _part, inputs: sizes.append(len(inputs[0])))
    engine = Engine(model, EngineConfig(max_rows=8))
    for request in wishes():
        engine.submit(request)
    events = list(engine.events())
    previews = {event.request_id: event.picture for event in events if isinstance(event, Preview)}
    assert sizes == [3]
    assert {(picture.width_px, picture.height_px) for picture in previews.values()} == {(64, 64)}
    assert len({picture.data for picture in previews.values()}) == 3


def test_an_image_whose_preview_fails_is_painted_all_the_same(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    model = with_previewer(make_engine().model)
    assert model.previewer is not None

    def choke(*_: Any) -> None:
        raise RuntimeError("no memory for previews")

    model.previewer.network.register_forward_pre_hook(choke)
    engine = Engine(model, EngineConfig(max_rows=2))
    [request] = wishes(1)
    kinds = [type(event) for event in engine.stream(request)]
    assert ImageFinished in kinds
    assert Preview not in kinds
    assert "no previews in this tick: decoding them raised RuntimeError" in caplog.text
    [plain] = make_engine(max_rows=2).generate(wishes(1))
    [unseen] = engine.generate(wishes(1))
    assert unseen.picture == plain.picture
