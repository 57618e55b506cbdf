"""Tokens that are read a tick after they were chosen: the same texts, and what was computed too much is thrown away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diffserve.api.sampling_params import SamplingParams
from diffserve.api.text_types import TextConfig, TextDelta, TextFinished, TextRequest
from diffserve.engine.text import TextEngine, TickBudget
from diffserve.runtime.kv import PagePool
from diffserve.runtime.language import load_language_model
from tests.engine.text.conftest import MakeEngine
from tests.engine.text.text_requests import expected, greedy, of_type, token_ids_of
from tests.runtime.language import tiny

PROMPTS = [tiny.random_ids(length, seed=seed) for seed, length in enumerate((3, 9, 14, 30, 5))]


def drawn(prompt_ids: list[int], seed: int, num_texts: int = 1, **params: Any) -> TextRequest:
    """Return a request with random sampling."""
    params = {"temperature": 0.7, "max_tokens": 18, **params}
    return TextRequest(token_ids=tuple(prompt_ids), params=SamplingParams(seed=seed, **params), num_texts=num_texts)


def mixed() -> list[TextRequest]:
    """Return requests with every kind of option, of different lengths."""
    likely = expected("llama", PROMPTS[1])
    return [
        greedy(PROMPTS[0], 30),
        greedy(PROMPTS[1], stop_token_ids=(likely[7],)),
        drawn(PROMPTS[2], 3, top_p=0.9, logprobs=2),
        drawn(PROMPTS[3], 4, num_texts=3, top_k=20),
        drawn(PROMPTS[4], 5, min_p=0.01, stop=(" ", "e")),
        greedy(PROMPTS[2], 12, min_tokens=6),
    ]


def run(engine: TextEngine, requests: list[TextRequest]) -> tuple[list[TextFinished], int]:
    """All answers in order, and after how many ticks something was unread."""
    for request in requests:
        engine.submit(request)
    ends: dict[str, TextFinished] = {}
    num_unread = 0
    while engine.has_work:
        ends |= {end.request_id: end for end in of_type(engine.tick(), TextFinished)}
        num_unread += engine._unread is not None
    return [ends[request.request_id] for request in requests], num_unread


def open_on(device: str, directory: Path, *, reads_late: bool) -> TextEngine:
    """Return an engine with a separate pool on ``device``."""
    model = load_language_model(tiny.save(directory / str(reads_late), "llama"), dtype="float32", device=device)
    pool = PagePool.for_specs(1 << 22, [model.spec()], device=model.device)
    return TextEngine(model, pool, TextConfig(num_draft_tokens=0), reads_late=reads_late)


def comparable_result(end: TextFinished) -> Any:
    """Return the content of an answer with rounded numbers."""
    return [(text.token_ids, text.text, text.finish_reason, text.stop_text) for text in end.results]


@pytest.mark.parametrize("config", [{}, {"num_draft_tokens": 4, "min_ngram": 3}])
def test_texts_are_the_same_and_what_was_too_much_is_thrown_away(make_engine: MakeEngine, config: Any) -> None:
    at_once, never = run(make_engine(reads_late=False, **config), mixed())
    engine = make_engine(reads_late=True, **config)
    late, often = run(engine, mixed())
    assert [comparable_result(end) for end in late] == [comparable_result(end) for end in at_once]
    numbers = [[info.logprob for info in ends[2].results[0].tokens] for ends in (late, at_once)]
    assert numbers[0] == pytest.approx(numbers[1], abs=1e-4)
    assert (never, often > 3) == (0, True)
    num_tokens = sum(len(text.token_ids) for end in late for text in end.results)
    assert engine.stats().output_tokens == num_tokens
    alone, _ = run(make_engine(reads_late=True, **config), mixed()[2:3])
    assert comparable_result(alone[0]) == comparable_result(late[2]), "its draws depend on no neighbour"


def test_one_token_too_much_is_computed_after_an_end_that_nobody_foresaw(make_engine: MakeEngine) -> None:
    likely = expected("llama", PROMPTS[1], 12)
    for stop_ids, num_surplus in (((), 0), ((likely[7],), 1)):
        counts = []
        for reads_late in (False, True):
            engine = make_engine(reads_late=reads_late)
            (end,), _ = run(engine, [greedy(PROMPTS[1], 12, stop_token_ids=stop_ids)])
            assert token_ids_of(end) == likely[: len(token_ids_of(end))]
            counts.append(engine.stats().computed_tokens)
            assert engine._unread is None
        assert counts[1] - counts[0] == num_surplus


def test_a_token_is_reported_one_tick_later_and_at_once_under_time_sharing(
    make_engine: MakeEngine,
) -> None:
    for budget, first in ((TickBudget(), []), (TickBudget(time_s=1.0), [1])):
        engine = make_engine(reads_late=True)
        engine.submit(greedy(PROMPTS[0], 5))
        deltas = [len(delta.token_ids) for delta in of_type(engine.tick(budget), TextDelta)]
        assert deltas == first
        while engine.has_work:
            deltas += [len(delta.token_ids) for delta in of_type(engine.tick(budget), TextDelta)]
        assert deltas == [1] * 5


def test_cancelling_with_a_token_unread_gives_everything_back(make_engine: MakeEngine) -> None:
    engine = make_engine(reads_late=True)
    names = [engine.submit(greedy(prompt)) for prompt in PROMPTS[:2]]
    for _ in range(3):
        engine.tick()
    assert engine._unread is not None
    engine.cancel(names[0])
    events = []
    while engine.has_work:
        events += engine.tick()
    assert [end.request_id for end in of_type(events, TextFinished)] == names[1:]
    assert token_ids_of(of_type(events, TextFinished)[0]) == expected("llama", PROMPTS[1])


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)])
def test_on_a_gpu_texts_are_the_same_however_they_are_read(device: str, tmp_path: Path) -> None:
    late, often = run(open_on(device, tmp_path, reads_late=True), mixed())
    at_once, _ = run(open_on(device, tmp_path, reads_late=False), mixed())
    assert [comparable_result(end) for end in late] == [comparable_result(end) for end in at_once]
    assert often > 3
