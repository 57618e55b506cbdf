"""Tensor work of a text tick: propose drafts, run the mixed batch, choose tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diffserve.api.errors import InvalidRequest, NumericalError
from diffserve.engine.base_engine import failure_of
from diffserve.engine.text.task import ScheduledTokens, TextOutcome, TextPlan, TextTask
from diffserve.runtime.decoding import SamplingState, accept, choose_soon, draft_next
from diffserve.runtime.device_health import raise_if_sticky
from diffserve.runtime.language import LanguageRunner, TokenChunk
from diffserve.runtime.transfer import send

logger = logging.getLogger(__name__)


class TextRunner:
    """Runs plans. Failures are reported for the text they belong to; a single text's failure raises nothing."""

    def __init__(self, runner: LanguageRunner, draft_runner: LanguageRunner | None, clock: Callable[[], float]) -> None:
        self.runner = runner
        self.draft_runner = draft_runner
        self.clock = clock

    @torch.inference_mode()
    def run(self, plan: TextPlan) -> TextOutcome:
        """Run ``plan`` and return its outcome."""
        outcome = TextOutcome()
        draft_probs = self._draft([piece for piece in plan.pieces if piece.num_draft])
        started_s = self.clock()
        if plan.pieces:
            self._compute(plan.pieces, draft_probs, outcome)
        outcome.forward_s = self.clock() - started_s
        return outcome

    def read(self, outcome: TextOutcome) -> None:
        """Wait for the ``unread`` tokens of ``outcome``, and add them to it."""
        for tasks, unread_tokens in outcome.unread:
            try:
                choices = unread_tokens.read()
            except Exception as error:
                outcome.failures.update(dict.fromkeys(tasks, failure_of(error, "computing this text")))
                continue
            for task, choice in zip(tasks, choices, strict=True):
                if isinstance(choice, Exception):
                    outcome.failures[task] = failure_of(_constraint_error(task, choice), "computing this text")
                else:
                    outcome.choices[task] = [choice]
        outcome.unread = []

    def _compute(
        self, pieces: Sequence[ScheduledTokens], draft_probs: dict[ScheduledTokens, Tensor], outcome: TextOutcome
    ) -> None:
        """Compute all texts in one call; if it fails, each text in a separate call, to find the one at fault."""
        tasks = list(dict.fromkeys(piece.task for piece in pieces))
        try:
            batch = TextBatch.of(pieces, draft_probs)
            logits = self.runner.forward(batch.chunks)
        except Exception as error:
            if len(tasks) == 1:
                outcome.failures[tasks[0]] = failure_of(error, "computing this text")
                return
            for task in tasks:
                self._compute([piece for piece in pieces if piece.task is task], draft_probs, outcome)
            return
        self._choose(batch, logits, outcome)

    def _choose(self, batch: TextBatch, logits: Tensor, outcome: TextOutcome) -> None:
        for task, lines in batch.searches.items():
            assert task.search is not None
            try:
                outcome.forks[task] = task.search.step(logits.index_select(0, _places(lines, logits)))
                if task.search.is_done and not task.search.best(1):
                    raise _constraint_error(task, NumericalError("no beam has an allowed next token."))
            except Exception as error:
                outcome.failures[task] = failure_of(error, "computing this text")
        if not batch.rows:
            return
        row_logits = logits if batch.lines is None else logits.index_select(0, _places(batch.lines, logits))
        try:
            if not any(batch.drafts):
                outcome.unread.append((batch.tasks, choose_soon(row_logits, batch.rows)))
                return
            accepted = accept(row_logits, batch.rows, batch.drafts, batch.draft_probs)
        except Exception as error:
            outcome.failures.update(dict.fromkeys(batch.tasks, failure_of(error, "computing this text")))
            return
        for task, draft, choices in zip(batch.tasks, batch.drafts, accepted, strict=True):
            if isinstance(choices, Exception):
                outcome.failures[task] = failure_of(_constraint_error(task, choices, draft), "computing this text")
            else:
                outcome.choices[task] = choices
                outcome.drafted[task] = len(draft)

    # Drafts --------------------------------------------------------------------------------------------------------

    def _draft(self, pieces: Sequence[ScheduledTokens]) -> dict[ScheduledTokens, Tensor]:
        """Fill ``draft`` of each piece by the draft model, and return its distributions (len(draft), V).

        If the draft model fails, the texts go on without drafts.
        """
        try:
            return self._propose(pieces) if pieces else {}
        except Exception as error:
            raise_if_sticky(error)
            logger.exception("the draft model failed; this tick continues without drafts")
            for piece in pieces:
                piece.draft = []
            return {}
        finally:
            for piece in pieces:
                piece.num_draft = 0

    def _propose(self, pieces: Sequence[ScheduledTokens]) -> dict[ScheduledTokens, Tensor]:
        assert self.draft_runner is not None
        forks = {piece: piece.sequence.row.fork() for piece in pieces}
        probs: dict[ScheduledTokens, list[Tensor]] = {piece: [] for piece in pieces}
        computed = {piece: piece.sequence.num_draft_computed for piece in pieces}
        for step in range(max(piece.num_draft for piece in pieces)):
            active = [piece for piece in pieces if piece.num_draft > step]
            logits = self.draft_runner.forward([_draft_chunk(piece, forks[piece], computed[piece]) for piece in active])
            if not bool(torch.isfinite(logits).all()):
                raise ArithmeticError("its logits are not finite")
            tokens, distributions = draft_next(logits, [forks[piece] for piece in active])
            for piece, token_id, distribution in zip(active, tokens, distributions, strict=True):
                computed[piece] = len(forks[piece].token_ids)
                forks[piece].append(token_id)
                probs[piece].append(distribution)
        for piece in pieces:
            proposed = forks[piece].token_ids[piece.sequence.num_tokens :]
            piece.draft = piece.sequence.row.crop(proposed)
            piece.sequence.num_draft_computed = computed[piece]
        return {piece: torch.stack(probs[piece][: len(piece.draft)]) for piece in pieces if piece.draft}


def _constraint_error(task: TextTask, error: Exception, draft: Sequence[int] = ()) -> Exception:
    """Return the error of the constraint of ``task``, possibly within ``draft``, or else ``error``."""
    row = task.sequences[0].row
    if row.constraint is None:
        return error
    state = row.state
    for token_id in draft:
        state = row.constraint.advance(state, token_id)
    problem = row.constraint.problem(state)
    if not problem:
        return error
    message = f"response_format: the text cannot continue to match the schema ({problem})."
    return InvalidRequest(message, param="response_format", code="invalid_json_schema")


def _places(lines: Sequence[int], logits: Tensor) -> Tensor:
    return send(torch.tensor(lines, dtype=torch.int64), logits.device)


def _draft_chunk(piece: ScheduledTokens, fork: SamplingState, start: int) -> TokenChunk:
    table = piece.sequence.draft_table
    assert table is not None
    return TokenChunk(table, start, fork.token_ids[start:])


@dataclass(frozen=True)
class TextBatch:
    """Inputs of a tick's call.

    Attributes:
        chunks: One for each piece.
        tasks: Texts that choose a token in this tick; followers of a request directly after its first text.
        rows: Sampling states of ``tasks``.
        drafts: Draft of each row, may be empty.
        draft_probs: Distributions of each row's draft; None for a draft from prompt lookup.
        lines: Lines of the call's logits that belong to the rows, in their order; None for all.
        searches: Beam searches that make a step, with their lines.
    """

    chunks: tuple[TokenChunk, ...]
    tasks: tuple[TextTask, ...]
    rows: tuple[SamplingState, ...]
    drafts: tuple[Sequence[int], ...]
    draft_probs: tuple[Tensor | None, ...]
    lines: tuple[int, ...] | None
    searches: dict[TextTask, list[int]]

    @classmethod
    def of(cls, pieces: Sequence[ScheduledTokens], draft_probs: dict[ScheduledTokens, Tensor]) -> TextBatch:
        """Create the batch of ``pieces``, whose drafts are final."""
        chunks: list[TokenChunk] = []
        tasks: list[TextTask] = []
        members: list[tuple[SamplingState, Sequence[int], Tensor | None]] = []
        lines: list[int] = []
        searches: dict[TextTask, list[int]] = {}
        num_lines = 0
        for piece in pieces:
            table = piece.sequence.table
            assert table is not None
            num_logits = len(piece.draft) + 1 if piece.is_last else 0
            chunks.append(TokenChunk(table, piece.start, piece.token_ids, num_logits, piece.sequence.unread))
            piece_lines = range(num_lines, num_lines + num_logits)
            num_lines += num_logits
            if piece.task.search is not None:
                searches.setdefault(piece.task, []).extend(piece_lines)
            elif num_logits:
                followers = piece.task.live.followers if piece.task.text_index == 0 else ()
                for task in (piece.task, *followers):
                    tasks.append(task)
                    members.append((task.sequences[0].row, piece.draft, draft_probs.get(piece)))
                    lines += piece_lines
        rows, drafts, probs = zip(*members, strict=True) if members else ((), (), ())
        is_all = lines == list(range(num_lines))
        stepping = {
            task: search_lines for task, search_lines in searches.items() if len(search_lines) == len(task.sequences)
        }
        return cls(tuple(chunks), tuple(tasks), rows, drafts, probs, None if is_all else tuple(lines), stepping)
