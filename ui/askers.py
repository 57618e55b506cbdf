"""For whom the page asks: so that one visitor's work is not another's, and each has a share of the engine."""

from __future__ import annotations

import gradio as gr

from diffserve.client import Asker, ask_for

MOST_CHARS = 500


def ask_for_visitor(request: gr.Request) -> None:
    """From now on what is asked in this context, and in tasks that begin in it, is asked for whoever sent
    ``request``."""
    told = ",".join(value for name, value in request.headers.items() if name.lower() == "x-forwarded-for")
    host = request.client.host if request.client is not None else ""
    ask_for(Asker(f"{told},{host}"[-MOST_CHARS:], request.session_hash or ""))
