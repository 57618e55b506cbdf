"""What a call costs is learnt, and a time budget becomes a number of tokens."""

from __future__ import annotations

import random

import pytest

from diffserve.api.pace import TokenCost
from diffserve.engine.text import TickBudget
from tests.engine.text.conftest import MakeEngine
from tests.engine.text.text_requests import greedy
from tests.runtime.language import tiny


def learnt(fixed_s: float, per_token_s: float, sizes: list[int]) -> TokenCost:
    cost = TokenCost()
    for num_tokens in sizes:
        cost.learn(num_tokens, fixed_s + per_token_s * num_tokens)
    return cost


def test_a_line_through_calls_of_many_sizes_is_found() -> None:
    dice = random.Random(0)
    cost = learnt(0.004, 0.0005, [dice.choice([1, 8, 64, 100]) for _ in range(60)])
    assert cost.line == pytest.approx((0.004, 0.0005), rel=1e-3)
    assert cost.max_tokens(0.014) == 20
    assert cost.max_tokens(0.001) == 1


def test_nothing_is_promised_before_anything_is_known() -> None:
    assert TokenCost().line == (0.0, 0.0)
    assert TokenCost().max_tokens(1.0) is None


def test_calls_of_one_size_tell_only_their_mean() -> None:
    assert learnt(0.0, 0.001, [8] * 10).line == pytest.approx((0.0, 0.001))


def test_what_was_learnt_long_ago_is_forgotten() -> None:
    cost = learnt(0.0, 0.001, [1, 64] * 20)
    for num_tokens in [1, 64] * 200:
        cost.learn(num_tokens, 0.01 * num_tokens)
    assert cost.line[1] == pytest.approx(0.01, rel=0.01)


def test_a_call_that_costs_less_for_more_tokens_is_noise() -> None:
    cost = TokenCost()
    for num_tokens, seconds in ((1, 0.02), (64, 0.01)):
        cost.learn(num_tokens, seconds)
    assert cost.line[1] == 0.0
    assert cost.max_tokens(1.0) is None


def test_a_time_budget_cuts_prompts_and_not_decoding(make_engine: MakeEngine) -> None:
    engine = make_engine(max_batch_tokens=100)
    for num_tokens in (1, 50) * 5:
        engine.cost.learn(num_tokens, 0.001 * num_tokens)
    assert engine.max_tokens(TickBudget(time_s=0.03)) == 30
    assert engine.max_tokens(TickBudget(time_s=0.0001)) == 16
    assert engine.max_tokens(TickBudget(time_s=0.0001, max_tokens=4)) == 4
    assert engine.max_tokens(TickBudget(time_s=10.0)) == engine.max_tokens(TickBudget()) == 100
    for seed in range(20):
        engine.submit(greedy(tiny.random_ids(2, seed=seed), 3))
    engine.tick()
    assert engine.scheduler.num_decoding == 20
    assert engine.max_tokens(TickBudget(time_s=0.0001)) == 20
    list(engine.events())
