"""Failure isolation: a failed text request affects no other request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from diffserve.api.text_types import TextFinished
from diffserve.api.types import Failed
from diffserve.engine.text import TextEngine
from tests.engine.text.conftest import Load, MakeEngine
from tests.engine.text.text_requests import expected, greedy, of_type, token_ids_of
from tests.runtime.language import tiny

POISON = 5
CLEAN = [[token for token in tiny.random_ids(length, seed=length) if token != POISON] for length in (8, 12, 20)]


@pytest.fixture
def poisoned(language: Load) -> Iterator[Callable[[str], None]]:
    """``poisoned(how)``: from now on the Llama gives NaN for, or chokes on, the token ``POISON``."""
    model = language("llama")
    embedding = model.network.get_input_embeddings()
    original_weight = embedding.weight[POISON].clone()
    hooks: list[Any] = []

    def choke(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        if bool((inputs[0] == POISON).any()):
            raise ZeroDivisionError("poison")

    def poison(how: str) -> None:
        if how == "nan":
            embedding.weight[POISON] = torch.nan
        else:
            hooks.append(embedding.register_forward_pre_hook(choke))

    yield poison
    embedding.weight[POISON] = original_weight
    for hook in hooks:
        hook.remove()


def run_with_poison(engine: TextEngine, **settings: Any) -> Failed:
    """Run valid requests with a poisoned one, check their answers, and return the failure of the poisoned one."""
    requests = [*(greedy(ids, 10) for ids in CLEAN[:2]), greedy([1, POISON, 2], 10, **settings), greedy(CLEAN[2], 10)]
    for request in requests:
        engine.submit(request)
    events = list(engine.events())
    answers = {event.request_id: token_ids_of(event) for event in of_type(events, TextFinished)}
    clean = [requests[0], requests[1], requests[3]]
    assert answers == {
        request.request_id: expected("llama", ids, 10) for request, ids in zip(clean, CLEAN, strict=True)
    }
    (failed,) = of_type(events, Failed)
    assert failed.request_id == requests[2].request_id
    assert engine.pool.stats().held_pages == 0
    return failed  # type: ignore[no-any-return] # of_type gave only these


@pytest.mark.parametrize("settings", [{}, {"num_texts": 3}, {"num_beams": 2}, {"temperature": 1.0, "seed": 1}])
def test_logits_that_are_not_finite_fail_their_own_request(
    settings: dict[str, Any], make_engine: MakeEngine, poisoned: Callable[[str], None]
) -> None:
    poisoned("nan")
    assert run_with_poison(make_engine(), **settings).code == "numerical_error"


@pytest.mark.parametrize("settings", [{}, {"num_texts": 3}, {"num_beams": 2}])
def test_a_call_that_raises_fails_whoever_is_to_blame(
    settings: dict[str, Any], make_engine: MakeEngine, poisoned: Callable[[str], None]
) -> None:
    poisoned("raise")
    failed = run_with_poison(make_engine(), **settings)
    assert (failed.code, failed.message) == ("internal_error", "computing this text raised ZeroDivisionError: poison")


def test_a_draft_model_that_raises_is_done_without(make_engine: MakeEngine, language: Load) -> None:
    engine = make_engine(num_draft_tokens=3, draft_seed=1)

    def choke(module: Any, inputs: Any) -> None:
        raise ZeroDivisionError("draft")

    hook = language("llama", 1).network.get_input_embeddings().register_forward_pre_hook(choke)
    try:
        answers = engine.generate([greedy(ids, 10) for ids in CLEAN])
    finally:
        hook.remove()
    assert [token_ids_of(answer) for answer in answers] == [expected("llama", ids, 10) for ids in CLEAN]
    assert engine.stats().draft_tokens == 0


def test_a_draft_model_that_gives_nan_is_done_without(make_engine: MakeEngine, language: Load) -> None:
    engine = make_engine(num_draft_tokens=3, draft_seed=1)
    weight = language("llama", 1).network.get_output_embeddings().weight
    original_weight = weight.clone()
    weight.fill_(torch.nan)
    try:
        answers = engine.generate([greedy(ids, 10, temperature=1.0, seed=3) for ids in CLEAN])
    finally:
        weight.copy_(original_weight)
    plain = make_engine().generate([greedy(ids, 10, temperature=1.0, seed=3) for ids in CLEAN])
    assert [token_ids_of(answer) for answer in answers] == [token_ids_of(answer) for answer in plain]


def test_pages_that_held_nan_are_harmless_to_whoever_comes_next(
    make_engine: MakeEngine, poisoned: Callable[[str], None]
) -> None:
    engine = make_engine(num_pages=12)
    poisoned("nan")
    engine.submit(greedy([POISON] * 40, 4))
    assert [event.code for event in of_type(list(engine.events()), Failed)] == ["numerical_error"]
    answers = engine.generate([greedy(ids, 10) for ids in CLEAN])
    assert [token_ids_of(answer) for answer in answers] == [expected("llama", ids, 10) for ids in CLEAN]
