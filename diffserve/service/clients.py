"""Who asks: told apart by address, and at one address by key. Names are digests, made anew by every process.

A key is not proof of anything here, so it divides the share of an address among at most ``MOST_KEYS`` at a time; nobody
gets more by making some up. What proxies say of their clients counts only where they are named in the configuration;
what the page says of its visitors, where it lives in this process.
"""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from starlette.requests import Request

from diffserve.client.on_behalf import HEADER, Asker, asker_in
from diffserve.service.http.hosts import address_of

MOST_KEYS: Final = 8
IPV6_NETWORK_BITS: Final = 64
"""What one customer of a provider has is one client."""


class Clients:
    """Names of those whose requests are inside. ``trusted_proxies``: addresses whose X-Forwarded-For is believed."""

    def __init__(self, trusted_proxies: Sequence[str] = ()) -> None:
        self._trusted = frozenset(trusted_proxies)
        self._salt = secrets.token_bytes(16)
        self._keys: dict[str, Counter[str]] = {}

    @contextmanager
    def known(self, request: Request) -> Iterator[str]:
        """The name of whoever sent ``request``, which is the same for as long as anything of theirs is inside."""
        asker = asker_in(request.headers.get(HEADER))
        address = self._digest(_network(self._address(request, asker)))
        key = self._digest(asker.key if asker else request.headers.get("authorization", ""))
        keys = self._keys.setdefault(address, Counter())
        if key not in keys and len(keys) >= MOST_KEYS:
            key = "others"
        keys[key] += 1
        try:
            yield f"{address}/{key}"
        finally:
            keys[key] -= 1
            if not keys[key]:
                del keys[key]
            if not keys and self._keys.get(address) is keys:
                del self._keys[address]

    def _address(self, request: Request, asker: Asker | None) -> str:
        """The nearest address that is not one of ours."""
        address = request.client.host if request.client is not None else ""
        told = ",".join(request.headers.getlist("x-forwarded-for")).split(",")
        if asker is not None:
            *told, address = (one.strip() for one in asker.addresses.split(","))
        while address in self._trusted and told and told[-1].strip():
            address = told.pop().strip()[:64]
        return address

    def _digest(self, text: str) -> str:
        return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8, key=self._salt).hexdigest()


def _network(address: str) -> str:
    """An IPv4 address as it is, the network of an IPv6 one."""
    parsed = address_of(address)
    if not isinstance(parsed, ipaddress.IPv6Address):
        return str(parsed or address)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed.packed, IPV6_NETWORK_BITS), strict=False))
