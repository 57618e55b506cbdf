"""What a step buys: the claims that people make about samplers, held against the data of a sweep.

Every sentence is computed. A claim is what one expects from the papers (DDIM: Song et al. 2020; DPM-Solver++: Lu et al.
2022); its verdict says whether these pictures bear it out, and it says so too when they do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from diffserve.experiments.analysis import Analysis
from diffserve.experiments.estimates import Estimate, Measure
from diffserve.experiments.plan import Cell

AS_EXPECTED = "as expected"
IN_PART = "in part"
NOT_DISTINGUISHABLE = "not distinguishable"
OTHERWISE = "otherwise"

FEW_STEPS = 20
FAR_MORE = 2.0
"""A gain counts as far more than another when it is surely more than so many times as large."""

SAME_PICTURE = 0.5
"""A picture counts as the converged one while it is less than half as far from it as another seed's picture is."""

REPAIR = (
    "Where the limit itself is behind, more steps cannot help DDIM: it carries the network's errors along one path, "
    "and noise added on the way lets a sampler correct them (Karras et al. 2022, section 4; Xu et al. 2023, Restart)."
)

Outcome = int
"""1 ahead, 0 not distinguishable, -1 behind."""


class Finding(msgspec.Struct, frozen=True):
    """A claim, whether the data bear it out, and the numbers behind it, a sentence each."""

    claim: str
    verdict: str
    evidence: tuple[str, ...]


def find(analysis: Analysis) -> tuple[Finding, ...]:
    """All claims that the cells of this sweep can answer, for every guidance."""
    scales = dict.fromkeys(cell.guidance_scale for cell in analysis.plan.cells)
    return tuple(finding for scale in scales for finding in _at(analysis, scale, with_scale=len(scales) > 1))


def _at(analysis: Analysis, scale: float, *, with_scale: bool) -> Iterator[Finding]:
    cells: dict[str, dict[int, Cell]] = {}
    for cell in analysis.plan.cells:
        if cell.guidance_scale == scale:
            cells.setdefault(cell.sampler, {})[cell.num_steps] = cell
    ddim, ddpm, dpm = (cells.get(name, {}) for name in ("ddim", "ddpm", "dpmpp_2m"))
    judge = _Judge(analysis)
    found = [
        _ahead_at_few_steps(judge, ddim, ddpm),
        _gains_more(judge, ddpm, ddim),
        _ten_are_enough(judge, dpm, ddim),
        _same_picture(judge, ddim, ddpm),
        _good_limit(judge, ddpm),
    ]
    for finding in found:
        if finding is not None:
            claim = f"At guidance {scale:g}: {finding.claim}" if with_scale else finding.claim
            yield Finding(claim, finding.verdict, finding.evidence)


class _Judge:
    """Compares cells by what pictures are worth: exact prompt match, and the Frechet distance to the best reference
    there is. Distances to the converged picture are left out, for they favour the sampler that made it."""

    def __init__(self, analysis: Analysis) -> None:
        self.analysis = analysis
        has_drawn = analysis.estimate(analysis.plan.cells[0], Measure.FRECHET) is not None
        self.measures = (Measure.EXACT, Measure.FRECHET if has_drawn else Measure.FRECHET_CONVERGED)

    def contrasts(self, weights: Mapping[Cell, float]) -> Iterator[tuple[Measure, Estimate, Outcome]]:
        """For each measure the weighted sum, and 1 where it speaks for the cells of positive weight, else 0 or -1."""
        for measure in self.measures:
            found = self.analysis.contrast(weights, measure)
            if found is not None:
                yield measure, found, found.sign * (1 if measure.more_is_better else -1)

    def compare(self, one: Cell, other: Cell, names: tuple[str, str], lead: str = "") -> list[tuple[str, Outcome]]:
        """For each measure both cells and their difference in a sentence, and the outcome for ``one``. The first word
        of a name is what is said to be better or worse."""
        found = []
        for measure, difference, outcome in self.contrasts({one: 1, other: -1}):
            both = f"{names[0]} {self.write(one, measure)}, {names[1]} {self.write(other, measure)}"
            words = describe_difference(names[0].split()[0], measure, difference, outcome)
            found.append((f"{lead}{measure.title}: {both}; {words}.", outcome))
        return found

    def write(self, cell: Cell, measure: Measure) -> str:
        """A cell's measure."""
        found = self.analysis.estimate(cell, measure)
        assert found is not None
        return measure.write(found.value)


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
    own, others = {ddpm[many]: 1.0, ddpm[few]: -1.0}, {ddim[many]: 1.0, ddim[few]: -1.0}
    far_more = {measure: outcome > 0 for measure, _, outcome in judge.contrasts(own | _times(-FAR_MORE, others))}
    evidence, outcomes = [], {}
    for measure, found, outcome in judge.contrasts(own | _times(-1, others)):
        outcomes[measure] = outcome
        ways = (
            f"{name} from {judge.write(cells[few], measure)} to {judge.write(cells[many], measure)}"
            for name, cells in (("ddpm", ddpm), ("ddim", ddim))
        )
        gains = describe_gains(measure, found, outcome, is_far_more=far_more[measure])
        evidence.append(f"{measure.title}: {' and '.join(ways)}; {gains}.")
    if not outcomes:
        return None
    verdict = _verdict(list(outcomes.values()))
    if verdict == AS_EXPECTED and not any(far_more[measure] for measure in outcomes if outcomes[measure] > 0):
        verdict = IN_PART
    return Finding(f"DDPM gains far more than DDIM from {few} to {many} steps", verdict, tuple(evidence))


def _ten_are_enough(judge: _Judge, dpm: Mapping[int, Cell], ddim: Mapping[int, Cell]) -> Finding | None:
    steps = [n for n in ddim if n >= FEW_STEPS]
    if 10 not in dpm or not steps:
        return None
    pairs = ((ddim[n], ("dpmpp_2m with 10 steps", f"ddim with {n}")) for n in steps)
    found = [one for other, names in pairs for one in judge.compare(dpm[10], other, names)]
    claim = f"DPM++ 2M with 10 steps is within noise of DDIM with {join_numbers(steps)}, or ahead of it"
    return _not_behind(claim, found)


def _same_picture(judge: _Judge, ddim: Mapping[int, Cell], ddpm: Mapping[int, Cell]) -> Finding | None:
    cells = [samplers[FEW_STEPS] for samplers in (ddim, ddpm) if FEW_STEPS in samplers]
    if len(cells) < 2:
        return None
    evidence, outcomes = [], []
    for cell, expected in zip(cells, (-1, 1), strict=True):
        line, outcome = _nearness(judge.analysis, cell)
        evidence.append(line)
        outcomes.append([outcome * expected])
    claim = f"With the same seed DDIM at {FEW_STEPS} steps is close to its converged picture, DDPM is not"
    return Finding(claim, _verdict_of_all(outcomes), tuple(evidence))


def _good_limit(judge: _Judge, ddpm: Mapping[int, Cell]) -> Finding | None:
    """Why DDIM is where it is: what it converges to, against DDPM with all its steps."""
    if not ddpm:
        return None
    many = ddpm[max(ddpm)]
    limit = judge.analysis.plan.reference_of(many)
    assert limit is not None, "a sweep has converged pictures"
    found = judge.compare(limit, many, ("converged", f"ddpm with {many.num_steps} steps"))
    claim = f"The pictures that DDIM converges to are as good as those of DDPM with {many.num_steps} steps"
    return _not_behind(claim, found, otherwise=REPAIR)


def _not_behind(claim: str, found: Sequence[tuple[str, Outcome]], otherwise: str = "") -> Finding | None:
    """Of a claim that holds where nothing is behind; ``otherwise`` is added where something is."""
    if not found:
        return None
    evidence, outcomes = [line for line, _ in found], [1 if outcome >= 0 else -1 for _, outcome in found]
    evidence += [otherwise] if otherwise and min(outcomes) < 0 else []
    return Finding(claim, _verdict(outcomes), tuple(evidence))


def _nearness(analysis: Analysis, cell: Cell) -> tuple[str, Outcome]:
    """How near a cell's pictures are to the converged ones; -1 close, 1 far, 0 neither for certain."""
    rmse = analysis.estimate(cell, Measure.LATENT_RMSE)
    psnr = analysis.estimate(cell, Measure.PSNR_DB)
    assert rmse is not None, "only references have no distance"
    assert psnr is not None
    line = (
        f"{cell.label}: latent RMSE {rmse.value:.3g}{interval(rmse)}, PSNR {psnr.value:.1f} dB{interval(psnr)} "
        "to the converged picture of its seed"
    )
    stranger = analysis.seed_spread.get(cell.guidance_scale)
    if stranger is None:
        return f"{line}; with one seed a prompt there is no other picture to compare with.", 0
    share = rmse.value / stranger
    line = f"{line}; {100 * share:.0f} % of the way to the converged picture of another seed ({stranger:.3g})."
    beyond = Estimate(
        rmse.value - SAME_PICTURE * stranger,
        None if rmse.low is None else rmse.low - SAME_PICTURE * stranger,
        None if rmse.high is None else rmse.high - SAME_PICTURE * stranger,
    )
    return line, beyond.sign


def _times(factor: float, weights: Mapping[Cell, float]) -> dict[Cell, float]:
    return {cell: factor * weight for cell, weight in weights.items()}


def _verdict_of_all(parts: Sequence[Sequence[Outcome]]) -> str:
    """The verdict on a claim of several parts, as expected only where each of them is."""
    verdicts = {_verdict(outcomes) for outcomes in parts}
    if len(verdicts) == 1:
        return verdicts.pop()
    if verdicts & {AS_EXPECTED, IN_PART}:
        return IN_PART
    return OTHERWISE


def _verdict(outcomes: Sequence[Outcome]) -> str:
    """One part: as expected where some measure speaks for it and none against."""
    if min(outcomes) >= 0 and max(outcomes) > 0:
        return AS_EXPECTED
    if max(outcomes) > 0:
        return IN_PART
    return OTHERWISE if min(outcomes) < 0 else NOT_DISTINGUISHABLE


def describe_difference(who: str, measure: Measure, found: Estimate, outcome: Outcome) -> str:
    """A difference in words; its interval is written the way the words count, so that "better by" is above zero."""
    by = measure.write_difference(found.value)
    if outcome:
        return f"{who} is {'better' if outcome > 0 else 'worse'} by {by}{interval(_upright(found), measure)}"
    more = "level" if found.value == 0 else f"{by} {'higher' if found.value > 0 else 'lower'}"
    return f"{who} is {more}, {_within_noise(found, measure)}"


def describe_gains(measure: Measure, found: Estimate, outcome: Outcome, *, is_far_more: bool) -> str:
    """What ddpm gains beyond ddim, in words."""
    by = measure.write_difference(found.value)
    if not outcome:
        return f"the gains differ by {by}, {_within_noise(found, measure)}"
    size = f"{by}{interval(_upright(found), measure)}"
    if outcome < 0:
        return f"ddpm gains less by {size}"
    return f"ddpm gains more by {size}, {'' if is_far_more else 'but not '}surely more than twice as much"


def _within_noise(found: Estimate, measure: Measure) -> str:
    if found.low is None or found.high is None:
        return "with too few prompts to say how sure that is"
    return f"within noise{interval(found, measure)}"


def _upright(found: Estimate) -> Estimate:
    """The difference taken the other way round where it is below zero."""
    if found.value >= 0 or found.low is None or found.high is None:
        return found
    return Estimate(-found.value, -found.high, -found.low)


def interval(found: Estimate, measure: Measure | None = None) -> str:
    """The interval in brackets, of shares in points; nothing where there is none."""
    if found.low is None or found.high is None:
        return ""
    factor = 100 if measure is Measure.EXACT else 1
    low, high = (f"{factor * end + 0.0:.3g}" for end in (found.low, found.high))
    return f" (95 % interval {low} to {high})"


def join_numbers(steps: Sequence[int]) -> str:
    """Numbers as people say them: "5, 10 and 20"."""
    words = [str(n) for n in sorted(steps)]
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)
