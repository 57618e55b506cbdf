"""PromptLookup: a draft copied from what was said before.

Rewriting says again much of what it was given. When the last n tokens stand somewhere earlier in prompt or output,
whatever followed them there is a guess at what follows now (Saxena 2023, prompt lookup decoding). ::

    a red cat on a mat . rewrite : a red | cat on a
      ^^^^^^^ ------>                ^^^   the draft
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from diffserve.errors import ConfigError

ITEM_BYTES = array("q").itemsize


@dataclass(frozen=True, slots=True)
class PromptLookup:
    """Drafts of at most ``num_draft_tokens``, found by the last ``max_ngram`` tokens, else by fewer.

    num_draft_tokens  0 switches drafting off
    max_ngram         the longest ending that is looked for, first
    min_ngram         the shortest; 1 finds most and is wrong most

    Raises ConfigError when these cannot be.
    """

    num_draft_tokens: int = 8
    max_ngram: int = 3
    min_ngram: int = 1

    def __post_init__(self) -> None:
        if self.num_draft_tokens < 0 or not 1 <= self.min_ngram <= self.max_ngram:
            raise ConfigError(
                f"prompt lookup with num_draft_tokens {self.num_draft_tokens}, min_ngram {self.min_ngram} and "
                f"max_ngram {self.max_ngram}: ask for 0 or more draft tokens, and 1 <= min_ngram <= max_ngram."
            )

    def propose(self, token_ids: Sequence[int]) -> list[int]:
        """What may follow ``token_ids`` (prompt and output together); empty when nothing like its end came before.

        Of several places the latest that has a whole draft after it is taken, else the earliest.
        """
        if self.num_draft_tokens == 0:
            return []
        text = array("q", token_ids).tobytes()
        longest = min(self.max_ngram, len(token_ids) - 1)
        for ngram in range(longest, self.min_ngram - 1, -1):
            end = self._find(text, ngram, len(token_ids))
            if end is not None:
                return list(token_ids[end : end + self.num_draft_tokens])
        return []

    def _find(self, text: bytes, ngram: int, count: int) -> int | None:
        """Where the last ``ngram`` tokens stood before: the index of the token after them."""
        wanted = text[-ngram * ITEM_BYTES :]
        latest = _rfind(text, wanted, max(count - self.num_draft_tokens, 0))
        start = _find(text, wanted, count - 1) if latest is None else latest
        return None if start is None else start + ngram


def _find(text: bytes, wanted: bytes, end: int) -> int | None:
    """Index of the first token at which ``wanted`` stands, before token ``end``."""
    at = text.find(wanted, 0, end * ITEM_BYTES)
    while at > 0 and at % ITEM_BYTES:
        at = text.find(wanted, at + 1, end * ITEM_BYTES)
    return at // ITEM_BYTES if at >= 0 else None


def _rfind(text: bytes, wanted: bytes, end: int) -> int | None:
    """Index of the last token at which ``wanted`` stands, before token ``end``."""
    at = text.rfind(wanted, 0, end * ITEM_BYTES)
    while at > 0 and at % ITEM_BYTES:
        at = text.rfind(wanted, 0, at + len(wanted) - 1)
    return at // ITEM_BYTES if at >= 0 else None
