"""Shared inputs of the page's tabs, and settings of gradio events that are not part of its API.

Short events do not use gradio's queue: it loses an event that is queued while the last one of the page ends, because
the server closes the page's event stream at that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from typing import Any, Final, TypeVar

import gradio as gr
from gradio.components import Component
from gradio.events import Dependency

PRIVATE: Final[dict[str, Any]] = {"api_visibility": "private", "show_progress": "hidden", "queue": False}

LATEST: Final[dict[str, Any]] = {**PRIVATE, "trigger_mode": "always_last"}
"""Settings of events that read the current state: those that occur while one runs are followed by one more.

Requests at the same time would end in any order, so that an old state might be shown last. The state comes from the
inputs, or from JavaScript as in ``on_report``: gradio sends the data of the first event with the later ones.

The additional request repeats the event with all its functions, so only one of them may have these settings: two would
repeat each other forever on a slow connection. ``then`` gives another function an event of its own.
"""

MAX_PRESSES: Final = 50
"""Presses of a list's buttons that one request takes; nobody presses more while the last request runs."""

SILENT: Final[dict[str, Any]] = {"fn": None, "api_visibility": "private", "show_progress": "hidden"}
"""Settings of events that only run JavaScript."""

Function = TypeVar("Function", bound=Callable[..., Any])


def called_with(*names: str) -> Callable[[Function], Function]:
    """Give a method with variable arguments the parameter names that gradio's client uses.

    Args:
        names: The names of its values; gradio's request follows them.
    """

    def decorate(function: Function) -> Function:
        every = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", *names, "request")]
        function.__signature__ = Signature(every)  # type: ignore[attr-defined]
        function.__annotations__ = {"request": gr.Request}
        return function

    return decorate


def on_report(
    events: Sequence[Any],
    function: Callable[..., Any],
    script: str,
    outputs: Sequence[Component] | Component | None,
    inputs: Sequence[Component] = (),
) -> Dependency:
    """Bind ``events`` to a function of a value from the browser; of several requests, the last one is shown last.

    Args:
        events: The events.
        function: Takes the JSON value, those of ``inputs``, and the request.
        script: JavaScript expression of the value, evaluated when a request is sent.
        outputs: The components that it updates.
        inputs: Components whose values it takes.

    Returns:
        The event of the request.
    """
    value = gr.JSON(visible=False)
    js = f"(_, ...values) => [{script}, ...values]"
    bound: Dependency = gr.on(list(events), function, [value, *inputs], outputs, js=js, **LATEST)
    return bound


def on_selection(
    event: Any, function: Callable[..., Any], name: str, script: str, outputs: Sequence[Component]
) -> None:
    """Bind a selection of images, as ``on_report``; buttons that apply to them wait for its response.

    Args:
        event: The event.
        function: Takes the JSON value and the request.
        name: Name of the list in ``hold.js``.
        script: JavaScript expression of the selection.
        outputs: The components that it updates.
    """
    sent = on_report([event], function, f"diffserve.sending({name!r}, {script})", outputs)
    sent.success(js=f"() => diffserve.received({name!r})", **SILENT)
    sent.failure(js=f"() => diffserve.failed({name!r})", **SILENT)


def shown_if(is_shown: bool) -> dict[str, Any]:
    """Return the update that shows or hides a button without removing it from the page.

    Gradio takes long to create a removed button again, and a click on it may be lost.
    """
    update: dict[str, Any] = gr.update(visible=True if is_shown else "hidden")
    return update


def keep_form(page: gr.Blocks, name: str, fields: Sequence[Any]) -> Dependency:
    """Keep the values of ``fields`` over a reload of the tab, under the form's ``name``; return the event of a load."""
    components: list[Component] = list(fields)
    names = [field.elem_id for field in fields]
    restored: Dependency = page.load(
        js=f"(...values) => diffserve.restore({name!r}, {names!r}, values)",
        inputs=components,
        outputs=components,
        **SILENT,
    )
    gr.on(
        [field.change for field in fields],
        js=f"(...values) => diffserve.keep({name!r}, values)",
        inputs=components,
        **SILENT,
    )
    return restored


def keep_tab(page: gr.Blocks) -> None:
    """Keep the selected tab over a reload."""
    page.load(js="() => diffserve.restoreTab()", **SILENT)


def number_field(
    label: str,
    placeholder: str,
    elem_id: str,
    *,
    info: str,
    minimum: float | None = None,
    maximum: float | None = None,
    step: float = 1,
) -> gr.Number:
    """Build a field for a number that may be left out; ``placeholder`` says what an empty one means."""
    return gr.Number(
        None,
        label=label,
        placeholder=placeholder,
        info=info,
        minimum=minimum,
        maximum=maximum,
        step=step,
        min_width=120,
        elem_id=elem_id,
    )


def text_field(label: str, placeholder: str, elem_id: str, *, info: str | None = None) -> gr.Textbox:
    """Build a one-line text field without the browser's corrections."""
    return gr.Textbox(
        "",
        label=label,
        placeholder=placeholder,
        info=info,
        max_lines=1,
        min_width=120,
        html_attributes=gr.InputHTMLAttributes(autocomplete="off", spellcheck=False),
        elem_id=elem_id,
    )
