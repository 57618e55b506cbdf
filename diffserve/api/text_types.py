"""The words of text generation: requests, what comes back token by token, usage, timings, settings, metrics.

Every type is a frozen ``msgspec.Struct`` and raises :class:`diffserve.api.errors.InvalidRequest` for a wrong value.
``diffserve.api.sampling_params`` says how tokens are chosen. No torch.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import msgspec

from diffserve.api.bounds import Between, check, check_bounds, check_chars, check_deadline, check_num, check_share
from diffserve.api.errors import ConfigError
from diffserve.api.sampling_params import SamplingParams
from diffserve.api.types import Asks, Cancelled, Failed, Priority, check_priority, new_request_id

MAX_TEXT_CHARS = 4_000_000
MAX_PROMPT_TOKENS = 1_000_000
MAX_TOKEN_ID = 2**31 - 1
MAX_TEXTS = 64
MAX_MESSAGES = 4096

FinishReason = Literal["stop", "length"]
Speculation = Literal["auto", "off", "prompt_lookup", "draft"]


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One turn of a conversation, for the model's own chat template."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str


class TextRequest(msgspec.Struct, Asks["TextEvent"], frozen=True, kw_only=True, forbid_unknown_fields=True, tag="text"):
    """What somebody wants continued: ``prompt`` as a text, ``token_ids``, or ``messages`` for the model's chat
    template, one of the three.

    num_texts          answers to one prompt; text i is drawn with seed + i. With beams: the best so many
    add_special_tokens whether the tokenizer puts its own marks around ``prompt``; a chat template has put them already
    speculation        "auto": a draft model where the engine has one, else prompt lookup where that is on
    deltas             whether TextDelta events are wanted; without them only the end is told
    cache_salt         only requests with the same salt share kept pages; empty: shared by all
    deadline_s         seconds after submit at which the work is given up; refused where not even the prompt could be
                       read by then
    priority, client, share  as in :class:`~diffserve.api.types.GenerationRequest`, but batch work ages: it is passed by
                       those who come soon after it

    Raises InvalidRequest, ``param`` naming the field.
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
            "give a prompt, token_ids or messages, one of them, and not an empty one.",
            "prompt",
            "invalid_value" if self.prompt or self.token_ids else "empty_prompt",
        )
        check(
            len(self.messages) <= MAX_MESSAGES,
            f"messages are {len(self.messages)}; at most {MAX_MESSAGES} are taken.",
            "messages",
            "array_above_max_length",
        )
        said = "".join([self.prompt, *(message.content for message in self.messages)])
        check_chars(said, MAX_TEXT_CHARS, "messages" if self.messages else "prompt", "the prompt")
        check(
            len(self.token_ids) <= MAX_PROMPT_TOKENS
            and all(0 <= token_id <= MAX_TOKEN_ID for token_id in self.token_ids),
            f"token_ids are {len(self.token_ids)}; give at most {MAX_PROMPT_TOKENS}, each 0 to {MAX_TOKEN_ID}.",
            "prompt",
        )
        check_num(self.num_texts, MAX_TEXTS, "texts")
        check(
            self.params.num_beams == 1 or self.num_texts <= self.params.num_beams,
            f"n is {self.num_texts} and num_beams {self.params.num_beams}; a search gives at most as many as beams.",
            "n",
        )
        check_deadline(self.deadline_s)
        check_share(self.share)
        check_priority(self.priority)


class TokenInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One token of an answer, in the model's own distribution: natural logarithms, entropy in nats.

    ``top`` holds (token text, token id, logprob) of the most likely ones, best first, when they were asked for.
    """

    token_id: int
    text: str
    logprob: float
    entropy: float
    top: tuple[tuple[str, int, float], ...] = ()


class TextUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one request. ``cached_tokens``: of the prompt's, those whose keys and values were there already.

    ``device_s``: its share, by tokens, of the seconds of the ticks that it took part in; those of all requests add up
    to the time in which the engine was busy.
    """

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    device_s: float = 0.0


class TextTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds. ``ttft_s``: from submit to the first token; ``tpot_s``: mean time of each later one (0: there is none).

    queue_s  from submit until the first piece of the prompt was computed
    """

    queue_s: float
    ttft_s: float
    tpot_s: float
    total_s: float


class TextResult(msgspec.Struct, frozen=True, kw_only=True):
    """One finished text.

    token_ids     all that was said, the token that ended it included
    finish_reason "stop": an end token or a stop text; "length": max_tokens, or the context, was used up
    stop_text     the stop text that ended it, if one did
    tokens        one entry for each of ``token_ids``, when logprobs were asked for
    mean_entropy  over the tokens said, in nats: how unsure the model was
    score         beam search: what the text was ranked by
    """

    text_index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_text: str | None = None
    tokens: tuple[TokenInfo, ...] = ()
    mean_entropy: float = 0.0
    score: float | None = None


class TextAccepted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The request is in the queue; ``seed`` is the one that will be used for text 0."""

    request_id: str
    seed: int
    num_texts: int
    num_prompt_tokens: int
    queue_position: int


class TextDelta(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What is new of text ``text_index``. ``text`` may be empty: a character, or a stop text, may not be whole yet.

    ``finish_reason`` is set with the last one of each text.
    """

    request_id: str
    text_index: int
    text: str
    token_ids: tuple[int, ...]
    tokens: tuple[TokenInfo, ...] = ()
    finish_reason: FinishReason | None = None


class TextFinished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Terminal: all texts of the request, in order."""

    request_id: str
    results: tuple[TextResult, ...]
    usage: TextUsage
    timings: TextTimings

    @property
    def text(self) -> str:
        """The first (with beams: the best) text."""
        return self.results[0].text


TextEvent = TextAccepted | TextDelta | TextFinished | Failed | Cancelled
TEXT_TERMINAL = (TextFinished, Failed, Cancelled)


class LanguageModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a loaded language model can do; the HTTP process and the command line read it, no torch needed.

    ``speaks_json``: whether its texts can be held to a schema, token by token.
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
    """How texts are batched.

    max_batch_tokens   tokens that one call of the network may take; a long prompt is cut into chunks that fit
    max_sequences      sequences (texts and beams) that run at once
    max_waiting        requests that may wait before :class:`~diffserve.api.errors.QueueFull`
    num_draft_tokens   tokens of a draft that are checked in one call; 0 switches speculation off. Without a draft model
                       drafts are copied from prompt and output
    max_ngram          the longest ending that prompt lookup looks for
    min_ngram          the shortest
    page_tokens        tokens on a page: what is shared between prompts is a multiple of it
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
                f"max_ngram is {self.max_ngram} and min_ngram {self.min_ngram}; the longest is no shorter.",
                param="max_ngram",
            )


class TextStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since birth, and what is there now. Pages and prefix hits by tenant are in ``PagePool.stats``."""

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
        """Share of draft tokens that were right, 0 when there were none."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that had not to be computed."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def mean_entropy(self) -> float:
        """Nats per token said."""
        return self.entropy_sum / self.output_tokens if self.output_tokens else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens said per second of work."""
        return self.output_tokens / self.busy_s if self.busy_s else 0.0
