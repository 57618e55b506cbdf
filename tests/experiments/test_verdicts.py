"""Verdicts on pairs of cells: paired, with enough seeds, and never on what noise explains."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from diffserve.experiments.analysis import Analysis
from diffserve.experiments.estimates import CheckerError, Measure
from diffserve.experiments.findings import find
from diffserve.experiments.measure import PromptCheck
from diffserve.experiments.plan import Cell
from diffserve.experiments.verdicts import (
    BETTER,
    NOT_DISTINGUISHABLE,
    WORSE,
    Comparison,
    compare_cells,
    comparison_table,
    count_wins,
)
from tests.experiments.synthetic import analysis_of, plan_of, records_of

PLAN = plan_of(("ddim", "ddpm"), (10, 100))
DDIM, DDPM = Cell("ddim", 10, 3.0), Cell("ddpm", 10, 3.0)


def exact(cell: Cell) -> float:
    return 0.3 if cell.sampler == "ddpm" else 0.7


def comparison(analysis: Analysis, cell: Cell, baseline: Cell, measure: Measure) -> Comparison:
    (comparison,) = [
        each
        for each in compare_cells(analysis)
        if (each.cell, each.baseline, each.measure) == (cell, baseline, measure.value)
    ]
    return comparison


def test_every_cell_is_compared_with_the_first_sampler_and_with_the_most_steps() -> None:
    assert PLAN.comparisons == (
        (DDIM, Cell("ddim", 100, 3.0)),
        (DDPM, DDIM),
        (DDPM, Cell("ddpm", 100, 3.0)),
        (Cell("ddpm", 100, 3.0), Cell("ddim", 100, 3.0)),
    )


def test_a_difference_has_pairs_wins_and_a_verdict_in_the_direction_of_the_measure() -> None:
    analysis = analysis_of(PLAN, exact, lambda cell: 0.9 if cell.sampler == "ddpm" else 0.1)
    matches, rmse = (comparison(analysis, DDPM, DDIM, measure) for measure in (Measure.EXACT, Measure.LATENT_RMSE))
    assert (matches.verdict, rmse.verdict, matches.num_pairs) == (WORSE, WORSE, 120)
    assert matches.wins is not None
    assert matches.losses is not None
    assert matches.wins - matches.losses == round(-0.4 * 120)
    assert count_wins(analysis, DDIM, DDPM, Measure.EXACT) == (matches.losses, matches.wins)
    assert comparison(analysis, DDIM, Cell("ddim", 100, 3.0), Measure.EXACT).verdict == NOT_DISTINGUISHABLE


def test_fewer_than_three_seeds_give_no_verdict() -> None:
    few = analysis_of(plan_of(("ddim", "ddpm"), (10,), num_seeds=2), exact)
    judged = comparison(few, DDPM, DDIM, Measure.EXACT)
    assert judged.difference.sign == -1
    assert (judged.verdict, judged.why_not) == (NOT_DISTINGUISHABLE, "fewer than 3 seeds per prompt")
    assert {finding.verdict for finding in find(few)} == {NOT_DISTINGUISHABLE}


@pytest.mark.parametrize(("gap", "verdict"), [(0.012, NOT_DISTINGUISHABLE), (0.014, BETTER)])
def test_a_small_gap_between_frechet_distances_is_not_distinguishable(
    gap: float, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(("ddim", "ddpm"), (10,))
    values = {(DDIM, Measure.FRECHET): 1.0, (DDPM, Measure.FRECHET): 1.0 - gap}
    analysis = Analysis(plan, records_of(plan, exact, lambda _: 0.1), set_values=values)
    replicates = np.random.default_rng(0).normal(0, 1e-4, 400)
    monkeypatch.setattr(analysis, "_set_replicates", lambda cell, _: replicates if cell == DDIM else 2 * replicates)
    judged = comparison(analysis, DDPM, DDIM, Measure.FRECHET)
    assert (judged.difference.sign, judged.verdict, judged.wins) == (-1, verdict, None)


def test_cells_are_paired_where_both_have_images() -> None:
    plan = plan_of(("ddim", "ddpm"), (10,))
    records = records_of(plan, exact, lambda _: 0.1)
    records[DDPM] = {place: record for place, record in records[DDPM].items() if place[1] == 0}
    analysis = Analysis(plan, records)
    assert comparison(analysis, DDPM, DDIM, Measure.EXACT).num_pairs == 40
    assert len(analysis.records(DDIM)) == 120
    assert len(analysis.picture_set(DDIM).features) == len(analysis.picture_set(DDPM).features) == 40


def test_a_share_of_matches_is_reported_with_the_error_of_the_checker() -> None:
    error = CheckerError(64, 0.015625, 0.0)
    analysis = Analysis(PLAN, records_of(PLAN, exact, lambda _: 0.1), checker=error)
    evidence = [line for finding in find(analysis) for line in finding.evidence if "wins" in line]
    assert evidence
    assert all("checker misses 1.6 % of right images, accepts 0.0 % of wrong ones" in line for line in evidence)


def test_the_checker_errs_on_damaged_images_and_not_on_rendered_ones() -> None:
    check = PromptCheck("embedded", ("a fox on the beach", "two apples", "the moon above a castle"))
    assert check.error(128, 128, lambda pixels: pixels) == CheckerError(63, 0.0, 0.0)
    damaged = check.error(128, 128, lambda pixels: np.full_like(pixels, 128))
    assert damaged == CheckerError(63, 1.0, 0.0)
    assert PromptCheck("sd15", ("a fox",)).error(128, 128, lambda pixels: pixels) is None


def test_the_table_of_comparisons_names_both_cells_and_travels_as_json() -> None:
    comparisons = tuple(compare_cells(analysis_of(PLAN, exact)))
    heads, *rows = comparison_table(comparisons)
    assert len(heads) == 6
    assert rows[2][0] == "ddpm 10 against ddim 10"
    assert rows[2][2].startswith("-40.0 points (-")
    assert rows[2][5] == WORSE
    decoded = msgspec.json.decode(msgspec.json.encode(comparisons), type=tuple[Comparison, ...])
    assert decoded == comparisons
