"""Vocabulary of a model with a closed vocabulary: buttons for its words, and a warning for unknown words."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import gradio as gr

from diffserve.api.errors import DiffserveError, InvalidRequest
from diffserve.client import World
from diffserve.models.loras import read_list, read_tags
from diffserve.models.vocabulary import MOST_NAMED, unknown_words
from diffserve.world.captions import plural
from ui.events import LATEST, SILENT
from ui.server import Server

UNCOUNTED: Final = ("grapes", "cherries", "corn")
"""Objects without an article."""

PREPOSITIONS: Final = {"beach": "on"}
"""Prepositions of places other than "in"."""

MAX_LOOKED_AT_CHARS: Final = 4_000
Update = Any  # a value of a component, or what gr.update gives


class Palette(NamedTuple):
    """Components of the vocabulary panel."""

    unknown: gr.HTML
    rewrite: gr.Button
    panel: gr.Accordion
    things: gr.HTML


def lay_out_warning() -> tuple[gr.HTML, gr.Button]:
    """Build the warning about unknown words and its button in the current context, hidden."""
    unknown = gr.HTML(elem_id="unknown-words", elem_classes="quiet")
    return unknown, gr.Button("Rewrite with known words", size="sm", visible=False, elem_id="rewrite-unknown")


def lay_out(unknown: gr.HTML, rewrite: gr.Button) -> Palette:
    """Build the panel in the current context, hidden; the arguments are those of ``lay_out_warning``."""
    with gr.Accordion("Vocabulary", open=False, visible=False, elem_id="palette") as panel:
        things = gr.HTML(elem_id="palette-things")
    return Palette(unknown, rewrite, panel, things)


def connect(
    server: Server,
    prompt: gr.Textbox,
    loras: gr.Textbox,
    rewrite_mode: gr.Radio,
    model: gr.Dropdown,
    palette: Palette,
) -> None:
    """Bind the events: unknown words are word_labels while typing, and the button switches to suggestions."""

    async def look(prompt: str | None, loras: str | None, mode: str, model: str | None) -> tuple[str, Update]:
        try:
            models = await server.models()
        except DiffserveError:
            return "", gr.update(visible=False)
        world = models.image_of(model).world
        words = unknown_in(prompt or "", world, loras or "") if mode != "Auto" else ()
        return warning_of(words), gr.update(visible=bool(words) and models.language is not None)

    fields: list[Any] = [prompt, loras, rewrite_mode, model]
    changed = gr.on([field.change for field in fields], js="() => []", **SILENT)
    changed.then(look, fields, [palette.unknown, palette.rewrite], **LATEST)


def shown(world: World | None) -> tuple[Update, Update]:
    """(panel, things) for what the model knows; nothing where that cannot be listed."""
    if world is None or not (world.objects or world.places):
        return gr.update(visible=False), gr.skip()
    return gr.update(visible=True), "".join(_rows(world))


def unknown_in(prompt: str, world: World | None, loras: str = "") -> tuple[str, ...]:
    """Return the words of ``prompt`` that neither the model nor one of the LoRAs in use knows."""
    if world is None or not world.words:
        return ()
    prompt = prompt[:MAX_LOOKED_AT_CHARS]
    try:
        text, tagged = read_tags(prompt)
        names = [lora.name.rpartition("/")[2] for lora in (*tagged, *read_list(loras))]
    except InvalidRequest:  # not finished typing
        text, names = prompt, []
    with suppress(InvalidRequest):
        return unknown_words(text, (*world.words, *names, *map(plural, names)))
    return ()


def warning_of(words: Sequence[str]) -> str:
    """Return the warning about unknown ``words`` as HTML; empty if there are none."""
    if not words:
        return ""
    word_labels = [f"“<b>{html.escape(word[:40])}</b>”" for word in words[:MOST_NAMED]]
    num_hidden = len(words) - MOST_NAMED
    word_labels += [f"{num_hidden} more"] if num_hidden > 0 else []
    listed = f"{', '.join(word_labels[:-1])} and {word_labels[-1]}" if len(word_labels) > 1 else word_labels[0]
    return f'<p role="status">It will ignore {listed}; try Rewrite.</p>'


def _rows(world: World) -> Iterator[str]:
    yield _row("Things", "thing", [(name, _with_article(name), plural(name)) for name in world.objects])
    yield _row("Places", "place", [(name, f"{PREPOSITIONS.get(name, 'in')} the {name}", "") for name in world.places])
    yield _row("Backgrounds", "place", [(name, f"on {_with_article(name)} background", "") for name in world.colors])


def _row(title: str, kind: str, says: Sequence[tuple[str, str, str]]) -> str:
    """Return buttons of (label, inserted text, text after a number) under ``title``, as HTML."""
    buttons = "".join(
        f'<button type="button" data-kind="{kind}" data-say="{html.escape(say)}" data-many="{html.escape(many)}">'
        f"{html.escape(name)}</button>"
        for name, say, many in says
    )
    return f"<h3>{title}</h3><p>{buttons}</p>" if says else ""


def _with_article(words: str) -> str:
    if words in UNCOUNTED:
        return words
    return f"{'an' if words[:1] in 'aeiou' else 'a'} {words}"
