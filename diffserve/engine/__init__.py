"""Engines and their tick loops: images, texts, prompt rewriting, and all of them combined in one process.

Names are looked up on first use, so that policy can be imported without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffserve.engine.combined_engine import CombinedEngine
    from diffserve.engine.image.engine import Engine
    from diffserve.engine.image.task import RowLabel, TickTrace, UNetCall
    from diffserve.engine.rewriter import Rewriter
    from diffserve.engine.text import TextEngine

__all__ = ["CombinedEngine", "Engine", "Rewriter", "RowLabel", "TextEngine", "TickTrace", "UNetCall"]

_HOMES = ("image.task", "image.engine", "text", "rewriter", "combined_engine")  # the first needs no torch


def __getattr__(name: str) -> Any:
    """Import the home of ``name`` on first use."""
    if name not in __all__:
        raise AttributeError(f"module 'diffserve.engine' has no attribute {name!r}; it offers {', '.join(__all__)}")
    from importlib import import_module

    homes = (import_module(f"{__name__}.{home}") for home in _HOMES)
    return next(getattr(home, name) for home in homes if hasattr(home, name))
