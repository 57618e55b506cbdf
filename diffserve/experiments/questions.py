"""Answers the usual questions about a sweep with one sentence each: closest sampler, enough steps, learned samplers.

Cells are compared by network evaluations per image, because a step of Heun's sampler costs two. The sampler with the
best value is compared with every other one; those whose paired difference has an interval that holds zero are named
with it, because choosing the best of many samplers favors lucky ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import NamedTuple

from diffserve.experiments.analysis import Analysis
from diffserve.experiments.axes import write_settings
from diffserve.experiments.estimates import Measure
from diffserve.experiments.findings import Finding, describe_difference, interval, is_not_behind
from diffserve.experiments.plan import Cell
from diffserve.experiments.verdicts import NOT_DISTINGUISHABLE, judge_difference
from schedulers.learned import is_learned

MOST_EVALUATIONS = 20
"""Questions about the closest sampler concern at most this many evaluations; with more, most samplers converge."""

MOST_NAMES = 5
"""Samplers that a sentence names; a count stands for the others."""


class _Rank(NamedTuple):
    """Cells with equally many evaluations: the one with the best value, and those not distinguishable from it."""

    best: Cell
    level: tuple[Cell, ...]
    behind: tuple[Cell, ...]


def answer_questions(analysis: Analysis) -> tuple[Finding, ...]:
    """Return an answer and its evidence for each question that the cells can answer.

    Each guidance scale, and each combination of the values of axes, is a question of its own.
    """
    variants = defaultdict[tuple[float, str], list[Cell]](list)
    for cell in analysis.plan.cells:
        variants[cell.guidance_scale, write_settings(cell.settings)].append(cell)
    several = len({scale for scale, _ in variants}) > 1
    answers: list[Finding] = []
    for (scale, settings), cells in variants.items():
        where = (f", guidance {scale:g}" if several else "") + settings
        questions = _Questions(analysis, cells)
        for finding in (*questions.closest(), *questions.enough_steps(), *questions.learned()):
            answers.append(Finding(finding.claim + where, finding.verdict, finding.evidence))
    return tuple(answers)


class _Questions:
    """The questions about cells that differ in sampler and steps only."""

    def __init__(self, analysis: Analysis, cells: Sequence[Cell]) -> None:
        self._analysis = analysis
        self._cells = cells
        self._by_evaluations = defaultdict[int, list[Cell]](list)
        for cell in cells:
            self._by_evaluations[_evaluations(cell)].append(cell)

    def closest(self) -> Iterator[Finding]:
        """Yield which sampler is closest to the converged image, for each number of evaluations that several have."""
        for evaluations, cells in sorted(self._by_evaluations.items()):
            rank = self._rank(cells) if len(cells) > 1 and evaluations <= MOST_EVALUATIONS else None
            if rank is None:
                continue
            verdict = rank.best.label
            if rank.level:
                verdict += f" ({NOT_DISTINGUISHABLE} from it: {_names(rank.level)})"
            evidence = (self._value(rank.best), *(self._difference(rank.best, cell) for cell in rank.behind))
            yield Finding(f"Closest to the converged image with {evaluations} network evaluations", verdict, evidence)

    def enough_steps(self) -> Iterator[Finding]:
        """Yield the fewest evaluations that match the prompt as often as the most steps of the same sampler."""
        measure, margin = Measure.EXACT, self._analysis.plan.detect.get(Measure.EXACT.value)
        if margin is None or self._analysis.estimate(self._cells[0], measure) is None:
            return
        enough, evidence = list[Cell](), list[str]()
        lines = defaultdict[str, list[Cell]](list)
        for cell in self._cells:
            if not is_learned(cell.sampler):
                lines[cell.sampler].append(cell)
        for sampler, cells in lines.items():
            *fewer, most_steps = sorted(cells, key=lambda cell: cell.num_steps)
            steps = ", ".join(str(cell.num_steps) for cell in fewer)
            first = self._first_not_behind(fewer, most_steps, margin)
            if first is None:
                evidence += [f"{sampler}: none of {steps} steps is shown to be enough."] if fewer else []
                continue
            enough.append(first)
            judged = judge_difference(self._analysis, {first: 1, most_steps: -1}, measure)
            assert judged is not None
            words = describe_difference(sampler, measure, judged)
            evidence.append(f"{sampler}: {first.num_steps} of {most_steps.num_steps} steps; with them {words}.")
        if not evidence:
            return
        claim = f"Fewest evaluations that match prompts as often as the most steps, within {100 * margin:g} points"
        if not enough:
            yield Finding(claim, NOT_DISTINGUISHABLE, tuple(evidence))
            return
        fewest_evaluations = min(map(_evaluations, enough))
        best = tuple(cell for cell in enough if _evaluations(cell) == fewest_evaluations)
        yield Finding(claim, f"{fewest_evaluations} ({_names(best)})", tuple(evidence))

    def learned(self) -> Iterator[Finding]:
        """Yield for each learned sampler how it compares with the best built-in ones."""
        for cell in filter(lambda cell: is_learned(cell.sampler), self._cells):
            rank = self._best_built_in(_evaluations(cell))
            if rank is None:
                continue
            judged = judge_difference(self._analysis, {cell: 1, rank.best: -1}, Measure.PSNR_DB)
            assert judged is not None, "a built-in cell with a value was found"
            difference = describe_difference("it", Measure.PSNR_DB, judged).removeprefix("it is ")
            larger = (n for n in sorted(self._by_evaluations) if n > _evaluations(cell) and self._best_built_in(n))
            equals = list(takewhile(partial(self._reaches, cell), larger))
            verdict = f"{difference} than {rank.best.label}" if judged.outcome else difference
            if equals:
                verdict += f"; {self._relation(cell, equals[-1])} the best built-in one with {equals[-1]} evaluations"
            evidence = [self._value(cell), self._value(rank.best)]
            evidence += [self._difference(cell, best.best) for n in equals if (best := self._best_built_in(n))]
            claim = f"{cell.label} against the best built-in sampler with {_evaluations(cell)} evaluations"
            yield Finding(claim, verdict, tuple(evidence))

    def _rank(self, cells: Sequence[Cell]) -> _Rank | None:
        values: Mapping[Cell, float] = {
            cell: estimate.value
            for cell in cells
            if (estimate := self._analysis.estimate(cell, Measure.PSNR_DB)) is not None
        }
        if not values:
            return None
        best, *other_cells = sorted(values, key=lambda cell: -values[cell])
        judged = {cell: judge_difference(self._analysis, {best: 1, cell: -1}, Measure.PSNR_DB) for cell in other_cells}
        behind = tuple(cell for cell in other_cells if (each := judged[cell]) is not None and each.outcome > 0)
        return _Rank(best, tuple(cell for cell in other_cells if cell not in behind), behind)

    def _best_built_in(self, evaluations: int) -> _Rank | None:
        return self._rank([cell for cell in self._by_evaluations[evaluations] if not is_learned(cell.sampler)])

    def _reaches(self, cell: Cell, evaluations: int) -> bool:
        """Return whether ``cell`` is not certainly behind the best built-in cell with ``evaluations``."""
        rank = self._best_built_in(evaluations)
        judged = judge_difference(self._analysis, {cell: 1, rank.best: -1}, Measure.PSNR_DB) if rank else None
        return judged is not None and judged.outcome >= 0 and not judged.why_not

    def _relation(self, cell: Cell, evaluations: int) -> str:
        """Describe how ``cell`` compares with the best built-in cell with ``evaluations``, which it is not behind."""
        rank, margin = self._best_built_in(evaluations), self._analysis.plan.detect.get(Measure.PSNR_DB.value, 0.0)
        judged = judge_difference(self._analysis, {cell: 1, rank.best: -1}, Measure.PSNR_DB) if rank else None
        if judged is not None and is_not_behind(judged, Measure.PSNR_DB, margin):
            return "not behind"
        return f"{NOT_DISTINGUISHABLE} from"

    def _first_not_behind(self, fewer: Sequence[Cell], most_steps: Cell, margin: float) -> Cell | None:
        """Return the first cell that, like all after it, is behind ``most_steps`` by certainly less than ``margin``."""
        first = None
        for cell in reversed(fewer):
            judged = judge_difference(self._analysis, {cell: 1, most_steps: -1}, Measure.EXACT)
            if judged is None or not is_not_behind(judged, Measure.EXACT, margin):
                break
            first = cell
        return first

    def _value(self, cell: Cell) -> str:
        estimate = self._analysis.estimate(cell, Measure.PSNR_DB)
        assert estimate is not None
        return f"{cell.label}: {Measure.PSNR_DB.write(estimate.value)}{interval(estimate)}."

    def _difference(self, cell: Cell, other: Cell) -> str:
        judged = judge_difference(self._analysis, {cell: 1, other: -1}, Measure.PSNR_DB)
        assert judged is not None
        num_pairs = len(self._analysis.shared_places((cell, other)))
        words = describe_difference(cell.label, Measure.PSNR_DB, judged)
        return f"Against {other.label}: {words}, in {num_pairs} pairs."


def _evaluations(cell: Cell) -> int:
    """Return the network evaluations per image, each of which has one or two rows."""
    return cell.rows // (2 if cell.guidance_scale > 1 else 1)


def _names(cells: Sequence[Cell]) -> str:
    names = [cell.label for cell in cells[:MOST_NAMES]]
    num_others = len(cells) - len(names)
    return ", ".join(names) + (f" and {num_others} more" if num_others else "")
