"""``diffserve serve``: the service, and the page on top of it."""

from __future__ import annotations

from diffserve.config import Settings
from diffserve.service.run import serve
from ui import mount_page


def run(settings: Settings) -> int:
    """Serve until stopped; the exit code. Raises what :func:`diffserve.service.run.serve` raises."""
    return serve(settings, mount_page=mount_page if settings.serve.page else None)
