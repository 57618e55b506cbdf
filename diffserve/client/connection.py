"""What both clients set up in the same way."""

from __future__ import annotations

import ipaddress
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

DEFAULT_URL: Final = "http://127.0.0.1:8000"
TIMEOUT_S: Final = 660.0
"""A little more than a server takes before it gives a request up itself."""

CONNECT_S: Final = 5.0
SILENCE_S: Final = 60.0
"""A stream is never silent for so long: the server sends comments."""

KEEP_ALIVE_S: Final = 2.0  # a server hangs up after five
JSON: Final = {"Content-Type": "application/json"}


def settings(url: str, timeout_s: float) -> dict[str, Any]:
    """For httpx' clients. A server on this machine is never looked for behind a proxy."""
    return {
        "base_url": url,
        "timeout": httpx.Timeout(timeout_s, connect=CONNECT_S),
        "limits": httpx.Limits(max_connections=None, keepalive_expiry=KEEP_ALIVE_S),
        "trust_env": not _is_here(urlsplit(url).hostname or ""),
    }


def stream_timeout(timeout_s: float) -> httpx.Timeout:
    """Of an answer in pieces: how long it may be silent."""
    return httpx.Timeout(min(timeout_s, SILENCE_S), connect=CONNECT_S)


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
