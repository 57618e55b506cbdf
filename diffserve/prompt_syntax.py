"""How prompts are written. No torch.

    a1111  "(fox:1.3)" weighs words, "BREAK" begins a new chunk, "<lora:ink>" names an adapter
    plain  all of that is text: brackets are brackets

A plain prompt is the same text in A1111's syntax, with a backslash before what would mean something there; that is how
it goes on, and how metadata has it, so it is read again as it was meant wherever that is read.
"""

from __future__ import annotations

import re
from typing import Final, Literal, get_args

from diffserve.bounds import check

PromptSyntax = Literal["a1111", "plain"]
A1111: Final = "a1111"
SYNTAXES: Final[tuple[PromptSyntax, ...]] = get_args(PromptSyntax)
_MEANT: Final = re.compile(r"[()\[\]\\]|<(?=lora:)|\bBREAK\b")


def in_a1111(text: str, syntax: str) -> str:
    """``text``, written in ``syntax``, as A1111 would have it. Raises InvalidRequest for another name."""
    said = f"prompt_syntax is {syntax[:40]!r}; give {' or '.join(SYNTAXES)}."
    check(syntax in SYNTAXES, said, "prompt_syntax")
    return _MEANT.sub(r"\\\g<0>", text) if syntax == "plain" else text
