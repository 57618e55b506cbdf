"""What gradio tells of who asks."""

from __future__ import annotations


class Request:
    """Somebody's page, on this machine."""

    session_hash = "somebody"
    client = None

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
