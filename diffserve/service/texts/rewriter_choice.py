"""``prompt_rewriter`` of an image request: off, auto, force, or a style, a seed and a system text."""

from __future__ import annotations

from functools import cache
from typing import Final, Literal

from diffserve.config import configs_dir
from diffserve.errors import InvalidRequest
from diffserve.service.http.bodies import show
from diffserve.service.texts.schemas import RewriterChoice
from diffserve.types import RewriteOptions

RewriterMode = Literal["off", "auto", "force"]
MAX_STYLE_CHARS: Final = 64


def rewriting_of(choice: RewriterMode | RewriterChoice | None, default: RewriterMode) -> RewriteOptions | None:
    """How the prompt is to be rewritten before it is painted; ``None``: not at all. Raises InvalidRequest."""
    if not isinstance(choice, RewriterChoice):
        mode = choice or default
        return None if mode == "off" else RewriteOptions(force=mode == "force")
    check_style(choice.style, "prompt_rewriter.style")
    return RewriteOptions(
        style=choice.style,
        seed=None if choice.seed in (None, -1) else choice.seed,
        system=choice.system,
        force=bool(choice.force),
    )


def check_style(style: str | None, param: str) -> None:
    """InvalidRequest where there is no style of that name; ``None`` is the model's own."""
    if style is not None and style not in styles():
        raise InvalidRequest(
            f"{param} is {show(style)}; it must be one of {', '.join(styles())}, or left out.",
            param=param,
            code="unknown_style",
        )


@cache
def styles() -> tuple[str, ...]:
    """The names of the files in ``configs/rewriter``."""
    return tuple(sorted(path.stem for path in (configs_dir() / "rewriter").glob("*.toml")))
