"""Policy for drafts: their source and length, adapted to how many were accepted."""

from __future__ import annotations

from typing import Final

from diffserve.api.bounds import check
from diffserve.api.text_types import Speculation, TextConfig, TextRequest
from diffserve.engine.text.pages import SequencePages
from diffserve.engine.text.task import ScheduledTokens, TextTask
from diffserve.runtime.decoding import PromptLookup
from diffserve.runtime.language import LanguageModel

PATIENCE: Final = 4
LOOK_EVERY: Final = 8
"""Where tokens may stay unread, a text in which no draft was found so often in a row is looked at in every so many-th
tick only."""


class DraftPolicy:
    """Adds drafts to the pieces of decoding texts while the tick has tokens left, and pages can be had without waiting.

    A draft is tokens that a constraint leaves no choice about, else what a draft model or the text itself suggests.
    """

    def __init__(self, config: TextConfig, pages: SequencePages, draft_model: LanguageModel | None) -> None:
        self.config = config
        self.pages = pages
        self.num_drafted = 0
        self.num_right = 0
        self._context_tokens = draft_model.info.context_tokens if draft_model else 0
        self._lookups = [
            PromptLookup(count, max_ngram=config.max_ngram, min_ngram=config.min_ngram)
            for count in range(config.num_draft_tokens + 1)
        ]

    def check(self, request: TextRequest) -> None:
        """Raise InvalidRequest if the request names a kind of speculation that is not available."""
        check(
            request.speculation != "draft" or self.pages.draft_tenant is not None,
            'speculation is "draft", and this engine has no draft model; choose "auto", "prompt_lookup" or "off".',
            "speculation",
        )

    def kind(self, request: TextRequest) -> Speculation:
        """Return the kind of speculation of ``request``: "draft", "prompt_lookup" or "off"."""
        if self.config.num_draft_tokens == 0 or request.speculation == "off":
            return "off"
        if request.speculation != "auto":
            return request.speculation
        return "prompt_lookup" if self.pages.draft_tenant is None else "draft"

    def extend(self, piece: ScheduledTokens, num_left: int) -> int:
        """Give ``piece`` a draft of at most ``num_left`` tokens; returns how many tokens that adds to the tick.

        None for beams, nor while other texts wait to go on from the same prompt.
        """
        task = piece.task
        kind = self.kind(task.live.request)
        limit = min(task.draft_limit, num_left)
        is_shared = task.search is not None or (task.text_index == 0 and any(task.live.followers))
        if kind == "off" or limit < 1 or is_shared or piece.sequence.unread is not None:
            return 0
        row = piece.sequence.row
        if kind == "prompt_lookup":
            return self._look(piece, self._lookups[limit])
        forced = row.crop(row.constraint.forced(row.state, limit)) if row.constraint is not None else []
        return self._take(piece, forced) if forced else self._ask(piece, limit, num_left)

    def may_go_unread(self, task: TextTask, tick: int) -> bool:
        """Whether the token chosen in tick number ``tick`` may stay unread while the next tick is planned.

        It must be read if it affects which tokens may follow, and if a draft will be looked for: texts without a draft
        for a while look again every ``LOOK_EVERY`` ticks, all in the same tick.
        """
        if task.search is not None or task.live.followers or task.sequences[0].row.depends_on_history:
            return False
        kind = self.kind(task.live.request)
        return kind == "off" or (kind != "draft" and task.num_misses >= PATIENCE and (tick + 1) % LOOK_EVERY > 0)

    def learn(self, task: TextTask, num_drafted: int, num_right: int) -> None:
        """Lengthen drafts while they are accepted, shorten them otherwise."""
        task.live.draft_tokens += num_drafted
        task.live.accepted_tokens += num_right
        self.num_drafted += num_drafted
        self.num_right += num_right
        if num_right == num_drafted:
            task.draft_limit = min(self.config.num_draft_tokens, 2 * task.draft_limit)
        elif num_right < (num_drafted + 1) // 2:
            task.draft_limit = max(1, task.draft_limit // 2)

    def _look(self, piece: ScheduledTokens, lookup: PromptLookup) -> int:
        row = piece.sequence.row
        if row.constraint is None:
            draft = lookup.propose(row.token_ids)
        else:
            draft = lookup.propose_allowed(row.token_ids, row.constraint, row.state)
        piece.task.num_misses = 0 if draft else piece.task.num_misses + 1
        return self._take(piece, row.crop(draft))

    def _take(self, piece: ScheduledTokens, draft: list[int]) -> int:
        if not draft or not self.pages.reserve(piece.sequence, piece.end + len(draft)):
            return 0
        piece.draft = draft
        return len(draft)

    def _ask(self, piece: ScheduledTokens, limit: int, num_left: int) -> int:
        """Schedule a draft-model proposal; tokens the draft model must read first count against the budget."""
        sequence = piece.sequence
        room = sequence.row.params.max_tokens - sequence.row.num_output_tokens - 1
        count = min(limit, room, self._context_tokens - piece.end)
        behind = sequence.num_tokens - sequence.num_draft_computed
        if count < 1 or behind > num_left or not self.pages.reserve(sequence, piece.end + count):
            return 0
        if not self.pages.reserve_draft(sequence, piece.end + count - 1, piece.task.live.request.cache_salt):
            return 0
        piece.num_draft = count
        return count
