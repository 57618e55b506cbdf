"""How events are bound that are a page's own affair: quick, without a spinner, and not offered to scripts; and what
JavaScript alone does (``memory.js``): a tab of a browser remembers over a reload what stands in its fields.

They do not queue. Gradio loses an event that is queued in the moment in which a page's last one ends: the server closes
the page's stream of answers just when the page counts on it. So only what takes long is queued.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from typing import Any, Final, TypeVar

import gradio as gr
from gradio.components import Component

PRIVATE: Final[dict[str, Any]] = {"api_visibility": "private", "show_progress": "hidden", "queue": False}

SILENT: Final[dict[str, Any]] = {"fn": None, "api_visibility": "private", "show_progress": "hidden"}
"""Those that never leave the browser: JavaScript alone."""

Function = TypeVar("Function", bound=Callable[..., Any])


def called_with(*names: str) -> Callable[[Function], Function]:
    """For a method that takes any arguments: gradio gives it values that its client may call by ``names``, and then
    its request.
    """

    def decorate(function: Function) -> Function:
        every = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", *names, "request")]
        function.__signature__ = Signature(every)  # type: ignore[attr-defined]
        function.__annotations__ = {"request": gr.Request}
        return function

    return decorate


def shown_if(is_shown: bool) -> dict[str, Any]:
    """The update of a button that another one takes the place of. It stays in the page: one that is made anew each time
    comes late, and a click upon it may be lost.
    """
    update: dict[str, Any] = gr.update(visible=True if is_shown else "hidden")
    return update


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
