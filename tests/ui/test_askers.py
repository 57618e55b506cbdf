"""Client identity that the page forwards to the server."""

from __future__ import annotations

from contextvars import copy_context

from starlette.datastructures import Address, Headers

from diffserve.client.on_behalf import HEADER, Asker, asker_in, headers
from ui.visitors import MOST_CHARS, ask_for_visitor


class Request:
    """A Gradio request of a client behind a proxy."""

    session_hash = "abc"
    client = Address("10.0.0.1", 5)

    def __init__(self, *forwarded: str) -> None:
        self.headers = Headers(raw=[(b"x-forwarded-for", line.encode()) for line in forwarded])


def asker_of(*forwarded: str) -> Asker | None:
    """Return the identity as the server parses it."""

    def tell() -> dict[str, str]:
        ask_for_visitor(Request(*forwarded))  # type: ignore[arg-type]
        return headers()

    return asker_in(copy_context().run(tell).get(HEADER))


def test_every_forwarded_line_is_passed_on_with_the_nearest_last() -> None:
    assert asker_of("1.2.3.4", "5.6.7.8") == Asker("1.2.3.4,5.6.7.8,10.0.0.1", "abc")
    assert asker_of() == Asker(",10.0.0.1", "abc")


def test_only_the_nearest_of_many_addresses_are_passed_on() -> None:
    asker = asker_of(*["1.2.3.4"] * 1000)
    assert asker is not None
    assert asker.addresses.endswith("1.2.3.4,10.0.0.1")
    assert len(asker.addresses) == MOST_CHARS
