"""The words of prompt rewriting: what is asked, what comes back, and why a wish was left as it was. No torch."""

from __future__ import annotations

import math
import uuid
from typing import Literal

import msgspec

from diffserve.errors import InvalidRequest
from diffserve.text_types import MAX_TEXT_CHARS, MAX_TEXTS, TextTimings, TextUsage
from diffserve.types import Asks, Cancelled, Failed, RewriteOptions, check_unicode

FallbackReason = Literal["unsure", "refused", "empty", "runaway", "lost_words", "too_long"]


def new_rewrite_id() -> str:
    """A fresh request id, ``rwt-`` and 24 hexadecimal digits."""
    return f"rwt-{uuid.uuid4().hex[:24]}"


def _check(ok: bool, message: str, param: str, code: str = "invalid_value") -> None:
    if not ok:
        raise InvalidRequest(message, param=param, code=code)


class RewriteRequest(
    msgspec.Struct, Asks["RewriteEvent"], frozen=True, kw_only=True, forbid_unknown_fields=True, tag="rewrite"
):
    """A wish to be turned into prompts.

    num_prompts  how many; the first is the likeliest, the others are drawn with seed + i
    options      style, seed, system text, and whether a doubtful answer is taken
    deltas       whether RewriteDelta events are wanted
    cache_salt   as in :class:`~diffserve.text_types.TextRequest`
    deadline_s   seconds after submit at which the work is given up

    Raises InvalidRequest, ``param`` naming the field.
    """

    wish: str
    num_prompts: int = 1
    options: RewriteOptions = RewriteOptions()
    deltas: bool = False
    cache_salt: bytes = b""
    deadline_s: float | None = None
    request_id: str = msgspec.field(default_factory=new_rewrite_id)

    def __post_init__(self) -> None:
        _check(bool(self.wish.strip()), "the prompt is empty; say what to paint.", "prompt", "empty_prompt")
        _check(
            len(self.wish) <= MAX_TEXT_CHARS,
            f"the prompt has {len(self.wish)} characters; at most {MAX_TEXT_CHARS} are taken.",
            "prompt",
            "string_above_max_length",
        )
        check_unicode(self.wish, "prompt")
        _check(
            1 <= self.num_prompts <= MAX_TEXTS,
            f"n is {self.num_prompts}; ask for 1 to {MAX_TEXTS} prompts in one request.",
            "n",
        )
        _check(
            self.deadline_s is None or (math.isfinite(self.deadline_s) and self.deadline_s > 0),
            f"deadline_s is {self.deadline_s}; it must be a positive number of seconds.",
            "deadline_s",
        )


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
