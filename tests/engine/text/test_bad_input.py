"""Invalid text requests: the error names the value and the fix, and the engine continues."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

from diffserve.api.errors import ConfigError, InvalidRequest, QueueFull
from diffserve.api.json_schemas import ANY_OBJECT
from diffserve.api.sampling_params import SamplingParams
from diffserve.api.text_types import TextConfig, TextRequest
from diffserve.engine.text import TextEngine
from diffserve.runtime.kv import PoolTooSmall
from diffserve.runtime.language import load_language_model
from tests.device import DEVICE
from tests.engine.text.conftest import Load, MakeEngine
from tests.engine.text.text_requests import expected, greedy, token_ids_of
from tests.runtime.language import tiny

IDS = tiny.random_ids(6, seed=6)


def assert_alive(engine: Any) -> None:
    assert token_ids_of(engine.generate(greedy(IDS, 4))[0]) == expected("llama", IDS, 4)


def test_a_schema_without_llguidance_is_refused_by_the_name_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    model = load_language_model(tiny.save(tmp_path / "llama", "llama"), dtype="float32", device=DEVICE)
    assert not model.info.speaks_json
    engine = TextEngine.from_model(model)
    with pytest.raises(InvalidRequest, match="pip install llguidance"):
        engine.generate(TextRequest(prompt="a fox", params=SamplingParams(json_schema=ANY_OBJECT)))


@pytest.mark.parametrize("extra", [0, 1, 1000])
def test_a_prompt_as_long_as_the_context_is_refused(extra: int, make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequest, match=f"context of {tiny.CONTEXT_TOKENS} tokens") as caught:
        engine.generate(greedy([1] * (tiny.CONTEXT_TOKENS + extra)))
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    assert_alive(engine)


def test_a_million_characters_are_refused_before_they_are_tokenised(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequest, match="1000000 characters") as caught:
        engine.submit(TextRequest(prompt="x" * 1_000_000))
    assert caught.value.code == "context_length_exceeded"
    assert_alive(engine)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -3}, "max_tokens"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"num_beams": 2, "temperature": 1.0}, "num_beams"),
    ],
)
def test_parameters_that_cannot_be_are_refused_by_name(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**changes)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": "a", "token_ids": (1,)}, "prompt"),
        ({"token_ids": (-1,)}, "prompt"),
        ({"prompt": "a", "num_texts": 0}, "n"),
        ({"prompt": "a", "num_texts": 65}, "n"),
        ({"prompt": "a", "num_texts": 3, "params": SamplingParams(temperature=0, num_beams=2)}, "n"),
        ({"prompt": "a", "deadline_s": math.nan}, "deadline_s"),
        ({"prompt": "a", "deadline_s": 0}, "deadline_s"),
    ],
)
def test_requests_that_cannot_be_are_refused_by_name(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        TextRequest(**changes)
    assert caught.value.param == param


def test_a_token_outside_the_vocabulary_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequest, match=f"token id {tiny.VOCAB_SIZE} is not"):
        engine.submit(greedy([1, tiny.VOCAB_SIZE]))
    assert_alive(engine)


@pytest.mark.parametrize(("count", "settings"), [(37, {}), (20, {"num_beams": 4})])
def test_what_can_never_fit_the_pool_is_refused_with_both_numbers(
    count: int, settings: dict[str, Any], make_engine: MakeEngine
) -> None:
    engine = make_engine(num_pages=10)
    with pytest.raises(PoolTooSmall, match="whole pool has 10") as caught:
        engine.submit(greedy(tiny.random_ids(count, seed=0), 20, **settings))
    assert caught.value.code == "pool_too_small"
    assert_alive(engine)


def test_what_just_fits_the_pool_is_answered(make_engine: MakeEngine) -> None:
    engine = make_engine(num_pages=10)
    ids = tiny.random_ids(21, seed=0)
    assert len(token_ids_of(engine.generate(greedy(ids, 20))[0])) == 20  # 21 + 20 - 1 tokens on ten pages
    with pytest.raises(PoolTooSmall):
        engine.submit(greedy(ids, 21))


def test_beams_that_just_fit_the_pool_are_searched(make_engine: MakeEngine) -> None:
    engine = make_engine(num_pages=10)
    ids = tiny.random_ids(17, seed=0)
    answer = engine.generate(greedy(ids, 8, num_beams=3))[0]  # 4 shared pages, 2 of each beam's own
    assert token_ids_of(answer) == expected("llama", ids, 8, num_beams=3)
    with pytest.raises(PoolTooSmall):
        engine.submit(greedy(ids, 9, num_beams=3))


def test_more_texts_than_run_at_once_are_refused(make_engine: MakeEngine) -> None:
    engine = make_engine(max_sequences=3)
    with pytest.raises(InvalidRequest, match="at most 3 at once"):
        engine.submit(greedy(IDS, num_texts=4))
    with pytest.raises(InvalidRequest, match="at most 3 at once"):
        engine.submit(greedy(IDS, num_beams=4))
    assert_alive(engine)


def test_drafts_of_a_model_that_is_not_there_are_refused(make_engine: MakeEngine) -> None:
    engine = make_engine(num_draft_tokens=3)
    with pytest.raises(InvalidRequest, match="no draft model"):
        engine.submit(greedy(IDS, speculation="draft"))
    assert_alive(engine)


def test_a_full_waiting_room_says_so(make_engine: MakeEngine) -> None:
    engine = make_engine(max_waiting=2)
    for _ in range(2):
        engine.submit(greedy(IDS, 2))
    with pytest.raises(QueueFull, match="2 requests are waiting"):
        engine.submit(greedy(IDS, 2))
    list(engine.events())


def test_an_id_that_is_in_use_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine()
    request = greedy(IDS, 2)
    engine.submit(request)
    with pytest.raises(InvalidRequest, match="already in use"):
        engine.submit(request)
    engine.tick()
    with pytest.raises(InvalidRequest, match="already in use"):
        engine.submit(request)
    list(engine.events())


@pytest.mark.parametrize(
    "changes", [{"max_batch_tokens": 0}, {"page_tokens": 0}, {"num_draft_tokens": -1}, {"max_ngram": 1, "min_ngram": 2}]
)
def test_settings_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        TextConfig(**changes)


def test_a_draft_model_with_another_vocabulary_is_refused(language: Load) -> None:
    import dataclasses

    import msgspec

    from diffserve.engine.text.engine import check_draft

    model = language("llama")
    check_draft(model, language("llama", 1))
    other = dataclasses.replace(model, info=msgspec.structs.replace(model.info, vocab_size=7, model_id="small"))
    with pytest.raises(ConfigError, match="'small' has a different vocabulary"):
        check_draft(model, other)
