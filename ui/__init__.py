"""The page in the browser: paint, have a wish rewritten, and see what a step buys.

The page is the roof of the house: it paints on a running server over HTTP through :mod:`diffserve.client`, like anybody
else, and never imports the engine, the runtime or torch. ``diffserve serve`` mounts it at ``/``;
``python -m ui --server URL`` shows it for a server elsewhere. Nothing heavy is imported before one of the functions
below is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import gradio as gr

    from ui.server import Server

__all__ = ["create_page", "mount_page"]


def create_page(url: str, *, server: Server | None = None) -> gr.Blocks:
    """The page of the diffserve server at ``url``, or of ``server``.

    It imports gradio, which takes seconds: call it in a thread where somebody waits.
    """
    from ui.mounting import create_page

    return create_page(url, server=server)


def mount_page(app: Any, url: str, grace_s: float | None = None) -> tuple[str, ...]:
    """Mount the page of the server at ``url`` at ``/`` of ``app``, a FastAPI application that serves nothing else.

    Returns the paths that the page needs (those that end in "/" or "=" stand for all below them), so that a caller can
    keep everything else away from it. ``app.router.lifespan_context`` has to be entered while it is served; leaving it
    lets go of open pages. A painting that nobody watches goes on for ``grace_s``.
    """
    from ui.mounting import mount_page

    return mount_page(app, url, grace_s)
