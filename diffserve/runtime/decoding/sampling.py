"""From logits to tokens, for a batch in which every row has its own parameters.

``choose`` takes one line of logits for each row. ``accept`` takes more: a row that brought a draft of k tokens has
k + 1 lines, those after each token of the draft, and is told how many were right, and the token after them. Choosing
moves no row on: ``SamplingState.append`` does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from diffserve.errors import NumericalError
from diffserve.runtime.decoding.sampling_batch import Draft, SamplingBatch
from diffserve.runtime.decoding.sampling_state import SamplingState


def choose(logits: Tensor, rows: Sequence[SamplingState]) -> list[Choice | NumericalError]:
    """The next token of each row, from ``logits`` (B, V) of any floating dtype, which are not changed.

    A row whose logits are not finite, or that may say nothing, gets a NumericalError in its place; its neighbours
    are not touched. Raises ValueError when there are not as many lines as rows.
    """
    accepted = accept(logits, rows, [()] * len(rows))
    return [found if isinstance(found, NumericalError) else found[0] for found in accepted]


def accept(
    logits: Tensor,
    rows: Sequence[SamplingState],
    drafts: Sequence[Draft],
    draft_probs: Sequence[Tensor | None] | None = None,
) -> list[list[Choice] | NumericalError]:
    """What each row says: the part of its draft that the model agrees with, and one token more (unless that ends it).

    logits       (sum of len(draft) + 1, V), the rows' lines one after another: after the row's last token, after
                 draft[0], ..., after the whole draft
    drafts       token ids; empty for a row without a draft
    draft_probs  (len(draft), V) the distributions that the row's draft was drawn from; None for a draft that was
                 looked up, and for greedy rows

    The output's distribution is that of ``choose`` token by token. Without ``draft_probs`` it is more than that: the
    same tokens, for the same seed. Raises ValueError when shapes do not fit.
    """
    batch = SamplingBatch(logits, rows, drafts)
    said = batch.say(draft_probs or [None] * len(rows))
    kept = [line for span, tokens in zip(batch.spans, said, strict=True) for line in span[: len(tokens)]]
    tokens = [token_id for row_tokens in said for token_id in row_tokens]
    num_top = [batch.positions[line].params.logprobs or 0 for line in kept]
    choices = iter(describe(*batch.some(kept), tokens, num_top))
    return [_whole(list(islice(choices, len(row_tokens)))) for row_tokens in said]


def draft_next(logits: Tensor, rows: Sequence[SamplingState]) -> tuple[list[int], Tensor]:
    """One token of a draft for each row from a draft model's ``logits`` (B, V), and the (B, V) distributions.

    ``rows`` are forks of the rows that the draft is for, each moved on by what was drafted so far. Stack the
    distributions to ``draft_probs`` of ``accept``; a greedy row's is all on the most likely token.
    """
    batch = SamplingBatch(logits, rows, [()] * len(rows))
    tokens = [said[0] for said in batch.say([None] * len(rows))]
    probs = F.one_hot(batch.scores.argmax(-1), logits.shape[-1]).float()  # (B, V)
    if batch.drawn:
        probs[batch.drawn] = batch.probs
    return tokens, probs


def _whole(choices: list[Choice | NumericalError]) -> list[Choice] | NumericalError:
    errors = [choice for choice in choices if isinstance(choice, NumericalError)]
    return errors[0] if errors else [choice for choice in choices if isinstance(choice, Choice)]


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
