"""A stand-in for Gradio's request object."""

from __future__ import annotations


class Request:
    """A request of a browser on this machine."""

    session_hash = "somebody"
    client = None

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
