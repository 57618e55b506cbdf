"""What gradio keeps of every visitor, without what it keeps for links to a visitor's state, which the page has none of.

For those, gradio describes every component anew for every session, and again with every update, within the event loop:
a hundred visitors at once would stop everybody for seconds, and each would stay in memory with a whole page's text.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def keep_sessions_lean() -> None:
    """From now on sessions of this process describe no components."""
    from gradio.state_holder import SessionState

    begin = SessionState.__init__
    if getattr(begin, "is_lean", False):
        return

    def begin_lean(self: Any, blocks: Any) -> None:
        begin(self, SimpleNamespace(default_config=blocks.default_config, blocks={}))  # type: ignore[arg-type]
        self.blocks_config.config_for_block = _describe_nothing

    begin_lean.is_lean = True  # type: ignore[attr-defined]
    SessionState.__init__ = begin_lean  # type: ignore[method-assign]


def _describe_nothing(*_: Any) -> dict[str, Any]:
    return {}
