"""Admission of text requests: tokenize them, check them against the model and the pool, and draw a seed.

Invalid values are refused here, with the value and a fix. An answer longer than the context is valid: it ends where
the context does, with ``finish_reason`` "length".
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence as Tokens
from functools import partial

import msgspec

from diffserve.api.bounds import check
from diffserve.api.errors import InvalidRequest
from diffserve.api.sampling_params import SamplingParams
from diffserve.api.text_types import TextConfig, TextRequest
from diffserve.engine.records import Stage
from diffserve.engine.text.pages import SequencePages
from diffserve.engine.text.task import LiveText, Sequence, TextTask
from diffserve.runtime.decoding import AnyConstraint, BeamSearch, SamplingState, TextStream
from diffserve.runtime.kv import PoolTooSmall
from diffserve.runtime.language import LanguageModel
from diffserve.runtime.language.model import render

MAX_FRESH_SEED = 2**32
MOST_CHARS_PER_TOKEN = 256
"""A prompt with more characters than this for each token of the context is refused before it is tokenized."""


class TextAdmission:
    """Turns a ``TextRequest`` into a ``LiveText``, or raises InvalidRequest. Safe to call from any thread."""

    def __init__(self, model: LanguageModel, pages: SequencePages, config: TextConfig) -> None:
        self.model = model
        self.pages = pages
        self.config = config
        self._lock = threading.Lock()  # a tokenizer is not for two threads at once

    def admit(self, request: TextRequest, now_s: float, constraint: AnyConstraint | None = None) -> LiveText:
        """Check ``request`` and resolve it. ``now_s`` starts its clock."""
        prompt_ids = self._prompt_ids(request)
        params = self._params(request, len(prompt_ids))
        self._check_fit(request, params, len(prompt_ids))
        seed = secrets.randbelow(MAX_FRESH_SEED) if params.seed is None else params.seed
        request = msgspec.structs.replace(request, params=params)
        live = LiveText(request, prompt_ids, seed, now_s)
        num_tasks = 1 if params.num_beams > 1 else request.num_texts
        live.tasks = [self._task(live, index, constraint) for index in range(num_tasks)]
        return live

    def _prompt_ids(self, request: TextRequest) -> list[int]:
        context_tokens = self.model.info.context_tokens
        param = "messages" if request.messages else "prompt"
        num_chars = len(request.prompt) + sum(len(message.content) for message in request.messages)
        if num_chars > context_tokens * MOST_CHARS_PER_TOKEN:
            raise too_long(f"{num_chars} characters", context_tokens, param)
        ids = list(request.token_ids) or self._tokenize(request)
        check(bool(ids), "the prompt has no tokens; give at least one.", param, "empty_prompt")
        if len(ids) >= context_tokens:
            raise too_long(f"{len(ids)} tokens", context_tokens, param)
        size = self.model.info.vocab_size
        check(max(ids) < size, f"token id {max(ids)} is not in the model's vocabulary of {size}.", "prompt")
        return ids

    def _tokenize(self, request: TextRequest) -> list[int]:
        """Return the prompt's tokens; the chat template of a conversation adds the special tokens itself."""
        tokenizer, text, adds_marks = self.model.tokenizer, request.prompt, request.add_special_tokens
        with self._lock:
            if request.messages:
                text, adds_marks = render(tokenizer, request.messages, self.model.info.model_id), False
            ids: list[int] = tokenizer(text, add_special_tokens=adds_marks, truncation=False, verbose=False).input_ids
        return ids

    def _params(self, request: TextRequest, num_prompt_tokens: int) -> SamplingParams:
        """Return the request's parameters, with ``max_tokens`` limited to the room in the context."""
        params = request.params
        room = self.model.info.context_tokens - num_prompt_tokens
        if params.max_tokens <= room:
            return params
        return msgspec.structs.replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))

    def _check_fit(self, request: TextRequest, params: SamplingParams, num_prompt_tokens: int) -> None:
        width = params.num_beams if params.num_beams > 1 else request.num_texts
        check(
            width <= self.config.max_sequences,
            f"{width} texts or beams are requested; this engine runs at most {self.config.max_sequences} at once.",
            "num_beams" if params.num_beams > 1 else "n",
        )
        check(
            params.num_beams == 1 or width <= self.config.max_batch_tokens,
            f"num_beams is {width}; this engine allows at most {self.config.max_batch_tokens} tokens.",
            "num_beams",
        )
        num_tokens = num_prompt_tokens + params.max_tokens - 1  # the last token is returned and never computed
        need, has = self.pages.most_pages(num_prompt_tokens, num_tokens, params.num_beams), self.pages.pool.num_pages
        if need > has:
            raise PoolTooSmall(
                f"the prompt has {num_prompt_tokens} tokens and max_tokens is {params.max_tokens}: that takes up to "
                f"{need} pages and the whole pool has {has}. Shorten the prompt, ask for fewer tokens or beams, or "
                "give the pool more bytes.",
                param="max_tokens",
            )

    def _task(self, live: LiveText, index: int, constraint: AnyConstraint | None) -> TextTask:
        params = live.request.params
        row = SamplingState(
            params, live.prompt_ids, end_ids=self.model.end_ids, constraint=constraint, seed=live.seed + index
        )
        task = TextTask(live, index, [Sequence(row)], draft_limit=self.config.num_draft_tokens)
        if params.num_beams > 1:
            task.search = BeamSearch(row, is_stopped=partial(self._has_any, params.stop) if params.stop else None)
            task.sequences = [Sequence(task.search.rows[0])]
        else:
            task.stream = TextStream(self.model.tokenizer, stop=params.stop, context_ids=live.prompt_ids)
        task.stage = Stage.FOLLOWING if index else Stage.WAITING
        return task

    def _has_any(self, stop: tuple[str, ...], token_ids: Tokens[int]) -> bool:
        """Whether one of the texts ``stop`` occurs in the text of some tokens."""
        text: str = self.model.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return any(stop_text in text for stop_text in stop)


def too_long(what: str, context_tokens: int, param: str = "prompt") -> InvalidRequest:
    """Return the error for a prompt that leaves no room for an answer."""
    return InvalidRequest(
        f"the prompt has {what}; with at least one token of answer the model's context of {context_tokens} tokens "
        f"takes at most {context_tokens - 1}.",
        param=param,
        code="context_length_exceeded",
    )
