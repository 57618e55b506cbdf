"""Client identity: which requests belong to the same client."""

from __future__ import annotations

from contextlib import ExitStack
from contextvars import copy_context

import pytest
from starlette.requests import Request

from diffserve.client import Asker, ask_for
from diffserve.client.on_behalf import HEADER, headers
from diffserve.service.http.addresses import MAX_KEYS_PER_ADDRESS, Clients


def request(peer: str | None, **headers: str) -> Request:
    raw = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    return Request({"type": "http", "client": None if peer is None else (peer, 1), "headers": raw})


def name_of(clients: Clients, peer: str | None, **headers: str) -> str:
    with clients.name_of(request(peer, **headers)) as name:
        return name


def test_clients_are_addresses_and_keys_within_an_address() -> None:
    clients = Clients()
    names = [
        name_of(clients, "10.0.0.1"),
        name_of(clients, "10.0.0.2"),
        name_of(clients, "10.0.0.1", authorization="Bearer a"),
        name_of(clients, "10.0.0.1", authorization="Bearer b"),
        name_of(clients, "10.0.0.2", authorization="Bearer a"),
        name_of(clients, None),
    ]
    assert len(set(names)) == len(names)
    assert name_of(clients, "10.0.0.1", authorization="Bearer a") == names[2]
    assert clients._keys == {}, "nobody is remembered who has nothing here"


def test_client_names_reveal_neither_address_nor_key() -> None:
    name = name_of(Clients(), "10.20.30.40", authorization="Bearer sk-secret")
    assert not any(part in name for part in ("10.20", "30.40", "secret", "Bearer"))
    assert name_of(Clients(), "10.20.30.40", authorization="Bearer sk-secret") != name, "another process"


def test_invented_keys_do_not_multiply_the_share_of_an_address() -> None:
    clients = Clients()
    with ExitStack() as stack:
        names = [
            stack.enter_context(clients.name_of(request("10.0.0.1", authorization=f"Bearer {number}")))
            for number in range(100)
        ]
        assert len(set(names)) == MAX_KEYS_PER_ADDRESS + 1
        assert stack.enter_context(clients.name_of(request("10.0.0.1", authorization="Bearer 3"))) == names[3]
    assert clients._keys == {}


@pytest.mark.parametrize(
    ("address", "other", "same"),
    [
        ("2001:db8:1:2::1", "2001:db8:1:2:ffff::9", True),
        ("2001:db8:1:2::1", "2001:db8:1:3::1", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("fe80::1%eth0", "fe80::1%eth0", True),
    ],
)
def test_an_ipv6_client_is_identified_by_its_network(address: str, other: str, same: bool) -> None:
    clients = Clients()
    assert (name_of(clients, address) == name_of(clients, other)) is same


def test_forwarded_addresses_count_only_behind_a_trusted_proxy() -> None:
    clients = Clients(["10.0.0.1", "10.0.0.2"])
    direct = name_of(clients, "192.0.2.7")
    assert name_of(clients, "192.0.2.7", x_forwarded_for="192.0.2.8") == direct
    assert name_of(clients, "10.0.0.1", x_forwarded_for="192.0.2.7") == direct
    assert name_of(clients, "10.0.0.1", x_forwarded_for="192.0.2.7, 10.0.0.2") == direct
    assert name_of(clients, "10.0.0.1", x_forwarded_for="made up, 192.0.2.7") == direct, "the last one is the proxy's"
    assert name_of(clients, "10.0.0.1", x_forwarded_for=" , ") == name_of(clients, "10.0.0.1")


def header_of(asker: Asker) -> str:
    """Return the header by which the page names ``asker``."""

    def tell() -> str:
        ask_for(asker)
        return headers()[HEADER]

    return copy_context().run(tell)


def test_visitors_of_the_page_are_separate_clients_and_only_the_page_can_name_them() -> None:
    clients = Clients(["10.0.0.1"])

    def client_of(header: str) -> str:
        return name_of(clients, "127.0.0.1", x_diffserve_on_behalf_of=header)

    first, other = (client_of(header_of(Asker(",127.0.0.1", key))) for key in "ab")
    assert len({first, other, name_of(clients, "127.0.0.1")}) == 3
    assert client_of(header_of(Asker(",127.0.0.1", "a"))) == first
    assert client_of(header_of(Asker("1.2.3.4,127.0.0.1", "a"))) == first, "that proxy is not trusted"
    assert client_of(header_of(Asker("1.2.3.4,10.0.0.1", "a"))) == client_of(header_of(Asker("1.2.3.4", "a")))
    for forged in ("x a 127.0.0.1", "", " ", "\xff a 127.0.0.1"):
        assert client_of(forged) == name_of(clients, "127.0.0.1")
    with ExitStack() as stack:
        names = {
            stack.enter_context(
                clients.name_of(request("127.0.0.1", x_diffserve_on_behalf_of=header_of(Asker("9.9.9.9", str(number)))))
            )
            for number in range(50)
        }
    assert len(names) == MAX_KEYS_PER_ADDRESS + 1, "many pages of one address have its share and no more"
