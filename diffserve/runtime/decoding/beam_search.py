"""BeamSearch: the best of many continuations, as a state machine that knows nothing of models or caches.

The semantics are those of transformers' ``generate(num_beams=..., do_sample=False)``, arithmetic in float32 included:
at each step the 2 k best continuations of k beams (more with several end tokens), of which the finished ones among
the first k are kept if they are among the k best finished, and the k best unfinished ones go on. ::

    logits of the beams --step()--> for each new beam: which old one it forks from, and its token --> model --> ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from diffserve.api.errors import InvalidRequest, NumericalError
from diffserve.runtime.decoding.adjustments import adjust
from diffserve.runtime.decoding.sampling import Choice, bits, entropy_of, fractions
from diffserve.runtime.decoding.sampling_state import SamplingState
from diffserve.runtime.transfer import fetch, send

HOPELESS: Final = -1e9  # transformers' score of impossible beams


@dataclass(frozen=True, slots=True)
class Fork:
    """Next input of the model: new beam i is old beam ``parents[i]`` followed by the token ``token_ids[i]``."""

    parents: tuple[int, ...]
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished text. ``score`` is the sum of its adjusted logprobs, over its length ** ``length_penalty``."""

    choices: tuple[Choice, ...]
    score: float

    @property
    def token_ids(self) -> list[int]:
        """The output's tokens, the stop token that ended it included."""
        return [choice.token_id for choice in self.choices]


@dataclass(frozen=True, slots=True)
class _Candidates:
    """The best continuations of a step, best first: scores (K,), and for each its old beam, its choices, its end."""

    scores: Tensor
    parents: list[int]
    choices: list[tuple[Choice, ...]]
    ended: Tensor


class BeamSearch:
    """Beam search of one request, from ``row``, which holds the parameters and the prompt (or prompt and output).

    Run the model on ``rows`` (one at first, ``num_beams`` after), pass its logits to ``step``, move the caches by the
    Fork, until ``is_done``.

    Args:
        max_tokens: Replaces ``params.max_tokens`` if the context is shorter.
        is_stopped: Whether an output ends here for another reason than a stop token: a stop text.
    """

    def __init__(
        self,
        row: SamplingState,
        *,
        max_tokens: int | None = None,
        is_stopped: Callable[[Sequence[int]], bool] | None = None,
    ) -> None:
        self._params = row.params
        self._num_beams = row.params.num_beams
        self._num_kept = max(2, 1 + len(row.stop_ids)) * self._num_beams
        self._max_tokens = max_tokens or row.params.max_tokens
        self._is_stopped = is_stopped
        self.rows = [row.fork()]
        self._choices: list[tuple[Choice, ...]] = [()]
        self._scores = torch.full((self._num_beams,), HOPELESS)  # (k,) of the beams that go on
        self._scores[0] = 0.0
        self._finished: list[tuple[Choice, ...] | None] = [None] * self._num_beams
        self._finished_scores = torch.full((self._num_beams,), HOPELESS)  # (k,)
        self.is_done = False

    @property
    def num_steps(self) -> int:
        """Number of tokens in each active beam."""
        return len(self._choices[0])

    def step(self, logits: Tensor) -> Fork:
        """Process the logits (len(rows), V) after each beam, and return the model's next input.

        Raises NumericalError for logits that are not finite, InvalidRequest for more beams than the vocabulary allows,
        ValueError when there are not as many lines as beams.
        """
        if logits.shape[0] != len(self.rows) or self.is_done:
            raise ValueError(f"{len(self.rows)} beams, done: {self.is_done}, take no logits {tuple(logits.shape)}.")
        candidates = self._best(logits.float().log_softmax(-1))
        self._finish(candidates)
        fork = self._go_on(candidates)
        self.is_done = not self._may_improve() or bool(candidates.ended.all())
        return fork

    def best(self, count: int) -> list[Hypothesis]:
        """Return the ``count`` best finished texts, best first; fewer if there are not so many."""
        finished = zip(self._finished, self._finished_scores.tolist(), strict=True)
        return [Hypothesis(choices, score) for choices, score in finished if choices is not None][:count]

    def _best(self, logprobs: Tensor) -> _Candidates:
        """Return the best continuations by total score, which is the score so far plus the adjusted logprob."""
        vocab_size = logprobs.shape[-1]
        if self._num_kept > self._num_beams * vocab_size:
            raise InvalidRequest(
                f"num_beams is {self._num_beams} with {len(self.rows[0].stop_ids)} stop tokens; "
                f"a vocabulary of {vocab_size} is too small for that: give fewer stop tokens.",
                param="num_beams",
            )
        # the first step has one line for all beams; all but beam 0 are hopeless, as in transformers
        so_far = send(self._scores, logprobs.device)[:, None]  # (k, 1)
        totals = adjust(logprobs, self.rows).expand(self._num_beams, vocab_size) + so_far  # (k, V)
        top = totals.reshape(1, -1).topk(self._num_kept)
        lines = (top.indices[0] // vocab_size).clamp(max=len(self.rows) - 1)
        tokens = top.indices[0] % vocab_size
        entropies = entropy_of(logprobs)
        reals = [top.values[0], logprobs[lines, tokens], entropies[lines], entropies.sum().expand(self._num_kept)]
        facts_on_host = fetch(torch.stack([top.indices[0], *map(bits, reals)])).read()
        scores, logprob, spread, total = fractions(facts_on_host[1:])
        if not bool(total.isfinite().all()):
            raise NumericalError("the language model gave logits that are not finite; try another dtype.")
        places = [divmod(index, vocab_size) for index in facts_on_host[0].tolist()]
        parents = [min(parent, len(self.rows) - 1) for parent, _ in places]
        token_ids = [token_id for _, token_id in places]
        facts = zip(parents, token_ids, logprob.tolist(), spread.tolist(), strict=True)
        choices = [(*self._choices[parent], Choice(*fact)) for parent, *fact in facts]
        ended = torch.tensor([self._ends(sequence) for sequence in choices])
        return _Candidates(scores, parents, choices, ended)

    def _ends(self, choices: tuple[Choice, ...]) -> bool:
        if len(choices) >= self._max_tokens or choices[-1].token_id in self.rows[0].stop_ids:
            return True
        return self._is_stopped is not None and self._is_stopped([choice.token_id for choice in choices])

    def _finish(self, candidates: _Candidates) -> None:
        """Keep the best finished texts; of the new ones only those among the first ``num_beams`` candidates count."""
        counts = candidates.ended & (torch.arange(self._num_kept) < self._num_beams)
        new = candidates.scores / ((self.num_steps + 1) ** self._params.length_penalty) + (~counts) * HOPELESS
        merged = torch.cat([self._finished_scores, new])[None]
        newcomers = zip(candidates.choices, counts.tolist(), strict=True)
        sequences = [*self._finished, *(sequence if ended else None for sequence, ended in newcomers)]
        top = merged.topk(self._num_beams)
        self._finished_scores = top.values[0]
        self._finished = [sequences[index] for index in top.indices[0].tolist()]

    def _go_on(self, candidates: _Candidates) -> Fork:
        """Replace the beams by the best candidates that have not ended."""
        top = (candidates.scores + candidates.ended * HOPELESS)[None].topk(self._num_beams)
        self._scores = top.values[0]
        best_indices = top.indices[0].tolist()
        self._choices = [candidates.choices[index] for index in best_indices]
        parents = tuple(candidates.parents[index] for index in best_indices)
        token_ids = tuple(sequence[-1].token_id for sequence in self._choices)
        self.rows = [self.rows[parent].fork() for parent in parents]
        for row, token_id in zip(self.rows, token_ids, strict=True):
            row.append(token_id)
        return Fork(parents, token_ids)

    def _may_improve(self) -> bool:
        """Whether an active beam could still beat a finished one, by the rule of ``early_stopping``."""
        all_finished = None not in self._finished
        if self._params.early_stopping is True and all_finished:
            return False
        penalty = self._params.length_penalty
        patient = self._params.early_stopping == "never" and penalty > 0.0
        length = self._max_tokens if patient else self.num_steps
        best = self._scores[:1] / (length**penalty)  # (1,)
        worst = self._finished_scores.min() if all_finished else torch.tensor(HOPELESS)
        return bool(best > worst)
