"""From logits to tokens, for a batch in which every row has its own parameters.

``choose`` takes one line of logits for each row. ``accept`` takes more: a row that brought a draft of k tokens has
k + 1 lines, those after each token of the draft, and is told how many were right, and the token after them. Choosing
moves no row on: ``DecodingRow.append`` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch.nn.functional as F
from torch import Tensor

from diffserve.errors import NumericalError
from diffserve.runtime.decoding.choice import Choice, describe
from diffserve.runtime.decoding.lines import Draft, Lines
from diffserve.runtime.decoding.row import DecodingRow


def choose(logits: Tensor, rows: Sequence[DecodingRow]) -> list[Choice | NumericalError]:
    """The next token of each row, from ``logits`` (B, V) of any floating dtype, which are not changed.

    A row whose logits are not finite, or that may say nothing, gets a NumericalError in its place; its neighbours
    are not touched. Raises ValueError when there are not as many lines as rows.
    """
    accepted = accept(logits, rows, [()] * len(rows))
    return [found if isinstance(found, NumericalError) else found[0] for found in accepted]


def accept(
    logits: Tensor,
    rows: Sequence[DecodingRow],
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
    batch = Lines(logits, rows, drafts)
    said = batch.say(draft_probs or [None] * len(rows))
    kept = [line for span, tokens in zip(batch.spans, said, strict=True) for line in span[: len(tokens)]]
    tokens = [token_id for row_tokens in said for token_id in row_tokens]
    num_top = [batch.positions[line].params.logprobs or 0 for line in kept]
    choices = iter(describe(*batch.some(kept), tokens, num_top))
    return [_whole(list(islice(choices, len(row_tokens)))) for row_tokens in said]


def draft_next(logits: Tensor, rows: Sequence[DecodingRow]) -> tuple[list[int], Tensor]:
    """One token of a draft for each row from a draft model's ``logits`` (B, V), and the (B, V) distributions.

    ``rows`` are forks of the rows that the draft is for, each moved on by what was drafted so far. Stack the
    distributions to ``draft_probs`` of ``accept``; a greedy row's is all on the most likely token.
    """
    batch = Lines(logits, rows, [()] * len(rows))
    tokens = [said[0] for said in batch.say([None] * len(rows))]
    probs = F.one_hot(batch.scores.argmax(-1), logits.shape[-1]).float()  # (B, V)
    if batch.drawn:
        probs[batch.drawn] = batch.probs
    return tokens, probs


def _whole(choices: list[Choice | NumericalError]) -> list[Choice] | NumericalError:
    errors = [choice for choice in choices if isinstance(choice, NumericalError)]
    return errors[0] if errors else [choice for choice in choices if isinstance(choice, Choice)]
