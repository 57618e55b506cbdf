"""Answers of a report are computed from the data: other data give other answers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from diffserve.api.errors import InvalidRequest
from diffserve.experiments.findings import Finding
from diffserve.experiments.plan import Cell, SweepPlan
from diffserve.experiments.plan_reading import plan_warnings
from diffserve.experiments.questions import answer_questions
from tests.experiments.synthetic import analysis_of, plan_of

LEARNED = "learned:test-5"


def answers(
    rmse: Callable[[Cell], float], exact: Callable[[Cell], float] = lambda _: 0.95, learned: bool = False
) -> dict[str, Finding]:
    samplers = ("ddim", "unipc", "heun", *([LEARNED] if learned else []))
    plan = plan_of(samplers, (5, 10, 50), num_prompts=100, learned={LEARNED: 5} if learned else {})
    return {finding.claim: finding for finding in answer_questions(analysis_of(plan, exact, rmse))}


def test_the_closest_sampler_is_named_with_those_that_are_not_distinguishable() -> None:
    distances = {"ddim": 0.5, "unipc": 0.2, "heun": 0.2}
    finding = answers(lambda cell: distances[cell.sampler])[
        "Closest to the converged image with 10 network evaluations"
    ]
    assert finding.verdict.startswith("unipc 10 (not distinguishable") or finding.verdict.startswith("heun 5 (not")
    assert "ddim" not in finding.verdict
    assert any(line.startswith("Against ddim 10: ") and "is better by 3." in line for line in finding.evidence)
    assert all("300 pairs" in line for line in finding.evidence[1:])


def test_cells_are_compared_by_evaluations_and_not_by_steps() -> None:
    claims = answers(lambda _: 0.2)
    assert "Closest to the converged image with 5 network evaluations" in claims  # ddim and unipc
    ten = claims["Closest to the converged image with 10 network evaluations"]
    assert "heun 5" in ten.verdict
    assert "heun 10" not in ten.verdict


def test_enough_steps_are_the_fewest_from_which_none_is_behind() -> None:
    shares = {("ddim", 5): 0.5, ("ddim", 10): 0.6, ("unipc", 5): 0.5}
    finding = answers(lambda _: 0.2, lambda cell: shares.get((cell.sampler, cell.num_steps), 1.0))[
        "Fewest evaluations that match prompts as often as the most steps, within 5 points"
    ]
    assert finding.verdict == "10 (unipc 10, heun 5)"
    assert "ddim: none of 5, 10 steps is shown to be enough." in finding.evidence


def test_a_step_count_between_worse_ones_is_not_enough() -> None:
    shares = {("unipc", 5): 1.0, ("unipc", 10): 0.6}
    finding = answers(lambda _: 0.2, lambda cell: shares.get((cell.sampler, cell.num_steps), 1.0))[
        "Fewest evaluations that match prompts as often as the most steps, within 5 points"
    ]
    assert "unipc: none of 5, 10 steps is shown to be enough." in finding.evidence


def test_a_learned_sampler_is_compared_with_the_best_built_in_one() -> None:
    distances = {LEARNED: 0.2, "ddim": 0.5, "unipc": 0.4, "heun": 0.2}

    def rmse(cell: Cell) -> float:
        return distances[cell.sampler] if cell.rows <= 2 * 10 else 0.1

    claim = f"{LEARNED} against the best built-in sampler with 5 evaluations"
    finding = answers(rmse, learned=True)[claim]
    assert finding.verdict.startswith("better by 2.0 dB")
    assert finding.verdict.endswith("than unipc 5; not behind the best built-in one with 10 evaluations")
    behind = answers(lambda cell: 0.9 if cell.sampler == LEARNED else 0.2, learned=True)[claim]
    assert behind.verdict.startswith("worse by 7.")


def test_a_learned_sampler_has_one_cell_with_its_own_steps() -> None:
    plan = plan_of(("ddim", LEARNED), (4, 5, 10), learned={LEARNED: 5})
    assert [cell.label for cell in plan.cells] == ["ddim 4", LEARNED, "ddim 5", "ddim 10"]
    (learned,) = (cell for cell in plan.cells if cell.sampler == LEARNED)
    assert (learned.num_steps, learned.rows, learned.slug) == (5, 10, "learned_test-5-5-g3")
    assert [(cell.label, baseline.label) for cell, baseline in plan.comparisons if cell == learned] == [
        (LEARNED, "ddim 5")
    ]


def test_a_learned_sampler_without_known_steps_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="learned:other"):
        SweepPlan(samplers=("learned:other",), steps=(4,), guidance=(3.0,), prompts=("a",))


def test_learned_samplers_without_a_comparison_or_an_effect_are_warned_of() -> None:
    plan = plan_of(("ddim", LEARNED), (4, 6), learned={LEARNED: 5}, axes={"eta": (0.0, 0.5)})
    assert plan_warnings(plan) == (
        f"{LEARNED} is compared with no other cell; add 5 to the steps.",
        f"eta has no effect with {LEARNED}.",
    )
    assert plan_warnings(plan_of(("ddim", LEARNED), (5, 6), learned={LEARNED: 5})) == ()
