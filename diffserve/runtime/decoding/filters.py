"""From scores to the distribution that is drawn from: temperature, then top-k, top-p and min-p, as in transformers.

Each filter works on the rows that ask for it, all at once, with a column of their settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from diffserve.sampling_params import SamplingParams

NUCLEUS_TOKENS: Final = 1024
"""Of a much larger vocabulary top-p sorts only so many of the best tokens, when these hold enough."""

Setting = Callable[[SamplingParams], float]


def distribution(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """(n, V) probabilities of rows that draw, from adjusted ``scores`` (n, V); temperatures are above 0."""
    return filtered(scores, params).softmax(-1)


def filtered(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """``scores`` (n, V) divided by the temperature, with -inf where a filter took a token out."""
    scores = _apply(scores, params, lambda p: p.temperature != 1.0, lambda p: p.temperature, torch.div)
    vocab_size = scores.shape[-1]
    scores = _apply(scores, params, lambda p: 0 < p.top_k < vocab_size, lambda p: p.top_k, _top_k)
    scores = _apply(scores, params, lambda p: p.top_p < 1.0, lambda p: 1.0 - p.top_p, _top_p)
    return _apply(scores, params, lambda p: p.min_p > 0.0, lambda p: p.min_p, _min_p)


def _apply(
    scores: Tensor,
    params: Sequence[SamplingParams],
    wants: Callable[[SamplingParams], bool],
    setting: Setting,
    change: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """``change(scores, column of settings)`` on the rows that want it."""
    lines = [line for line, own in enumerate(params) if wants(own)]
    if not lines:
        return scores
    column = scores.new_tensor([setting(params[line]) for line in lines])[:, None]  # (n, 1)
    if len(lines) == len(params):
        return change(scores, column)
    where = torch.tensor(lines, device=scores.device)
    return scores.index_copy(0, where, change(scores[where], column))


def _top_k(scores: Tensor, counts: Tensor) -> Tensor:
    """Without the tokens that score less than the k-th; ties with it stay."""
    best = scores.topk(int(counts.max()), dim=-1).values  # (n, largest k)
    threshold = best.gather(-1, counts.long() - 1)
    return scores.masked_fill(scores < threshold, -math.inf)


def _top_p(scores: Tensor, tails: Tensor) -> Tensor:
    """Without the least likely tokens, as long as these hold at most ``tails`` = 1 - top_p; the best one stays.

    Which of two ways leads there depends on the row alone, so its draws do not depend on its neighbours.
    """
    if scores.shape[-1] < 8 * NUCLEUS_TOKENS:
        return _sorted_top_p(scores, tails)
    found, enough = _nucleus(scores, tails)
    if not bool(enough.all()):
        found[~enough] = _sorted_top_p(scores[~enough], tails[~enough])
    return found


def _sorted_top_p(scores: Tensor, tails: Tensor) -> Tensor:
    """From the least likely token up, as transformers does it; of equal tokens the first go first."""
    values, tokens = torch.sort(scores, dim=-1, stable=True)
    removed = values.softmax(-1).cumsum(-1) <= tails
    removed[:, -1] = False
    gone = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, tokens, removed)
    return scores.masked_fill(gone, -math.inf)


def _nucleus(scores: Tensor, tails: Tensor) -> tuple[Tensor, Tensor]:
    """From the best token down, and for which rows (n,) the best ``NUCLEUS_TOKENS`` were enough."""
    best, tokens = scores.topk(NUCLEUS_TOKENS, dim=-1)
    probs = (best - scores.logsumexp(-1, keepdim=True)).exp()
    held = probs.cumsum(-1)
    kept = held - probs < 1.0 - tails  # what the better ones hold is not yet enough
    kept[:, 0] = True
    found = torch.full_like(scores, -math.inf).scatter(-1, tokens, best.masked_fill(~kept, -math.inf))
    return found, held[:, -1] >= 1.0 - tails[:, 0]


def _min_p(scores: Tensor, shares: Tensor) -> Tensor:
    """Without the tokens that are less than ``shares`` times as likely as the likeliest, which stays."""
    probs = scores.softmax(-1)
    removed = probs < shares * probs.amax(-1, keepdim=True)
    removed.scatter_(-1, probs.argmax(-1, keepdim=True), False)
    return scores.masked_fill(removed, -math.inf)
