"""What was chosen, and what the model thought of it: worked out on the device, and read when it has come.

Everything that is told of a tick's tokens travels in one transfer, as whole numbers; fractions travel as their bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from diffserve.api.errors import NumericalError
from diffserve.runtime.transfer import Fetched, fetch

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


@dataclass(frozen=True, eq=False)
class Chosen:
    """Tokens that are chosen on the device, and what is to be told of them.

    tokens  (n,) int64, on the device: the network can go on from them before anybody has read them
    """

    tokens: Tensor
    _facts: Fetched  # (n, 4 + 2 * widest) int64
    _num_top: tuple[int, ...]

    @property
    def is_here(self) -> bool:
        """Whether reading waits for nothing."""
        return self._facts.is_here

    def read(self) -> list[Choice | NumericalError]:
        """A Choice for each token, or what is wrong with its line; waited for where they are not here yet."""
        facts = self._facts.read()
        whole = facts.tolist()
        real = fractions(facts).tolist()
        widest = (facts.shape[1] - 4) // 2
        found = []
        for ids, shares, count in zip(whole, real, self._num_top, strict=True):
            top = tuple(zip(ids[4 : 4 + widest], shares[4 + widest :], strict=True))[:count]
            found.append(_checked(Choice(ids[0], shares[2], shares[3], top), bool(ids[1])))
        return found


def describe(logits: Tensor, scores: Tensor, tokens: Tensor, num_top: Sequence[int]) -> Chosen:
    """What is to be told of ``tokens`` (n,), int64 on the device of ``logits`` (n, V) float32.

    scores   (n, V) what the tokens were chosen by: the choice of a token that may not be said is an error
    num_top  how many of the most likely tokens each line reports
    """
    chosen = tokens[:, None]
    logprobs = logits.log_softmax(-1)
    possible = scores.gather(-1, chosen) > -torch.inf
    own = logprobs.gather(-1, chosen)
    facts = [chosen, possible.long(), bits(own), bits(entropy_of(logprobs)[:, None])]
    widest = min(max(num_top, default=0), logprobs.shape[-1])
    if widest:
        best = logprobs.topk(widest, dim=-1)
        facts += [best.indices, bits(best.values)]
    return Chosen(tokens, fetch(torch.cat(facts, 1)), tuple(num_top))


def entropy_of(logprobs: Tensor) -> Tensor:
    """(n,) entropies in nats of distributions given as logprobs (n, V); not finite when the logits were not."""
    return -(logprobs.exp() * logprobs.clamp_min(LEAST_LOGPROB)).sum(-1)


def bits(numbers: Tensor) -> Tensor:
    """float32 as int64 of the same bits, to travel beside whole numbers; ``fractions`` is the way back."""
    return numbers.view(torch.int32).long()


def fractions(told: Tensor) -> Tensor:
    """The float32 of which ``told`` are the bits."""
    return told.int().view(torch.float32)


def _checked(choice: Choice, possible: bool) -> Choice | NumericalError:
    if not math.isfinite(choice.entropy):
        return NumericalError("the language model gave logits that are not finite; try another dtype.")
    if not possible:
        return NumericalError("no token may be said here: the model gives every allowed one the probability 0.")
    return choice
