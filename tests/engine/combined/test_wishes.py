"""Rewriting before generation: the reported prompt is the one used, and a rewriter failure loses no image."""

from __future__ import annotations

from typing import Any

import pytest

from diffserve.api.errors import InvalidRequest, QueueFull
from diffserve.api.types import (
    Accepted,
    Cancelled,
    DiffusionParams,
    Failed,
    Finished,
    GenerationRequest,
    ImageFinished,
    ImageResult,
    RewriteOptions,
)
from diffserve.engine.combined_engine import CombinedEngine
from diffserve.engine.rewrite_queue import BUSY, FAILED, NO_MODEL
from diffserve.engine.rewriter import Rewriter
from diffserve.rewriting import TextWindow
from diffserve.runtime.language import LanguageModel
from tests.engine.combined.conftest import SAYS, MakeStudio

WISH = "something cosy for the evening"


def wish(prompt: str = WISH, **fields: Any) -> GenerationRequest:
    options = {"rewriting": RewriteOptions(), "seed": 3, "width_px": 64, "height_px": 64, **fields}
    return GenerationRequest(prompt=prompt, diffusion=DiffusionParams(num_steps=2, sampler="ddim"), **options)


def results(studio: CombinedEngine, *requests: GenerationRequest) -> list[ImageResult]:
    for request in requests:
        studio.submit(request)
    return [event.result for event in studio.events() if isinstance(event, ImageFinished)]


def test_a_wish_is_generated_as_its_rewritten_prompt_and_both_are_reported(make_studio: MakeStudio) -> None:
    studio = make_studio()
    (rewritten,) = results(studio, wish())
    (direct,) = results(studio, wish(SAYS, rewriting=None))
    assert (rewritten.prompt, rewritten.original_prompt, rewritten.warnings) == (SAYS, WISH, ())
    assert (direct.prompt, direct.original_prompt) == (SAYS, None)
    assert rewritten.picture == direct.picture


def test_a_wish_for_a_model_of_another_family_is_written_in_the_style_that_it_reads(make_studio: MakeStudio) -> None:
    studio = make_studio()
    assert studio.texts is not None
    assert studio.rewriter is not None
    follows = Rewriter(studio.texts, style="tags", window=studio.rewriter.window, follows=True)
    options = RewriteOptions(style="prose", seed=4)
    assert follows.options_for(RewriteOptions(seed=4), "embedded") == RewriteOptions(seed=4, style="embedded")
    assert follows.options_for(options, "embedded") == options
    assert studio.rewriter.options_for(RewriteOptions(), "embedded").style is None, "it was given one for all"


def test_a_rewritten_prompt_must_fit_the_model_that_paints_whatever_the_first_one_reads(
    make_studio: MakeStudio,
) -> None:
    studio = make_studio()
    assert studio.rewriter is not None
    window = studio.rewriter.window
    studio.rewriter.window = TextWindow(0, window.count)  # a first model that reads nothing
    (painted,) = results(studio, wish())
    assert (painted.prompt, painted.warnings) == (SAYS, ())
    assert studio.images.window_of(wish(), studio.rewriter.window).num_tokens == window.num_tokens


def test_a_prompt_that_stays_as_it_is_has_no_original(make_studio: MakeStudio) -> None:
    (result,) = results(make_studio(), wish(SAYS))
    assert (result.prompt, result.original_prompt) == (SAYS, None)


def test_all_images_of_a_wish_come_from_one_rewritten_prompt(make_studio: MakeStudio) -> None:
    studio = make_studio()
    wish_results = results(studio, wish(num_images=3))
    assert [(result.prompt, result.seed) for result in wish_results] == [(SAYS, 3), (SAYS, 4), (SAYS, 5)]
    assert studio.texts is not None
    assert studio.texts.stats().output_tokens == len(SAYS) + 1


def test_the_image_is_with_the_engine_in_the_tick_of_the_last_token(make_studio: MakeStudio) -> None:
    studio = make_studio()
    studio.submit(wish())
    assert (studio.num_live, studio.engine.num_live) == (1, 0)
    assert studio.texts is not None
    while studio.texts.num_live:
        assert studio.engine.num_live == 0
        studio.tick()
    assert studio.engine.num_live == 1
    assert any(isinstance(event, Accepted) for event in studio.tick())
    list(studio.events())


def test_the_time_of_rewriting_counts_as_queueing(make_studio: MakeStudio) -> None:
    studio = make_studio(clock=Clock())
    (result,) = results(studio, wish())
    assert result.timings.queue_s > 10.0


def test_without_a_language_model_the_wish_is_painted_as_it_is_with_a_warning(make_studio: MakeStudio) -> None:
    studio = make_studio(has_texts=False)
    studio.submit(wish())
    events = list(studio.events())
    (accepted,) = [event for event in events if isinstance(event, Accepted)]
    (painted,) = [event for event in events if isinstance(event, ImageFinished)]
    assert (painted.result.prompt, painted.result.original_prompt) == (WISH, None)
    assert accepted.warnings == painted.result.warnings == (NO_MODEL,)


def test_a_language_model_that_fails_costs_the_rewriting_and_not_the_image(
    make_studio: MakeStudio, talker: LanguageModel
) -> None:
    studio = make_studio()
    hook = talker.network.get_input_embeddings().register_forward_pre_hook(_fail)
    try:
        (result,) = results(studio, wish())
    finally:
        hook.remove()
    assert (result.prompt, result.original_prompt, result.warnings) == (WISH, None, (FAILED,))
    (after,) = results(studio, wish())
    assert after.prompt == SAYS


def test_a_wish_too_long_for_the_language_model_is_painted_as_it_is(make_studio: MakeStudio) -> None:
    long = "a " * 1600
    (result,) = results(make_studio(), wish(long))
    assert (result.prompt, result.original_prompt, result.warnings) == (long, None, (FAILED,))


def test_a_busy_rewriter_costs_the_rewriting_and_not_the_image(make_studio: MakeStudio) -> None:
    studio = make_studio(text={"max_waiting": 1})
    wish_results = results(studio, wish(seed=1), wish(seed=2))
    prompts_by_seed = {result.seed: (result.prompt, result.warnings) for result in wish_results}
    assert prompts_by_seed == {1: (SAYS, ()), 2: (WISH, (BUSY,))}


def test_a_style_that_is_not_there_is_refused_at_once(make_studio: MakeStudio) -> None:
    studio = make_studio()
    with pytest.raises(InvalidRequest, match="'cubist'") as caught:
        studio.submit(wish(rewriting=RewriteOptions(style="cubist")))
    assert caught.value.param == "style"
    assert studio.num_live == 0


def test_what_the_engine_would_refuse_is_refused_before_it_is_rewritten(make_studio: MakeStudio) -> None:
    studio = make_studio()
    with pytest.raises(InvalidRequest, match="multiple of"):
        studio.submit(wish(width_px=63))
    assert not studio.has_work


def test_wishes_count_in_the_waiting_room_and_none_is_lost_when_it_fills(make_studio: MakeStudio) -> None:
    studio = make_studio(max_waiting=2, max_lanes=1)
    studio.submit(wish(seed=1))
    studio.submit(wish(seed=2))
    with pytest.raises(QueueFull):
        studio.submit(wish(seed=3))
    for seed in (11, 12):  # who needs no rewriting is faster
        studio.submit(wish(seed=seed, rewriting=None))
    events = list(studio.events())
    assert sorted(event.result.seed for event in events if isinstance(event, ImageFinished)) == [1, 2, 11, 12]


def test_a_cancelled_wish_is_neither_rewritten_nor_painted(make_studio: MakeStudio) -> None:
    studio = make_studio()
    request = wish()
    studio.submit(request)
    studio.tick()
    assert studio.cancel(request.request_id)
    assert not studio.cancel(request.request_id)
    events = list(studio.events())
    assert [type(event) for event in events] == [Cancelled]
    assert studio.texts is not None
    assert studio.texts.num_live == 0


class Clock:
    """Ten seconds later each time it is read."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 10.0
        return self.now_s


def test_rewriting_takes_half_of_the_deadline_at_most(make_studio: MakeStudio) -> None:
    studio = make_studio(clock=Clock())
    (result,) = results(studio, wish(deadline_s=600.0))
    assert (result.prompt, result.warnings) == (WISH, (FAILED,))


def test_a_wish_past_its_deadline_fails_by_name(make_studio: MakeStudio) -> None:
    studio = make_studio(clock=Clock())
    studio.submit(wish(deadline_s=0.001))
    events = list(studio.events())
    (failed,) = [event for event in events if isinstance(event, Failed)]
    assert (failed.code, failed.param) == ("deadline_exceeded", "deadline_s")
    assert not [event for event in events if isinstance(event, Finished)]


def _fail(*_: Any) -> None:
    raise ArithmeticError("no")
