"""TextStream: converts tokens to text, as early as the text is certain.

Only the tokenizer's ``decode`` is used, because tokenizers differ (spaces at the beginning or the end of tokens, bytes
of a character in several tokens). New text is what ``decode`` returns for the last shown and the new tokens together,
beyond its result for the last shown ones. Text that ends in the replacement character waits for more bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
CHARACTER_TOKENS: Final = 3
"""Largest number of tokens at the end that may belong to an incomplete character of up to 4 bytes."""

PATIENCE_TOKENS: Final = 16
"""Number of tokens without a complete character at their end after which all but the last ones are shown."""


class StopStrings:
    """Looks for ``stops`` in a text that arrives in pieces, and cuts it before the first one that is complete.

    Of several that end at the same character the longest is used, so the result does not depend on the pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None
        """The stop text that ended the text; None so far."""

    def feed(self, piece: str) -> str:
        """Return the text that may be shown after ``piece``; nothing after a stop text."""
        if self.found is not None:
            return ""
        text = self._held + piece
        places = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if places:
            _, at, self.found = min(places)
            self._held = ""
            return text[:at]
        num_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def release(self) -> str:
        """Return the text that was held back, at the end of the input."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """How many of the last characters of ``text`` may be the beginning of ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((count for count in range(longest, 0, -1) if text.endswith(stop[:count])), 0)


class TextStream:
    """The text of one sequence, token by token, up to the first stop text.

    tokenizer    any transformers tokenizer
    stop         texts that end the output; see ``stopped_by``
    context_ids  the tokens before the first one, when the text continues a prompt (" world" and not "world")

    Special tokens are not shown. A stop *token* should not be pushed: it is no part of the text.
    """

    def __init__(self, tokenizer: Any, *, stop: Sequence[str] = (), context_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._shown = list(context_ids[-PATIENCE_TOKENS:])
        self._waiting: list[int] = []
        self._stops = StopStrings(stop)
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """Everything given out so far."""
        return "".join(self._pieces)

    @property
    def stopped_by(self) -> str | None:
        """The stop text that ended the text; tokens pushed later are ignored."""
        return self._stops.found

    def push(self, token_id: int) -> str:
        """Return the text that ``token_id`` makes certain, often none; never half a character or part of a stop."""
        if self.stopped_by is not None:
            return ""
        self._waiting.append(token_id)
        new = self._new_text(self._waiting)
        if new and not new.endswith(REPLACEMENT):
            self._shown, self._waiting = self._waiting, []
        elif len(self._waiting) >= PATIENCE_TOKENS:
            new = self._give_up()
        else:
            return ""
        return self._give_out(self._stops.feed(new))

    def finish(self) -> str:
        """Return the text that was held back. An incomplete character is left out."""
        new = self._new_text(self._waiting).rstrip(REPLACEMENT) if self._waiting else ""
        self._waiting = []
        return self._give_out(self._stops.feed(new) + self._stops.release())

    def _give_out(self, piece: str) -> str:
        self._pieces.append(piece)
        return piece

    def _give_up(self) -> str:
        certain = self._waiting[:-CHARACTER_TOKENS]
        new = self._new_text(certain)
        self._shown, self._waiting = (certain if new else self._shown), self._waiting[-CHARACTER_TOKENS:]
        return new

    def _new_text(self, token_ids: Sequence[int]) -> str:
        before = self._decode(self._shown)
        return self._decode([*self._shown, *token_ids])[len(before) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text
