"""OpenAI's response objects for results of the language model: complete and as chunks of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from diffserve.api.text_types import FinishReason, TextDelta, TextFinished, TextResult, TextUsage, TokenInfo
from diffserve.service.endpoint import RequestPlan
from diffserve.service.texts.texts import CheckedTexts

Json = dict[str, Any]
IMPOSSIBLE = -9999.0


class ChatAnswers:
    """Format of ``/v1/chat/completions``; ``first_index`` is the choice of text 0 of a prompt."""

    chunk_kind = "chat.completion.chunk"

    def answer(self, plan: CheckedTexts, finished: Sequence[TextFinished]) -> Json:
        """Return a "chat.completion" object."""
        choices: list[Json] = [
            {
                "index": index,
                "message": {"role": "assistant", "content": result.text, "refusal": None, "annotations": []},
                "logprobs": self._logprobs(plan, result.tokens, result.finish_reason),
                "finish_reason": result.finish_reason,
            }
            for index, result in _numbered_results(finished)
        ]
        return _answer(plan, "chat.completion", choices, finished)

    def opening(self, plan: CheckedTexts, first_index: int, num_texts: int) -> Iterator[Json]:
        """Yield a chunk with the role for each text."""
        for index in range(first_index, first_index + num_texts):
            yield self._chunk(plan, index, {"role": "assistant", "content": "", "refusal": None}, None, None)

    def delta(self, plan: CheckedTexts, first_index: int, delta: TextDelta) -> Iterator[Json]:
        """Yield new text, if any; the end of a text is a separate chunk."""
        index = first_index + delta.text_index
        logprobs = self._logprobs(plan, delta.tokens, delta.finish_reason)
        if delta.text or (logprobs and logprobs["content"]):
            yield self._chunk(plan, index, {"content": delta.text}, logprobs, None)
        if delta.finish_reason is not None:
            yield self._chunk(plan, index, {}, None, delta.finish_reason)

    @staticmethod
    def _chunk(plan: CheckedTexts, index: int, delta: Json, logprobs: Json | None, reason: FinishReason | None) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return chunk(plan, ChatAnswers.chunk_kind, [choice])

    @staticmethod
    def _logprobs(plan: CheckedTexts, tokens: Sequence[TokenInfo], reason: FinishReason | None) -> Json | None:
        if plan.requests[0].params.logprobs is None:
            return None
        content = [
            {
                **_token(token.text, token.logprob),
                "top_logprobs": [_token(text, logprob) for text, _, logprob in token.top],
            }
            for token in spoken(plan, tokens, reason)
        ]
        return {"content": content, "refusal": None}


class CompletionAnswers:
    """Format of ``/v1/completions``; offsets continue where the last chunk ended."""

    chunk_kind = "text_completion"

    def __init__(self) -> None:
        self._offsets: dict[int, int] = {}

    def answer(self, plan: CheckedTexts, finished: Sequence[TextFinished]) -> Json:
        """Return a "text_completion" object."""
        choices = [
            self._choice(plan, index, result.text, result.tokens, result.finish_reason)
            for index, result in _numbered_results(finished)
        ]
        return _answer(plan, "text_completion", choices, finished)

    def opening(self, plan: CheckedTexts, first_index: int, num_texts: int) -> Iterator[Json]:
        """Yield nothing; completions have no opening chunk."""
        return iter(())

    def delta(self, plan: CheckedTexts, first_index: int, delta: TextDelta) -> Iterator[Json]:
        """Yield new text, with the finish reason in the last chunk."""
        choice = self._choice(plan, first_index + delta.text_index, delta.text, delta.tokens, delta.finish_reason)
        if delta.text or delta.finish_reason is not None or (choice["logprobs"] and choice["logprobs"]["tokens"]):
            yield chunk(plan, self.chunk_kind, [choice])

    def _choice(
        self, plan: CheckedTexts, index: int, text: str, tokens: Sequence[TokenInfo], reason: FinishReason | None
    ) -> Json:
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(plan, index, tokens, reason),
            "finish_reason": reason,
        }

    def _logprobs(
        self, plan: CheckedTexts, index: int, tokens: Sequence[TokenInfo], reason: FinishReason | None
    ) -> Json | None:
        if plan.requests[0].params.logprobs is None:
            return None
        shown = spoken(plan, tokens, reason)
        offsets, offset = [], self._offsets.get(index, 0)
        for token in shown:
            offsets.append(offset)
            offset += len(token.text)
        self._offsets[index] = offset
        return {
            "tokens": [token.text for token in shown],
            "token_logprobs": [bounded(token.logprob) for token in shown],
            "top_logprobs": [{text: bounded(logprob) for text, _, logprob in token.top} for token in shown],
            "text_offset": offsets,
        }


Dialect = ChatAnswers | CompletionAnswers
"""Format of the answers of a text endpoint."""


def chunk(plan: CheckedTexts, kind: str, choices: list[Json], usage: Json | None = None) -> Json:
    """Return one chunk of a stream; ``usage`` is null before the last chunk if it was requested, else left out."""
    fields = {"usage": usage} if plan.has_usage_chunk else {}
    return {**_head(plan, kind), "choices": choices, **fields}


def usage(plan: RequestPlan, used: Sequence[TextUsage]) -> Json:
    """Return token counts in OpenAI's format and device seconds, summed over the prompts of a request."""
    prompt_tokens = sum(item.prompt_tokens for item in used)
    output_tokens = sum(item.output_tokens for item in used)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(item.cached_tokens for item in used)},
        **plan.spent(sum(item.device_s for item in used)),
    }


def spoken(plan: CheckedTexts, tokens: Sequence[TokenInfo], reason: FinishReason | None) -> Sequence[TokenInfo]:
    """Return ``tokens`` without the token that only ended the text."""
    ends = reason == "stop" and bool(tokens) and tokens[-1].token_id in plan.end_ids
    return tokens[:-1] if ends else tokens


def _answer(plan: CheckedTexts, kind: str, choices: list[Json], finished: Sequence[TextFinished]) -> Json:
    return {
        **_head(plan, kind),
        "choices": choices,
        "usage": usage(plan, [item.usage for item in finished]),
        "timings": timings_of(finished),
        "warnings": list(plan.warnings),
    }


def _head(plan: CheckedTexts, kind: str) -> Json:
    fields = {"id": plan.answer_id, "object": kind, "created": plan.created, "model": plan.model}
    return fields | {"system_fingerprint": plan.fingerprint}


def timings_of(finished: Sequence[TextFinished]) -> Json:
    """Return the timings of the slowest prompt in seconds."""
    slowest = max((item.timings for item in finished), key=lambda timings: timings.total_s)
    return {name: round(getattr(slowest, name), 6) for name in slowest.__struct_fields__}


def _numbered_results(finished: Sequence[TextFinished]) -> Iterator[tuple[int, TextResult]]:
    yield from enumerate(result for item in finished for result in item.results)


def bounded(logprob: float) -> float:
    """Return a log-probability with minus infinity replaced by -9999, as in OpenAI's API."""
    return max(logprob, IMPOSSIBLE)


def _token(text: str, logprob: float) -> Json:
    """Describe a token; ``bytes`` is null if it is part of a character."""
    is_complete = "\N{REPLACEMENT CHARACTER}" not in text
    return {"token": text, "logprob": bounded(logprob), "bytes": list(text.encode()) if is_complete else None}
