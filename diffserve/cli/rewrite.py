"""``diffserve rewrite``: a wish in, prompts out, one line each; what there is to say about them on standard error."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
from rich.console import Console

from diffserve.api.rewrite_types import Rewrite, RewriteDelta, RewriteEvent, RewriteFinished, RewriteRequest
from diffserve.api.types import MAX_SEED
from diffserve.cli.generate import note

if TYPE_CHECKING:
    from diffserve.engine.rewriter import Rewriter
    from diffserve.rewriting import TextWindow
    from diffserve.runtime.language import LanguageModel

EMBEDDED: Final = "embedded"
EMBEDDED_MARKS: Final = ("<wish>", "<caption>")
"""A tokenizer with these was made for the embedded rewriter's own prompt."""

CLIP_PAD: Final = "!"
MAX_ATTEMPTS: Final = 4
"""How often prompts are drawn where some of them are equal."""

NUM_FURTHER: Final = 10
"""Prompts of each further attempt."""

T = TypeVar("T")


def run(request: RewriteRequest, model: str, style: str | None, *, device: str, dtype: str, is_json: bool) -> int:
    """Rewrite by ``model``, in the ``style`` that suits it unless one is named; the exit code. Mistakes, and a model
    that is not there, are raised as DiffserveError."""
    console = Console(stderr=True, highlight=False)
    with console.status(f"loading {model}"):
        rewriter = open_rewriter(model, style, device=device, dtype=dtype)
    end, streamed = _show(rewriter, request, is_json=is_json)

    def more(seed: int) -> tuple[Rewrite, ...]:
        options = msgspec.structs.replace(request.options, seed=seed)
        return rewriter.rewrite(request.wish, NUM_FURTHER, options)[1:]

    rewrites = distinct(end.rewrites, lambda one: one.prompt, request, more)
    if is_json:
        _print_json(msgspec.structs.replace(end, rewrites=tuple(rewrites)))
    else:
        _print_prompts(rewrites, streamed)
    warnings = [*(one.warning for one in rewrites), too_few(request, len(rewrites))]
    note(console, *dict.fromkeys(filter(None, warnings)))
    return 0


def distinct(
    first: Iterable[T], text_of: Callable[[T], str], request: RewriteRequest, more: Callable[[int], Iterable[T]]
) -> list[T]:
    """Return as many different prompts as were requested, drawing others with further seeds for equal ones.

    Args:
        first: The prompts of the request itself.
        text_of: Returns the text of a prompt.
        more: Returns further prompts for a seed.
    """
    prompts: dict[str, T] = {}
    for attempt in range(MAX_ATTEMPTS):
        seed = (request.options.seed or 0) + request.num_prompts + NUM_FURTHER * attempt
        drawn = first if attempt == 0 else more(seed % MAX_SEED)
        for one in drawn:
            prompts.setdefault(" ".join(text_of(one).casefold().split()), one)
        if len(prompts) >= request.num_prompts:
            break
    return list(prompts.values())[: request.num_prompts]


def too_few(request: RewriteRequest, num_prompts: int) -> str | None:
    """Return what to say where the model has fewer different prompts than were requested."""
    if num_prompts >= request.num_prompts:
        return None
    count = "1 prompt" if num_prompts == 1 else f"{num_prompts} different prompts"
    return f"{request.num_prompts} prompts were requested, and the model has {count} for this wish."


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


def _show(rewriter: Rewriter, request: RewriteRequest, *, is_json: bool) -> tuple[RewriteFinished, str]:
    """Print the deltas, and return the end and the words that were printed. Raises what a failed rewrite stands for."""
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
    return end, streamed


def _print_prompts(rewrites: Sequence[Rewrite], streamed: str) -> None:
    """One line each; the first not twice when its words were shown as they came."""
    for index, one in enumerate(rewrites):
        line = " ".join(one.prompt.split())
        if index or line != streamed.strip():
            print(line)


def _print_json(event: RewriteDelta | RewriteFinished) -> None:
    sys.stdout.write(msgspec.json.encode(event).decode("utf-8") + "\n")
    sys.stdout.flush()
