"""What happens to logits before anything is chosen: penalties, ``min_tokens``, and the constraint.

In the order of transformers: repetition penalty, presence and frequency penalties (which transformers has not, and
which come where vLLM has them), stop tokens hidden, allowed words. Each touches only the rows that ask for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from diffserve.runtime.decoding.sampling_state import SamplingState


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
    repetition, frequency, presence = _settings(scores, [rows[line] for line in lines]).repeat_interleave(lengths, 1)
    line_of = _on(scores, lines).repeat_interleave(lengths)
    known = tokens < scores.shape[-1]  # a model can read more tokens than it can say
    where = (line_of[known], tokens[known])
    found = scores[where]
    factor, count = repetition[known], counts[known]
    found = torch.where(found < 0, found * factor, found / factor)
    return scores.index_put(where, found - frequency[known] * count - presence[known] * (count > 0))


def _settings(scores: Tensor, rows: Sequence[SamplingState]) -> Tensor:
    """(3, rows): repetition, frequency and presence penalty."""
    params = [row.params for row in rows]
    columns = [[p.repetition_penalty, p.frequency_penalty, p.presence_penalty] for p in params]
    return scores.new_tensor(columns).T


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
    if len(lines) == len(rows):
        return scores.masked_fill(~allowed, -math.inf)
    where = _on(scores, lines)
    return scores.index_copy(0, where, scores[where].masked_fill(~allowed, -math.inf))


def _on(scores: Tensor, indices: Sequence[int]) -> Tensor:
    return torch.tensor(indices, dtype=torch.long, device=scores.device)
