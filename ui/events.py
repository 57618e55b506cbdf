"""How events are bound that are a page's own affair: quick, without a spinner, and not offered to scripts.

They do not queue. Gradio loses an event that is queued in the moment in which a page's last one ends: the server closes
the page's stream of answers just when the page counts on it. So only what takes long is queued.
"""

from __future__ import annotations

from typing import Any, Final

PRIVATE: Final[dict[str, Any]] = {"api_visibility": "private", "show_progress": "hidden", "queue": False}

SILENT: Final[dict[str, Any]] = {"fn": None, "api_visibility": "private", "show_progress": "hidden"}
"""Those that never leave the browser: JavaScript alone."""
