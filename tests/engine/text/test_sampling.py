"""Draws, seeds, logprobs and constraints, as far as the engine has a hand in them."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from diffserve.api.sampling_params import SamplingParams
from diffserve.api.text_types import TextRequest
from tests.engine.text.conftest import Load, MakeEngine
from tests.engine.text.text_requests import greedy, token_ids_of
from tests.runtime.decoding.word_constraints import allowed_words
from tests.runtime.language import tiny

IDS = tiny.random_ids(9, seed=9)


def drawn(seed: int | None, max_tokens: int = 16, **changes: Any) -> TextRequest:
    params = {"temperature": 1.0, "top_k": 20, **changes.pop("params", {})}
    settings = SamplingParams(seed=seed, max_tokens=max_tokens, **params)
    return TextRequest(**{"token_ids": tuple(IDS), "params": settings, **changes})


def test_a_seed_gives_the_same_text_alone_and_among_others(make_engine: MakeEngine) -> None:
    alone = token_ids_of(make_engine().generate(drawn(7))[0])
    engine = make_engine(max_batch_tokens=11)
    crowd = [greedy(tiny.random_ids(20, seed=1)), drawn(8), drawn(7), drawn(9, params={"temperature": 0.3})]
    answers = engine.generate(crowd)
    assert token_ids_of(answers[2]) == alone
    assert token_ids_of(answers[1]) != alone


def test_text_i_of_a_request_is_drawn_with_seed_plus_i(make_engine: MakeEngine) -> None:
    engine = make_engine()
    together = engine.generate(drawn(20, num_texts=3))[0]
    apart = engine.generate([drawn(seed) for seed in (20, 21, 22)])
    assert [token_ids_of(together, index) for index in range(3)] == [token_ids_of(answer) for answer in apart]


def test_looked_up_drafts_do_not_change_what_a_seed_draws(make_engine: MakeEngine) -> None:
    params = {"temperature": 0.4}
    plain = make_engine().generate(drawn(3, 40, params=params))[0]
    engine = make_engine(num_draft_tokens=4, min_ngram=1)
    assert token_ids_of(engine.generate(drawn(3, 40, params=params))[0]) == token_ids_of(plain)
    assert engine.stats().draft_tokens > 0


@pytest.mark.parametrize("draft_seed", [None, 0])
def test_texts_that_share_a_known_prompt_draft_each_on_its_own(draft_seed: int | None, make_engine: MakeEngine) -> None:
    request = greedy([*IDS[:4], *IDS[:4], IDS[0]], 12, num_texts=3)
    alone = token_ids_of(make_engine().generate(request)[0])
    engine = make_engine(num_draft_tokens=3, min_ngram=1, draft_seed=draft_seed)
    for _ in range(2):  # the second time all of the prompt but one token is there
        answer = engine.generate(greedy(request.token_ids, 12, num_texts=3))[0]
        assert [token_ids_of(answer, index) for index in range(3)] == [alone] * 3
    assert answer.usage.draft_tokens > 0


def test_preemption_does_not_change_what_a_seed_draws(make_engine: MakeEngine) -> None:
    alone = [token_ids_of(make_engine().generate(drawn(seed, 24))[0]) for seed in (1, 2, 3)]
    engine = make_engine(num_pages=13)
    assert [token_ids_of(answer) for answer in engine.generate([drawn(seed, 24) for seed in (1, 2, 3)])] == alone
    assert engine.stats().preemptions > 0


def test_without_a_seed_texts_differ_and_the_seed_is_reported(make_engine: MakeEngine) -> None:
    engine = make_engine()
    events = list(engine.stream(drawn(None)))
    again = engine.generate(drawn(events[0].seed))[0]  # type: ignore[union-attr] # TextAccepted comes first
    assert token_ids_of(again) == token_ids_of(events[-1])  # type: ignore[arg-type] # TextFinished comes last
    assert token_ids_of(engine.generate(drawn(None))[0]) != token_ids_of(again)


@pytest.mark.slow
@pytest.mark.parametrize("draft_seed", [None, 1])
def test_a_draft_model_leaves_the_distribution_as_it_is(draft_seed: int | None, make_engine: MakeEngine) -> None:
    engine = make_engine(num_pages=2000, num_draft_tokens=2, draft_seed=draft_seed, min_ngram=1)
    params = {"top_k": 3, "temperature": 2.0}
    requests = [drawn(1000 * part, 3, num_texts=64, params=params) for part in range(16)]
    texts = [token_ids_of(answer, index) for answer in engine.generate(requests) for index in range(64)]
    if draft_seed is not None:
        assert engine.stats().draft_tokens > 0
    thirds = Counter(text[-1] for text in texts if len(text) == 3)
    reference = make_engine(num_pages=2000)
    again = [token_ids_of(answer, index) for answer in reference.generate(requests) for index in range(64)]
    for token_id, count in Counter(text[-1] for text in again if len(text) == 3).items():
        assert abs(thirds[token_id] - count) < 5 * math.sqrt(2 * max(count, 9))


@pytest.mark.parametrize("num_draft_tokens", [0, 4])
def test_logprobs_and_entropy_are_those_of_the_model(
    num_draft_tokens: int, make_engine: MakeEngine, language: Load
) -> None:
    engine = make_engine(num_draft_tokens=num_draft_tokens, min_ngram=1)
    result = engine.generate(greedy(IDS, 12, logprobs=3))[0].results[0]
    logprobs = language("llama").plain_logits([*IDS, *result.token_ids[:-1]])[len(IDS) - 1 :].log_softmax(-1)
    assert [token.token_id for token in result.tokens] == list(result.token_ids)
    for token, line in zip(result.tokens, logprobs, strict=True):
        best = line.topk(3)
        assert token.logprob == pytest.approx(float(line[token.token_id]), abs=1e-4)
        assert token.entropy == pytest.approx(float(-(line.exp() * line).sum()), abs=1e-3)
        assert [top[1] for top in token.top] == best.indices.tolist()
        assert [top[2] for top in token.top] == pytest.approx(best.values.tolist(), abs=1e-4)
    entropies = torch.tensor([token.entropy for token in result.tokens])
    assert result.mean_entropy == pytest.approx(float(entropies.mean()))


def test_logprobs_are_left_out_unless_asked_for(make_engine: MakeEngine) -> None:
    assert make_engine().generate(greedy(IDS, 3))[0].results[0].tokens == ()


@pytest.mark.parametrize("settings", [{}, {"num_beams": 2}])
def test_a_constraint_leaves_only_its_words(settings: dict[str, int], make_engine: MakeEngine, language: Load) -> None:
    model = language("llama")
    constraint = allowed_words(model.tokenizer, ["cat", "sun", "sunny"], attached=[","], end_ids=model.end_ids)
    engine = make_engine(num_draft_tokens=3)
    answer = engine.generate(greedy(IDS, 40, **settings), constraint=constraint)[0]
    words = answer.text.replace(",", " ,").split(" ")
    expected_words = words if answer.results[0].finish_reason == "stop" else words[:-1]
    assert len(expected_words) > 1
    assert set(expected_words) <= {"cat", "sun", "sunny", ","}
    if not settings:
        assert engine.stats().accepted_tokens > 0  # a token without an alternative is accepted without sampling


def test_seconds_are_shared_by_tokens_and_add_up_to_the_busy_time(make_engine: MakeEngine) -> None:
    engine = make_engine(max_batch_tokens=24)
    answers = engine.generate([greedy(IDS, 20), greedy(IDS[:3], 3), drawn(1, 9, num_texts=3), greedy(IDS[:4], 8)])
    device_times_s = [answer.usage.device_s for answer in answers]
    assert sum(device_times_s) == pytest.approx(engine.stats().busy_s - engine._owed_s, rel=1e-9)
    assert 0.0 < device_times_s[1] < device_times_s[0]
