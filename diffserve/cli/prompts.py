"""Reading of the prompt argument: one quoted argument, or standard input."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from diffserve.api.errors import InvalidRequest
from diffserve.api.types import MAX_PROMPT_CHARS

STDIN = "-"


def read_text_argument(words: Sequence[str], *, command: str, name: str = "prompt") -> str:
    """Return the only argument of ``command``, or the text on standard input if it is ``-``.

    Args:
        words: The arguments as the shell passed them.
        command: Name of the command, for the error message.
        name: Name of the argument, for the error message.

    Raises:
        InvalidRequest: There are several arguments (a prompt without quotes), or standard input is empty or not UTF-8.
    """
    if len(words) > 1:
        quoted = shlex.quote(" ".join(words)[:60])
        raise InvalidRequest(
            f"the {name} must be one argument, got {len(words)}; put it in quotes: diffserve {command} {quoted}",
            param=name,
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
        raise InvalidRequest(f"standard input has no {name}; write a text.", param=name, code="empty_prompt")
    return text.strip()
