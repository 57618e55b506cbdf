"""What happens to logits before anything is chosen: penalties, ``min_tokens``, the constraint, and then filters.

In the order of transformers: repetition penalty, presence and frequency penalties (which transformers has not, and
which come where vLLM has them), stop tokens hidden, allowed words, temperature, top-k, top-p and min-p. Each touches
only the rows that ask for it, all at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from diffserve.runtime.decoding.sampling_state import SamplingState
from diffserve.sampling_params import SamplingParams

NUCLEUS_TOKENS: Final = 1024
"""Of a much larger vocabulary top-p sorts only so many of the best tokens, when these hold enough."""


def adjust(scores: Tensor, rows: Sequence[SamplingState]) -> Tensor:
    """``scores`` (B, V) float32 with penalties and masks; the same tensor when no row asks for any, else a new one."""
    scores = _penalise(scores, rows)
    scores = _hide_stops(scores, rows)
    return _constrain(scores, rows)


def _penalise(scores: Tensor, rows: Sequence[SamplingState]) -> Tensor:
    lines = [line for line, row in enumerate(rows) if row.counts is not None]
    if not lines:
        return scores
    parts = [row.counts.tensors() for row in rows if row.counts is not None]
    tokens, counts = (torch.cat(column).to(scores.device) for column in zip(*parts, strict=True))  # (n,) of all rows
    lengths = _on(scores, [len(ids) for ids, _ in parts])
    params = [rows[line].params for line in lines]
    columns = [[p.repetition_penalty, p.frequency_penalty, p.presence_penalty] for p in params]
    repetition, frequency, presence = scores.new_tensor(columns).T.repeat_interleave(lengths, 1)
    line_of = _on(scores, lines).repeat_interleave(lengths)
    known = tokens < scores.shape[-1]  # a model can read more tokens than it can say
    where = (line_of[known], tokens[known])
    found = scores[where]
    factor, count = repetition[known], counts[known]
    found = torch.where(found < 0, found * factor, found / factor)
    return scores.index_put(where, found - frequency[known] * count - presence[known] * (count > 0))


def _hide_stops(scores: Tensor, rows: Sequence[SamplingState]) -> Tensor:
    hidden = [
        (line, token_id)
        for line, row in enumerate(rows)
        if row.hides_stops and row.constraint is None
        for token_id in row.stop_ids
        if token_id < scores.shape[-1]
    ]
    if not hidden:
        return scores
    lines, tokens = zip(*hidden, strict=True)
    return scores.index_put((_on(scores, lines), _on(scores, tokens)), scores.new_tensor(-math.inf))


def _constrain(scores: Tensor, rows: Sequence[SamplingState]) -> Tensor:
    lines = [line for line, row in enumerate(rows) if row.constraint is not None]
    if not lines:
        return scores
    allowed = torch.stack([rows[line].allowed(scores.shape[-1]) for line in lines]).to(scores.device)
    return _change(scores, lines, lambda some: some.masked_fill(~allowed, -math.inf))


def _change(scores: Tensor, lines: Sequence[int], change: Callable[[Tensor], Tensor]) -> Tensor:
    """``scores`` with ``change`` made to ``lines`` of it."""
    if len(lines) == len(scores):
        return change(scores)
    where = _on(scores, lines)
    return scores.index_copy(0, where, change(scores[where]))


def _on(scores: Tensor, indices: Sequence[int]) -> Tensor:
    return torch.tensor(indices, dtype=torch.long, device=scores.device)


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
    setting: Callable[[SamplingParams], float],
    change: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """``change(scores, column of settings)`` on the rows that want it."""
    lines = [line for line, own in enumerate(params) if wants(own)]
    if not lines:
        return scores
    column = scores.new_tensor([setting(params[line]) for line in lines])[:, None]  # (n, 1)
    return _change(scores, lines, lambda some: change(some, column))


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
