"""``diffserve rewrite``: rewrites a wish into prompts, one per line; warnings go to standard error."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
from rich.console import Console

from diffserve.api.fields import MAX_SEED
from diffserve.api.rewrite_types import Rewrite, RewriteDelta, RewriteEvent, RewriteFinished, RewriteRequest
from diffserve.cli.generate import note

if TYPE_CHECKING:
    from diffserve.engine.rewriter import Rewriter
    from diffserve.rewriting import TextWindow
    from diffserve.runtime.language import LanguageModel

EMBEDDED: Final = "embedded"
EMBEDDED_MARKS: Final = ("<wish>", "<caption>")
"""Tokens in the vocabulary of language models that are trained for the prompt of the embedded rewriter."""

CLIP_PAD: Final = "!"
MAX_ATTEMPTS: Final = 4
"""How often to sample prompts when some of them are equal."""

NUM_FURTHER: Final = 10
"""Number of prompts in each further attempt."""

T = TypeVar("T")


def run(request: RewriteRequest, model: str, style: str | None, *, device: str, dtype: str, is_json: bool) -> int:
    """Rewrite a wish with a local language model, print the prompts and return the exit code.

    Args:
        request: The wish and its options.
        model: Name or folder of the language model.
        style: Prompt style. None: the style that fits the model.
        device: Device name.
        dtype: Precision name.
        is_json: Whether to print JSON.

    Raises:
        DiffserveError: The request is invalid, or the model cannot be loaded.
    """
    console = Console(stderr=True, highlight=False)
    with console.status(f"loading {model}"):
        rewriter = open_rewriter(model, style, device=device, dtype=dtype)
    end, streamed = _show(rewriter, request, is_json=is_json)

    def draw(seed: int) -> tuple[Rewrite, ...]:
        options = msgspec.structs.replace(request.options, seed=seed)
        return rewriter.rewrite(request.wish, NUM_FURTHER, options)[1:]

    rewrites = distinct(end.rewrites, lambda rewrite: rewrite.prompt, request, draw)
    if is_json:
        _print_json(msgspec.structs.replace(end, rewrites=tuple(rewrites)))
    else:
        _print_prompts(rewrites, streamed)
    warnings = [*(rewrite.warning for rewrite in rewrites), shortage_warning(request, len(rewrites))]
    note(console, *dict.fromkeys(filter(None, warnings)))
    return 0


def distinct(
    first: Iterable[T], text_of: Callable[[T], str], request: RewriteRequest, draw: Callable[[int], Iterable[T]]
) -> list[T]:
    """Return as many different prompts as were requested, drawing others with further seeds for equal ones.

    Args:
        first: The prompts of the request itself.
        text_of: Returns the text of a prompt.
        request: The request, with the number of prompts and the seed.
        draw: Returns further prompts for a seed.
    """
    prompts: dict[str, T] = {}
    for attempt in range(MAX_ATTEMPTS):
        seed = (request.options.seed or 0) + request.num_prompts + NUM_FURTHER * attempt
        drawn = first if attempt == 0 else draw(seed % MAX_SEED)
        for prompt in drawn:
            prompts.setdefault(" ".join(text_of(prompt).casefold().split()), prompt)
        if len(prompts) >= request.num_prompts:
            break
    return list(prompts.values())[: request.num_prompts]


def shortage_warning(request: RewriteRequest, num_prompts: int) -> str | None:
    """Return a warning if the model has fewer different prompts than requested, otherwise None."""
    if num_prompts >= request.num_prompts:
        return None
    count = "1 prompt" if num_prompts == 1 else f"{num_prompts} different prompts"
    return f"{request.num_prompts} prompts were requested, but the model found only {count}."


def open_rewriter(name: str, style: str | None, *, device: str, dtype: str) -> Rewriter:
    """Load a language model and return its rewriter. torch is imported only here.

    Args:
        name: Name or folder of the language model.
        style: Prompt style. None: the style that fits the model.
        device: Device name.
        dtype: Precision name.

    Raises:
        ModelNotFound: There is no such model.
        ModelLoadError: The model cannot be loaded.
        ConfigError: The device or precision is not available.
        InvalidRequest: The style is unknown.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from diffserve.engine.rewriter import Rewriter
    from diffserve.engine.text import TextEngine
    from diffserve.rewriting import find_rewriter, load_style
    from diffserve.runtime.language import load_language_model

    if style is not None:
        load_style(style)  # report an unknown style before the model is loaded
    model = load_language_model(find_rewriter(name), device=device, dtype=dtype)
    style = style or _style_of(model)
    return Rewriter(TextEngine.from_model(model), style=style, window=_window(style))


def _style_of(model: LanguageModel) -> str:
    """Return the default style for ``model``."""
    vocabulary = model.tokenizer.get_vocab()
    return EMBEDDED if all(mark in vocabulary for mark in EMBEDDED_MARKS) else "prose"


def _window(style: str) -> TextWindow:
    """Return the text window of the image models that ``style`` targets."""
    from diffserve.rewriting import TextWindow
    from diffserve.runtime.loading.components import load_tokenizer
    from diffserve.runtime.loading.family import BUILT_IN
    from diffserve.runtime.text.clip_vocabulary import clip_tokenizer

    is_embedded = style == EMBEDDED
    tokenizer = load_tokenizer(BUILT_IN[EMBEDDED] / "tokenizer") if is_embedded else clip_tokenizer(pad=CLIP_PAD)
    return TextWindow.of_tokenizer(tokenizer, tokenizer.model_max_length)


def _show(rewriter: Rewriter, request: RewriteRequest, *, is_json: bool) -> tuple[RewriteFinished, str]:
    """Print the text while it is generated.

    Returns:
        The final event and the text that was printed.

    Raises:
        DiffserveError: The rewrite failed.
    """
    from diffserve.engine.base_engine import raise_if_failed

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
    """Print one prompt per line, without the first one if it was already streamed."""
    for index, rewrite in enumerate(rewrites):
        line = " ".join(rewrite.prompt.split())
        if index or line != streamed.strip():
            print(line)


def _print_json(event: RewriteDelta | RewriteFinished) -> None:
    sys.stdout.write(msgspec.json.encode(event).decode("utf-8") + "\n")
    sys.stdout.flush()
