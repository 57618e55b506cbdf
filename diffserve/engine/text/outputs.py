"""Apply a tick's outcome to texts: append tokens, emit text, and detect the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from diffserve.api.text_types import (
    FinishReason,
    TextDelta,
    TextEvent,
    TextFinished,
    TextResult,
    TextTimings,
    TextUsage,
    TokenInfo,
)
from diffserve.engine.records import Stage
from diffserve.engine.text.drafts import DraftPolicy
from diffserve.engine.text.pages import SequencePages
from diffserve.engine.text.task import LiveText, ScheduledTokens, TextOutcome, TextTask
from diffserve.runtime.decoding import Choice, Hypothesis, TextStream
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
