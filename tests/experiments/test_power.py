"""Power and sequential looks: right on simulated data, and equal to the published tables and to scipy."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from scipy import stats

from diffserve.api.errors import InvalidRequest
from diffserve.experiments.analysis import Analysis
from diffserve.experiments.estimates import Measure
from diffserve.experiments.plan import DEFAULT_PROMPTS, DEFAULT_SEEDS, Cell, double_looks, read_differences
from diffserve.experiments.power import (
    Z_LEVEL,
    describe_power,
    detectable_difference,
    look_bounds,
    mean_interval,
    needed_units,
    student_quantile,
)
from diffserve.experiments.report import read_deviations, records_of_looks
from diffserve.experiments.verdicts import BETTER, EQUIVALENT, compare_cells, open_comparisons
from tests.experiments.synthetic import analysis_of, plan_of, records_of

NUM_REPETITIONS = 1000
LOOKS = (4, 8, 16)
GROUPS = [prompt for prompt in range(DEFAULT_PROMPTS) for _ in range(LOOKS[-1])]
SEEDS = np.array([seed for _ in range(DEFAULT_PROMPTS) for seed in range(LOOKS[-1])])


@pytest.mark.parametrize(("deviation", "num_units"), [(5.0, 64), (0.45, 20), (1.0, 200)])
def test_the_detectable_difference_has_the_stated_power(deviation: float, num_units: int) -> None:
    difference = detectable_difference(deviation, num_units)
    shift, freedom = difference / deviation * math.sqrt(num_units), num_units - 1
    power = stats.nct.sf(stats.t.isf(0.025, freedom), freedom, shift)
    assert power == pytest.approx(0.8, abs=0.01)
    assert needed_units(deviation, difference) in (num_units, num_units + 1)
    assert detectable_difference(deviation, 2) == math.inf


def test_bounds_are_those_of_the_published_table() -> None:
    """Lan-DeMets bounds for O'Brien-Fleming spending at five equal looks, two-sided 5 %: Reboussin et al. 2000."""
    assert look_bounds((1, 2, 3, 4, 5)) == pytest.approx((4.8769, 3.3569, 2.6803, 2.2898, 2.0310), abs=2e-3)
    assert look_bounds((7,)) == pytest.approx((stats.norm.isf(0.025),))


@pytest.mark.parametrize(("z", "freedom"), [(1.96, 10), (1.96, 63), (3.0, 63), (2.7, 20)])
def test_quantiles_of_student_are_those_of_scipy(z: float, freedom: int) -> None:
    assert student_quantile(z, freedom) == pytest.approx(stats.t.isf(stats.norm.sf(z), freedom), rel=2e-3)


def noise(rng: np.random.Generator, kind: str) -> np.ndarray:
    """Return paired differences of two equal cells, correlated within a prompt."""
    if kind == "binary":
        rates = rng.beta(2, 2, DEFAULT_PROMPTS)[GROUPS]
        return (rng.random(len(GROUPS)) < rates).astype(float) - (rng.random(len(GROUPS)) < rates)
    prompts = rng.normal(0, 1.0 if kind == "prompts" else 0.0, DEFAULT_PROMPTS)
    return prompts[GROUPS] + 3 * rng.normal(size=len(GROUPS))


@pytest.mark.parametrize("kind", ["seeds", "prompts", "binary"])
def test_equal_cells_are_seldom_called_different_with_all_looks_included(kind: str) -> None:
    rng, num_different = np.random.default_rng(0), 0
    for _ in range(NUM_REPETITIONS):
        differences = noise(rng, kind)
        for look, bound in zip(LOOKS, look_bounds(LOOKS), strict=True):
            in_look = look > SEEDS
            low, high = mean_interval(differences[in_look], np.array(GROUPS)[in_look].tolist(), bound)
            if low > 0 or high < 0:
                num_different += 1
                break
    assert 0.02 * NUM_REPETITIONS < num_different <= 0.07 * NUM_REPETITIONS


@pytest.mark.parametrize("num_prompts", [3, 4, 8, 16, 64])
def test_equal_cells_are_seldom_called_different_with_few_prompts_and_a_single_look(num_prompts: int) -> None:
    rng, num_different = np.random.default_rng(num_prompts), 0
    groups = np.repeat(np.arange(num_prompts), DEFAULT_SEEDS)
    for _ in range(NUM_REPETITIONS):
        differences = rng.normal(size=num_prompts)[groups] + 3 * rng.normal(size=len(groups))
        low, high = mean_interval(differences, groups.tolist(), Z_LEVEL)
        num_different += low > 0 or high < 0
    assert 0.03 * NUM_REPETITIONS < num_different <= 0.07 * NUM_REPETITIONS


def test_two_prompts_show_no_difference() -> None:
    assert mean_interval(np.array([1.0, 1.0, 1.1, 1.1]), [0, 0, 1, 1], Z_LEVEL) == (-math.inf, math.inf)


def test_a_verdict_is_open_until_a_difference_or_equivalence_is_clear() -> None:
    plan = plan_of(("ddim", "ddpm"), (10,), num_prompts=20, num_seeds=16, looks=LOOKS, detect={"latent_rmse": 0.02})
    cell = plan.cells[0]

    def at_look(rmse: float, num_seeds: int) -> Analysis:
        records = records_of(plan, lambda _: 0.5, lambda each: rmse if each == cell else 0.3)
        return Analysis(plan, records, places=plan.places_until(num_seeds))

    def verdict(analysis: Analysis) -> str:
        (comparison,) = compare_cells(analysis, [Measure.LATENT_RMSE])
        return comparison.verdict

    assert [len(open_comparisons(at_look(0.3, num_seeds))) for num_seeds in LOOKS] == [1, 0, 0]
    assert verdict(at_look(0.3, 16)) == EQUIVALENT
    assert open_comparisons(at_look(0.6, 4)) == []
    assert verdict(at_look(0.6, 4)) in (BETTER, "worse")


def test_records_count_up_to_the_last_complete_look() -> None:
    plan = plan_of(("ddim",), (10,), num_prompts=3, num_seeds=16, looks=LOOKS)
    records = records_of(plan, lambda _: 0.5, lambda _: 0.1)[plan.cells[0]]
    del records[2, 9]
    assert set(records_of_looks(plan, records)) == set(plan.places_until(8))


def test_the_plan_says_what_it_detects_and_what_more_needs() -> None:
    comparisons = [("a against b", Measure.PSNR_DB, None), ("c against b", Measure.PSNR_DB, None)]
    (sentence,) = describe_power(comparisons, 64, 4, {"psnr_db": 1.0})
    assert sentence == (
        "each of 2 comparisons: 64 prompts detect a difference of 1.8 dB in PSNR (80 % power, 5 % level, standard "
        "deviation 5.0 dB assumed); 1.0 dB needs 199 prompts, 796 images per cell"
    )
    (with_deviation,) = describe_power([("a against b", Measure.EXACT, 0.2)], 64, 4, {"exact": 0.1})
    assert with_deviation.startswith("a against b: 64 prompts detect a difference of 7.1 points in exact prompt match")
    (few,) = describe_power(comparisons, 2, 4, {"psnr_db": 1.0})
    assert "2 prompts detect no difference" in few
    assert "1 seed detects no difference" in next(
        describe_power([("a", Measure.PSNR_DB, None)], 1, 1, {"psnr_db": 0.5})
    )


def test_deviations_are_read_from_a_report_and_scaled_for_fewer_seeds(tmp_path: Path) -> None:
    plan = plan_of(("ddim", "ddpm"), (10,), num_seeds=4)
    comparisons = tuple(compare_cells(analysis_of(plan, lambda _: 0.5)))
    (tmp_path / "report.json").write_bytes(msgspec.json.encode({"plan": plan, "comparisons": comparisons}))
    key = (Cell("ddpm", 10, 3.0), Cell("ddim", 10, 3.0), "psnr_db")
    same, fewer = read_deviations(tmp_path, 4)[key], read_deviations(tmp_path / "report.json", 1)[key]
    assert same == pytest.approx(next(each.deviation for each in comparisons if each.measure == "psnr_db"))
    assert fewer == pytest.approx(2 * same)
    with pytest.raises(InvalidRequest, match="No such file"):
        read_deviations(tmp_path / "none.json", 4)
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(InvalidRequest, match="not a report with comparisons"):
        read_deviations(tmp_path, 4)


def test_looks_double_up_to_the_largest_number_of_images() -> None:
    assert double_looks(4, 64, 1024) == (4, 8, 16)
    assert double_looks(4, 64, 300) == (4,)
    with pytest.raises(InvalidRequest, match="start with 256 images per cell, so give at least 256"):
        double_looks(4, 64, 200)


def test_differences_are_read_in_the_units_of_their_measures() -> None:
    assert read_differences("exact=5, psnr_db=0.5", "--detect") == {"exact": 0.05, "psnr_db": 0.5}
    for text, message in (
        ("frechet=1", "'frechet'; the measures are exact"),
        ("ssim=0", "above 0"),
        ("ssim", "'ssim'; write MEASURE=DIFFERENCE"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            read_differences(text, "--detect")
