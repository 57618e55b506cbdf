"""Web page of a diffserve server: image generation, prompt rewriting and sampler comparisons.

The page uses the server over HTTP through ``diffserve.client`` and never imports the engine, the runtime or torch.
``diffserve serve`` mounts it at ``/``; ``python -m ui --server URL`` serves it for a server that runs elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import gradio as gr

    from ui.server import Server

__all__ = ["create_page", "mount_page"]


def create_page(url: str, *, server: Server | None = None) -> gr.Blocks:
    """Build the page of the diffserve server at ``url``, or of ``server``.

    This imports gradio, which takes seconds, so call it in a thread where it would block an event loop.
    """
    from ui.mounting import create_page

    return create_page(url, server=server)


def mount_page(app: Any, url: str, grace_s: float | None = None) -> tuple[str, ...]:
    """Mount the page of the server at ``url`` at ``/`` of a FastAPI application.

    Args:
        app: An application that serves nothing else. Enter ``app.router.lifespan_context`` while it is served; leaving
            it closes the streams of open pages.
        url: The address of the server.
        grace_s: How many seconds a request continues while no page shows it.

    Returns:
        The paths that the page needs; those that end in "/" or "=" stand for all paths below them.
    """
    from ui.mounting import mount_page

    return mount_page(app, url, grace_s)
