"""What is to be painted, as it comes from a shell: quoted, or by standard input."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from diffserve.api.errors import InvalidRequest
from diffserve.api.types import MAX_PROMPT_CHARS

STDIN = "-"


def one_text(words: Sequence[str], *, command: str, name: str = "prompt") -> str:
    """The one argument of ``command``, or what standard input says where it is "-".

    Raises InvalidRequest for several arguments, which a shell made of a sentence without quotes, and for an input that
    is no text, or too long.
    """
    if len(words) > 1:
        told = shlex.quote(" ".join(words)[:60])
        raise InvalidRequest(
            f"the {name} came as {len(words)} words; put it in quotes: diffserve {command} {told}", param=name
        )
    return _read_stdin(name) if words[0] == STDIN else words[0]


def _read_stdin(name: str) -> str:
    try:
        text = sys.stdin.buffer.read(4 * MAX_PROMPT_CHARS + 1).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"the {name} on standard input is not UTF-8 text ({error.reason} at byte {error.start}).", param=name
        ) from None
    if not text.strip():
        raise InvalidRequest(f"standard input holds no {name}; say what to paint.", param=name, code="empty_prompt")
    return text.strip()
