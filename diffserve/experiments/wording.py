"""Differences in words: who is better, by how much, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence

from diffserve.experiments.estimates import Estimate, Measure

Outcome = int
"""1 ahead, 0 not distinguishable, -1 behind."""


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
