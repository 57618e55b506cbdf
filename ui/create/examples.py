"""Example prompts with pictures that the embedded model painted."""

from __future__ import annotations

import base64
import html
from functools import cache
from pathlib import Path
from typing import Any, Final

import gradio as gr

FOLDER: Final = Path(__file__).resolve().parent.parent / "examples"
EXAMPLES: Final = {
    "a fox next to a cactus on the beach": "fox",
    "two apples on a blue background": "apples",
    "an owl above a castle at night": "owl",
    "a butterfly and a sunflower in the meadow": "butterfly",
    "a small boat in the ocean": "boat",
    "three penguins in the snow": "penguins",
}
"""Thumbnails in ``FOLDER`` by prompt; each is 128x128."""


def lay_out() -> gr.HTML:
    """Build the examples in the current context; ``palette.js`` puts a clicked one into the prompt."""
    return gr.HTML(_buttons(has_pictures=True), elem_id="examples", js_on_load=None)


def shown(has_pictures: bool) -> Any:
    """Return the update for a model that painted the pictures, or for another one, which has only the prompts."""
    return gr.update(value=_buttons(has_pictures=has_pictures))


@cache
def _buttons(*, has_pictures: bool) -> str:
    """Return a button for each example as HTML."""
    buttons = []
    for prompt, name in EXAMPLES.items():
        picture = ""
        if has_pictures:
            data = base64.b64encode((FOLDER / f"{name}.webp").read_bytes()).decode("ascii")
            picture = f'<img src="data:image/webp;base64,{data}" width="128" height="128" alt="">'
        text = html.escape(prompt)
        buttons.append(f'<button type="button" data-example="{text}">{picture}<span>{text}</span></button>')
    return f'<div role="group" aria-label="Examples">{"".join(buttons)}</div>'
