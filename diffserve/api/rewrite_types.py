"""The words of prompt rewriting: what is asked, what comes back, and why a wish was left as it was. No torch."""

from __future__ import annotations

from functools import partial
from typing import Literal

import msgspec

from diffserve.api.bounds import check, check_chars, check_deadline, check_num, check_share
from diffserve.api.text_types import MAX_TEXT_CHARS, MAX_TEXTS, TextTimings, TextUsage
from diffserve.api.types import Asks, Cancelled, Failed, Priority, RewriteOptions, check_priority, new_request_id

FallbackReason = Literal["unsure", "refused", "empty", "runaway", "lost_words", "too_long"]


class RewriteRequest(
    msgspec.Struct, Asks["RewriteEvent"], frozen=True, kw_only=True, forbid_unknown_fields=True, tag="rewrite"
):
    """A wish to be turned into prompts.

    num_prompts  how many; the first is the likeliest, the others are drawn with seed + i
    options      style, seed, system text, and whether a doubtful answer is taken
    deltas       whether RewriteDelta events are wanted
    cache_salt   as in :class:`~diffserve.api.text_types.TextRequest`
    deadline_s   seconds after submit at which the work is given up
    priority, client, share  as in :class:`~diffserve.api.text_types.TextRequest`

    Raises InvalidRequest, ``param`` naming the field.
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
        check(bool(self.wish.strip()), "the prompt is empty; say what to paint.", "prompt", "empty_prompt")
        check_chars(self.wish, MAX_TEXT_CHARS, "prompt", "the prompt")
        check_num(self.num_prompts, MAX_TEXTS, "prompts")
        check_deadline(self.deadline_s)
        check_share(self.share)
        check_priority(self.priority)


class Rewrite(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt for a wish. ``prompt`` is the wish itself where ``fallback`` says why the answer was not taken.

    mean_entropy  of the tokens said, in nats: how unsure the model was
    warning       one sentence for the person who asked, with every fallback
    answer        what the model said, also where it was not taken
    """

    prompt: str
    answer: str
    mean_entropy: float
    fallback: FallbackReason | None = None
    warning: str | None = None


class RewriteDelta(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What is new of prompt ``index``. Words may still be taken back: RewriteFinished has the last say."""

    request_id: str
    index: int
    text: str


class RewriteFinished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Terminal: every prompt, in order. ``style`` is the one that was used."""

    request_id: str
    rewrites: tuple[Rewrite, ...]
    style: str
    model: str
    usage: TextUsage
    timings: TextTimings


RewriteEvent = RewriteDelta | RewriteFinished | Failed | Cancelled
REWRITE_TERMINAL = (RewriteFinished, Failed, Cancelled)
