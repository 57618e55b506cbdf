"""How many threads: on machines that are only arithmetic, so that every load can be had."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from diffserve.runtime.threads import ThreadChoice, candidates

Cost = Callable[[int], float]
"""Threads -> seconds of a call."""

CALL_S = 0.02


def machine(cost: Cost, *, noise: float = 0.1, seed: int = 0) -> Cost:
    """``cost`` as a clock sees it: disturbed, now and then by a lot."""
    rng = random.Random(seed)

    def seconds(count: int) -> float:
        hiccup = 3.0 if rng.random() < 0.01 else 1.0
        return cost(count) * hiccup * (1.0 + noise * rng.random())

    return seconds


def idle(count: int) -> float:
    return CALL_S * (0.1 + 0.9 / count)


def crowded(factor: float) -> Cost:
    """Neighbours make a single thread a little slower, and ``factor`` times each further one that waits for another."""
    return lambda count: 1.5 * CALL_S * (1.0 if count == 1 else factor * (count - 1))


def run(choice: ThreadChoice, seconds: Cost, num_calls: int, allowed: tuple[int, ...] | None = None) -> float:
    """Make calls; how long they take together."""
    total_s = 0.0
    for call in range(num_calls):
        count = choice.next_count(("call", call % 2), allowed or choice.counts)
        wall_s = seconds(count)
        choice.observe(("call", call % 2), count, wall_s)
        total_s += wall_s
    return total_s


def fixed(seconds: Cost, count: int, num_calls: int) -> float:
    return sum(seconds(count) for _ in range(num_calls))


def test_candidates_halve_from_the_most_to_one() -> None:
    assert candidates(2) == (2, 1)
    assert candidates(12) == (12, 6, 3, 1)
    assert candidates(1) == (1,)


@pytest.mark.parametrize("seed", range(5))
def test_on_an_idle_machine_trying_costs_no_more_than_a_twentieth(seed: int) -> None:
    spent_s = run(ThreadChoice((2, 1)), machine(idle, seed=seed), 3000)
    assert spent_s <= 1.05 * fixed(machine(idle, seed=seed), 2, 3000)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("factor", [0.6, 0.9, 1.2, 3.0, 30.0])
def test_at_any_load_it_is_at_most_a_third_slower_than_the_better_number(factor: float, seed: int) -> None:
    cost = crowded(factor)
    spent_s = run(ThreadChoice((2, 1)), machine(cost, seed=seed), 3000)
    assert spent_s <= 1.3 * min(fixed(machine(cost, seed=seed), count, 3000) for count in (1, 2))


def test_when_neighbours_come_it_is_noticed_within_a_few_calls_and_when_they_go_within_seconds() -> None:
    choice = ThreadChoice((2, 1))
    run(choice, machine(idle), 500)
    assert choice.current == 2
    run(choice, machine(crowded(10.0)), 8)
    assert choice.current == 1
    run(choice, machine(crowded(10.0)), 500)
    assert choice.current == 1
    calls = 0
    while choice.current == 1:
        run(choice, machine(idle, seed=calls), 1)
        calls += 1
    assert calls * CALL_S <= 15.0


def test_many_cores_come_down_step_by_step_and_go_up_again() -> None:
    choice = ThreadChoice(candidates(16))
    run(choice, machine(crowded(10.0)), 400)
    assert choice.current == 1
    run(choice, machine(idle), 6000)
    assert choice.current == 16


def test_a_number_that_is_not_allowed_is_never_used() -> None:
    choice = ThreadChoice((2, 1))
    for _ in range(50):
        assert choice.next_count("call", (2,)) == 2
        choice.observe("call", 2, 0.02)
    run(choice, machine(crowded(10.0)), 50)
    assert choice.current == 1
    assert choice.next_count("call", (2,)) == 2


def test_a_single_number_is_never_tried_against_itself() -> None:
    choice = ThreadChoice((1,))
    choice.begin_trial()
    run(choice, machine(crowded(3.0)), 200)
    assert choice.current == 1
    assert not choice.is_trying


def test_a_first_call_that_compiles_kernels_says_nothing() -> None:
    choice = ThreadChoice((2, 1))
    choice.begin_trial()
    cost = crowded(10.0)
    thread_counts: set[int] = set()

    def cold(count: int) -> float:
        slow = 1.0 if count in thread_counts else 100.0
        thread_counts.add(count)
        return slow * cost(count)

    for _ in range(12):
        count = choice.next_count("call", choice.counts)
        choice.observe("call", count, cold(count))
    assert choice.current == 1
