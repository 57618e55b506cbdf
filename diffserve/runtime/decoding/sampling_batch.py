"""SamplingBatch: a batch of logits, whose they are, and what each row would say by itself."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from diffserve.errors import ConfigError
from diffserve.runtime.decoding.acceptance import accept_or_resample, matching
from diffserve.runtime.decoding.adjustments import adjust
from diffserve.runtime.decoding.filters import distribution
from diffserve.runtime.decoding.sampling_state import SamplingState
from diffserve.runtime.decoding.uniforms import draw

Draft = Sequence[int]


class SamplingBatch:
    """Logits (N, V) of rows and of their drafts: ``len(draft) + 1`` lines for each row, one row after another.

    logits     (N, V) float32
    scores     (N, V) float32, adjusted
    positions  N rows, each as it would be when the draft was right so far
    spans      the lines of each row
    drawn      the lines that are drawn at random, not greedily
    probs      (len(drawn), V) what they are drawn from

    Raises ValueError when the number of lines is not what rows and drafts take.
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
        self.probs = distribution(_some(self.scores, self.drawn), [self.positions[line].params for line in self.drawn])

    def say(self, draft_probs: Sequence[Tensor | None]) -> list[list[int]]:
        """The tokens that each row says; see :func:`diffserve.runtime.decoding.sampling.accept`."""
        tokens = self._own_tokens()
        said: list[list[int]] = []
        for row, draft, span, q in zip(self.rows, self.drafts, self.spans, draft_probs, strict=True):
            if q is not None and draft and not row.params.is_greedy:
                said.append(self._resampled(row, draft, span, q))
                continue
            said.append(matching(tokens[span.start : span.stop], draft, row.stop_ids))
            if not row.params.is_greedy:
                row.uniforms.take(len(said[-1]))
        return said

    def some(self, lines: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(logits, scores) of ``lines``, in rising order."""
        return _some(self.logits, lines), _some(self.scores, lines)

    def _own_tokens(self) -> list[int]:
        """What the row would say at each line, with the numbers it would use, which are not used up yet."""
        everything_is_drawn = len(self.drawn) == len(self.positions)
        tokens: list[int] = [0] * len(self.drawn) if everything_is_drawn else self.scores.argmax(-1).tolist()
        for line, token_id in zip(self.drawn, draw(self.probs, self._numbers()), strict=True):
            tokens[line] = token_id
        return tokens

    def _numbers(self) -> list[float]:
        pairs = zip(self.rows, self.spans, strict=True)
        return [number for row, span in pairs if not row.params.is_greedy for number in row.uniforms.peek(len(span))]

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
    """The row before each token of ``draft`` and after the last; itself each time when history changes nothing."""
    if not draft or not row.depends_on_history:
        return [row] * (len(draft) + 1)
    places = [row]
    for token_id in draft:
        places.append(places[-1].fork())
        places[-1].append(token_id)
    return places


def _some(tensor: Tensor, lines: Sequence[int]) -> Tensor:
    return tensor if len(lines) == len(tensor) else tensor[list(lines)]
