"""RewriteJob: a wish on its way, from the first text request to the last answer. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from diffserve.api.rewrite_types import RewriteDelta, RewriteFinished, RewriteRequest
from diffserve.api.text_types import TextDelta, TextFinished, TextTimings, TextUsage
from diffserve.rewriting.cleaning import THINK, without_thoughts
from diffserve.rewriting.judging import Judge

COUNTED = TextUsage.__struct_fields__


class VisibleText:
    """The part of an answer that may be shown while it is still being said: thoughts are not."""

    def __init__(self) -> None:
        self._said = ""
        self._num_shown = 0

    def push(self, text: str) -> str:
        """What ``text`` adds to what is shown."""
        self._said += text
        visible = without_thoughts(self._said).lstrip()
        if THINK.startswith(visible):
            return ""
        new = visible[self._num_shown :]
        self._num_shown = max(self._num_shown, len(visible))
        return new


@dataclass(eq=False)
class RewriteJob:
    """A live rewrite.

    questions  text request id -> index of the first prompt that its texts are
    answers    what came back of them
    """

    request: RewriteRequest
    judge: Judge
    model_id: str
    questions: dict[str, int]
    answers: dict[str, TextFinished] = field(default_factory=dict)
    showing: dict[int, VisibleText] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Whether every question is answered."""
        return len(self.answers) == len(self.questions)

    def show(self, delta: TextDelta) -> Iterator[RewriteDelta]:
        """What is new to see, if anything is."""
        index = self.questions[delta.request_id] + delta.text_index
        text = self.showing.setdefault(index, VisibleText()).push(delta.text)
        if text and self.request.deltas:
            yield RewriteDelta(request_id=self.request.request_id, index=index, text=text)

    def finish(self) -> RewriteFinished:
        """The end: every answer, judged."""
        answers = [self.answers[text_id] for text_id in self.questions]
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
    """Questions run side by side: the first token of any, the slowest of the rest."""
    return TextTimings(
        queue_s=min(part.queue_s for part in parts),
        ttft_s=min(part.ttft_s for part in parts),
        tpot_s=max(part.tpot_s for part in parts),
        total_s=max(part.total_s for part in parts),
    )
