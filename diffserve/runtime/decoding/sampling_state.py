"""Random numbers of one sequence, and tokens drawn with them.

Each sequence has its own generator and uses one number for each output token, so its draws do not depend on other
sequences, on its place in the batch, or on whether a draft was accepted.
"""

from __future__ import annotations

import secrets
from array import array
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from itertools import islice
from typing import Any, Final, Literal, Self

import torch
from torch import Tensor

from diffserve.api.errors import InvalidRequest
from diffserve.api.sampling_params import SamplingParams
from diffserve.runtime.accelerators import float64_device
from diffserve.runtime.decoding.constraint import AnyConstraint
from diffserve.runtime.transfer import send

BLOCK: Final = 32


class Uniforms:
    """An endless row of numbers from [0, 1) in double precision; the same ``seed`` gives the same row.

    ``seed`` None takes one from the system.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = secrets.randbits(63) if seed is None else seed
        self._waiting: deque[float] = deque()

    def peek(self, count: int) -> list[float]:
        """Return the next ``count`` numbers without consuming them."""
        while len(self._waiting) < count:
            self._waiting.extend(torch.rand(BLOCK, generator=self._generator, dtype=torch.float64).tolist())
        return list(islice(self._waiting, count))

    def take(self, count: int) -> list[float]:
        """Return the next ``count`` numbers and consume them."""
        numbers = self.peek(count)
        for _ in range(count):
            self._waiting.popleft()
        return numbers

    @cached_property
    def _generator(self) -> torch.Generator:  # made when first needed: greedy rows need none
        return torch.Generator("cpu").manual_seed(self.seed)


def draw(weights: Tensor, numbers: Sequence[float]) -> list[int]:
    """Draw tokens with ``invert`` and wait for the result."""
    tokens: list[int] = invert(weights, numbers).tolist()
    return tokens


def invert(weights: Tensor, numbers: Sequence[float]) -> Tensor:
    """Draw one token id (n,) for each line of ``weights`` (n, V), not negative, by inverse transform sampling.

    Line i's token is the first whose cumulative weight exceeds ``numbers[i]`` times the line's sum, so a token of
    weight zero is never drawn. A device without float64 has the CPU draw, so that the tokens are the same everywhere.
    """
    place = float64_device(weights.device)
    cumulative = weights.to(place).cumsum(-1, dtype=torch.float64)  # (n, V)
    total = cumulative[:, -1:]
    level = send(torch.tensor(numbers, dtype=torch.float64), place)[:, None] * total
    below = torch.nextafter(total, torch.zeros_like(total))
    indices = torch.searchsorted(cumulative, torch.minimum(level, below), right=True)  # (n, 1)
    return indices[:, 0].clamp_(max=weights.shape[-1] - 1).to(weights.device)


FinishReason = Literal["stop", "length"]


class TokenCounts:
    """Distinct tokens of prompt and output, with their number in the output; 0 for tokens of the prompt only."""

    __slots__ = ("_counts", "_ids", "_places")

    def __init__(self, prompt_ids: Iterable[int]) -> None:
        self._ids = array("q", dict.fromkeys(prompt_ids))
        self._counts = array("f", bytes(4 * len(self._ids)))
        self._places = {token_id: place for place, token_id in enumerate(self._ids)}

    def add(self, token_id: int) -> None:
        """Count one more ``token_id`` in the output."""
        place = self._places.setdefault(token_id, len(self._ids))
        if place == len(self._ids):
            self._ids.append(token_id)
            self._counts.append(0.0)
        self._counts[place] += 1.0

    def copy(self) -> Self:
        """Return an independent copy of the counts."""
        twin = object.__new__(type(self))
        twin._ids, twin._counts, twin._places = self._ids[:], self._counts[:], self._places.copy()
        return twin

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Token ids (n,) int64 and counts (n,) float32: views, to be copied before the next ``add``."""
        return torch.frombuffer(self._ids, dtype=torch.int64), torch.frombuffer(self._counts, dtype=torch.float32)


class SamplingState:
    """Parameters, tokens, random numbers and constraint state of one sequence.

    Args:
        prompt_ids: Token ids of the prompt, at least one.
        end_ids: The model's end tokens; ``params.stop_token_ids`` are added.
        constraint: Limits the tokens; one object may serve many rows.
        seed: Replaces ``params.seed``; n answers to one prompt get seed, seed + 1, ...

    Raises InvalidRequest when the prompt is empty.
    """

    __slots__ = (
        "constraint",
        "counts",
        "num_prompt_tokens",
        "params",
        "state",
        "stop_ids",
        "token_ids",
        "uniforms",
    )

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        *,
        end_ids: Collection[int] = (),
        constraint: AnyConstraint | None = None,
        seed: int | None = None,
    ) -> None:
        if not prompt_ids:
            raise InvalidRequest("the prompt has no tokens; give at least one.", param="prompt", code="empty_prompt")
        self.params = params
        self.token_ids = list(prompt_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.stop_ids = frozenset(end_ids) | frozenset(params.stop_token_ids)
        self.constrain(constraint)
        self.uniforms = Uniforms(params.seed if seed is None else seed)
        self.counts = TokenCounts(self.token_ids) if params.has_penalties else None

    def constrain(self, constraint: AnyConstraint | None) -> None:
        """Apply ``constraint`` to the row; only before its first token."""
        self.constraint = constraint
        self.state: Any = constraint.start if constraint else None

    @property
    def output_ids(self) -> list[int]:
        """Return the output tokens so far, including a stop token."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        """Return the number of output tokens so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        """Reason that the sequence is over, a stop token or ``max_tokens``; None while it is not."""
        if self.num_output_tokens == 0:
            return None
        if self.token_ids[-1] in self.stop_ids:
            return "stop"
        return "length" if self.num_output_tokens >= self.params.max_tokens else None

    @property
    def hides_stops(self) -> bool:
        """Return whether stop tokens are still masked by ``min_tokens``."""
        return self.num_output_tokens < self.params.min_tokens and bool(self.stop_ids)

    @property
    def depends_on_history(self) -> bool:
        """Return whether earlier tokens change the sampling distribution beyond the logits."""
        return self.params.has_penalties or self.constraint is not None or self.hides_stops

    def append(self, token_id: int) -> None:
        """Append ``token_id`` and advance the state; choosing alone does not."""
        self.token_ids.append(token_id)
        if self.counts:
            self.counts.add(token_id)
        if self.constraint:
            self.state = self.constraint.advance(self.state, token_id)

    def fork(self) -> Self:
        """Return an independent copy that shares the random numbers: draw for only one of the two."""
        twin = object.__new__(type(self))
        for name in ("params", "num_prompt_tokens", "stop_ids", "constraint", "state", "uniforms"):
            setattr(twin, name, getattr(self, name))
        twin.token_ids = self.token_ids.copy()
        twin.counts = self.counts.copy() if self.counts else None
        return twin

    def allowed(self, vocab_size: int) -> Tensor:
        """(vocab_size,) bool mask of a row with a constraint. ``min_tokens`` gives way when only the end is allowed."""
        assert self.constraint is not None
        max_tokens = self.params.max_tokens
        mask = self.constraint.mask(self.state, vocab_size)
        mask = self.constraint.ending(self.state, mask, max_tokens - self.num_output_tokens, max_tokens)
        if not self.hides_stops:
            return mask
        longer = mask.clone()
        longer[[token_id for token_id in self.stop_ids if token_id < vocab_size]] = False
        return longer if longer.any() else mask

    def crop(self, draft: Sequence[int]) -> list[int]:
        """Return the part of ``draft`` worth checking: not past a stop token, the constraint, or ``max_tokens``."""
        room = self.params.max_tokens - self.num_output_tokens - 1  # a checked draft gives one token more
        cropped = list(draft[: max(room, 0)])
        stop = next((index for index, token_id in enumerate(cropped) if token_id in self.stop_ids), len(cropped))
        cropped = cropped[: stop + 1]
        return cropped[: self.constraint.num_allowed(self.state, cropped)] if self.constraint else cropped
