"""The mutable records of text generation: a live request, its texts, and the sequences that hold pages."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from diffserve.text_types import TextRequest, TextResult

if TYPE_CHECKING:
    from diffserve.runtime.decoding import BeamSearch, Choice, DecodingRow, TextStream
    from diffserve.runtime.kv import PageTable


class Stage(enum.Enum):
    """Where a text stands.

    WAITING    has no pages; also after a preemption
    FOLLOWING  waits for the first text of its request to compute the prompt that they share
    RUNNING    has pages
    DONE       finished, failed or cancelled
    """

    WAITING = "waiting"
    FOLLOWING = "following"
    RUNNING = "running"
    DONE = "done"


@dataclass(eq=False, slots=True)
class Sequence:
    """Tokens and the pages of those already computed.

    num_computed        leading tokens of ``row`` whose keys and values are in ``table``
    num_draft_computed  the same of the draft model and ``draft_table``
    """

    row: DecodingRow
    table: PageTable | None = None
    num_computed: int = 0
    draft_table: PageTable | None = None
    num_draft_computed: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""
        return len(self.row.token_ids)

    @property
    def num_pending(self) -> int:
        """Tokens still to be computed before the next one can be chosen: 1 while decoding."""
        return len(self.row.token_ids) - self.num_computed


@dataclass(eq=False, slots=True)
class TextTask:
    """One text on its way, or one beam search.

    sequences      one, or the beams
    choices        what was said so far; beams keep their own
    draft_limit    drafts are at most so long: grows while they are right, shrinks when they are wrong
    last_tick      when it last chose a token
    """

    live: LiveText
    text_index: int
    sequences: list[Sequence]
    stage: Stage = Stage.WAITING
    search: BeamSearch | None = None
    stream: TextStream | None = None
    choices: list[Choice] = field(default_factory=list)
    draft_limit: int = 0
    last_tick: int = 0

    @property
    def order(self) -> tuple[int, int]:
        """Arrival, which decides who goes first and who gives way."""
        return self.live.arrival, self.text_index

    @property
    def width(self) -> int:
        """Sequences it will run side by side."""
        return self.live.request.params.num_beams

    @property
    def is_decoding(self) -> bool:
        """Whether one more token of each sequence is all that the next choice needs."""
        return all(sequence.num_pending == 1 for sequence in self.sequences)


@dataclass(eq=False, slots=True)
class LiveText:
    """A request from submit to its terminal event. Times are clock readings in seconds."""

    request: TextRequest
    prompt_ids: list[int]
    seed: int
    submitted_s: float
    arrival: int = 0
    tasks: list[TextTask] = field(default_factory=list)
    results: list[TextResult] = field(default_factory=list)
    started_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float = 0.0
    cached_tokens: int | None = None
    draft_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def request_id(self) -> str:
        """The id the caller knows it by."""
        return self.request.request_id

    @property
    def followers(self) -> Iterable[TextTask]:
        """Texts that wait for the prompt to be computed."""
        return [task for task in self.tasks if task.stage is Stage.FOLLOWING]

    @property
    def has_started(self) -> bool:
        """Whether it has left the waiting room."""
        return self.started_s is not None

    @property
    def is_over(self) -> bool:
        """Whether all of its texts are done."""
        return all(task.stage is Stage.DONE for task in self.tasks)

    @property
    def deadline_at_s(self) -> float | None:
        """The clock reading at which the work is given up."""
        return None if self.request.deadline_s is None else self.submitted_s + self.request.deadline_s
