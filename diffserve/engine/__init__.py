"""Time: who advances now. ``Engine``, ``TextEngine``, ``Rewriter`` and ``Studio`` are the faces that others use.

    delivery      the shell of all four: who follows what, every event exactly once
    records, engine   one tick of pictures or texts: cancel, expire, plan, run, apply; and the counter before it
    image, text   what that means for either
    rewriter, pending_images   wishes that become prompts, and the pictures that wait for them
    time_share, studio, loading, process   both sides in one loop, on one pool, in a process of its own

Names are looked up on first use, so that policy can be imported without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffserve.engine.image.engine import Engine
    from diffserve.engine.image.task import RowLabel, TickTrace, UNetCall
    from diffserve.engine.rewriter import Rewriter
    from diffserve.engine.studio import Studio
    from diffserve.engine.text import TextEngine

__all__ = ["Engine", "Rewriter", "RowLabel", "Studio", "TextEngine", "TickTrace", "UNetCall"]

_HOMES = ("image.task", "image.engine", "text", "rewriter", "studio")  # the first needs no torch


def __getattr__(name: str) -> Any:
    """Import the home of ``name`` when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module 'diffserve.engine' has no attribute {name!r}; it offers {', '.join(__all__)}")
    from importlib import import_module

    homes = (import_module(f"{__name__}.{home}") for home in _HOMES)
    return next(getattr(home, name) for home in homes if hasattr(home, name))
