"""State of a running rewrite, from its first text request to the last answer, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from diffserve.api.rewrite_types import RewriteDelta, RewriteFinished, RewriteRequest
from diffserve.api.text_types import TextDelta, TextFinished, TextTimings, TextUsage
from diffserve.rewriting.cleaning import THINK, without_thoughts
from diffserve.rewriting.judging import Judge

COUNTED = TextUsage.__struct_fields__


class VisibleText:
    """Streams the visible part of an answer while it is generated; thoughts are hidden."""

    def __init__(self) -> None:
        self._answer = ""
        self._num_shown = 0

    def push(self, text: str) -> str:
        """Append ``text`` to the answer and return the newly visible part."""
        self._answer += text
        visible = without_thoughts(self._answer).lstrip()
        if THINK.startswith(visible):
            return ""
        new = visible[self._num_shown :]
        self._num_shown = max(self._num_shown, len(visible))
        return new


@dataclass(eq=False)
class RewriteJob:
    """A running rewrite.

    Attributes:
        request: The rewrite request.
        judge: Decides whether answers are accepted.
        model_id: Name of the language model.
        first_indices: Index of the first prompt of each text request, by text request id.
        answers: Finished text requests by id.
        showing: Visible text of each prompt by index.
    """

    request: RewriteRequest
    judge: Judge
    model_id: str
    first_indices: dict[str, int]
    answers: dict[str, TextFinished] = field(default_factory=dict)
    showing: dict[int, VisibleText] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Whether every text request has finished."""
        return len(self.answers) == len(self.first_indices)

    def show(self, delta: TextDelta) -> Iterator[RewriteDelta]:
        """Yield a delta event if ``delta`` adds visible text and the request wants deltas."""
        index = self.first_indices[delta.request_id] + delta.text_index
        text = self.showing.setdefault(index, VisibleText()).push(delta.text)
        if text and self.request.deltas:
            yield RewriteDelta(request_id=self.request.request_id, index=index, text=text)

    def finish(self) -> RewriteFinished:
        """Build the final event with all accepted or rejected answers."""
        answers = [self.answers[text_id] for text_id in self.first_indices]
        results = [result for answer in answers for result in answer.results]
        force = self.request.options.force
        return RewriteFinished(
            request_id=self.request.request_id,
            rewrites=tuple(self.judge.rewrite(self.request.wish, result, force=force) for result in results),
            style=self.judge.style.name,
            model=self.model_id,
            usage=TextUsage(**{name: sum(getattr(answer.usage, name) for answer in answers) for name in COUNTED}),
            timings=_timings([answer.timings for answer in answers]),
        )


def _timings(parts: list[TextTimings]) -> TextTimings:
    """Combine timings of concurrent requests: the earliest queue exit and first token, and the slowest rate and end."""
    return TextTimings(
        queue_s=min(part.queue_s for part in parts),
        ttft_s=min(part.ttft_s for part in parts),
        tpot_s=max(part.tpot_s for part in parts),
        total_s=max(part.total_s for part in parts),
    )
