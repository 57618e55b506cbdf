"""TextWindow: how much of a prompt an image model reads in one piece, counted as the image model counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from diffserve.api.prompt_syntax import parse_prompt

if TYPE_CHECKING:
    from diffserve.runtime import TextEncoderRunner

MARKS = 2
"""The start and the end mark stand in every window."""


@dataclass(frozen=True)
class TextWindow:
    """``num_tokens`` tokens of a prompt are read in one piece (75 of CLIP's 77); ``count`` says how many one has."""

    num_tokens: int
    count: Callable[[str], int]

    @classmethod
    def of(cls, text: TextEncoderRunner) -> Self:
        """The window of an image model, by its own text encoders; of two the one that counts more."""
        tokenizers = [encoder.tokenizer for encoder in text.encoders]
        return cls(text.window_tokens - MARKS, partial(_num_tokens, tokenizers))

    @classmethod
    def of_tokenizer(cls, tokenizer: Callable[..., Any], window_tokens: int) -> Self:
        """The window of one transformers tokenizer of a text encoder that reads ``window_tokens``, marks included."""
        return cls(window_tokens - MARKS, partial(_num_tokens, [tokenizer]))

    def fits(self, prompt: str) -> bool:
        """Whether nothing of ``prompt`` is beyond the window."""
        return self.count(prompt) <= self.num_tokens


def _num_tokens(tokenizers: Sequence[Callable[..., Any]], prompt: str) -> int:
    """Tokens of a prompt without marks; brackets and weights are not read as words."""
    texts = [piece.text for section in parse_prompt(prompt) for piece in section]
    options = {"add_special_tokens": False, "truncation": False, "verbose": False}
    return max(sum(len(tokenizer(text, **options)["input_ids"]) for text in texts) for tokenizer in tokenizers)
