"""Time: who advances now. One tick = plan, run, apply (``core``); ``Engine`` is the face that everybody else uses.

    task, plan, lanes, buckets       records and ledgers, no torch
    admission, request_scheduler     policy, no torch
    preparer, row_batch, unet_caller, lane_pool, groups, exactness, runners   the tensors
    core, engine                     the loop and its face
    text                             the same for a language model's texts
    rewriting                        from wishes to prompts, by such texts
    time_share, wishes, studio_parts, studio   both sides in one loop, on one pool

Names are looked up on first use, so that policy can be imported without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffserve.engine.engine import Engine
    from diffserve.engine.plan import RowLabel, TickTrace, UNetCall
    from diffserve.engine.rewriting import Rewriter
    from diffserve.engine.studio import Studio
    from diffserve.engine.text import TextEngine

__all__ = ["Engine", "Rewriter", "RowLabel", "Studio", "TextEngine", "TickTrace", "UNetCall"]

_HOME = {
    "Engine": "diffserve.engine.engine",
    "Rewriter": "diffserve.engine.rewriting",
    "RowLabel": "diffserve.engine.plan",
    "Studio": "diffserve.engine.studio",
    "TextEngine": "diffserve.engine.text",
    "TickTrace": "diffserve.engine.plan",
    "UNetCall": "diffserve.engine.plan",
}


def __getattr__(name: str) -> Any:
    """Import the home of ``name`` when it is first asked for."""
    if name not in _HOME:
        raise AttributeError(f"module 'diffserve.engine' has no attribute {name!r}; it offers {', '.join(__all__)}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
