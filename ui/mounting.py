"""Serving of the page: offline, without telemetry, and without the parts of gradio that it does not need."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from diffserve.client import own_key
from ui.guard import Guard
from ui.server import GRACE_S, Server

if TYPE_CHECKING:
    from ui.blocks import PageBlocks

T = TypeVar("T")
MAX_UPLOAD_BYTES: Final = 16_000_000
MAX_SESSIONS: Final = 1000
"""Sessions whose component state gradio stores, about 40 kB each."""

IDLE_LOOK_S: Final = 0.02
"""Polling interval of gradio's idle queue; its default of 1 ms keeps a core busy."""

API: Final = "/gradio_api"
PATHS: Final = (
    *("/", "/config", "/theme.css", "/manifest.json", "/favicon.ico", "/robots.txt", "/pwa_icon"),
    *("/assets/", "/static/", "/svelte/"),
    *(f"{API}/{name}" for name in ("info", "config", "theme.css", "app_id", "user", "login_check", "token")),
    *(f"{API}/{name}" for name in ("queue/join", "queue/data", "cancel", "reset", "upload", "upload_progress")),
    *(f"{API}/{name}" for name in ("startup-events", "heartbeat/", "file=", "run/")),
)
"""Paths that the page and gradio's clients request; login, proxy, monitoring and code editing are not served."""

QUIET: Final = {
    "GRADIO_ANALYTICS_ENABLED": "False",
    "GRADIO_ANALYTICS_CACHE_FREQUENCY": "1000000000",  # its event table would import pandas
    "GRADIO_ANALYTICS_MAX_EVENTS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "GRADIO_SHARE": "False",
}


def create_page(url: str, *, server: Server | None = None) -> PageBlocks:
    """Build the page as described in ``ui.create_page``."""
    server = server or Server(url)
    os.environ.update(QUIET, GRADIO_TEMP_DIR=str(server.files.folder))
    from ui.page import build
    from ui.uploads import keep_sessions_lean, limit_uploads

    keep_sessions_lean()
    page = _within_a_loop(lambda: build(server))
    limit_uploads(page, server.files)
    page.state_session_capacity = MAX_SESSIONS
    page._queue.sleep_when_free = IDLE_LOOK_S
    page._queue.progress_update_sleep_when_free = 10 * IDLE_LOOK_S
    return page


def use_relative_manifest() -> None:
    """Make the manifest URL in gradio's page template relative to the page."""
    from gradio import routes
    from jinja2 import ChoiceLoader, DictLoader

    name, environment = "frontend/index.html", routes.templates.env
    assert environment.loader is not None
    source = environment.loader.get_source(environment, name)[0]
    page = source.replace('href="/manifest.json"', 'href="./manifest.json"')
    environment.loader = ChoiceLoader([DictLoader({name: page}), environment.loader])


def mount_page(app: Any, url: str, grace_s: float | None = None) -> tuple[str, ...]:
    """Mount the page as described in ``ui.mount_page``."""
    server = Server(url, api_key=own_key(), grace_s=GRACE_S if grace_s is None else grace_s)
    page = create_page(url, server=server)
    import gradio as gr

    from ui.blocks import FreshInfo
    from ui.page import looks

    use_relative_manifest()
    _within_a_loop(
        lambda: gr.mount_gradio_app(
            app, page, path="/", max_file_size=MAX_UPLOAD_BYTES, ssr_mode=False, mcp_server=False, pwa=False, **looks()
        )
    )
    app.add_middleware(FreshInfo, blocks=page, gradio_app=app.routes[-1].app, path=f"{API}/info")
    app.add_middleware(Guard, blocks=page, api=API, files=server.files)
    app.router.lifespan_context = _closing_pages(app.router.lifespan_context, app.routes[-1].app, server)
    return PATHS


def launch_page(url: str, *, host: str, port: int) -> None:
    """Serve the page of the server at ``url`` in this process until interrupted.

    Raises:
        OSError: The port is in use.
    """
    page = create_page(url)
    from ui.page import looks

    _, address, _ = page.launch(
        server_name=host, server_port=port, share=False, inbrowser=False, quiet=True, max_file_size=MAX_UPLOAD_BYTES,
        ssr_mode=False, mcp_server=False, pwa=False, prevent_thread_lock=True,
        state_session_capacity=MAX_SESSIONS, **looks(),
    )  # fmt: skip
    print(f"ui: the page of {url} is at {address}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    page.block_thread()


def _within_a_loop(build: Callable[[], T]) -> T:
    """Return ``build()``, run inside an event loop; without a running one, gradio would leak new loops."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:

        async def run() -> T:
            return build()

        return asyncio.run(run())
    return build()


def _closing_pages(lifespan: Any, gradio_app: Any, server: Server) -> Any:
    """Wrap ``lifespan`` to close the streams of open pages at its end, which would otherwise block the shutdown."""

    @contextlib.asynccontextmanager
    async def ending(app: Any) -> AsyncIterator[Any]:
        async with lifespan(app) as state:
            try:
                yield state
            finally:
                server.files.settle()  # while the open pages are still known
                gradio_app.stop_event.set()
                gradio_app.get_blocks()._queue.close()
                await server.close()

    return ending
