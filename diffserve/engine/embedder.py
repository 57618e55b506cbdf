"""Embedder: text embeddings by the text encoder of an image model, a few windows between two image steps.

The embedding is the encoder's pooled output, projected where the encoder has a projection (CLIP; Radford et al. 2021,
section 2.4), at length 1; for several windows it is their mean, weighted by tokens. Prompt weights are ignored.
Windows of all requests share calls in turns, so that large requests delay no others, and results do not depend on
each other. Interactive requests come before batch work, except in every ``EQUAL_TURN``-th call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from diffserve.api.embedding_types import Embedded, EmbeddingEvent, EmbeddingRequest
from diffserve.api.errors import DiffserveError, InvalidRequest
from diffserve.engine.image.engine import Engine
from diffserve.engine.image.engines import ImageEngines
from diffserve.engine.stages import QueuedRequest, RequestQueue
from diffserve.runtime.kv import PoolBusy
from diffserve.runtime.text.encoding import TextEncoder
from diffserve.runtime.text.paged_encoder import MOST_WINDOWS

MAX_WAITING: Final = 256
EQUAL_TURN: Final = 8


class EmbeddedWindow(NamedTuple):
    """Token ids of one window of input ``place``, and the number of its text tokens."""

    place: int
    ids: tuple[int, ...]
    num_tokens: int


@dataclass(eq=False)
class QueuedEmbedding(QueuedRequest[EmbeddingRequest]):
    """Embedding request in progress; ``sums`` holds per input the token-weighted sum of window vectors."""

    next_input: int = 0
    pieces: deque[EmbeddedWindow] = field(default_factory=deque)
    sums: dict[int, Tensor] = field(default_factory=dict)
    num_tokens: int = 0

    def take(self, encoder: TextEncoder) -> EmbeddedWindow | None:
        """Return the next window or None; raise InvalidRequest naming the input that cannot be read."""
        while not self.pieces and self.next_input < self.request.num_inputs:
            place, text = self.next_input, self.request.inputs[self.next_input]
            try:
                windows = encoder.windows_of(text)
            except InvalidRequest as error:
                message = f"input[{place}]: {error.message}"
                raise InvalidRequest(message, param="input", code=error.code) from None
            self.pieces.extend(EmbeddedWindow(place, ids, count) for ids, count in windows)
            self.num_tokens += sum(count for _, count in windows)
            self.next_input += 1
        return self.pieces.popleft() if self.pieces else None

    @property
    def is_done(self) -> bool:
        """Return whether all windows are embedded."""
        return not self.pieces and self.next_input == self.request.num_inputs


class Embedder(RequestQueue[EmbeddingRequest]):
    """Queue of embedding requests; ``tick`` runs in the engine thread.

    Attributes:
        has_moved: Whether the latest tick made progress.
    """

    doing = "embedding these texts"
    goal = "the texts were embedded"
    entry = QueuedEmbedding

    def __init__(self, images: ImageEngines, clock: Callable[[], float]) -> None:
        super().__init__(images, MAX_WAITING, clock)
        self.has_moved = False
        self._most_windows = MOST_WINDOWS
        self._num_calls = 0

    def tick(self) -> list[EmbeddingEvent]:
        """Encode windows of one model and return the events."""
        events = self._expire()
        waiting = self._entries()
        is_equal = self._num_calls % EQUAL_TURN == EQUAL_TURN - 1
        if not is_equal:
            waiting.sort(key=_is_batch)
        is_served = False
        for live in waiting:
            try:
                engine = self._images.request_engine(live.request.model)
            except DiffserveError as error:
                events += self._fail([live], error)
                continue
            if engine is not None:
                same_model = [candidate for candidate in waiting if candidate.request.model == live.request.model]
                self._num_calls += 1
                is_served = self._serve(engine, same_model, events, is_equal=is_equal)
                break
        self.has_moved = is_served or bool(events)
        return events

    def _serve(
        self, engine: Engine, live: list[QueuedEmbedding], events: list[EmbeddingEvent], *, is_equal: bool
    ) -> bool:
        """Embed the next windows of ``live`` and extend ``events``; return whether a call was made."""
        batch: list[tuple[QueuedEmbedding, EmbeddedWindow]] = []
        conditioner = engine.runners.conditioner
        for owner in self._turns(live, is_equal=is_equal):
            try:
                piece = owner.take(conditioner.model.text.encoders[-1])
            except Exception as error:
                live.remove(owner)
                batch = [(other, taken) for other, taken in batch if other is not owner]
                events += self._fail([owner], error)
                continue
            if piece is not None:
                batch.append((owner, piece))
            if len(batch) == self._most_windows:
                break
        try:
            vectors = conditioner.embed([piece.ids for _, piece in batch])
        except PoolBusy:  # pages are short: fewer at a time, and later
            for owner, piece in reversed(batch):
                owner.pieces.appendleft(piece)
            self._most_windows = max(1, self._most_windows // 2)
            return False
        except Exception as error:
            events += self._fail(list(dict.fromkeys(owner for owner, _ in batch)), error)
            return True
        self._most_windows = min(MOST_WINDOWS, 2 * self._most_windows)
        for (owner, piece), vector in zip(batch, vectors, strict=True):
            share = max(1, piece.num_tokens) * F.normalize(vector.float(), dim=0).cpu()
            owner.sums[piece.place] = share if piece.place not in owner.sums else owner.sums[piece.place] + share
        self._turn(owner for owner, _ in batch)
        events += self._finish(engine, live)
        return True

    @staticmethod
    def _turns(live: list[QueuedEmbedding], *, is_equal: bool) -> Iterator[QueuedEmbedding]:
        """Yield requests round-robin while they have windows; batch work is last unless ``is_equal``."""
        before = [owner for owner in live if is_equal or not _is_batch(owner)]
        for each in (before, [owner for owner in live if owner not in before]):
            left = deque(each)
            while left:
                owner = left.popleft()
                yield owner
                if not owner.is_done and owner in live:
                    left.append(owner)

    def _turn(self, served: Iterable[QueuedEmbedding]) -> None:
        """Move served requests to the end of the queue."""
        with self._lock:
            for owner in served:
                if self._waiting.pop(owner.request.request_id, None) is not None:
                    self._waiting[owner.request.request_id] = owner

    def _finish(self, engine: Engine, live: list[QueuedEmbedding]) -> list[EmbeddingEvent]:
        done = [owner for owner in live if owner.is_done and self.cancel(owner.request.request_id)]
        events: list[EmbeddingEvent] = []
        for owner in done:
            vectors = torch.stack([F.normalize(owner.sums[place], dim=0) for place in range(owner.request.num_inputs)])
            events.append(
                Embedded(
                    request_id=owner.request.request_id,
                    model=engine.info.model_id,
                    dimensions=vectors.shape[1],
                    data=vectors.numpy().astype("<f4").tobytes(),
                    num_tokens=owner.num_tokens,
                )
            )
        return events


def _is_batch(live: QueuedEmbedding) -> bool:
    return live.request.priority == "batch"
