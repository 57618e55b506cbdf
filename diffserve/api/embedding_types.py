"""Request and result types of text embeddings. This module does not import torch."""

from __future__ import annotations

from functools import partial

import msgspec

from diffserve.api.bounds import check, check_chars
from diffserve.api.types import (
    MAX_PROMPT_CHARS,
    Asks,
    Cancelled,
    Failed,
    Priority,
    RequestEvent,
    check_scheduling,
    new_request_id,
)

MAX_INPUTS = 2048
MAX_INPUT_TOKENS = 8192


class EmbeddingRequest(
    msgspec.Struct, Asks["EmbeddingEvent"], frozen=True, kw_only=True, forbid_unknown_fields=True, tag="embedding"
):
    """A request for one vector for each text, or for each list of token ids of the model's own tokenizer.

    Attributes:
        model: Name of the image model whose text encoder is used; "": the first.
        deadline_s: Seconds after submit at which the request is abandoned.
        priority: "batch" gets what interactive work leaves, and every eighth of its turns.

    Raises:
        InvalidRequest: A field is wrong; ``param`` names it.
    """

    texts: tuple[str, ...] = ()
    token_ids: tuple[tuple[int, ...], ...] = ()
    model: str = ""
    deadline_s: float | None = None
    priority: Priority = "interactive"
    request_id: str = msgspec.field(default_factory=partial(new_request_id, "emb"))

    def __post_init__(self) -> None:
        check(
            bool(self.texts) is not bool(self.token_ids) and all(self.inputs),
            "the input or a part of it is empty; give texts, or lists of token ids.",
            "input",
            "empty_input",
        )
        message = f"input has {self.num_inputs} texts; at most {MAX_INPUTS} are allowed."
        check(self.num_inputs <= MAX_INPUTS, message, "input", "array_above_max_length")
        for text in self.texts:
            check_chars(text, MAX_PROMPT_CHARS, "input")
        for ids in self.token_ids:
            message = f"input has a text of {len(ids)} tokens; at most {MAX_INPUT_TOKENS} are allowed."
            check(len(ids) <= MAX_INPUT_TOKENS, message, "input", "array_above_max_length")
        check_scheduling(self.deadline_s, self.priority)

    @property
    def inputs(self) -> tuple[str, ...] | tuple[tuple[int, ...], ...]:
        """The texts or the lists of token ids, whichever the request has."""
        return self.texts or self.token_ids

    @property
    def num_inputs(self) -> int:
        """Number of requested vectors."""
        return len(self.inputs)


class Embedded(RequestEvent, frozen=True, kw_only=True):
    """Terminal: the vectors, each normalized to length 1.

    Attributes:
        dimensions: Length of each vector.
        data: Little-endian float32 vectors, one after the other.
        num_tokens: Tokens of all inputs, without special tokens and padding.
    """

    model: str
    dimensions: int
    data: bytes
    num_tokens: int


EmbeddingEvent = Embedded | Failed | Cancelled
EMBEDDING_TERMINAL = (Embedded, Failed, Cancelled)
