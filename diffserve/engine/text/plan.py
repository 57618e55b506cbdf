"""What one text tick may do, will do, did, and what the trace remembers of it. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from diffserve.engine.task import Failure
from diffserve.engine.text.task import Sequence, TextTask

if TYPE_CHECKING:
    from diffserve.runtime.decoding import Choice, Fork


@dataclass(frozen=True, slots=True)
class TickBudget:
    """What one tick may take; None: no limit beside the engine's own.

    max_tokens  tokens in the call of the network
    time_s      seconds that the call should take, by what earlier calls took; see ``TextCore.max_tokens``
    admits      whether texts that have no pages may be given some; not while others wait for pages longer already
    """

    max_tokens: int | None = None
    time_s: float | None = None
    admits: bool = True


@dataclass(eq=False, slots=True)
class Piece:
    """What a sequence brings to the tick's call: tokens ``start`` to ``end`` of its row, then ``draft``.

    num_draft  tokens that a draft model shall propose, in place of ``draft``
    """

    task: TextTask
    sequence: Sequence
    start: int
    end: int
    draft: list[int] = field(default_factory=list)
    num_draft: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens in the call."""
        return self.end - self.start + max(len(self.draft), self.num_draft)

    @property
    def is_last(self) -> bool:
        """Whether nothing of the row is left to compute, so that a token can be chosen."""
        return self.end == self.sequence.num_tokens

    @property
    def token_ids(self) -> list[int]:
        """What the network is given."""
        return [*self.sequence.row.token_ids[self.start : self.end], *self.draft]


@dataclass(frozen=True)
class TextPlan:
    """The work of one tick; every piece has its pages."""

    pieces: tuple[Piece, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens in the call."""
        return sum(piece.num_tokens for piece in self.pieces)

    @property
    def tasks(self) -> tuple[TextTask, ...]:
        """Everybody this tick touches, once."""
        return tuple(dict.fromkeys(piece.task for piece in self.pieces))


@dataclass
class TextOutcome:
    """What the runner reports back, read by ``TextScheduler.apply``.

    said     by text: the tokens chosen, one or more
    drafted  by text: how many tokens of a draft were checked
    forks    by beam search: which beam goes on from which
    """

    said: dict[TextTask, list[Choice]] = field(default_factory=dict)
    drafted: dict[TextTask, int] = field(default_factory=dict)
    forks: dict[TextTask, Fork] = field(default_factory=dict)
    failures: dict[TextTask, Failure] = field(default_factory=dict)
    forward_s: float = 0.0


@dataclass(frozen=True)
class TextTick:
    """What tick number ``tick`` ran. ``rows`` are (request_id, text_index, tokens computed, of them draft)."""

    tick: int
    rows: tuple[tuple[str, int, int, int], ...]
    wall_s: float

    @property
    def num_tokens(self) -> int:
        """Tokens in the call."""
        return sum(row[2] for row in self.rows)
