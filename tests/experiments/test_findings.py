"""Findings are computed from the data: different data give different verdicts."""

from __future__ import annotations

import re
from collections.abc import Mapping

from diffserve.experiments.findings import (
    AS_EXPECTED,
    IN_PART,
    OTHERWISE,
    REPAIR,
    Finding,
    find,
)
from diffserve.experiments.plan import Cell
from diffserve.experiments.verdicts import NOT_DISTINGUISHABLE
from tests.experiments.synthetic import analysis_of, plan_of

PAPERS = {
    ("ddim", 5): 0.6, ("ddim", 10): 0.8, ("ddim", 20): 0.9, ("ddim", 100): 0.95, ("ddim", 200): 0.95,
    ("ddpm", 5): 0.1, ("ddpm", 10): 0.2, ("ddpm", 20): 0.4, ("ddpm", 100): 0.9,
    ("dpmpp_2m", 10): 0.95, ("dpmpp_2m", 20): 0.95,
}  # fmt: skip
STEPS = (5, 10, 20, 100)


def findings(
    shares: Mapping[tuple[str, int], float],
    rmse: Mapping[str, float] = {"ddim": 0.1, "ddpm": 0.9},
    samplers: tuple[str, ...] = ("ddpm", "ddim"),
    seed_spread: float = 1.0,
) -> list[Finding]:
    def exact(cell: Cell) -> float:
        return shares.get((cell.sampler, cell.num_steps), 0.95)

    plan = plan_of(samplers, STEPS)
    return list(find(analysis_of(plan, exact, lambda cell: rmse.get(cell.sampler, 0.1), {(3.0, ()): seed_spread})))


def verdict(results: list[Finding], start: str) -> str:
    (finding,) = [finding for finding in results if finding.claim.startswith(start)]
    return finding.verdict


def test_what_the_papers_say_is_found_where_the_data_say_it() -> None:
    results = findings(PAPERS, samplers=("ddpm", "ddim", "dpmpp_2m"))
    assert [finding.claim for finding in results] == [
        "DDIM is ahead of DDPM at 5, 10 and 20 steps",
        "DDPM gains far more than DDIM from 10 to 100 steps",
        "DPM++ 2M with 10 steps is as good as DDIM with 20 and 100",
        "With the same seed DDIM at 20 steps is close to its converged image, and DDPM is not",
        "The images that DDIM converges to are as good as those of DDPM with 100 steps",
    ]
    assert {finding.verdict for finding in results} == {AS_EXPECTED}


def test_the_opposite_data_give_the_opposite_verdicts() -> None:
    swapped = {("ddim" if name == "ddpm" else "ddpm", n): share for (name, n), share in PAPERS.items()}
    swapped |= {("ddim", 200): 0.3, ("dpmpp_2m", 10): 0.1, ("ddpm", 100): 0.95}
    results = findings(swapped, {"ddim": 0.9, "ddpm": 0.1}, ("ddpm", "ddim", "dpmpp_2m"))
    assert {finding.verdict for finding in results} == {OTHERWISE}
    assert results[-1].evidence[-1] == REPAIR


def test_equal_samplers_are_not_distinguishable() -> None:
    results = findings(dict.fromkeys(PAPERS, 0.7))
    assert verdict(results, "DDIM is ahead") == NOT_DISTINGUISHABLE
    assert verdict(results, "DDPM gains") == NOT_DISTINGUISHABLE
    assert all("ddim is level, within noise (95 % interval" in line for line in results[0].evidence)
    assert "the gains differ by 0.0 points, within noise" in results[1].evidence[0]


def test_more_but_not_far_more_is_in_part() -> None:
    shares = PAPERS | {("ddim", 10): 0.5, ("ddim", 100): 0.9, ("ddpm", 10): 0.1, ("ddpm", 100): 0.8}
    results = findings(shares)
    assert verdict(results, "DDPM gains") == IN_PART
    assert "but not clearly more than twice as much" in results[1].evidence[0]


def test_the_interval_of_an_advantage_is_above_zero_whichever_way_the_measure_counts() -> None:
    for shares, word in ((PAPERS, "better"), (PAPERS | {("ddpm", 5): 1.0}, "worse")):
        line = findings(shares)[0].evidence[0]
        ends = re.search(
            rf"ddim is {word} by [\d.]+ points \(95 % interval ([\d.]+) to ([\d.]+)\); \d+ wins, \d+ losses", line
        )
        assert ends is not None, line
        assert 0 < float(ends[1]) < float(ends[2])


def test_ahead_here_and_behind_there_is_in_part() -> None:
    results = findings(PAPERS | {("ddpm", 20): 1.0, ("ddim", 20): 0.5})
    assert verdict(results, "DDIM is ahead") == IN_PART


def test_ahead_at_one_of_three_step_counts_is_in_part() -> None:
    level = dict.fromkeys([("ddim", 10), ("ddpm", 10), ("ddim", 20), ("ddpm", 20)], 0.9)
    assert verdict(findings(PAPERS | level), "DDIM is ahead") == IN_PART


def test_a_sentence_quotes_its_numbers_and_their_interval() -> None:
    results = findings(PAPERS)
    assert (
        results[0]
        .evidence[0]
        .startswith("5 steps, exact prompt match: ddim 60.0 %, ddpm 10.0 %; ddim is better by 50.0")
    )
    assert "95 % interval" in results[0].evidence[0]


def test_nearness_is_measured_by_how_far_another_seed_is() -> None:
    near, far = findings(PAPERS, seed_spread=1.0), findings(PAPERS, seed_spread=0.12)
    assert verdict(near, "With the same seed") == AS_EXPECTED
    assert verdict(far, "With the same seed") == IN_PART
    assert "10 % of the way" in near[2].evidence[0]


def test_cells_that_answer_nothing_give_no_claim() -> None:
    assert find(analysis_of(plan_of(("euler",), (10, 20)), lambda _: 0.5)) == ()
    alone = find(analysis_of(plan_of(("ddim",), (10, 20)), lambda _: 0.5))
    assert alone == ()


def test_as_good_needs_enough_images_to_rule_out_that_it_is_worse() -> None:
    def verdict_of(num_prompts: int) -> str:
        plan = plan_of(("ddim", "dpmpp_2m"), (10, 20), num_prompts=num_prompts)
        (finding,) = [each for each in find(analysis_of(plan, lambda _: 0.8)) if each.claim.startswith("DPM++")]
        assert ("behind by less than 5.0 points" in finding.evidence[0]) == (finding.verdict == AS_EXPECTED)
        return finding.verdict

    assert verdict_of(12) == NOT_DISTINGUISHABLE
    assert verdict_of(400) == AS_EXPECTED
