"""Tests common claims about samplers and step counts against the data of a sweep.

The claims follow the papers (DDIM: Song et al. 2020; DPM-Solver++: Lu et al. 2022). Each verdict is computed from the
measured images, so a claim can also come out as not supported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from diffserve.experiments.analysis import Analysis
from diffserve.experiments.axes import write_settings
from diffserve.experiments.estimates import Estimate, Measure
from diffserve.experiments.plan import Cell
from diffserve.experiments.verdicts import (
    LEAST_SEEDS,
    NOT_DISTINGUISHABLE,
    Judged,
    Outcome,
    count_wins,
    judge_difference,
)

AS_EXPECTED = "as expected"
IN_PART = "in part"
OTHERWISE = "otherwise"

FEW_STEPS = 20
FAR_MORE = 2.0
"""Factor by which one gain must significantly exceed another to count as "far more"."""

SAME_PICTURE = 0.5
"""Share of the distance between two seeds below which an image counts as equal to its converged image."""

REPAIR = (
    "Where the limit itself is behind, more steps cannot help DDIM: it carries the network's errors along one path, "
    "and noise added on the way lets a sampler correct them (Karras et al. 2022, section 4; Xu et al. 2023, Restart)."
)


class Finding(msgspec.Struct, frozen=True):
    """A claim, the verdict of the data on it, and one sentence of evidence per measurement."""

    claim: str
    verdict: str
    evidence: tuple[str, ...]


def find(analysis: Analysis) -> tuple[Finding, ...]:
    """Evaluate every claim that the cells of this sweep can answer, for each guidance scale and other settings."""
    cells = analysis.plan.cells
    variants = dict.fromkeys((cell.guidance_scale, cell.settings) for cell in cells)
    several = len({scale for scale, _ in variants}) > 1
    return tuple(
        finding
        for scale, settings in variants
        for finding in _findings_of(
            analysis,
            [cell for cell in cells if (cell.guidance_scale, cell.settings) == (scale, settings)],
            (f", guidance {scale:g}" if several else "") + write_settings(settings),
        )
    )


def _findings_of(analysis: Analysis, variant: Sequence[Cell], where: str) -> Iterator[Finding]:
    cells: dict[str, dict[int, Cell]] = {}
    for cell in variant:
        cells.setdefault(cell.sampler, {})[cell.num_steps] = cell
    ddim, ddpm, dpm = (cells.get(name, {}) for name in ("ddim", "ddpm", "dpmpp_2m"))
    judge = _Judge(analysis, variant[0])
    has_seeds = analysis.num_seeds(analysis.plan.cells) >= LEAST_SEEDS
    findings = [
        _ahead_at_few_steps(judge, ddim, ddpm),
        _gains_more(judge, ddpm, ddim),
        _matches_with_ten_steps(judge, dpm, ddim),
        _keeps_converged_image(judge, ddim, ddpm),
        _limit_is_as_good(judge, ddpm),
    ]
    for finding in findings:
        if finding is not None:
            claim = f"At {where.removeprefix(', ')}: {finding.claim}" if where else finding.claim
            yield Finding(claim, finding.verdict if has_seeds else NOT_DISTINGUISHABLE, finding.evidence)


class _Judge:
    """Compares cells by exact prompt match and by Frechet distance to the best available reference.

    Distances to the converged image are not used because they favor the sampler that generated it.
    """

    def __init__(self, analysis: Analysis, cell: Cell) -> None:
        self.analysis = analysis
        has_drawn = analysis.estimate(cell, Measure.FRECHET) is not None
        self.measures = (Measure.EXACT, Measure.FRECHET if has_drawn else Measure.FRECHET_CONVERGED)

    def contrasts(self, weights: Mapping[Cell, float]) -> Iterator[tuple[Measure, Judged]]:
        """Yield each measure and its judged weighted sum over the cells."""
        for measure in self.measures:
            judged = judge_difference(self.analysis, weights, measure)
            if judged is not None:
                yield measure, judged

    def compare(
        self, cell: Cell, other: Cell, names: tuple[str, str], lead: str = "", *, allows_margin: bool = False
    ) -> list[tuple[str, Outcome]]:
        """Describe the difference between two cells in one sentence per measure.

        Args:
            cell: The cell whose outcome is returned.
            other: The cell to compare with.
            names: Text for both cells; the first word of the first name is the subject of the sentence.
            lead: Text in front of each sentence.
            allows_margin: Whether a cell that is certainly behind by less than the plan's difference of interest
                counts as ahead.

        Returns:
            One (sentence, outcome for ``cell``) pair per measure.
        """
        comparisons = []
        for measure, judged in self.contrasts({cell: 1, other: -1}):
            values = f"{names[0]} {self.write(cell, measure)}, {names[1]} {self.write(other, measure)}"
            words = describe_difference(names[0].split()[0], measure, judged)
            outcome, margin = judged.outcome, self.analysis.plan.detect.get(measure.value)
            if allows_margin and margin is not None and _is_within(judged, measure, margin):
                outcome, words = 1, f"{words}, behind by less than {measure.write_difference(margin)}"
            details = "".join(f"; {text}" for text in self._details(cell, other, measure))
            comparisons.append((f"{lead}{measure.title}: {values}; {words}{details}.", outcome))
        return comparisons

    def _details(self, cell: Cell, other: Cell, measure: Measure) -> Iterator[str]:
        """Yield the pairwise wins, and for shares of matches the checker's own error."""
        counts = count_wins(self.analysis, cell, other, measure)
        if counts is not None:
            num_pairs = len(self.analysis.shared_places((cell, other)))
            yield f"{counts[0]} wins, {counts[1]} losses in {num_pairs} pairs"
        if measure is Measure.EXACT and self.analysis.checker is not None:
            yield str(self.analysis.checker)

    def write(self, cell: Cell, measure: Measure) -> str:
        """Format a cell's value of ``measure``."""
        estimate = self.analysis.estimate(cell, measure)
        assert estimate is not None
        return measure.write(estimate.value)


def is_not_behind(judged: Judged, measure: Measure, margin: float) -> bool:
    """Return whether a difference is better, or certainly worse by less than ``margin`` (non-inferiority)."""
    return judged.outcome > 0 or _is_within(judged, measure, margin)


def _is_within(judged: Judged, measure: Measure, margin: float) -> bool:
    """Return whether an undecided difference is certainly worse by less than ``margin`` (non-inferiority)."""
    low, high = judged.difference.low, judged.difference.high
    if judged.outcome or judged.why_not or low is None or high is None:
        return False
    return (low if measure.more_is_better else -high) > -margin


def _ahead_at_few_steps(judge: _Judge, ddim: Mapping[int, Cell], ddpm: Mapping[int, Cell]) -> Finding | None:
    steps = [n for n in ddim if n in ddpm and n <= FEW_STEPS]
    parts = [judge.compare(ddim[n], ddpm[n], ("ddim", "ddpm"), f"{n} steps, ") for n in steps]
    if not any(parts):
        return None
    evidence = tuple(line for part in parts for line, _ in part)
    verdict = _verdict_of_all([[outcome for _, outcome in part] for part in parts])
    return Finding(f"DDIM is ahead of DDPM at {join_numbers(steps)} steps", verdict, evidence)


def _gains_more(judge: _Judge, ddpm: Mapping[int, Cell], ddim: Mapping[int, Cell]) -> Finding | None:
    steps = sorted(n for n in ddim if n in ddpm)
    few, many = (10, 100) if {10, 100} <= set(steps) else (min(steps, default=0), max(steps, default=0))
    if few == many:
        return None
    ddpm_gain, ddim_gain = {ddpm[many]: 1.0, ddpm[few]: -1.0}, {ddim[many]: 1.0, ddim[few]: -1.0}
    far_more = {
        measure: judged.outcome > 0 for measure, judged in judge.contrasts(ddpm_gain | _scaled(-FAR_MORE, ddim_gain))
    }
    evidence, outcomes = [], {}
    for measure, judged in judge.contrasts(ddpm_gain | _scaled(-1, ddim_gain)):
        outcomes[measure] = judged.outcome
        changes = (
            f"{name} from {judge.write(cells[few], measure)} to {judge.write(cells[many], measure)}"
            for name, cells in (("ddpm", ddpm), ("ddim", ddim))
        )
        gains = describe_gains(measure, judged, is_far_more=far_more[measure])
        evidence.append(f"{measure.title}: {' and '.join(changes)}; {gains}.")
    if not outcomes:
        return None
    verdict = _verdict(list(outcomes.values()))
    if verdict == AS_EXPECTED and not any(far_more[measure] for measure in outcomes if outcomes[measure] > 0):
        verdict = IN_PART
    return Finding(f"DDPM gains far more than DDIM from {few} to {many} steps", verdict, tuple(evidence))


def _matches_with_ten_steps(judge: _Judge, dpm: Mapping[int, Cell], ddim: Mapping[int, Cell]) -> Finding | None:
    steps = [n for n in ddim if n >= FEW_STEPS]
    if 10 not in dpm or not steps:
        return None
    pairs = ((ddim[n], ("dpmpp_2m with 10 steps", f"ddim with {n}")) for n in steps)
    comparisons = [
        comparison for other, names in pairs for comparison in judge.compare(dpm[10], other, names, allows_margin=True)
    ]
    claim = f"DPM++ 2M with 10 steps is as good as DDIM with {join_numbers(steps)}"
    return _not_behind(claim, comparisons)


def _keeps_converged_image(judge: _Judge, ddim: Mapping[int, Cell], ddpm: Mapping[int, Cell]) -> Finding | None:
    cells = [samplers[FEW_STEPS] for samplers in (ddim, ddpm) if FEW_STEPS in samplers]
    if len(cells) < 2:
        return None
    evidence, outcomes = [], []
    for cell, expected in zip(cells, (-1, 1), strict=True):
        line, outcome = _nearness(judge.analysis, cell)
        evidence.append(line)
        outcomes.append([outcome * expected])
    claim = f"With the same seed DDIM at {FEW_STEPS} steps is close to its converged image, and DDPM is not"
    return Finding(claim, _verdict_of_all(outcomes), tuple(evidence))


def _limit_is_as_good(judge: _Judge, ddpm: Mapping[int, Cell]) -> Finding | None:
    """Compare the converged DDIM images with those of DDPM at its largest step count."""
    if not ddpm:
        return None
    many = ddpm[max(ddpm)]
    limit = judge.analysis.plan.reference_of(many)
    assert limit is not None, "a sweep has converged images"
    comparisons = judge.compare(limit, many, ("converged", f"ddpm with {many.num_steps} steps"), allows_margin=True)
    claim = f"The images that DDIM converges to are as good as those of DDPM with {many.num_steps} steps"
    return _not_behind(claim, comparisons, otherwise=REPAIR)


def _not_behind(claim: str, comparisons: Sequence[tuple[str, Outcome]], otherwise: str = "") -> Finding | None:
    """Build the finding of a claim that holds if a measure is not behind by more than a margin, and none is behind.

    Args:
        claim: The claim to evaluate.
        comparisons: Sentences with their outcomes.
        otherwise: Explanation that is added to the evidence when some outcome is behind.
    """
    if not comparisons:
        return None
    evidence, outcomes = [line for line, _ in comparisons], [outcome for _, outcome in comparisons]
    evidence += [otherwise] if otherwise and min(outcomes) < 0 else []
    return Finding(claim, _verdict(outcomes), tuple(evidence))


def _nearness(analysis: Analysis, cell: Cell) -> tuple[str, Outcome]:
    """Describe the distance of a cell's images to the converged ones; the outcome is -1 close, 1 far, 0 uncertain."""
    rmse = analysis.estimate(cell, Measure.LATENT_RMSE)
    psnr = analysis.estimate(cell, Measure.PSNR_DB)
    assert rmse is not None, "only references have no distance"
    assert psnr is not None
    line = (
        f"{cell.label}: latent RMSE {rmse.value:.3g}{interval(rmse)}, PSNR {psnr.value:.1f} dB{interval(psnr)} "
        "to the converged image of its seed"
    )
    other_seed = analysis.seed_spread.get(cell.target)
    if other_seed is None:
        return f"{line}; with one seed per prompt there is no other image to compare with.", 0
    share = rmse.value / other_seed
    line = f"{line}; {100 * share:.0f} % of the way to the converged image of another seed ({other_seed:.3g})."
    excess = Estimate(
        rmse.value - SAME_PICTURE * other_seed,
        None if rmse.low is None else rmse.low - SAME_PICTURE * other_seed,
        None if rmse.high is None else rmse.high - SAME_PICTURE * other_seed,
    )
    return line, excess.sign


def _scaled(factor: float, weights: Mapping[Cell, float]) -> dict[Cell, float]:
    return {cell: factor * weight for cell, weight in weights.items()}


def _verdict_of_all(parts: Sequence[Sequence[Outcome]]) -> str:
    """Combine the verdicts of a claim's parts; the claim is as expected only if every part is."""
    verdicts = {_verdict(outcomes) for outcomes in parts}
    if len(verdicts) == 1:
        return verdicts.pop()
    if verdicts & {AS_EXPECTED, IN_PART}:
        return IN_PART
    return OTHERWISE


def _verdict(outcomes: Sequence[Outcome]) -> str:
    """Return the verdict of one part: as expected if some measure supports it and none contradicts it."""
    if min(outcomes) >= 0 and max(outcomes) > 0:
        return AS_EXPECTED
    if max(outcomes) > 0:
        return IN_PART
    return OTHERWISE if min(outcomes) < 0 else NOT_DISTINGUISHABLE


def describe_difference(who: str, measure: Measure, judged: Judged) -> str:
    """Describe a difference in words; the interval follows the wording, so "better by" has a positive interval.

    Args:
        who: Subject of the sentence.
        measure: The measure that was compared.
        judged: The difference, and whether the subject is ahead, behind, or not distinguishable.
    """
    difference, amount = judged.difference, measure.write_difference(judged.difference.value)
    if judged.outcome:
        word = "better" if judged.outcome > 0 else "worse"
        return f"{who} is {word} by {amount}{interval(_absolute(difference), measure)}"
    relation = "level" if difference.value == 0 else f"{amount} {'higher' if difference.value > 0 else 'lower'}"
    return f"{who} is {relation}, {_not_distinguishable(judged, measure)}"


def describe_gains(measure: Measure, judged: Judged, *, is_far_more: bool) -> str:
    """Describe in words how much more DDPM gains than DDIM."""
    difference, amount = judged.difference, measure.write_difference(judged.difference.value)
    if not judged.outcome:
        return f"the gains differ by {amount}, {_not_distinguishable(judged, measure)}"
    size = f"{amount}{interval(_absolute(difference), measure)}"
    if judged.outcome < 0:
        return f"ddpm gains less by {size}"
    return f"ddpm gains more by {size}, {'' if is_far_more else 'but not '}clearly more than twice as much"


def _not_distinguishable(judged: Judged, measure: Measure) -> str:
    """Describe why a difference is not distinguishable from zero."""
    difference = judged.difference
    if difference.low is None or difference.high is None:
        return "with too few prompts for a confidence interval"
    if judged.why_not:
        return f"{judged.why_not}{interval(difference, measure)}"
    return f"within noise{interval(difference, measure)}"


def _absolute(estimate: Estimate) -> Estimate:
    """Return the absolute difference with the interval flipped accordingly."""
    if estimate.value >= 0 or estimate.low is None or estimate.high is None:
        return estimate
    return Estimate(-estimate.value, -estimate.high, -estimate.low)


def interval(estimate: Estimate, measure: Measure | None = None) -> str:
    """Format the interval in brackets, shares in percentage points; empty if there is no interval."""
    if estimate.low is None or estimate.high is None:
        return ""
    factor = 100 if measure is Measure.EXACT else 1
    low, high = (f"{factor * end + 0.0:.3g}" for end in (estimate.low, estimate.high))
    return f" (95 % interval {low} to {high})"


def join_numbers(steps: Sequence[int]) -> str:
    """Join sorted numbers into a phrase such as "5, 10 and 20"."""
    words = [str(n) for n in sorted(steps)]
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)
