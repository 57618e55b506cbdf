"""``diffserve rewrite``: a wish in, prompts out, one line each; what there is to say about them on standard error."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final

import msgspec
from rich.console import Console

from diffserve.rewrite_types import Rewrite, RewriteDelta, RewriteEvent, RewriteFinished, RewriteRequest

if TYPE_CHECKING:
    from diffserve.engine.rewriter import Rewriter
    from diffserve.rewriting import TextWindow
    from diffserve.runtime.language import LanguageModel

EMBEDDED: Final = "embedded"
EMBEDDED_MARKS: Final = ("<wish>", "<caption>")
"""A tokenizer with these was made for the embedded rewriter's own prompt."""

CLIP_PAD: Final = "!"


def run(request: RewriteRequest, model: str, style: str | None, *, device: str, dtype: str, is_json: bool) -> int:
    """Rewrite by ``model``, in the ``style`` that suits it unless one is named; the exit code. Mistakes, and a model
    that is not there, are raised as DiffserveError."""
    console = Console(stderr=True, highlight=False)
    with console.status(f"loading {model}"):
        rewriter = open_rewriter(model, style, device=device, dtype=dtype)
    end = _show(rewriter, request, is_json=is_json)
    for one in dict.fromkeys(filter(None, (one.warning for one in end.rewrites))):
        console.print(f"note: {one}", style="yellow", markup=False, soft_wrap=True)
    return 0


def open_rewriter(name: str, style: str | None, *, device: str, dtype: str) -> Rewriter:
    """A rewriter on the model called ``name``; torch is imported here and not before.

    Raises ModelNotFound, ModelLoadError, ConfigError, InvalidRequest (a style that is not there).
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from diffserve.engine.rewriter import Rewriter
    from diffserve.engine.text import TextEngine
    from diffserve.rewriting import find_rewriter, load_style
    from diffserve.runtime.language import load_language_model

    if style is not None:
        load_style(style)  # before anything heavy
    model = load_language_model(find_rewriter(name), device=device, dtype=dtype)
    style = style or _style_of(model)
    return Rewriter(TextEngine.from_model(model), style=style, window=_window(style))


def _style_of(model: LanguageModel) -> str:
    """What suits ``model`` when nobody says for which image model."""
    vocabulary = model.tokenizer.get_vocab()
    return EMBEDDED if all(mark in vocabulary for mark in EMBEDDED_MARKS) else "prose"


def _window(style: str) -> TextWindow:
    """The text window of the image models that ``style`` is for."""
    from diffserve.rewriting import TextWindow
    from diffserve.runtime.loading.components import load_tokenizer
    from diffserve.runtime.loading.family import BUILT_IN
    from diffserve.runtime.text.clip_vocabulary import clip_tokenizer

    is_embedded = style == EMBEDDED
    tokenizer = load_tokenizer(BUILT_IN[EMBEDDED] / "tokenizer") if is_embedded else clip_tokenizer(pad=CLIP_PAD)
    return TextWindow.of_tokenizer(tokenizer, tokenizer.model_max_length)


def _show(rewriter: Rewriter, request: RewriteRequest, *, is_json: bool) -> RewriteFinished:
    """Print what happens, and return the end. Raises what a failed rewrite stands for."""
    from diffserve.engine.delivery import raise_if_failed

    streamed = ""
    events: list[RewriteEvent] = []
    for event in rewriter.stream(request):
        events.append(event)
        if isinstance(event, RewriteDelta) and is_json:
            _print_json(event)
        elif isinstance(event, RewriteDelta) and event.index == 0:
            streamed += event.text
            print(event.text, end="", flush=True)
    if streamed:
        print()
    end = events[-1]
    raise_if_failed(end)
    assert isinstance(end, RewriteFinished)
    if is_json:
        _print_json(end)
    else:
        _print_prompts(end.rewrites, streamed)
    return end


def _print_prompts(rewrites: tuple[Rewrite, ...], streamed: str) -> None:
    """One line each; the first not twice when its words were shown as they came."""
    for index, one in enumerate(rewrites):
        line = " ".join(one.prompt.split())
        if index or line != streamed.strip():
            print(line)


def _print_json(event: RewriteDelta | RewriteFinished) -> None:
    sys.stdout.write(msgspec.json.encode(event).decode("utf-8") + "\n")
    sys.stdout.flush()
