"""Adjustments of logits before the choice: bias, penalties, ``min_tokens``, the constraint, and then filters.

The order is that of transformers: bias, repetition penalty, presence and frequency penalties (which only vLLM has, at
this place), masked stop tokens, allowed words, temperature, top-k, top-p and min-p. Each is applied to all rows at
once that use it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from diffserve.api.sampling_params import SamplingParams
from diffserve.runtime.decoding.sampling_state import SamplingState
from diffserve.runtime.transfer import send

NUCLEUS_TOKENS: Final = 1024
"""Of a much larger vocabulary top-p sorts only so many of the best tokens, when these hold enough."""


def adjust(scores: Tensor, rows: Sequence[SamplingState]) -> Tensor:
    """Apply bias, penalties and masks to ``scores`` (B, V) float32; returns the same tensor if no row uses any."""
    scores = _add_bias(scores, rows)
    scores = _penalize(scores, rows)
    scores = _hide_stops(scores, rows)
    return _constrain(scores, rows)


def _add_bias(scores: Tensor, rows: Sequence[SamplingState]) -> Tensor:
    biased = [
        (line, token_id, value)
        for line, row in enumerate(rows)
        for token_id, value in row.params.logit_bias
        if token_id < scores.shape[-1]
    ]
    if not biased:
        return scores
    lines, tokens, values = zip(*biased, strict=True)
    where = tuple(send(torch.tensor([lines, tokens]), scores.device))
    return scores.index_put(where, send(torch.tensor(values), scores.device), accumulate=True)


def _penalize(scores: Tensor, rows: Sequence[SamplingState]) -> Tensor:
    lines = [line for line, row in enumerate(rows) if row.counts is not None]
    if not lines:
        return scores
    parts = [row.counts.tensors() for row in rows if row.counts is not None]
    tokens, counts = (torch.cat(column) for column in zip(*parts, strict=True))  # (n,) of all rows
    in_vocabulary = tokens < scores.shape[-1]  # a model may have more input tokens than output tokens
    lengths = torch.tensor([len(ids) for ids, _ in parts])
    params = [rows[line].params for line in lines]
    columns = [[p.repetition_penalty, p.frequency_penalty, p.presence_penalty] for p in params]
    settings = torch.cat([torch.tensor(columns).T.repeat_interleave(lengths, 1), counts[None]])[:, in_vocabulary]
    places = torch.stack([torch.tensor(lines).repeat_interleave(lengths), tokens])[:, in_vocabulary]
    factor, frequency, presence, count = send(settings, scores.device)
    where = tuple(send(places, scores.device))
    penalized = scores[where]
    penalized = torch.where(penalized < 0, penalized * factor, penalized / factor)
    return scores.index_put(where, penalized - frequency * count - presence * (count > 0))


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
    lines, tokens = send(torch.tensor(hidden).T.contiguous(), scores.device)
    return scores.index_put((lines, tokens), torch.full((), -math.inf, device=scores.device))


def _constrain(scores: Tensor, rows: Sequence[SamplingState]) -> Tensor:
    lines = [line for line, row in enumerate(rows) if row.constraint is not None]
    if not lines:
        return scores
    allowed = send(torch.stack([rows[line].allowed(scores.shape[-1]) for line in lines]), scores.device)
    return _change(scores, lines, lambda some: some.masked_fill(~allowed, -math.inf))


def _change(scores: Tensor, lines: Sequence[int], change: Callable[..., Tensor], *columns: Tensor) -> Tensor:
    """Return ``scores`` with ``change`` applied to ``lines``, with the same lines of ``columns`` as arguments."""
    if len(lines) == len(scores):
        return change(scores, *columns)
    where = send(torch.tensor(lines), scores.device)
    some = change(*(column.index_select(0, where) for column in (scores, *columns)))
    return scores.index_copy(0, where, some)


def distribution(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """(n, V) probabilities of rows that draw, from adjusted ``scores`` (n, V); temperatures are above 0."""
    return filtered(scores, params).softmax(-1)


def filtered(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """``scores`` (n, V) divided by the temperature, with -inf where a filter took a token out."""
    vocab_size = scores.shape[-1]
    max_top_k = max((p.top_k for p in params if p.top_k < vocab_size), default=0)
    filters: list[tuple[Callable[[SamplingParams], bool], Callable[[Tensor, Tensor], Tensor]]] = [
        (lambda p: p.temperature != 1.0, torch.div),
        (lambda p: 0 < p.top_k < vocab_size, partial(_top_k, max_top_k=max_top_k)),
        (lambda p: p.top_p < 1.0, _top_p),
        (lambda p: p.min_p > 0.0, _min_p),
    ]
    lines_by_filter = [
        [line for line, row_params in enumerate(params) if applies(row_params)] for applies, _ in filters
    ]
    if not any(lines_by_filter):
        return scores
    settings = torch.tensor([(p.temperature, min(p.top_k, vocab_size), 1.0 - p.top_p, p.min_p) for p in params])
    columns = send(settings.to(scores.dtype).T.contiguous(), scores.device)[..., None]  # (4, n, 1)
    for lines, column, (_, change) in zip(lines_by_filter, columns, filters, strict=True):
        if lines:
            scores = _change(scores, lines, change, column)
    return scores


def _top_k(scores: Tensor, counts: Tensor, max_top_k: int) -> Tensor:
    """Without the tokens that score less than the k-th; ties with it stay. ``most``: the largest of ``counts``."""
    best = scores.topk(max_top_k, dim=-1).values  # (n, most)
    threshold = best.gather(-1, counts.long() - 1)
    return scores.masked_fill(scores < threshold, -math.inf)


def _top_p(scores: Tensor, tails: Tensor) -> Tensor:
    """Mask the least likely tokens that together hold at most ``tails`` = 1 - top_p; the best one stays.

    Which of two methods is used depends on each row only, so its draws do not depend on other rows. On a CPU, where the
    check costs nothing, the second method is skipped when no row needs it.
    """
    if scores.shape[-1] < 8 * NUCLEUS_TOKENS:
        return _sorted_top_p(scores, tails)
    nucleus, enough = _nucleus(scores, tails)
    if scores.device.type != "cpu":
        return torch.where(enough[:, None], nucleus, _sorted_top_p(scores, tails))
    if not bool(enough.all()):
        nucleus[~enough] = _sorted_top_p(scores[~enough], tails[~enough])
    return nucleus


def _sorted_top_p(scores: Tensor, tails: Tensor) -> Tensor:
    """Mask from the least likely token up, as in transformers; of equal tokens the first are masked first."""
    values, tokens = torch.sort(scores, dim=-1, stable=True)
    removed = values.softmax(-1).cumsum(-1) <= tails
    removed[:, -1] = False
    gone = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, tokens, removed)
    return scores.masked_fill(gone, -math.inf)


def _nucleus(scores: Tensor, tails: Tensor) -> tuple[Tensor, Tensor]:
    """Keep tokens from the best down; also return for which rows (n,) the best ``NUCLEUS_TOKENS`` were enough."""
    best, tokens = scores.topk(NUCLEUS_TOKENS, dim=-1)
    probs = (best - scores.logsumexp(-1, keepdim=True)).exp()
    cumulative = probs.cumsum(-1)
    in_nucleus = cumulative - probs < 1.0 - tails  # better tokens do not reach top_p
    in_nucleus[:, 0] = True
    filtered_scores = torch.full_like(scores, -math.inf).scatter(-1, tokens, best.masked_fill(~in_nucleus, -math.inf))
    return filtered_scores, cumulative[:, -1] >= 1.0 - tails[:, 0]


def _min_p(scores: Tensor, shares: Tensor) -> Tensor:
    """Without the tokens that are less than ``shares`` times as likely as the likeliest, which stays."""
    probs = scores.softmax(-1)
    removed = probs < shares * probs.amax(-1, keepdim=True)
    removed.scatter_(-1, probs.argmax(-1, keepdim=True), False)
    return scores.masked_fill(removed, -math.inf)
