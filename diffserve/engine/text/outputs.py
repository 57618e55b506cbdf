"""Apply a tick's outcome to texts: append tokens, emit text, detect the end, and adapt the drafts of the next tick."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from diffserve.api.bounds import check
from diffserve.api.text_types import (
    FinishReason,
    Speculation,
    TextConfig,
    TextDelta,
    TextEvent,
    TextFinished,
    TextRequest,
    TextResult,
    TextTimings,
    TextUsage,
    TokenInfo,
)
from diffserve.engine.records import Stage
from diffserve.engine.text.pages import SequencePages
from diffserve.engine.text.task import LiveText, ScheduledTokens, TextOutcome, TextTask
from diffserve.runtime.decoding import Choice, Hypothesis, PromptLookup, TextStream
from diffserve.runtime.language import LanguageModel


class TextOutputs:
    """Advances texts and writes their events. ``num_output_tokens`` and ``entropy_sum`` count over all texts."""

    def __init__(self, pages: SequencePages, drafts: DraftPolicy, model: LanguageModel) -> None:
        self.pages = pages
        self.drafts = drafts
        self.model = model
        self.num_output_tokens = 0
        self.entropy_sum = 0.0

    def mark_computed(self, piece: ScheduledTokens, now_s: float) -> None:
        """Record that the piece's keys and values are written; draft tokens do not count yet."""
        piece.sequence.num_computed = piece.end
        live = piece.task.live
        if live.started_s is None:
            live.started_s = now_s
        if not piece.is_last:
            self.pages.settle(piece.sequence)

    def apply_choices(self, task: TextTask, outcome: TextOutcome, now_s: float) -> Iterator[TextEvent]:
        """Append the chosen tokens of ``task``; its stage is DONE if they end the text."""
        live = task.live
        live.first_token_s = now_s if live.first_token_s is None else live.first_token_s
        live.last_token_s = now_s
        if task.search is not None:
            yield from self._searched(task, outcome)
            return
        choices = outcome.choices[task]
        task.sequences[0].unread = None
        pieces, reason = self._take(task, choices)
        if outcome.drafted.get(task):
            self.drafts.learn(task, outcome.drafted[task], len(choices) - 1)
        sequence = task.sequences[0]
        sequence.num_computed = sequence.num_tokens - 1
        self.pages.settle(sequence)
        if reason is not None:
            assert task.stream is not None
            pieces.append(task.stream.finish())
            task.stage = Stage.DONE
            live.results.append(self._result(task, task.text_index, task.choices, task.stream, reason))
        if live.request.deltas:
            new = task.choices[-len(choices) :] if choices else []
            yield self._delta(live, task.text_index, "".join(pieces), new, reason)

    def finished(self, live: LiveText, now_s: float) -> TextFinished:
        """Return the final event of a request whose texts are all done."""
        results = tuple(sorted(live.results, key=lambda result: result.text_index))
        return TextFinished(
            request_id=live.request_id,
            results=results,
            usage=TextUsage(
                prompt_tokens=len(live.prompt_ids),
                output_tokens=sum(len(result.token_ids) for result in results),
                cached_tokens=live.cached_tokens or 0,
                draft_tokens=live.draft_tokens,
                accepted_tokens=live.accepted_tokens,
                device_s=live.device_s,
            ),
            timings=timings(live, results, now_s),
        )

    def _take(self, task: TextTask, choices: list[Choice]) -> tuple[list[str], FinishReason | None]:
        """Append tokens up to the one that ends the text; return the pieces of text and the finish reason."""
        assert task.stream is not None
        row, pieces = task.sequences[0].row, []
        for index, choice in enumerate(choices):
            row.append(choice.token_id)
            task.choices.append(choice)
            self.num_output_tokens += 1
            self.entropy_sum += choice.entropy
            if choice.token_id not in row.stop_ids:
                pieces.append(task.stream.push(choice.token_id))
            reason = "stop" if task.stream.stopped_by is not None else row.finish_reason
            if reason is not None:
                del choices[index + 1 :]
                return pieces, reason
        return pieces, None

    def _searched(self, task: TextTask, outcome: TextOutcome) -> Iterator[TextEvent]:
        """Apply a step of a beam search; the texts are known only at its end."""
        assert task.search is not None
        self.pages.rearrange(task, outcome.forks[task].parents)
        for sequence in task.sequences:
            self.pages.settle(sequence)
        if not task.search.is_done:
            return
        task.stage = Stage.DONE
        for index, hypothesis in enumerate(task.search.best(task.live.request.num_texts)):
            yield from self._hypothesis(task, index, hypothesis)

    def _hypothesis(self, task: TextTask, index: int, hypothesis: Hypothesis) -> Iterator[TextEvent]:
        live, row = task.live, task.sequences[0].row
        stream = TextStream(self.model.tokenizer, stop=live.request.params.stop, context_ids=live.prompt_ids)
        ends = hypothesis.token_ids[-1] in row.stop_ids
        pieces = [stream.push(token_id) for token_id in (hypothesis.token_ids[:-1] if ends else hypothesis.token_ids)]
        pieces.append(stream.finish())
        reason: FinishReason = "stop" if ends or stream.stopped_by is not None else "length"
        live.results.append(self._result(task, index, hypothesis.choices, stream, reason, hypothesis.score))
        self.num_output_tokens += len(hypothesis.choices)
        self.entropy_sum += sum(choice.entropy for choice in hypothesis.choices)
        if live.request.deltas:
            yield self._delta(live, index, "".join(pieces), hypothesis.choices, reason)

    def _delta(
        self, live: LiveText, index: int, text: str, choices: Sequence[Choice], reason: FinishReason | None
    ) -> TextDelta:
        return TextDelta(
            request_id=live.request_id,
            text_index=index,
            text=text,
            token_ids=tuple(choice.token_id for choice in choices),
            tokens=self._infos(live, choices),
            finish_reason=reason,
        )

    def _result(
        self,
        task: TextTask,
        index: int,
        choices: Sequence[Choice],
        stream: TextStream,
        reason: FinishReason,
        score: float | None = None,
    ) -> TextResult:
        return TextResult(
            text_index=index,
            text=stream.text,
            token_ids=tuple(choice.token_id for choice in choices),
            finish_reason=reason,
            stop_text=stream.stopped_by,
            tokens=self._infos(task.live, choices),
            mean_entropy=sum(choice.entropy for choice in choices) / len(choices),
            score=score,
        )

    def _infos(self, live: LiveText, choices: Sequence[Choice]) -> tuple[TokenInfo, ...]:
        if live.request.params.logprobs is None:
            return ()
        return tuple(
            TokenInfo(
                token_id=choice.token_id,
                text=self._spell(choice.token_id),
                logprob=choice.logprob,
                entropy=choice.entropy,
                top=tuple((self._spell(token_id), token_id, logprob) for token_id, logprob in choice.top),
            )
            for choice in choices
        )

    def _spell(self, token_id: int) -> str:
        text: str = self.model.tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        return text


def timings(live: LiveText, results: Sequence[TextResult], now_s: float) -> TextTimings:
    """Return the timings of a finished request; its texts run concurrently, so the longest one counts."""
    first_s = live.first_token_s if live.first_token_s is not None else now_s
    num_later = max(len(result.token_ids) for result in results) - 1
    return TextTimings(
        queue_s=(live.started_s if live.started_s is not None else now_s) - live.submitted_s,
        ttft_s=first_s - live.submitted_s,
        tpot_s=(live.last_token_s - first_s) / num_later if num_later else 0.0,
        total_s=now_s - live.submitted_s,
    )


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
