"""Choice: a token, and what the model thought of it and of its rivals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from diffserve.errors import NumericalError

LEAST_LOGPROB: Final = -1e30
"""Stands for -inf where it is multiplied by a probability of 0."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One chosen token. All numbers are of the model's own distribution, before temperature, penalties and filters.

    logprob  natural logarithm of the token's probability
    entropy  of the whole distribution, in nats: 0 when certain, log(V) when clueless
    top      (token id, logprob) of the ``params.logprobs`` most likely tokens, best first; empty unless asked for
    """

    token_id: int
    logprob: float
    entropy: float
    top: tuple[tuple[int, float], ...] = ()


def describe(
    logits: Tensor, scores: Tensor, tokens: Sequence[int], num_top: Sequence[int]
) -> list[Choice | NumericalError]:
    """A Choice for each line of ``logits`` (n, V), or what is wrong with the line.

    scores   (n, V) what the tokens were chosen by: the choice of a token that may not be said is an error
    num_top  how many of the most likely tokens each line reports
    """
    chosen = torch.tensor(tokens, dtype=torch.long, device=logits.device)[:, None]  # (n, 1)
    logprobs = logits.log_softmax(-1)
    entropies = entropy_of(logprobs)
    possible = (scores.gather(-1, chosen)[:, 0] > -torch.inf).tolist()
    own = logprobs.gather(-1, chosen)[:, 0].tolist()
    tops = _tops(logprobs, num_top)
    facts = zip(tokens, own, entropies.tolist(), tops, possible, strict=True)
    return [_checked(Choice(*fact), ok) for *fact, ok in facts]


def entropy_of(logprobs: Tensor) -> Tensor:
    """(n,) entropies in nats of distributions given as logprobs (n, V); not finite when the logits were not."""
    return -(logprobs.exp() * logprobs.clamp_min(LEAST_LOGPROB)).sum(-1)


def _checked(choice: Choice, possible: bool) -> Choice | NumericalError:
    if not math.isfinite(choice.entropy):
        return NumericalError("the language model gave logits that are not finite; try another dtype.")
    if not possible:
        return NumericalError("no token may be said here: the model gives every allowed one the probability 0.")
    return choice


def _tops(logprobs: Tensor, num_top: Sequence[int]) -> list[tuple[tuple[int, float], ...]]:
    widest = min(max(num_top, default=0), logprobs.shape[-1])
    if widest == 0:
        return [()] * len(num_top)
    lines = [line for line, count in enumerate(num_top) if count]
    found = logprobs[lines].topk(widest, dim=-1)
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(num_top)
    for line, ids, values in zip(lines, found.indices.tolist(), found.values.tolist(), strict=True):
        tops[line] = tuple(zip(ids, values, strict=True))[: num_top[line]]
    return tops
