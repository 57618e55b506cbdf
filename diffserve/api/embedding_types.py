"""The words of text embeddings: what is asked, and what comes back. No torch."""

from __future__ import annotations

from functools import partial

import msgspec

from diffserve.api.bounds import check, check_chars, check_deadline
from diffserve.api.types import MAX_PROMPT_CHARS, Asks, Cancelled, Failed, Priority, check_priority, new_request_id

MAX_INPUTS = 2048
MAX_INPUT_TOKENS = 8192


class EmbeddingRequest(
    msgspec.Struct, Asks["EmbeddingEvent"], frozen=True, kw_only=True, forbid_unknown_fields=True, tag="embedding"
):
    """Texts, or token ids of the model's own tokenizer, each to become a vector.

    model       the name of the image model whose text encoder reads them; "": the first
    deadline_s  seconds after submit at which the work is given up
    priority    batch: it gets what interactive work leaves, and of its turns every eighth

    Raises InvalidRequest, ``param`` naming the field.
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
            "the input is empty, or a part of it is; give texts, or lists of token ids.",
            "input",
            "empty_input",
        )
        many = f"input has {self.num_inputs} texts; at most {MAX_INPUTS} are taken."
        check(self.num_inputs <= MAX_INPUTS, many, "input", "array_above_max_length")
        for text in self.texts:
            check_chars(text, MAX_PROMPT_CHARS, "input")
        for ids in self.token_ids:
            said = f"input has a text of {len(ids)} tokens; at most {MAX_INPUT_TOKENS} are taken."
            check(len(ids) <= MAX_INPUT_TOKENS, said, "input", "array_above_max_length")
        check_deadline(self.deadline_s)
        check_priority(self.priority)

    @property
    def inputs(self) -> tuple[str, ...] | tuple[tuple[int, ...], ...]:
        """Texts or token ids, whichever there are."""
        return self.texts or self.token_ids

    @property
    def num_inputs(self) -> int:
        """How many vectors are asked for."""
        return len(self.inputs)


class Embedded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Terminal: every vector, of length 1.

    data        little-endian float32, ``dimensions`` for each input in turn
    num_tokens  of all inputs, marks and padding left out
    """

    request_id: str
    model: str
    dimensions: int
    data: bytes
    num_tokens: int


EmbeddingEvent = Embedded | Failed | Cancelled
EMBEDDING_TERMINAL = (Embedded, Failed, Cancelled)
