"""Shared types of text generation: requests, results, events, settings and statistics.

Every type is a frozen ``msgspec.Struct`` that raises :class:`diffserve.api.errors.InvalidRequest` for a wrong value.
``diffserve.api.sampling_params`` has the sampling parameters. This module does not import torch.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import msgspec

from diffserve.api.bounds import Between, check, check_bounds, check_chars, check_num
from diffserve.api.errors import ConfigError
from diffserve.api.sampling_params import SamplingParams
from diffserve.api.types import Asks, Cancelled, Failed, Priority, RequestEvent, check_scheduling, new_request_id

MAX_TEXT_CHARS = 4_000_000
MAX_PROMPT_TOKENS = 1_000_000
MAX_TOKEN_ID = 2**31 - 1
MAX_TEXTS = 64
MAX_MESSAGES = 4096

FinishReason = Literal["stop", "length"]
Speculation = Literal["auto", "off", "prompt_lookup", "draft"]


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One message of a conversation, for the model's chat template."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str


class TextRequest(msgspec.Struct, Asks["TextEvent"], frozen=True, kw_only=True, forbid_unknown_fields=True, tag="text"):
    """A request for text: one of ``prompt``, ``token_ids``, or ``messages`` for the model's chat template.

    Attributes:
        num_texts: Number of texts; text i is sampled with seed + i. With beam search: the best this many.
        add_special_tokens: Whether the tokenizer adds its special tokens to ``prompt``; chat templates contain them.
        speculation: "auto": a draft model if there is one, else prompt lookup if it is on.
        deltas: Whether to send TextDelta events.
        cache_salt: Only requests with the same salt share cached prefixes; empty: shared by all.
        deadline_s: Seconds after submit at which the request is abandoned. It is refused if not even the prompt can be
            processed in time.
        priority, client, share: See :class:`~diffserve.api.types.GenerationRequest`; batch requests age, so that only
            requests that arrive soon after them can overtake them.

    Raises:
        InvalidRequest: A field is wrong; ``param`` names it.
    """

    prompt: str = ""
    token_ids: tuple[int, ...] = ()
    messages: tuple[ChatMessage, ...] = ()
    params: SamplingParams = SamplingParams()
    num_texts: int = 1
    add_special_tokens: bool = True
    speculation: Speculation = "auto"
    deltas: bool = True
    cache_salt: bytes = b""
    deadline_s: float | None = None
    priority: Priority = "interactive"
    client: str = ""
    share: float = 1.0
    request_id: str = msgspec.field(default_factory=partial(new_request_id, "txt"))

    def __post_init__(self) -> None:
        check(
            sum(map(bool, (self.prompt, self.token_ids, self.messages))) == 1,
            "give exactly one of prompt, token_ids and messages, and do not leave it empty.",
            "prompt",
            "invalid_value" if self.prompt or self.token_ids else "empty_prompt",
        )
        check(
            len(self.messages) <= MAX_MESSAGES,
            f"messages has {len(self.messages)} entries; at most {MAX_MESSAGES} are allowed.",
            "messages",
            "array_above_max_length",
        )
        text = "".join([self.prompt, *(message.content for message in self.messages)])
        check_chars(text, MAX_TEXT_CHARS, "messages" if self.messages else "prompt", "the prompt")
        check(
            len(self.token_ids) <= MAX_PROMPT_TOKENS
            and all(0 <= token_id <= MAX_TOKEN_ID for token_id in self.token_ids),
            f"token_ids has {len(self.token_ids)} entries; give at most {MAX_PROMPT_TOKENS}, each 0 to {MAX_TOKEN_ID}.",
            "prompt",
        )
        check_num(self.num_texts, MAX_TEXTS, "texts")
        check(
            self.params.num_beams == 1 or self.num_texts <= self.params.num_beams,
            f"n is {self.num_texts} and num_beams {self.params.num_beams}; n must not exceed num_beams.",
            "n",
        )
        check_scheduling(self.deadline_s, self.priority, self.share)


class TokenInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One output token under the model's unmodified distribution.

    Attributes:
        logprob: Natural logarithm of its probability.
        entropy: Entropy of the distribution in nats.
        top: (token text, token id, logprob) of the most likely tokens, best first, if requested.
    """

    token_id: int
    text: str
    logprob: float
    entropy: float
    top: tuple[tuple[str, int, float], ...] = ()


class TextUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of one request.

    Attributes:
        cached_tokens: Prompt tokens whose keys and values were cached.
        draft_tokens, accepted_tokens: Tokens proposed and accepted by speculative decoding.
        device_s: This request's share, by tokens, of the device time. The shares of all requests add up to the engine's
            busy time.
    """

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    device_s: float = 0.0


class TextTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one request in seconds.

    Attributes:
        queue_s: From submit until the first chunk of the prompt was processed.
        ttft_s: Time to first token, from submit.
        tpot_s: Mean time per further output token; 0 if there is none.
        total_s: From submit until the end.
    """

    queue_s: float
    ttft_s: float
    tpot_s: float
    total_s: float


class TextResult(msgspec.Struct, frozen=True, kw_only=True):
    """One finished text.

    Attributes:
        token_ids: All output tokens, including the one that ended the text.
        finish_reason: "stop": an end token or a stop text; "length": ``max_tokens`` or the context was reached.
        stop_text: The stop text that ended the text, if one did.
        tokens: One entry for each of ``token_ids``, if logprobs were requested.
        mean_entropy: Mean entropy in nats per token, a measure of the model's uncertainty.
        score: Beam search: the score by which the text was ranked.
    """

    text_index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_text: str | None = None
    tokens: tuple[TokenInfo, ...] = ()
    mean_entropy: float = 0.0
    score: float | None = None


class TextAccepted(RequestEvent, frozen=True, kw_only=True):
    """The request is queued; ``seed`` is the seed of text 0."""

    seed: int
    num_texts: int
    num_prompt_tokens: int
    queue_position: int


class TextDelta(RequestEvent, frozen=True, kw_only=True):
    """New tokens of text ``text_index``; ``finish_reason`` is set in the last delta of each text.

    ``text`` may be empty while a character or a possible stop text is incomplete.
    """

    text_index: int
    text: str
    token_ids: tuple[int, ...]
    tokens: tuple[TokenInfo, ...] = ()
    finish_reason: FinishReason | None = None


class TextFinished(RequestEvent, frozen=True, kw_only=True):
    """Terminal: all texts of the request, in order."""

    results: tuple[TextResult, ...]
    usage: TextUsage
    timings: TextTimings

    @property
    def text(self) -> str:
        """The first text (with beam search: the best)."""
        return self.results[0].text


TextEvent = TextAccepted | TextDelta | TextFinished | Failed | Cancelled
TEXT_TERMINAL = (TextFinished, Failed, Cancelled)


class LanguageModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Capabilities of a loaded language model, for the HTTP process and the CLI.

    Attributes:
        speaks_json: Whether its texts can be constrained to a JSON Schema.
    """

    model_id: str
    architecture: str
    digest: str
    vocab_size: int
    context_tokens: int
    end_ids: tuple[int, ...]
    has_chat_template: bool
    device: str
    dtype: str
    choice_reason: str
    num_parameters: int
    weights_bytes: int
    speaks_json: bool = False


TEXT_BOUNDS = {
    "max_batch_tokens": Between(1, 1 << 20),
    "max_sequences": Between(1, 4096),
    "max_waiting": Between(1, 100_000),
    "page_tokens": Between(1, 4096),
    "num_draft_tokens": Between(0, 256),
    "min_ngram": Between(1, 64),
    "max_ngram": Between(1, 64),
}


class TextConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Batching of texts; the keys are part of the ``[text]`` table.

    Attributes:
        max_batch_tokens: Tokens in one call of the language model; a long prompt is split into chunks that fit.
        max_sequences: Sequences (texts and beams) that run at once.
        max_waiting: Requests that may wait; more raise :class:`~diffserve.api.errors.QueueFull`.
        num_draft_tokens: Draft tokens that one call verifies; 0: no speculation. Without a draft model drafts are
            copied from the prompt and the output (prompt lookup).
        max_ngram: Longest n-gram that prompt lookup searches for.
        min_ngram: Shortest n-gram that prompt lookup searches for.
        page_tokens: Tokens per page of the pool; prompts share whole pages.
    """

    max_batch_tokens: int = 512
    max_sequences: int = 64
    max_waiting: int = 256
    page_tokens: int = 16
    num_draft_tokens: int = 5
    max_ngram: int = 3
    min_ngram: int = 2

    def __post_init__(self) -> None:
        check_bounds(self, TEXT_BOUNDS)
        if self.max_ngram < self.min_ngram:
            raise ConfigError(
                f"max_ngram is {self.max_ngram} and min_ngram {self.min_ngram}; max_ngram must not be smaller.",
                param="max_ngram",
            )


class TextStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the start of the engine, and current values. ``PagePool.stats`` has prefix hits by tenant."""

    num_running: int
    num_waiting: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    computed_tokens: int
    draft_tokens: int
    accepted_tokens: int
    preemptions: int
    entropy_sum: float
    busy_s: float

    @property
    def acceptance(self) -> float:
        """Share of draft tokens that were accepted; 0 if there were none."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were cached; 0 if there were none."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def mean_entropy(self) -> float:
        """Mean entropy of output tokens in nats."""
        return self.entropy_sum / self.output_tokens if self.output_tokens else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second of work."""
        return self.output_tokens / self.busy_s if self.busy_s else 0.0
