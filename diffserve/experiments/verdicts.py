"""Verdicts on pairs of cells from the differences of their images, paired by prompt and seed.

A difference is not distinguishable from zero if its 95 % interval holds zero, if the prompts have fewer than
``LEAST_SEEDS`` seeds, or if it is a gap between Frechet distances that retraining and reseeding cause by themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from diffserve.experiments.analysis import Analysis
from diffserve.experiments.axes import MODEL, PROMPT
from diffserve.experiments.estimates import MODEL_MEASURES, PROMPT_MEASURES, SET_MEASURES, Estimate, Measure
from diffserve.experiments.plan import Cell, cell_names
from diffserve.experiments.power import detectable_difference

BETTER, WORSE, EQUIVALENT, NOT_DISTINGUISHABLE = "better", "worse", "equivalent", "not distinguishable"
DECIDED = (BETTER, WORSE, EQUIVALENT)
LEAST_SEEDS = 3
LEAST_FRECHET_GAP = 0.013
"""Relative gap between Frechet distances that retraining and reseeding a model cause (arXiv 2606.20536)."""

Outcome = int
"""Result of a comparison: 1 ahead, 0 not distinguishable, -1 behind."""

SHOWN = (Measure.EXACT, *MODEL_MEASURES, Measure.PSNR_DB, Measure.FRECHET, Measure.FRECHET_CONVERGED)
"""Measures in tables of comparisons; report.json has all."""


class Judged(msgspec.Struct, frozen=True):
    """A difference, its outcome, and why an interval without zero is no verdict ("" if nothing forbids one)."""

    difference: Estimate
    outcome: Outcome
    why_not: str = ""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The paired difference of one measure between a cell and its baseline.

    Attributes:
        cell: The compared cell.
        baseline: The cell that differs from ``cell`` on one axis only.
        measure: Name of the :class:`Measure`.
        difference: Value of the cell minus that of the baseline.
        num_pairs: Number of image pairs with the same prompt and seed.
        wins: Pairs in which the cell's image is better; ``None`` for distances between sets.
        losses: Pairs in which the baseline's image is better; ``None`` for distances between sets.
        deviation: Standard deviation of the prompts' mean differences, from which power follows.
        detectable: Smallest difference that these images detect with a power of 80 % at a level of 5 %.
        margin: Difference below which the cells are equivalent, ``None`` if the plan states none.
        verdict: ``BETTER``, ``WORSE``, ``EQUIVALENT`` (the interval is within the margin) or ``NOT_DISTINGUISHABLE``.
        why_not: Why an interval without zero is no verdict; "" if nothing forbids one.
    """

    cell: Cell
    baseline: Cell
    measure: str
    difference: Estimate
    num_pairs: int
    wins: int | None
    losses: int | None
    deviation: float | None
    detectable: float | None
    margin: float | None
    verdict: str
    why_not: str = ""


def judge_difference(analysis: Analysis, weights: Mapping[Cell, float], measure: Measure) -> Judged | None:
    """Judge a weighted sum of a measure over cells.

    Args:
        analysis: The analysis of the sweep.
        weights: Weight of each cell; ``{a: 1, b: -1}`` asks whether a is ahead of b.
        measure: The measure to compare.

    Returns:
        The difference and whether it favors the cells of positive weight; ``None`` if a cell lacks the measure.
    """
    difference = analysis.contrast(weights, measure)
    if difference is None:
        return None
    if analysis.num_seeds(weights) < LEAST_SEEDS:
        return Judged(difference, 0, f"fewer than {LEAST_SEEDS} seeds per prompt")
    if measure in (Measure.FRECHET, Measure.FRECHET_CONVERGED):
        values = [estimate.value for cell in weights if (estimate := analysis.estimate(cell, measure)) is not None]
        if abs(difference.value) < LEAST_FRECHET_GAP * max(values):
            return Judged(difference, 0, f"a gap under {100 * LEAST_FRECHET_GAP:.1f} %")
    return Judged(difference, difference.sign * (1 if measure.more_is_better else -1))


def count_wins(analysis: Analysis, cell: Cell, baseline: Cell, measure: Measure) -> tuple[int, int] | None:
    """Count the pairs of images in which ``cell`` is better and those in which ``baseline`` is better.

    Returns:
        Wins and losses, or ``None`` if the measure is not one of single images.
    """
    pairs = None if measure in SET_MEASURES else analysis.paired_values((cell, baseline), measure)
    if pairs is None:
        return None
    ahead = (pairs[0] - pairs[1]) * (1 if measure.more_is_better else -1)
    return int((ahead > 0).sum()), int((ahead < 0).sum())


def is_comparable(cell: Cell, baseline: Cell, measure: Measure) -> bool:
    """Return whether a difference in ``measure`` says which cell is better.

    Different models and prompts have different converged images, so distances to them are not compared between models
    or prompts.
    """
    settings, other = dict(cell.settings), dict(baseline.settings)
    has_same_target = all(settings.get(name) == other.get(name) for name in (MODEL, PROMPT))
    return has_same_target or measure in (Measure.EXACT, Measure.FRECHET, Measure.KID, *PROMPT_MEASURES)


def compare_cells(
    analysis: Analysis, measures: Iterable[Measure] = Measure, pairs: Iterable[tuple[Cell, Cell]] | None = None
) -> Iterator[Comparison]:
    """Yield the comparisons of ``pairs`` (by default the plan's) in each of ``measures`` that both cells have."""
    measures = tuple(measures)
    for cell, baseline in analysis.plan.comparisons if pairs is None else pairs:
        for measure in measures:
            judged = judge_difference(analysis, {cell: 1, baseline: -1}, measure)
            if judged is None or not is_comparable(cell, baseline, measure):
                continue
            margin = analysis.plan.detect.get(measure.value)
            deviation = analysis.deviation((cell, baseline), measure)
            num_units = analysis.num_units((cell, baseline))
            wins, losses = count_wins(analysis, cell, baseline, measure) or (None, None)
            yield Comparison(
                cell=cell,
                baseline=baseline,
                measure=measure.value,
                difference=judged.difference,
                num_pairs=len(analysis.shared_places((cell, baseline))),
                wins=wins,
                losses=losses,
                deviation=deviation,
                detectable=None if deviation is None else detectable_difference(deviation, num_units),
                margin=margin,
                verdict=_verdict(judged, margin),
                why_not=judged.why_not,
            )


def _verdict(judged: Judged, margin: float | None) -> str:
    low, high = judged.difference.low, judged.difference.high
    if judged.outcome:
        return BETTER if judged.outcome > 0 else WORSE
    if not judged.why_not and margin is not None and low is not None and high is not None:
        return EQUIVALENT if -margin < low and high < margin else NOT_DISTINGUISHABLE
    return NOT_DISTINGUISHABLE


def open_comparisons(analysis: Analysis) -> list[Comparison]:
    """Return the comparisons without a decision, in the measures that the plan should detect."""
    comparisons = compare_cells(analysis, [Measure(name) for name in analysis.plan.detect])
    return [comparison for comparison in comparisons if comparison.verdict not in DECIDED]


def comparison_table(comparisons: Sequence[Comparison]) -> list[tuple[str, ...]]:
    """Format comparisons in the ``SHOWN`` measures as rows of text, the heads first."""
    names = cell_names(cell for comparison in comparisons for cell in (comparison.cell, comparison.baseline))
    heads = ("comparison", "measure", "difference", "detectable", "wins, losses of pairs", "verdict")
    rows: list[tuple[str, ...]] = [heads]
    for comparison in comparisons:
        measure, difference = Measure(comparison.measure), comparison.difference
        if measure not in SHOWN:
            continue
        text = ("-" if difference.value < 0 else "+") + measure.write_difference(difference.value)
        if difference.low is not None and difference.high is not None:
            factor = 100 if measure is Measure.EXACT else 1
            text += f" ({factor * difference.low:.3g} to {factor * difference.high:.3g})"
        wins = "" if comparison.wins is None else f"{comparison.wins}, {comparison.losses} of {comparison.num_pairs}"
        verdict = f"{comparison.verdict}: {comparison.why_not}" if comparison.why_not else comparison.verdict
        if comparison.verdict == EQUIVALENT and comparison.margin is not None:
            verdict += f" within {measure.write_difference(comparison.margin)}"
        pair = f"{names[comparison.cell]} against {names[comparison.baseline]}"
        detectable = "" if comparison.detectable is None else measure.write_difference(comparison.detectable)
        rows.append((pair, measure.short_title, text, detectable, wins, verdict))
    return rows
