"""The Pareto front and its knee on drawn curves."""

from __future__ import annotations

import random

from diffserve.experiments.charts import knee, pareto_front
from diffserve.experiments.estimates import Estimate
from diffserve.experiments.series import ChartDot
from diffserve.experiments.summary import CellSummary, summarise
from tests.experiments.synthetic import analysis_of, plan_of, time_of

PLAN = plan_of(num_prompts=1)
SUMMARY: CellSummary = summarise(analysis_of(PLAN, lambda _: 0.5), PLAN.cells[0], time_of(PLAN.cells[0]))


def dots(*pairs: tuple[float, float]) -> list[ChartDot]:
    """Return a dot for each pair of seconds and quality."""
    return [ChartDot(seconds, Estimate(quality), SUMMARY) for seconds, quality in pairs]


def front_of(*pairs: tuple[float, float]) -> list[tuple[float, float]]:
    return [(dot.x, dot.value.value) for dot in pareto_front(dots(*pairs), more_is_better=True)]


def test_the_front_holds_all_pareto_optimal_points() -> None:
    front = front_of((1, 0.2), (2, 0.1), (2, 0.5), (4, 0.5), (3, 0.9), (9, 0.91), (9, 0.95))
    assert front == [(1, 0.2), (2, 0.5), (3, 0.9), (9, 0.95)]


def test_a_random_front_holds_exactly_the_undominated_points() -> None:
    rng = random.Random(0)
    cloud = [(rng.uniform(0.1, 9), rng.random()) for _ in range(200)]

    def is_beaten(point: tuple[float, float]) -> bool:
        return any(other[0] <= point[0] and other[1] >= point[1] and other != point for other in cloud)

    assert {point for point in cloud if not is_beaten(point)} == set(front_of(*cloud))


def test_the_knee_is_where_more_time_has_little_benefit() -> None:
    best = knee(dots((1, 0.1), (2, 0.6), (4, 0.85), (16, 0.9), (64, 0.92)))
    assert best is not None
    assert best.x == 4


def test_the_knee_does_not_depend_on_units_or_direction() -> None:
    pairs = ((1, 0.1), (3, 0.7), (4, 0.75), (30, 0.92))
    plain = knee(dots(*pairs))
    assert plain is not None
    for factor in (9, -9):
        scaled = knee(dots(*((60 * s, -50 + factor * q) for s, q in pairs)))
        assert scaled is not None
        assert scaled.x == 60 * plain.x


def test_two_points_or_a_bulge_the_other_way_have_no_knee() -> None:
    assert knee(dots((1, 0.1), (2, 0.9))) is None
    assert knee(dots((1, 0.0), (4, 0.1), (8, 0.9))) is None
    assert knee([]) is None
    assert pareto_front([], more_is_better=True) == ()
