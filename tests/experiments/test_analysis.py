"""Measures with intervals: paired where cells are compared, by prompt where pictures belong together."""

from __future__ import annotations

import numpy as np
import pytest

from diffserve.experiments.analysis import Analysis, PictureSet
from diffserve.experiments.estimates import SET_MEASURES, Estimate, Measure
from diffserve.experiments.metrics.set_distance import frechet_distance, kernel_distance
from diffserve.experiments.plan import SweepPlan
from diffserve.experiments.records import features_of
from diffserve.experiments.report import set_value
from tests.experiments.synthetic import NUM_FEATURES, analysis_of, plan_of, records_of

PLAN = plan_of(("ddpm", "ddim"), (10,))
DDPM, DDIM = PLAN.cells
CONVERGED = PLAN.references[0]


def with_sets(plan: SweepPlan = PLAN, shift: float = 0.0) -> Analysis:
    """Return an analysis with drawn scenes and the library's distances to them."""
    records = records_of(plan, lambda _: 0.5, lambda _: 0.2)
    prompts = [index for index in range(len(plan.prompts)) for _ in range(5)]
    features = np.random.default_rng(99).normal(shift, 1, size=(len(prompts), NUM_FEATURES)).astype(np.float32)
    drawn = PictureSet(features, prompts, len(plan.prompts))
    first = Analysis(plan, records, drawn, {})
    measures = list(SET_MEASURES)
    values = {(cell, measure): set_value(first, cell, measure) for cell in records for measure in measures}
    return Analysis(plan, records, drawn, {key: value for key, value in values.items() if value is not None})


def test_a_cell_has_the_share_and_the_mean_of_its_records() -> None:
    analysis = analysis_of(PLAN, lambda cell: 0.25 if cell == DDPM else 0.75, lambda _: 0.4)
    exact, rmse = analysis.estimate(DDPM, Measure.EXACT), analysis.estimate(DDPM, Measure.LATENT_RMSE)
    assert exact is not None
    assert rmse is not None
    distances = [record.distance.latent_rmse or 0.0 for record in analysis.records(DDPM) if record.distance]
    assert exact.value == 0.25
    assert rmse.value == pytest.approx(np.mean(distances))
    assert exact.low is not None
    assert exact.high is not None
    assert 0.1 < exact.low < 0.25 < exact.high < 0.4


def test_all_right_has_an_interval_all_the_same() -> None:
    estimate = analysis_of(PLAN, lambda _: 1.0).estimate(DDIM, Measure.EXACT)
    assert estimate == Estimate(1.0, 1 - 3 / 40, 1.0)


def test_a_converged_picture_has_no_distance_to_itself() -> None:
    analysis = analysis_of(PLAN, lambda _: 0.5)
    assert analysis.estimate(CONVERGED, Measure.SSIM) is None
    assert analysis.contrast({DDIM: 1, CONVERGED: -1}, Measure.SSIM) is None
    assert analysis.contrast({DDIM: 1, CONVERGED: -1}, Measure.EXACT) is not None
    assert analysis.estimate(DDIM, Measure.FRECHET) is None


def test_a_paired_difference_is_surer_than_two_cells_that_vary_alike() -> None:
    analysis = analysis_of(PLAN, lambda _: 0.5)
    values = analysis.values(DDPM, Measure.EXACT)
    assert values is not None
    alone, nothing = analysis.estimate(DDPM, Measure.EXACT), analysis.contrast({DDPM: 0}, Measure.EXACT)
    twice = analysis.contrast({DDPM: 2}, Measure.EXACT)
    assert nothing == Estimate(0.0, 0.0, 0.0)
    assert alone is not None
    assert twice is not None
    assert twice.value == pytest.approx(2 * alone.value)


def test_distances_between_sets_are_those_of_the_metrics_library_with_an_interval_around() -> None:
    analysis = with_sets(shift=0.5)
    features = features_of(analysis.records(DDIM))
    drawn = analysis.reference_set(DDIM, Measure.FRECHET)
    converged = analysis.reference_set(DDIM, Measure.FRECHET_CONVERGED)
    assert drawn is not None
    assert converged is not None
    expected = {
        Measure.FRECHET: frechet_distance(drawn.features, features),
        Measure.KID: kernel_distance(drawn.features, features),
        Measure.FRECHET_CONVERGED: frechet_distance(converged.features, features),
    }
    assert analysis.estimate(DDIM, Measure.KID_CONVERGED) is None
    for measure, value in expected.items():
        estimate = analysis.estimate(DDIM, measure)
        assert estimate is not None
        assert estimate.value == value
        assert estimate.low is not None
        assert estimate.high is not None
        assert estimate.low < value < estimate.high


def test_a_set_that_is_shifted_is_surely_farther_away() -> None:
    near, far = with_sets(shift=0.0), with_sets(shift=1.0)
    for measure in (Measure.FRECHET, Measure.KID):
        close, away = near.estimate(DDIM, measure), far.estimate(DDIM, measure)
        assert close is not None
        assert away is not None
        assert away.sign == 1
        assert away.value > 5 * abs(close.value)
    level = near.contrast({DDIM: 1, DDPM: -1}, Measure.FRECHET)
    assert level is not None
    assert level.sign == 0


@pytest.mark.parametrize("num_prompts", [1, 2, 7])
def test_few_prompts_have_distances_without_an_interval(num_prompts: int) -> None:
    plan = plan_of(("ddpm", "ddim"), (10,), num_prompts=num_prompts, num_seeds=12)
    estimate = with_sets(plan).estimate(plan.cells[0], Measure.FRECHET)
    assert estimate is not None
    assert (estimate.low, estimate.high, estimate.sign) == (None, None, 0)


@pytest.mark.parametrize(("ends", "sign"), [((0.1, 0.2), 1), ((-0.2, -0.1), -1), ((-0.1, 0.2), 0), ((0.0, 0.2), 0)])
def test_an_estimate_has_a_sign_where_its_interval_does_not_hold_zero(ends: tuple[float, float], sign: int) -> None:
    assert Estimate(sum(ends) / 2, *ends).sign == sign


def test_no_cell_may_be_complete() -> None:
    assert Analysis(PLAN, {}).shared_places(()) == ()
