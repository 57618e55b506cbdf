"""Request, result and event types of prompt rewriting. This module does not import torch."""

from __future__ import annotations

from functools import partial
from typing import Literal

import msgspec

from diffserve.api.bounds import check, check_chars, check_num
from diffserve.api.text_types import MAX_TEXT_CHARS, MAX_TEXTS, TextTimings, TextUsage
from diffserve.api.types import (
    Asks,
    Cancelled,
    Failed,
    Priority,
    RequestEvent,
    RewriteOptions,
    check_scheduling,
    new_request_id,
)

FallbackReason = Literal["unsure", "refused", "empty", "runaway", "lost_words", "too_long"]


class RewriteRequest(
    msgspec.Struct, Asks["RewriteEvent"], frozen=True, kw_only=True, forbid_unknown_fields=True, tag="rewrite"
):
    """A short prompt (wish) to be expanded into detailed prompts.

    Attributes:
        num_prompts: Number of prompts; the first is the most likely one, prompt i is sampled with seed + i.
        options: Style, seed, system prompt, and whether unsure answers are accepted.
        deltas: Whether to send RewriteDelta events.
        cache_salt: See :class:`~diffserve.api.text_types.TextRequest`.
        deadline_s: Seconds after submit at which the request is abandoned.
        priority, client, share: See :class:`~diffserve.api.text_types.TextRequest`.

    Raises:
        InvalidRequest: A field is wrong; ``param`` names it.
    """

    wish: str
    num_prompts: int = 1
    options: RewriteOptions = RewriteOptions()
    deltas: bool = False
    cache_salt: bytes = b""
    deadline_s: float | None = None
    priority: Priority = "interactive"
    client: str = ""
    share: float = 1.0
    request_id: str = msgspec.field(default_factory=partial(new_request_id, "rwt"))

    def __post_init__(self) -> None:
        check(bool(self.wish.strip()), "the prompt is empty; give a prompt to rewrite.", "prompt", "empty_prompt")
        check_chars(self.wish, MAX_TEXT_CHARS, "prompt", "the prompt")
        check_num(self.num_prompts, MAX_TEXTS, "prompts")
        check_scheduling(self.deadline_s, self.priority, self.share)


class Rewrite(msgspec.Struct, frozen=True, kw_only=True):
    """One rewritten prompt.

    Attributes:
        prompt: The prompt to use: the answer, or the wish if there is a ``fallback``.
        answer: The answer of the model, accepted or not.
        mean_entropy: Mean entropy of the answer in nats per token, a measure of the model's uncertainty.
        fallback: The reason why the answer was not accepted; ``None`` if it was.
        warning: One sentence for the user; set with every fallback.
    """

    prompt: str
    answer: str
    mean_entropy: float
    fallback: FallbackReason | None = None
    warning: str | None = None


class RewriteDelta(RequestEvent, frozen=True, kw_only=True):
    """New text of prompt ``index``. It may still change: RewriteFinished has the final text."""

    index: int
    text: str


class RewriteFinished(RequestEvent, frozen=True, kw_only=True):
    """Terminal: every prompt in order, and the ``style`` that was used."""

    rewrites: tuple[Rewrite, ...]
    style: str
    model: str
    usage: TextUsage
    timings: TextTimings


RewriteEvent = RewriteDelta | RewriteFinished | Failed | Cancelled
REWRITE_TERMINAL = (RewriteFinished, Failed, Cancelled)
