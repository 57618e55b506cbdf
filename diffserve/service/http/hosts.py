"""Host names under which the server may be addressed, as protection against DNS rebinding."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

ANY: Final = "*"
AUTHORITY: Final = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.\-_]+)(?::[0-9]*)?")
"""A host with an optional port; userinfo (RFC 9112 4.2.4) is refused."""
HOST_NOT_ALLOWED: Final = (
    "this server does not answer to that name; use its address, or have the name listed in "
    "[serve] allowed_hosts of its configuration."
)


class HostNames:
    """Accepted host names.

    Names of the loopback interface, the bound host and the host of ``public_url`` are always accepted; ``allowed``
    adds more ("*" for any). If it is empty and other machines can connect, addresses and the machine's name are
    accepted too.
    """

    def __init__(self, bound_host: str, allowed: Sequence[str] = (), *, public_url: str = "") -> None:
        self._names = {bound_host.lower(), *(name.lower() for name in allowed)}
        if public_host := urlsplit(public_url).hostname:
            self._names.add(public_host)
        self._is_any = ANY in allowed
        self._takes_addresses = not allowed and not is_loopback(bound_host)
        if self._takes_addresses:
            machine_name = socket.gethostname().lower()
            self._names |= {machine_name, f"{machine_name}.local"}

    def __contains__(self, host: str | None) -> bool:
        """Return whether ``host`` (lower case, without brackets and port; None if malformed) is accepted."""
        if host is None:
            return False
        if self._is_any or host in self._names or is_loopback(host):
            return True
        return self._takes_addresses and address_of(host) is not None


def is_loopback(host: str) -> bool:
    """Return whether ``host`` (a name or an address without brackets) is this machine."""
    address = address_of(host)
    return host == "localhost" or host.endswith(".localhost") or (address is not None and address.is_loopback)


def hostname(authority: str) -> str | None:
    """Return the host in ``authority`` in lower case without brackets; None if it is malformed."""
    if not AUTHORITY.fullmatch(authority):
        return None
    try:
        parts = urlsplit(f"//{authority}")
        _ = parts.port
        return parts.hostname
    except ValueError:
        return None


def origin_of(url: str) -> str:
    """Return the origin of ``url`` as browsers write it (``https://paint.example.org``); empty for an empty one."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}".lower() if url else ""


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return ``host`` as an IP address; None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
