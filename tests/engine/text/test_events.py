"""Events during text generation: deltas, ends, usage and times."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import pytest

from diffserve.api.errors import DeadlineExceeded, DeadlineUnreachable, DiffserveError
from diffserve.api.pace import TokenCost
from diffserve.api.text_types import TextAccepted, TextDelta, TextFinished
from diffserve.api.types import Cancelled, Failed
from diffserve.engine.text import TickBudget
from tests.engine.text.conftest import Load, MakeEngine
from tests.engine.text.text_requests import expected, greedy, of_type, text_of, token_ids_of
from tests.runtime.decoding.word_constraints import allowed_words
from tests.runtime.language import tiny

IDS = tiny.random_ids(9, seed=9)


@dataclass
class Clock:
    """A clock that stands still until it is moved."""

    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


def words(language: Load) -> Any:
    """Whatever a random model says with this is readable."""
    model = language("llama")
    return allowed_words(model.tokenizer, ["cat", "sun", "dog"], end_ids=model.end_ids)


def test_deltas_add_up_to_the_text_and_the_last_one_says_why(make_engine: MakeEngine, language: Load) -> None:
    events = list(make_engine().stream(greedy(IDS, 17, num_texts=2), constraint=words(language)))
    assert isinstance(events[0], TextAccepted)
    end = events[-1]
    assert isinstance(end, TextFinished)
    for index, result in enumerate(end.results):
        deltas = [delta for delta in of_type(events, TextDelta) if delta.text_index == index]
        assert text_of(events, index) == result.text
        assert [token for delta in deltas for token in delta.token_ids] == list(result.token_ids)
        assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + [result.finish_reason]
    assert len({event.request_id for event in events}) == 1


def test_without_deltas_only_the_final_event_is_sent(make_engine: MakeEngine) -> None:
    events = list(make_engine().stream(greedy(IDS, 5, deltas=False)))
    assert [type(event) for event in events] == [TextAccepted, TextFinished]


@pytest.mark.parametrize("settings", [{"num_draft_tokens": 0}, {"num_draft_tokens": 4, "min_ngram": 1}])
def test_a_stop_text_ends_the_output_and_is_never_shown(
    settings: dict[str, int], make_engine: MakeEngine, language: Load
) -> None:
    engine, constraint = make_engine(**settings), words(language)
    full_text = engine.generate(greedy(IDS, 30, min_tokens=30), constraint=constraint)[0].text
    stop = full_text[9:12]
    events = list(engine.stream(greedy(IDS, 30, min_tokens=30, stop=(stop, "never said")), constraint=constraint))
    end = events[-1]
    assert isinstance(end, TextFinished)
    assert end.text == text_of(events) == full_text[: full_text.index(stop)]
    assert (end.results[0].finish_reason, end.results[0].stop_text) == ("stop", stop)
    assert len(end.results[0].token_ids) == full_text.index(stop) + len(stop)


def test_a_stop_text_ends_a_beam(make_engine: MakeEngine, language: Load) -> None:
    engine, constraint = make_engine(), words(language)
    full_text = engine.generate(greedy(IDS, 20, num_beams=2, min_tokens=20), constraint=constraint)[0].text
    stop = full_text[4:6]
    result = engine.generate(greedy(IDS, 20, num_beams=2, min_tokens=20, stop=(stop,)), constraint=constraint)[
        0
    ].results[0]
    assert stop not in result.text
    assert (result.finish_reason, result.stop_text) == ("stop", stop)


def test_an_end_token_is_counted_and_not_shown(make_engine: MakeEngine) -> None:
    for seed in range(40):
        ids = tiny.random_ids(12, seed=seed)
        if tiny.END_ID in expected("qwen3", ids, 24):
            break
    result = make_engine("qwen3").generate(greedy(ids, 24))[0].results[0]
    assert result.token_ids[-1] == tiny.END_ID
    assert result.finish_reason == "stop"
    assert tiny.END not in result.text


def test_a_stop_token_of_the_request_ends_it_too(make_engine: MakeEngine) -> None:
    full = expected("llama", IDS, 10)
    result = make_engine().generate(greedy(IDS, 10, stop_token_ids=(full[4],)))[0].results[0]
    assert list(result.token_ids) == full[: full.index(full[4]) + 1]


def test_the_best_beams_are_returned_in_order(make_engine: MakeEngine) -> None:
    events = list(make_engine().stream(greedy(IDS, 8, num_beams=4, num_texts=3)))
    end = events[-1]
    assert isinstance(end, TextFinished)
    scores = [result.score for result in end.results]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)  # type: ignore[type-var] # beams have scores
    assert len({result.token_ids for result in end.results}) == 3
    assert [delta.text_index for delta in of_type(events, TextDelta)] == [0, 1, 2]


def test_usage_counts_prompt_cache_and_output(make_engine: MakeEngine) -> None:
    engine = make_engine()
    first, second = (engine.generate(greedy(IDS, 5, num_texts=2))[0].usage for _ in range(2))
    assert (first.prompt_tokens, first.cached_tokens, first.output_tokens) == (9, 0, 10)
    assert (second.prompt_tokens, second.cached_tokens, second.output_tokens) == (9, 8, 10)
    stats = engine.stats()
    assert (stats.output_tokens, stats.hit_rate) == (20, 8 / 18)
    assert stats.mean_entropy > 0


def test_times_are_queue_first_token_and_each_later_one(make_engine: MakeEngine) -> None:
    clock = Clock()
    engine = make_engine(clock=clock, max_batch_tokens=8, reads_late=False)
    engine.submit(greedy(IDS, 3))
    for now_s in (102.0, 103.5, 104.0, 106.0):
        clock.now_s = now_s
        events = engine.tick()
    (end,) = of_type(events, TextFinished)
    assert end.timings.queue_s == 2.0
    assert end.timings.ttft_s == 3.5
    assert end.timings.tpot_s == 1.25
    assert end.timings.total_s == 6.0


def test_a_deadline_ends_waiting_and_running_requests(make_engine: MakeEngine) -> None:
    clock = Clock()
    engine = make_engine(clock=clock, num_pages=10)
    running = engine.submit(greedy(tiny.random_ids(24, seed=1), 10, deadline_s=5.0))
    waiting = engine.submit(greedy(tiny.random_ids(24, seed=2), 10, deadline_s=5.0))
    patient = engine.submit(greedy(tiny.random_ids(24, seed=3), 3))
    engine.tick()
    clock.now_s += 5.5
    events = engine.tick()
    assert [(event.request_id, event.code) for event in of_type(events, Failed)] == [
        (running, "deadline_exceeded"),
        (waiting, "deadline_exceeded"),
    ]
    (end,) = of_type(list(engine.events()), TextFinished)
    assert end.request_id == patient


def test_generate_raises_what_went_wrong(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(DeadlineExceeded):
        engine.generate(greedy(IDS, 100, deadline_s=1e-9))
    assert engine.num_live == 0


def test_closing_a_stream_cancels_its_request(make_engine: MakeEngine) -> None:
    engine = make_engine()
    stream = engine.stream(greedy(IDS, 100))
    for _ in range(3):
        next(stream)
    stream.close()  # type: ignore[attr-defined] # a generator
    assert engine.num_live == 0
    assert engine.pool.stats().held_pages == 0


def test_a_cancelled_request_is_an_error_for_whoever_waits(make_engine: MakeEngine) -> None:
    engine = make_engine()
    stream = engine.stream(greedy(IDS, 100))
    accepted = next(stream)
    engine.cancel(accepted.request_id)
    assert [type(event) for event in stream] == [Cancelled]
    from diffserve.engine.base_engine import raise_if_failed

    with pytest.raises(DiffserveError, match="cancelled"):
        raise_if_failed(Cancelled(request_id="x"))


def test_a_list_may_be_longer_than_the_waiting_room(make_engine: MakeEngine) -> None:
    prompts = [tiny.random_ids(4, seed=seed) for seed in range(9)]
    answers = make_engine(max_waiting=2, max_sequences=2).generate([greedy(ids, 4) for ids in prompts])
    assert [token_ids_of(answer) for answer in answers] == [expected("llama", ids, 4) for ids in prompts]


def test_threads_that_ask_at_the_same_time_get_their_own_answers(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompts = [tiny.random_ids(5 + seed, seed=seed) for seed in range(4)]
    answers: dict[int, list[list[int]]] = {}

    def ask(index: int) -> None:
        answers[index] = [token_ids_of(engine.generate(greedy(prompts[index], 6))[0]) for _ in range(2)]

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {index: [expected("llama", ids, 6)] * 2 for index, ids in enumerate(prompts)}


def test_a_budget_bounds_the_tokens_of_a_tick(make_engine: MakeEngine) -> None:
    engine = make_engine(max_batch_tokens=64)
    engine.submit(greedy(tiny.random_ids(40, seed=1), 4))
    while engine.has_work:
        engine.tick(TickBudget(max_tokens=6))
    assert [tick.num_tokens for tick in engine.trace] == [6] * 6 + [4, 1, 1, 1]


def test_a_budget_smaller_than_the_crowd_gives_everybody_a_turn(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompts = [tiny.random_ids(1, seed=seed) for seed in range(5)]
    names = [engine.submit(greedy(ids, 6)) for ids in prompts]
    ends = {}
    while engine.has_work:
        for event in engine.tick(TickBudget(max_tokens=2)):
            if isinstance(event, TextFinished):
                ends[event.request_id] = token_ids_of(event)
    assert [ends[name] for name in names] == [expected("llama", ids, 6) for ids in prompts]
    assert max(tick.num_tokens for tick in engine.trace) == 2


def test_a_prompt_that_cannot_be_read_in_time_is_refused_at_the_door(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.generate(greedy(tiny.random_ids(24, seed=1), 4))
    engine.cost = TokenCost()
    for num_tokens in (1, 20, 40):
        engine.cost.learn(num_tokens, 0.5 * num_tokens)
    with pytest.raises(
        DeadlineUnreachable, match=r"deadline_s is 5, but this request would take about 1\d\.\d s"
    ) as late:
        engine.submit(greedy(tiny.random_ids(24, seed=2), 4, deadline_s=5.0))
    assert late.value.retry_after_s is None, "it takes as long alone"
    assert not engine.has_work
    engine.submit(greedy(tiny.random_ids(24, seed=2), 4, deadline_s=60.0))
    with pytest.raises(DeadlineUnreachable) as behind:
        engine.submit(greedy(tiny.random_ids(24, seed=3), 4, deadline_s=15.0))
    assert (behind.value.retry_after_s or 0.0) > 1.0, "there is somebody before it"
