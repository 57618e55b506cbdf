"""Greedy text equals transformers' ``generate`` token for token, whatever goes on around it."""

from __future__ import annotations

import pytest

from diffserve.api.sampling_params import SamplingParams
from diffserve.api.text_types import TextRequest
from diffserve.engine.text import TextEngine
from tests.engine.text.conftest import MakeEngine
from tests.engine.text.text_requests import expected, greedy, token_ids_of
from tests.runtime.language import tiny

KINDS = (*tiny.KINDS, *tiny.OTHER_KINDS)
PROMPTS = [tiny.random_ids(length, seed=length) for length in (1, 6, 17, 44, 70)]


def check(engine: TextEngine, kind: str, prompts: list[list[int]] = PROMPTS, max_tokens: int = 24) -> None:
    answers = engine.generate([greedy(ids, max_tokens) for ids in prompts])
    assert [token_ids_of(answer) for answer in answers] == [expected(kind, ids, max_tokens) for ids in prompts]


def test_the_models_say_different_things() -> None:
    """Were the most likely token always the same one, the other tests would show little."""
    for kind in KINDS:
        texts = [expected(kind, ids) for ids in PROMPTS]
        assert len({tuple(text) for text in texts}) == len(PROMPTS)
        assert all(len(set(text)) >= 4 for text in texts)


@pytest.mark.parametrize("kind", KINDS)
def test_alone(kind: str, make_engine: MakeEngine) -> None:
    for ids in PROMPTS[1:4]:
        check(make_engine(kind), kind, [ids])


@pytest.mark.parametrize("kind", KINDS)
def test_together_with_chunked_prompts(kind: str, make_engine: MakeEngine) -> None:
    engine = make_engine(kind, max_batch_tokens=12)
    check(engine, kind)
    assert max(tick.num_tokens for tick in engine.trace) <= 12
    is_mixed = [len({row[2] for row in tick.rows}) > 1 for tick in engine.trace]
    assert any(is_mixed), "prompts and decoding never shared a call"


@pytest.mark.parametrize("kind", KINDS)
def test_with_prefix_hits(kind: str, make_engine: MakeEngine) -> None:
    engine = make_engine(kind)
    check(engine, kind, [PROMPTS[3]])
    longer = [PROMPTS[3] + ids for ids in PROMPTS[:3]]
    answers = engine.generate([greedy(ids) for ids in [PROMPTS[3], *longer]])
    assert [token_ids_of(answer) for answer in answers] == [expected(kind, ids) for ids in [PROMPTS[3], *longer]]
    assert [answer.usage.cached_tokens for answer in answers] == [40, 44, 44, 44]


@pytest.mark.parametrize("kind", KINDS)
def test_after_eviction_and_computing_again(kind: str, make_engine: MakeEngine) -> None:
    engine = make_engine(kind, num_pages=24)
    check(engine, kind, [PROMPTS[3]])
    check(engine, kind, [PROMPTS[4]])
    assert engine.pool.stats().tenants["llm"].evicted_pages > 0
    check(engine, kind, [PROMPTS[3]])
    check(engine, kind, [PROMPTS[3]])


@pytest.mark.parametrize("kind", KINDS)
def test_with_preemption(kind: str, make_engine: MakeEngine) -> None:
    engine = make_engine(kind, num_pages=14)
    prompts = [tiny.random_ids(length, seed=length) for length in (9, 8, 7, 6)]
    check(engine, kind, prompts, max_tokens=30)
    assert engine.stats().preemptions > 0


@pytest.mark.parametrize("kind", KINDS)
def test_with_drafts_from_the_prompt(kind: str, make_engine: MakeEngine) -> None:
    engine = make_engine(kind, num_draft_tokens=5, min_ngram=1, max_batch_tokens=40)
    check(engine, kind)
    stats = engine.stats()
    assert stats.draft_tokens > stats.accepted_tokens > 0


@pytest.mark.parametrize("kind", KINDS)
def test_with_drafts_from_another_model(kind: str, make_engine: MakeEngine) -> None:
    engine = make_engine(kind, num_draft_tokens=3, draft_seed=1)
    check(engine, kind)
    assert engine.stats().draft_tokens > 0


def test_a_draft_model_that_is_always_right_saves_most_calls(make_engine: MakeEngine) -> None:
    engine = make_engine("llama", num_draft_tokens=3, draft_seed=0)
    check(engine, "llama", [PROMPTS[2]])
    stats = engine.stats()
    assert stats.accepted_tokens == stats.draft_tokens > 0
    assert len(engine.trace) <= 8  # 24 tokens, four at a time


def test_drafts_and_preemption_together(make_engine: MakeEngine) -> None:
    for draft_seed in (None, 0, 1):
        engine = make_engine("qwen3", num_pages=20, num_draft_tokens=4, min_ngram=1, draft_seed=draft_seed)
        prompts = [tiny.random_ids(length, seed=length) for length in (9, 8, 7, 6)]
        check(engine, "qwen3", prompts, max_tokens=30)
        assert engine.stats().preemptions > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_beams", [2, 5])
def test_beam_search(kind: str, num_beams: int, make_engine: MakeEngine) -> None:
    answers = make_engine(kind).generate([greedy(ids, 12, num_beams=num_beams) for ids in PROMPTS[1:4]])
    texts = [expected(kind, ids, 12, num_beams=num_beams) for ids in PROMPTS[1:4]]
    assert [token_ids_of(answer) for answer in answers] == texts


def test_beam_search_in_a_batch_in_chunks_and_with_preemption(make_engine: MakeEngine) -> None:
    engine = make_engine("llama", num_pages=26, max_batch_tokens=14)
    beams = [greedy(ids, 12, num_beams=3) for ids in (PROMPTS[2], PROMPTS[1])]
    plain = [greedy(ids, 30) for ids in PROMPTS[:3]]
    answers = engine.generate([plain[0], beams[0], plain[1], beams[1], plain[2]])
    assert [token_ids_of(answers[place]) for place in (1, 3)] == [
        expected("llama", ids, 12, num_beams=3) for ids in (PROMPTS[2], PROMPTS[1])
    ]
    assert [token_ids_of(answers[place]) for place in (0, 2, 4)] == [expected("llama", ids, 30) for ids in PROMPTS[:3]]
    assert engine.stats().preemptions > 0


@pytest.mark.parametrize("settings", [{"length_penalty": 2.0}, {"early_stopping": True}, {"early_stopping": "never"}])
def test_beam_search_takes_the_settings_of_transformers(settings: dict[str, object], make_engine: MakeEngine) -> None:
    answer = make_engine("qwen3").generate(greedy(PROMPTS[2], 16, num_beams=3, **settings))[0]
    assert token_ids_of(answer) == expected("qwen3", PROMPTS[2], 16, num_beams=3, **settings)


def test_several_greedy_texts_of_one_prompt_are_the_same_and_share_its_pages(make_engine: MakeEngine) -> None:
    engine = make_engine("llama")
    answer = engine.generate(greedy(PROMPTS[3], num_texts=4))[0]
    assert [token_ids_of(answer, index) for index in range(4)] == [expected("llama", PROMPTS[3])] * 4
    assert engine.stats().computed_tokens == len(PROMPTS[3]) + 4 * 23


def test_repetition_penalty_and_forced_length_follow_transformers(make_engine: MakeEngine) -> None:
    answer = make_engine("gpt2").generate(greedy(PROMPTS[2], 20, repetition_penalty=1.4, min_tokens=18))[0]
    assert token_ids_of(answer) == expected("gpt2", PROMPTS[2], 20, repetition_penalty=1.4, min_new_tokens=18)


def test_a_text_ends_where_the_context_does(make_engine: MakeEngine) -> None:
    ids = tiny.random_ids(tiny.CONTEXT_TOKENS - 5, seed=3)
    answer = make_engine("llama").generate(greedy(ids, 100))[0]
    assert token_ids_of(answer) == expected("llama", ids, 5)
    assert answer.results[0].finish_reason == "length"


def test_a_prompt_given_as_text_is_tokenised(make_engine: MakeEngine) -> None:
    engine = make_engine("llama")
    params = SamplingParams(temperature=0.0, max_tokens=10)
    answer = engine.generate(TextRequest(prompt="a fox, naïve", params=params))[0]
    ids = tiny.make_tokenizer()("a fox, naïve").input_ids
    assert token_ids_of(answer) == expected("llama", ids, 10)
    assert answer.usage.prompt_tokens == len(ids) == 13
