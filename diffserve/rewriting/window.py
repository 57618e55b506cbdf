"""Text window of an image model: the number of prompt tokens that it reads at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from diffserve.api.prompt_syntax import parse_prompt

if TYPE_CHECKING:
    from diffserve.runtime import TextEncoderRunner

MARKS = 2
"""Number of start and end tokens in every window."""


@dataclass(frozen=True)
class TextWindow:
    """Text window of ``num_tokens`` tokens (75 of CLIP's 77); ``count`` returns the number of tokens of a prompt."""

    num_tokens: int
    count: Callable[[str], int]

    @classmethod
    def of(cls, text: TextEncoderRunner) -> Self:
        """Build the window of an image model; with several text encoders the largest token count applies."""
        tokenizers = [encoder.tokenizer for encoder in text.encoders]
        return cls(text.window_tokens - MARKS, partial(_num_tokens, tokenizers))

    @classmethod
    def of_tokenizer(cls, tokenizer: Callable[..., Any], window_tokens: int) -> Self:
        """Build the window for one tokenizer; ``window_tokens`` includes the start and end tokens."""
        return cls(window_tokens - MARKS, partial(_num_tokens, [tokenizer]))

    def fits(self, prompt: str) -> bool:
        """Return whether ``prompt`` fits the window."""
        return self.count(prompt) <= self.num_tokens


def _num_tokens(tokenizers: Sequence[Callable[..., Any]], prompt: str) -> int:
    """Count the tokens of a prompt without start and end tokens, brackets and weights."""
    texts = [piece.text for section in parse_prompt(prompt) for piece in section]
    options = {"add_special_tokens": False, "truncation": False, "verbose": False}
    return max(sum(len(tokenizer(text, **options)["input_ids"]) for text in texts) for tokenizer in tokenizers)
