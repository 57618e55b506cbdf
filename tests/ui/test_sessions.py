"""Sessions of visitors: cheap to create, cheap to update, and equivalent to Gradio's own."""

from __future__ import annotations

from typing import Any

import gradio as gr
import pytest
from gradio.blocks import BlocksConfig
from gradio.state_holder import SessionState

from ui.mounting import _within_a_loop
from ui.uploads import keep_sessions_lean


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the components that are described from now on."""
    ids: list[int] = []
    describe = BlocksConfig.config_for_block

    def counted(number: int, *arguments: Any) -> dict[str, Any]:
        ids.append(number)
        return describe(number, *arguments)

    monkeypatch.setattr(BlocksConfig, "config_for_block", staticmethod(counted))
    return ids


def small_page() -> tuple[gr.Blocks, gr.Textbox, gr.Radio]:
    with gr.Blocks() as page:
        box, choice = gr.Textbox("a"), gr.Radio(["x", "y"])
    return page, box, choice


def test_a_session_describes_no_component_and_has_all(described: list[int]) -> None:
    keep_sessions_lean()
    page, box, choice = _within_a_loop(small_page)
    described.clear()
    session = SessionState(page)
    session[box._id] = gr.Textbox("b", render=False)
    session._update_config(box._id)
    session._update_value_in_config(choice._id, "y")
    assert described == []
    assert (session[box._id].value, session[choice._id] is choice) == ("b", True)
    assert SessionState(page)[box._id].value == "a"
    assert page.get_config_file()["components"][0]["props"]["value"] == "a"


def test_components_are_described_once() -> None:
    keep_sessions_lean()
    lean = SessionState.__init__
    keep_sessions_lean()
    assert SessionState.__init__ is lean
