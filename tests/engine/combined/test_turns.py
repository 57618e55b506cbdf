"""The loop by a clock that moves only when a network runs: each side gets its share, and all of it when alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from diffserve.api.sampling_params import SamplingParams
from diffserve.api.text_types import TextRequest
from diffserve.api.types import DiffusionParams, GenerationRequest
from diffserve.engine.combined_engine import CombinedEngine
from diffserve.runtime import DiffusionModel
from diffserve.runtime.language import LanguageModel
from tests.engine.combined.conftest import MakeStudio

IMAGE_S, TEXT_S = 0.09, 0.01
LONG = SamplingParams(temperature=1.0, seed=0, max_tokens=400, min_tokens=400)


class NetworkTime:
    """Seconds that the networks would have taken, and the order in which they ran: "i" for images, "t" for texts."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.turns: list[str] = []
        self.token_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def paint(self, *_: Any) -> None:
        self.now_s += IMAGE_S
        self.turns.append("i")

    def write(self, network: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.now_s += TEXT_S + self.token_s * kwargs["input_ids"].numel()
        self.turns.append("t")


@pytest.fixture
def time(painter: DiffusionModel, talker: LanguageModel) -> Iterator[NetworkTime]:
    clock = NetworkTime()
    hooks = [
        painter.unet.network.register_forward_pre_hook(clock.paint),
        talker.network.register_forward_pre_hook(clock.write, with_kwargs=True),
    ]
    yield clock
    for hook in hooks:
        hook.remove()


def picture(num_steps: int) -> GenerationRequest:
    return GenerationRequest(
        prompt="a red fox",
        width_px=64,
        height_px=64,
        diffusion=DiffusionParams(num_steps=num_steps, sampler="ddim", guidance_scale=1.0),
    )


def start(
    make_studio: MakeStudio, time: NetworkTime, *, num_steps: int, num_texts: int, **settings: Any
) -> CombinedEngine:
    """Return a studio with this much work, whose image group is measured already."""
    studio = make_studio(clock=time, **settings)
    studio.engine.generate(picture(1))
    time.turns.clear()
    if num_steps:
        studio.submit(picture(num_steps))
    for _ in range(num_texts):
        studio.submit(TextRequest(prompt="x", params=LONG, deltas=False))
    return studio


def finish(studio: CombinedEngine) -> None:
    for request_id in list(studio._live):
        studio.cancel(request_id)
    list(studio.events())


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
def test_both_sides_get_their_share_while_both_want_it(
    share: float, make_studio: MakeStudio, time: NetworkTime
) -> None:
    studio = start(make_studio, time, num_steps=40, num_texts=2, time_share=share)
    while studio.engine.has_work:
        studio.tick()
    images, texts = time.turns.count("i") * IMAGE_S, time.turns.count("t") * TEXT_S
    assert texts / (images + texts) == pytest.approx(share, rel=0.1)
    finish(studio)


def test_calls_come_in_bursts_of_what_two_steps_earn(make_studio: MakeStudio, time: NetworkTime) -> None:
    studio = start(make_studio, time, num_steps=20, num_texts=1, time_share=0.25)
    while studio.engine.has_work:
        studio.tick()
    _, *pairs = re.findall("(i+)(t+)", "".join(time.turns))
    assert all(2 <= len(images) <= 3 for images, _ in pairs)
    assert all(6 <= len(texts) <= 9 for _, texts in pairs)
    finish(studio)


def test_events_are_sent_and_requests_are_accepted_between_ticks(make_studio: MakeStudio, time: NetworkTime) -> None:
    studio = start(make_studio, time, num_steps=5, num_texts=2)
    while studio.has_work and len(time.turns) < 60:
        before = len(time.turns)
        studio.tick()
        assert len(time.turns) - before <= 1
    finish(studio)


def test_images_alone_run_at_full_speed(make_studio: MakeStudio, time: NetworkTime) -> None:
    studio = start(make_studio, time, num_steps=10, num_texts=0)
    list(studio.events())
    assert "".join(time.turns) == "i" * 10


def test_texts_alone_run_freely(make_studio: MakeStudio, time: NetworkTime) -> None:
    studio = start(make_studio, time, num_steps=0, num_texts=3, time_share=0.01)
    list(studio.events())
    assert set(time.turns) == {"t"}
    assert len(time.turns) <= 402
    assert (studio.share.image_s, studio.share.text_s) == (0.0, 0.0)


def test_a_long_prompt_is_computed_in_pieces_that_the_images_can_afford(
    make_studio: MakeStudio, time: NetworkTime
) -> None:
    studio = start(make_studio, time, num_steps=200, num_texts=0, time_share=0.5)
    assert studio.texts is not None
    time.token_s = 0.002
    for num_tokens in (10, 50):
        studio.texts.cost.learn(num_tokens, TEXT_S + 0.002 * num_tokens)
    for _ in range(4):
        studio.tick()
    studio.submit(TextRequest(prompt="x" * 300, params=LONG, deltas=False))
    while not (studio.texts.trace and studio.texts.trace[-1].num_tokens == 1):
        studio.tick()
    pieces = [tick.num_tokens for tick in studio.texts.trace][:-1]
    assert sum(pieces) == 300
    assert 35 <= max(pieces) <= 40, "a step earns 90 ms: 10 for the call, and 40 tokens"
    finish(studio)
