"""The mutable records of text generation: a live request, its texts, and the sequences that hold pages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from diffserve.api.text_types import TextRequest, TextResult
from diffserve.api.types import Priority
from diffserve.engine.records import FailureReason, Live, Stage

if TYPE_CHECKING:
    from concurrent.futures import Future

    from torch import Tensor

    from diffserve.runtime.decoding import (
        AnyConstraint,
        BeamSearch,
        Choice,
        Chosen,
        Fork,
        SamplingState,
        TextStream,
    )
    from diffserve.runtime.kv import PageTable


@dataclass(eq=False, slots=True)
class Sequence:
    """Tokens of a text, and the pages that hold keys and values of the computed ones.

    Attributes:
        num_computed: Number of leading tokens of ``row`` whose keys and values are in ``table``.
        num_draft_computed: Number of leading tokens that the draft model has computed into ``draft_table``.
        unread: (1,) the last token, while it is still on the device.
    """

    row: SamplingState
    table: PageTable | None = None
    num_computed: int = 0
    draft_table: PageTable | None = None
    num_draft_computed: int = 0
    unread: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Return the tokens of prompt and output, including the unread one."""
        return len(self.row.token_ids) + (self.unread is not None)

    @property
    def num_pending(self) -> int:
        """Return the tokens to compute before the next choice: 1 while decoding, 0 if there is no next token."""
        if self.unread is not None and self.row.num_output_tokens + 1 >= self.row.params.max_tokens:
            return 0
        return self.num_tokens - self.num_computed


@dataclass(eq=False, slots=True)
class TextTask:
    """One text of a request, or one beam search.

    Attributes:
        sequences: One sequence, or the beams.
        choices: Tokens generated so far; beams have their own.
        draft_limit: Largest length of a draft; grows while drafts are accepted, shrinks when they are rejected.
        num_misses: Number of consecutive lookups without a draft.
        last_tick: The latest tick in which the text chose a token.
    """

    live: LiveText
    text_index: int
    sequences: list[Sequence]
    stage: Stage = Stage.WAITING
    search: BeamSearch | None = None
    stream: TextStream | None = None
    choices: list[Choice] = field(default_factory=list)
    draft_limit: int = 0
    num_misses: int = 0
    last_tick: int = 0

    @property
    def order(self) -> tuple[float, int, int]:
        """Return the scheduling order: earlier tasks run first and are preempted last."""
        return self.live.turn, self.live.arrival, self.text_index

    @property
    def is_decoding(self) -> bool:
        """Return whether each sequence needs exactly one more token for the next choice."""
        return all(sequence.num_pending == 1 for sequence in self.sequences)


@dataclass(eq=False, slots=True)
class LiveText(Live):
    """A request from submission to its terminal event. Times are clock readings in seconds.

    Attributes:
        starts: Start in the virtual time of ``pages.Turns``; ``turn`` orders the requests.
        compiling: Constraint of its texts while it is compiled.
        device_s: Its share of the ticks so far.
    """

    request: TextRequest
    prompt_ids: list[int]
    seed: int
    submitted_s: float
    arrival: int = 0
    starts: float = 0.0
    turn: float = 0.0
    tasks: list[TextTask] = field(default_factory=list)
    results: list[TextResult] = field(default_factory=list)
    started_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float = 0.0
    cached_tokens: int | None = None
    draft_tokens: int = 0
    accepted_tokens: int = 0
    compiling: Future[AnyConstraint] | None = None
    device_s: float = 0.0

    @property
    def line(self) -> tuple[str, Priority]:
        """Return the queue of the request: one for each client and priority."""
        return self.request.client, self.request.priority

    @property
    def followers(self) -> list[TextTask]:
        """Return the texts that wait for the prompt to be computed."""
        return [task for task in self.tasks if task.stage is Stage.FOLLOWING]

    def constrain(self, constraint: AnyConstraint) -> None:
        """Apply ``constraint`` to every text before its first token."""
        for task in self.tasks:
            task.sequences[0].row.constrain(constraint)

    @property
    def has_started(self) -> bool:
        """Return whether the request has left the waiting queue."""
        return self.started_s is not None


@dataclass(eq=False, slots=True)
class ScheduledTokens:
    """Tokens of a sequence in a tick's call: ``start`` to ``end`` of its row, then ``draft``.

    ``num_draft`` is the number of tokens that a draft model shall propose for ``draft``.
    """

    task: TextTask
    sequence: Sequence
    start: int
    end: int
    draft: list[int] = field(default_factory=list)
    num_draft: int = 0

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens in the call."""
        return self.end - self.start + max(len(self.draft), self.num_draft)

    @property
    def is_last(self) -> bool:
        """Return whether the row is complete after this piece, so that a token can be chosen."""
        return self.end == self.sequence.num_tokens

    @property
    def token_ids(self) -> list[int]:
        """Return the input token ids; 0 stands for a token that is not read yet."""
        token_ids = self.sequence.row.token_ids[self.start : self.end]
        return [*token_ids, *[0] * (self.end - self.start - len(token_ids)), *self.draft]


@dataclass(frozen=True)
class TextPlan:
    """The work of one tick; every piece has its pages."""

    pieces: tuple[ScheduledTokens, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens in the call."""
        return sum(piece.num_tokens for piece in self.pieces)

    @property
    def tasks(self) -> tuple[TextTask, ...]:
        """Return the tasks of this tick without duplicates."""
        return tuple(dict.fromkeys(piece.task for piece in self.pieces))


@dataclass
class TextOutcome:
    """Results of the runner for ``TextScheduler.apply``.

    Attributes:
        choices: Chosen tokens of each text, one or more.
        drafted: Number of checked draft tokens of each text.
        forks: Parent beams of each beam search.
        unread: Texts whose next token is still on the device, one each, with the source of ``choices``.
    """

    choices: dict[TextTask, list[Choice]] = field(default_factory=dict)
    drafted: dict[TextTask, int] = field(default_factory=dict)
    forks: dict[TextTask, Fork] = field(default_factory=dict)
    failures: dict[TextTask, FailureReason] = field(default_factory=dict)
    unread: list[tuple[tuple[TextTask, ...], Chosen]] = field(default_factory=list)
    forward_s: float = 0.0


@dataclass(frozen=True)
class TextTick:
    """Record of tick number ``tick``. ``rows`` are (request_id, text_index, computed tokens, drafts among them)."""

    tick: int
    rows: tuple[tuple[str, int, int, int], ...]
    wall_s: float

    @property
    def num_tokens(self) -> int:
        """Tokens in the call."""
        return sum(row[2] for row in self.rows)
