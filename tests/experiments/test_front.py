"""The Pareto front and its knee on drawn curves."""

from __future__ import annotations

import random

from diffserve.experiments.charts import Point, knee, pareto_front


def points(*pairs: tuple[float, float]) -> list[Point]:
    return [Point(str(index), seconds, quality) for index, (seconds, quality) in enumerate(pairs)]


def test_the_front_holds_all_pareto_optimal_points() -> None:
    front = pareto_front(points((1, 0.2), (2, 0.1), (2, 0.5), (4, 0.5), (3, 0.9), (9, 0.91), (9, 0.95)))
    assert [(point.seconds, point.quality) for point in front] == [(1, 0.2), (2, 0.5), (3, 0.9), (9, 0.95)]


def test_a_random_front_holds_exactly_the_undominated_points() -> None:
    rng = random.Random(0)
    cloud = [Point(str(index), rng.uniform(0.1, 9), rng.random()) for index in range(200)]
    front = pareto_front(cloud)

    def is_beaten(point: Point) -> bool:
        return any(o.seconds <= point.seconds and o.quality >= point.quality and o[1:] != point[1:] for o in cloud)

    assert {point.name for point in cloud if not is_beaten(point)} == {point.name for point in front}


def test_the_knee_is_where_more_time_has_little_benefit() -> None:
    front = pareto_front(points((1, 0.1), (2, 0.6), (4, 0.85), (16, 0.9), (64, 0.92)))
    best = knee(front)
    assert best is not None
    assert best.seconds == 4


def test_the_knee_does_not_depend_on_units() -> None:
    pairs = ((1, 0.1), (3, 0.7), (4, 0.75), (30, 0.92))
    plain, scaled = knee(points(*pairs)), knee(points(*((60 * s, -50 + 9 * q) for s, q in pairs)))
    assert plain is not None
    assert scaled is not None
    assert plain.name == scaled.name


def test_two_points_or_a_bulge_the_other_way_have_no_knee() -> None:
    assert knee(points((1, 0.1), (2, 0.9))) is None
    assert knee(points((1, 0.0), (4, 0.1), (8, 0.9))) is None
    assert knee([]) is None
    assert pareto_front([]) == ()
