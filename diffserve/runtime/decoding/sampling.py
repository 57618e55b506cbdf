"""Token choice, with log-probabilities: computed on the device and read asynchronously.

All results of a tick's tokens are one transfer of integers, with floats as their bits.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from diffserve.api.errors import ConfigError, NumericalError
from diffserve.runtime.decoding.adjustments import adjust, distribution
from diffserve.runtime.decoding.sampling_state import SamplingState, Uniforms, draw, invert
from diffserve.runtime.transfer import Fetched, fetch, send

LEAST_LOGPROB: Final = -1e30
"""Stands for -inf where it is multiplied by a probability of 0."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Chosen token. All numbers are of the model's distribution, before temperature, penalties and filters.

    Attributes:
        logprob: Natural logarithm of the token's probability.
        entropy: Entropy of the distribution in nats: 0 when certain, log(V) when uniform.
        top: (token id, logprob) of the ``params.logprobs`` most likely tokens, best first; may be empty.
    """

    token_id: int
    logprob: float
    entropy: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, eq=False)
class Chosen:
    """Tokens chosen on the device, with their facts for the host.

    Attributes:
        tokens: (n,) int64 on the device, so that the network can continue before they are read.
    """

    tokens: Tensor
    _facts: Fetched  # (n, 4 + 2 * widest) int64
    _num_top: tuple[int, ...]

    @property
    def is_here(self) -> bool:
        """Return whether reading would not block."""
        return self._facts.is_here

    def read(self) -> list[Choice | NumericalError]:
        """Return a Choice, or the error of its line, for each token; waits for the transfer."""
        facts = self._facts.read()
        integers = facts.tolist()
        floats = fractions(facts).tolist()
        widest = (facts.shape[1] - 4) // 2
        choices = []
        for ids, shares, count in zip(integers, floats, self._num_top, strict=True):
            top = tuple(zip(ids[4 : 4 + widest], shares[4 + widest :], strict=True))[:count]
            choices.append(_checked(Choice(ids[0], shares[2], shares[3], top), bool(ids[1])))
        return choices


def describe(logits: Tensor, scores: Tensor, tokens: Tensor, num_top: Sequence[int]) -> Chosen:
    """Start the transfer of log-probabilities and entropies of ``tokens``.

    Args:
        logits: (n, V) float32.
        scores: (n, V) scores the tokens were chosen by; the choice of a masked token is an error.
        tokens: (n,) int64 on the device of ``logits``.
        num_top: Number of most likely tokens that each line reports.
    """
    token_column = tokens[:, None]
    logprobs = logits.log_softmax(-1)
    possible = scores.gather(-1, token_column) > -torch.inf
    token_logprobs = logprobs.gather(-1, token_column)
    facts = [token_column, possible.long(), bits(token_logprobs), bits(entropy_of(logprobs)[:, None])]
    widest = min(max(num_top, default=0), logprobs.shape[-1])
    if widest:
        best = logprobs.topk(widest, dim=-1)
        facts += [best.indices, bits(best.values)]
    return Chosen(tokens, fetch(torch.cat(facts, 1)), tuple(num_top))


def entropy_of(logprobs: Tensor) -> Tensor:
    """(n,) entropies in nats of distributions given as logprobs (n, V); not finite when the logits were not."""
    return -(logprobs.exp() * logprobs.clamp_min(LEAST_LOGPROB)).sum(-1)


def bits(numbers: Tensor) -> Tensor:
    """Return the bits of float32 numbers as int64, to join them with integers; ``fractions`` is the inverse."""
    return numbers.view(torch.int32).long()


def fractions(integers: Tensor) -> Tensor:
    """Convert the int64 bit patterns ``integers`` back to float32."""
    return integers.int().view(torch.float32)


def _checked(choice: Choice, possible: bool) -> Choice | NumericalError:
    if not math.isfinite(choice.entropy):
        return NumericalError("the language model gave logits that are not finite; try another dtype.")
    if not possible:
        return NumericalError("no token can be generated: the model gives every allowed token the probability 0.")
    return choice


Draft = Sequence[int]


def choose(logits: Tensor, rows: Sequence[SamplingState]) -> list[Choice | NumericalError]:
    """Choose the next token of each row, from ``logits`` (B, V) of any floating dtype, which are not changed.

    A row with non-finite logits, or without an allowed token, gets a NumericalError; other rows are not affected.
    Raises ValueError when there are not as many lines as rows.
    """
    return choose_soon(logits, rows).read()


def choose_soon(logits: Tensor, rows: Sequence[SamplingState]) -> Chosen:
    """Choose the next token of each row on the device, without waiting; random numbers are consumed."""
    batch = SamplingBatch(logits, rows, [()] * len(rows))
    tokens = batch.own_tokens()
    for row in rows:
        if not row.params.is_greedy:
            row.uniforms.take(1)
    return describe(batch.logits, batch.scores, tokens, [row.params.logprobs or 0 for row in rows])


def accept(
    logits: Tensor,
    rows: Sequence[SamplingState],
    drafts: Sequence[Draft],
    draft_probs: Sequence[Tensor | None] | None = None,
) -> list[list[Choice] | NumericalError]:
    """Choose the tokens of each row: the part of its draft that the model agrees with, and one more.

    The draft may also end the text; then no token is added. The output's distribution is that of ``choose`` token by
    token. Without ``draft_probs`` even the tokens are the same, for the same seed.

    Args:
        logits: (sum of len(draft) + 1, V), the rows' lines one after another: after the row's last token, after
            draft[0], ..., after the full draft.
        rows: The sampling states.
        drafts: Token ids; empty for a row without a draft.
        draft_probs: (len(draft), V) distributions that the row's draft was drawn from; None for drafts from prompt
            lookup and for greedy rows.

    Raises:
        ValueError: Shapes do not fit.
    """
    if len(drafts) == len(rows) and not any(drafts):
        return [_choices_or_error([choice]) for choice in choose(logits, rows)]
    batch = SamplingBatch(logits, rows, drafts)
    accepted = batch.say(draft_probs or [None] * len(rows))
    lines = [line for span, tokens in zip(batch.spans, accepted, strict=True) for line in span[: len(tokens)]]
    tokens = send(torch.tensor([token_id for row_tokens in accepted for token_id in row_tokens]), logits.device)
    num_top = [batch.positions[line].params.logprobs or 0 for line in lines]
    choices = iter(describe(_some(batch.logits, lines), _some(batch.scores, lines), tokens, num_top).read())
    return [_choices_or_error(list(islice(choices, len(row_tokens)))) for row_tokens in accepted]


def draft_next(logits: Tensor, rows: Sequence[SamplingState]) -> tuple[list[int], Tensor]:
    """One token of a draft for each row from a draft model's ``logits`` (B, V), and the (B, V) distributions.

    ``rows`` are forks of the rows that the draft is for, each moved on by what was drafted so far. Stack the
    distributions to ``draft_probs`` of ``accept``; a greedy row's is all on the most likely token.
    """
    batch = SamplingBatch(logits, rows, [()] * len(rows))
    tokens = [row_tokens[0] for row_tokens in batch.say([None] * len(rows))]
    probs = F.one_hot(batch.scores.argmax(-1), logits.shape[-1]).float()  # (B, V)
    if batch.places is not None:
        probs.index_copy_(0, batch.places, batch.probs)
    return tokens, probs


def _choices_or_error(choices: list[Choice | NumericalError]) -> list[Choice] | NumericalError:
    errors = [choice for choice in choices if isinstance(choice, NumericalError)]
    return errors[0] if errors else [choice for choice in choices if isinstance(choice, Choice)]


class SamplingBatch:
    """Logits (N, V) of rows and of their drafts: ``len(draft) + 1`` lines for each row, one row after another.

    Attributes:
        logits: (N, V) float32.
        scores: (N, V) float32, adjusted.
        positions: N states, each as after the part of the draft before its line.
        spans: The lines of each row.
        drawn: The lines that are sampled, not greedy.
        places: ``drawn`` on the device, None if empty.
        probs: (len(drawn), V) distributions of these lines.

    Raises ValueError when the number of lines does not fit rows and drafts.
    """

    def __init__(self, logits: Tensor, rows: Sequence[SamplingState], drafts: Sequence[Draft]) -> None:
        ends = list(accumulate(len(draft) + 1 for draft in drafts))
        if len(drafts) != len(rows) or logits.ndim != 2 or len(logits) != (ends[-1] if ends else 0):
            raise ValueError(
                f"{len(rows)} rows with {len(drafts)} drafts take {ends[-1] if ends else 0} lines of logits, "
                f"not {tuple(logits.shape)}."
            )
        self.rows, self.drafts = rows, drafts
        self.spans = [range(end - len(draft) - 1, end) for end, draft in zip(ends, drafts, strict=True)]
        self.positions = [place for row, draft in zip(rows, drafts, strict=True) for place in _places(row, draft)]
        self.logits = logits.float()
        self.scores = adjust(self.logits, self.positions)
        self.drawn = [line for line, place in enumerate(self.positions) if not place.params.is_greedy]
        self.places = send(torch.tensor(self.drawn, dtype=torch.int64), logits.device) if self.drawn else None
        drawing = _some(self.scores, self.drawn, self.places)
        self.probs = distribution(drawing, [self.positions[line].params for line in self.drawn])

    def say(self, draft_probs: Sequence[Tensor | None]) -> list[list[int]]:
        """Return the tokens of each row; see :func:`accept`."""
        tokens = fetch(self.own_tokens()).read().tolist()
        accepted: list[list[int]] = []
        for row, draft, span, q in zip(self.rows, self.drafts, self.spans, draft_probs, strict=True):
            if q is not None and draft and not row.params.is_greedy:
                accepted.append(self._resampled(row, draft, span, q))
                continue
            accepted.append(matching(tokens[span.start : span.stop], draft, row.stop_ids))
            if not row.params.is_greedy:
                row.uniforms.take(len(accepted[-1]))
        return accepted

    def own_tokens(self) -> Tensor:
        """Return the model's token (N,) at each line, with the row's next random numbers, which are not consumed."""
        if self.places is None:
            return self.scores.argmax(-1)
        pairs = zip(self.rows, self.spans, strict=True)
        numbers = [number for row, span in pairs if not row.params.is_greedy for number in row.uniforms.peek(len(span))]
        tokens = invert(self.probs, numbers)
        if len(self.drawn) == len(self.positions):
            return tokens
        return self.scores.argmax(-1).index_copy_(0, self.places, tokens)

    def _resampled(self, row: SamplingState, draft: Draft, span: range, q: Tensor) -> list[int]:
        vocab_size = self.logits.shape[-1]
        if q.shape != (len(draft), vocab_size):
            raise ConfigError(
                f"the distributions of a draft of {len(draft)} tokens over {vocab_size} have the shape "
                f"{tuple(q.shape)}: the draft model must share the model's vocabulary."
            )
        first = bisect_left(self.drawn, span.start)
        return accept_or_resample(self.probs[first : first + len(span)], draft, q, row.uniforms, row.stop_ids)


def _places(row: SamplingState, draft: Draft) -> list[SamplingState]:
    """Return the row before each token of ``draft`` and after the last; the same row if history changes nothing."""
    if not draft or not row.depends_on_history:
        return [row] * (len(draft) + 1)
    places = [row]
    for token_id in draft:
        places.append(places[-1].fork())
        places[-1].append(token_id)
    return places


def _some(tensor: Tensor, lines: Sequence[int], places: Tensor | None = None) -> Tensor:
    """Return ``lines`` of ``tensor``, in rising order; ``places`` are the lines as a tensor on its device, if known."""
    if not lines or len(lines) == len(tensor):
        return tensor[: len(lines)]
    if places is None:
        places = send(torch.tensor(lines, dtype=torch.int64), tensor.device)
    return tensor.index_select(0, places)


def matching(tokens: Sequence[int], draft: Sequence[int], stop_ids: Collection[int]) -> list[int]:
    """Return the accepted tokens, given the model's ``tokens`` (k + 1) and a looked-up ``draft`` (k).

    These are the tokens up to and with the first that differs from the draft or ends the text.
    """
    accepted: list[int] = []
    for index, token_id in enumerate(tokens):
        accepted.append(token_id)
        if index == len(draft) or token_id != draft[index] or token_id in stop_ids:
            break
    return accepted


def accept_or_resample(
    probs: Tensor, draft: Sequence[int], draft_probs: Tensor, uniforms: Uniforms, stop_ids: Collection[int]
) -> list[int]:
    """Return the accepted tokens of ``draft`` (k), which was drawn from ``draft_probs`` (k, V).

    ``probs`` (k + 1, V) are the model's distributions.
    """
    for index, token_id in enumerate(draft):
        p, q = probs[index], draft_probs[index].to(probs)
        if uniforms.take(1)[0] * float(q[token_id]) >= float(p[token_id]):
            residual = (p - q).clamp_min(0)  # (V,); all zero only when p and q differ by rounding alone
            return [*draft[:index], *draw((residual if bool(residual.any()) else p)[None], uniforms.take(1))]
        if token_id in stop_ids:
            return list(draft[: index + 1])
    return [*draft, *draw(probs[-1:], uniforms.take(1))]
