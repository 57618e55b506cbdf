"""Images from URLs: a real server with a real certificate, found by a resolver that may lie."""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from diffserve.api.errors import InvalidRequest
from diffserve.media.images import decode_image
from diffserve.service.a1111.schemas import Img2ImgBody
from diffserve.service.http.outgoing import OutgoingClient, is_public
from diffserve.service.images.fetching import MAX_FETCHED_BYTES, Fetcher
from diffserve.service.images.inputs import image_bytes
from diffserve.service.images.schemas import EditBody
from tests.certificates import Chain, make_chain

HOST, PUBLIC = "pictures.example.org", "93.184.216.34"
ANSWERS = {
    "/a.png": b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 7\r\n\r\npicture",
    "/chunked?size=2": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\npic\r\n4\r\nture\r\n0\r\n\r\n",
    "/moved": b"HTTP/1.1 302 Found\r\nLocation: https://169.254.169.254/\r\nContent-Length: 0\r\n\r\n",
    "/gone": b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
    "/long": b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
    "/endless": b"HTTP/1.1 200 OK\r\n\r\n" + bytes(MAX_FETCHED_BYTES + 1),
    "/packed": b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 1\r\n\r\nx",
    "/gopher": b"hello\r\n\r\n",
    "/short": b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\npic",
    "/gopher-line": b"hello",
    "/closed": b"",
    "/slow": b"",
}


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return make_chain(tmp_path_factory.mktemp("tls"), HOST, host=True)


@asynccontextmanager
async def picture_host(chain: Chain) -> AsyncIterator[tuple[Callable[..., Fetcher], list[Any]]]:
    """Run an image host with the address ``PUBLIC``; yield a factory of fetchers that reach it, and its requests."""
    received: list[Any] = []
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(chain.chain, chain.key)
    served.sni_callback = lambda _, name, __: received.append(name)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        received.append(head)
        path = head.split()[1]
        writer.write(ANSWERS[path])
        await writer.drain()
        await asyncio.sleep(5 if path == "/slow" else 0)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=served)
    port = server.sockets[0].getsockname()[1]

    async def connect(
        address: str, asked_port: int, **options: Any
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        received.append((address, asked_port))
        return await asyncio.open_connection("127.0.0.1", port, **options)

    def fetcher(*addresses: str, trusted: Path | None = None, **options: Any) -> Fetcher:
        answers = iter([list(addresses or [PUBLIC]), ["127.0.0.1"]])  # a second lookup gets another answer
        context = ssl.create_default_context(cafile=trusted or chain.root)
        client = OutgoingClient([HOST], resolve=lambda *_: next(answers), connect=connect, context=context)
        return Fetcher(client, **options)

    try:
        yield fetcher, received
    finally:
        server.close()


def test_an_image_is_fetched_from_the_checked_address_with_the_requested_host_name(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")

    async def story() -> None:
        async with picture_host(chain) as (fetcher, received):
            assert await fetcher().fetch(f"https://{HOST}/a.png#top") == b"picture"
            assert received[:2] == [(PUBLIC, 443), HOST]
            assert received[2].startswith("GET /a.png HTTP/1.1\r\n")
            assert f"\r\nhost: {HOST}\r\n" in received[2].lower()
            assert await fetcher().fetch(f"https://{HOST.upper()}/chunked?size=2") == b"picture"
            body = EditBody.model_validate(
                {"prompt": "https://a.b", "images": [{"image_url": f"https://{HOST}/a.png"}]}
            )
            await fetcher().fill(body)
            assert body.images is not None
            assert image_bytes(body.images[0].image_url, "image") == b"picture"  # type: ignore[union-attr, arg-type]
            unit = {"image": f"https://{HOST}/a.png", "model": "https://elsewhere.org"}
            img2img_body = Img2ImgBody.model_validate({"alwayson_scripts": {"controlnet": {"args": [unit]}}})
            await fetcher().fill(img2img_body)
            assert unit["model"] == "https://elsewhere.org"
            assert "https" not in str((img2img_body.alwayson_scripts or {})["controlnet"]["args"][0]["image"])

    asyncio.run(story())


@pytest.mark.parametrize(
    ("path", "code", "message"),
    [
        ("/moved", "url_not_allowed", "redirects are not followed"),
        ("/gone", "url_unreadable", "answered 404"),
        ("/long", "image_too_large", "too large"),
        ("/endless", "image_too_large", "too large"),
        ("/packed", "url_unreadable", "compressed"),
        ("/gopher", "url_unreadable", "did not answer in HTTP"),
        ("/gopher-line", "url_unreadable", "did not answer in HTTP"),
        ("/short", "url_unreadable", "closed the connection"),
        ("/closed", "url_unreadable", "closed the connection"),
        ("/slow", "url_unreadable", "did not answer within 0.2 s"),
    ],
)
def test_an_answer_that_is_not_an_image_is_refused(chain: Chain, path: str, code: str, message: str) -> None:
    async def story() -> None:
        async with picture_host(chain) as (fetcher, _):
            with pytest.raises(InvalidRequest, match=message) as refused:
                await fetcher(limit_s=0.2 if path == "/slow" else 5.0).fetch(f"https://{HOST}{path}", "mask")
            assert (refused.value.param, refused.value.code) == ("mask", code)

    asyncio.run(story())


def test_an_untrusted_certificate_is_refused(chain: Chain, tmp_path: Path) -> None:
    async def story() -> None:
        async with picture_host(chain) as (fetcher, received):
            other = make_chain(tmp_path, HOST, host=True).root
            with pytest.raises(InvalidRequest, match="no valid certificate"):
                await fetcher(trusted=other).fetch(f"https://{HOST}/a.png")
            assert not [line for line in received if str(line).startswith("GET")]

    asyncio.run(story())


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.1"], ["10.0.0.1"], ["169.254.169.254"], ["100.64.0.1"], ["0.0.0.0"], ["224.0.0.1"], ["::1"], ["::"],
        ["fe80::1"], ["fc00::1"], ["fec0::1"], ["ff02::1"], ["::ffff:127.0.0.1"], ["::127.0.0.1"],
        ["64:ff9b::7f00:1"], ["64:ff9b:1::5db8:d822"], ["2002:7f00:1::"], [PUBLIC, "127.0.0.1"], [], ["nonsense"],
    ],
    ids=str,
)  # fmt: skip
def test_a_host_at_a_private_address_is_never_contacted(chain: Chain, addresses: list[str]) -> None:
    async def story() -> None:
        async def connect(*_: Any, **__: Any) -> Any:
            raise AssertionError("a packet was sent")

        fetcher = Fetcher(OutgoingClient([HOST], resolve=lambda *_: addresses, connect=connect))
        with pytest.raises(InvalidRequest, match="not on the public internet") as refused:
            await fetcher.fetch(f"https://{HOST}/a.png")
        assert refused.value.code == "url_not_allowed"

    asyncio.run(story())


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/", "https://127.0.0.1/", "https://[::1]/", "https://[::ffff:127.0.0.1]/", "https://0/",
        "https://0x7f000001/", "https://2130706433/", "https://169.254.169.254/", "https://metadata.google.internal/",
        f"http://{HOST}/a.png", f"https://{HOST}:8443/", f"https://user@{HOST}/", f"https://{HOST}@evil.test/",
        f"https://{HOST}.evil.test/", f"https://evil.test/{HOST}", f"https://{HOST}\\@evil.test/", f"gopher://{HOST}/",
        f"https://{HOST}./", f"https://{HOST}:99999/", f"https://{HOST}/\r\nX: y", "file:///etc/passwd", "ftp://a/b",
    ],
)  # fmt: skip
def test_an_unlisted_host_is_not_resolved(url: str) -> None:
    def resolve(*_: Any) -> list[str]:
        raise AssertionError("a name was looked up")

    for hosts in ([HOST], []):
        fetcher = Fetcher(OutgoingClient(hosts, resolve=resolve))
        with pytest.raises(InvalidRequest) as refused:
            asyncio.run(fetcher.fill(EditBody(prompt="a", image=url)))
        assert (refused.value.code, refused.value.param) == ("url_not_allowed", "image")


def test_public_addresses_are_recognized() -> None:
    expected = {PUBLIC: True, "2606:4700::1111": True, "64:ff9b::5db8:d822": True, "192.168.1.1": False}
    assert {address: is_public(ipaddress.ip_address(address)) for address in expected} == expected


def test_seventeen_urls_are_too_many() -> None:
    images = [{"image_url": f"https://{HOST}/{number}"} for number in range(16)]
    body = EditBody.model_validate({"prompt": "a", "images": images, "mask": f"https://{HOST}/mask"})
    with pytest.raises(InvalidRequest, match="17 images are given as URLs"):
        asyncio.run(Fetcher(OutgoingClient([HOST])).fill(body))


@pytest.mark.parametrize(
    "text",
    [
        "/etc/passwd", "/etc/passwd1", "file=/etc/passwd", "http://10.0.0.1/a.png", "file:///etc/passwd", " https://a/b",
        "data:image/png;base64,!!", "data:image/png;base64,iVBO Rw0K", "data:text/html;base64,PGh0bWw+", "data:,a", "",
        "data:image/png;base64,", "//evil.test/a.png",
    ],
)  # fmt: skip
def test_text_that_is_not_an_image_is_refused_without_a_lookup(text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        decode_image(image_bytes(text, "init_images"), name="init_images")
    assert refused.value.param == "init_images"
    assert refused.value.code in ("invalid_image", "url_not_allowed")
