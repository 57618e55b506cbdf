"""``diffserve serve``: the service, and the page on top of it where its extra is installed."""

from __future__ import annotations

from diffserve.config import Settings
from diffserve.service.run import serve
from ui import HOW_TO_INSTALL, is_installed, mount_page


def run(settings: Settings) -> int:
    """Serve until stopped; the exit code. Raises what :func:`diffserve.service.run.serve` raises."""
    if not settings.serve.page:
        return serve(settings)
    if not is_installed():
        print(f"diffserve: {HOW_TO_INSTALL}", flush=True)
        return serve(settings)
    return serve(settings, mount_page=mount_page)
