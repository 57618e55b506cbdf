"""What a tab of a browser remembers over a reload: who it is and what stands in its fields (see ``memory.js``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gradio as gr
from gradio.components import Component

from ui.events import SILENT


def keep_form(page: gr.Blocks, name: str, fields: Sequence[Any]) -> None:
    """Whatever stands in ``fields`` is there again after a reload; ``name`` tells one form of the page from another."""
    everything: list[Component] = list(fields)
    names = [field.elem_id for field in fields]
    page.load(
        js=f"(...values) => diffserve.restore({name!r}, {names!r}, values)",
        inputs=everything,
        outputs=everything,
        **SILENT,
    )
    gr.on(
        [field.change for field in fields],
        js=f"(...values) => diffserve.keep({name!r}, values)",
        inputs=everything,
        **SILENT,
    )


def keep_tab(page: gr.Blocks) -> None:
    """The tab that was open is open after a reload."""
    page.load(js="() => diffserve.restoreTab()", **SILENT)
