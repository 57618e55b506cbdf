"""Server logs during client errors: JSON lines without prompts, and no errors for mistakes of clients."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from diffserve.service.engine.connection import EngineOutput
from tests.service.server import GENERATIONS, SOON_S, RunningServer, wait_for

SECRET = "zebrasecret"
BROKEN_CHUNKS = (b"zz\r\n%s\r\n", b'5\r\n{"pro\r\nzz\r\n%s', b'5\r\n{"proXXXX%s\r\n')


def broken_chunk(path: str, kind: str, chunk: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head.encode() + chunk


class Log:
    """Lines of a server's standard error since this object was created."""

    def __init__(self, server: RunningServer) -> None:
        self._server = server
        self._since = len(server.errors.read_bytes())

    def records(self) -> list[dict[str, Any]]:
        """Return the records after checking the invariants of all lines."""
        text = self._server.errors.read_bytes()[self._since :].decode()
        lines = [json.loads(line) for line in text.splitlines()]
        assert SECRET not in text
        return lines

    def wait_for(self, event: str, **facts: Any) -> dict[str, Any]:
        """Return the first record of ``event`` with ``facts``."""

        def look() -> dict[str, Any] | None:
            fitting = (record for record in self.records() if facts.items() <= record.items())
            return next((record for record in fitting if record["event"] == event), None)

        return wait_for(look, SOON_S, f"{event} with {facts} in the log")

    def assert_nobody_blames_the_server(self) -> None:
        assert [record for record in self.records() if record["level"] in ("error", "critical")] == []


def send_raw(server: RunningServer, data: bytes, *, patience_s: float = 20.0) -> bytes:
    received = b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=patience_s) as connection:
        connection.sendall(data)
        while part := connection.recv(65536):
            received += part
    return received


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_invalid_weight_is_reported_to_the_client_and_not_logged(server: RunningServer, stream: bool) -> None:
    log = Log(server)
    answer = server.paint(f"a ({SECRET}:999) fox", stream=stream)
    assert SECRET in answer.text
    failed = log.wait_for("image failed")
    assert (failed["level"], failed["code"]) == ("warning", "invalid_value")
    log.assert_nobody_blames_the_server()


@pytest.mark.slow
@pytest.mark.parametrize("chunk", BROKEN_CHUNKS, ids=["length", "next-length", "end"])
@pytest.mark.parametrize("path", [GENERATIONS, "/v1/chat/completions", "/v1/prompts/rewrite", "/nowhere"])
def test_a_broken_chunk_is_a_400_without_a_traceback(server: RunningServer, path: str, chunk: bytes) -> None:
    log = Log(server)
    answer = send_raw(server, broken_chunk(path, "application/json", chunk.replace(b"%s", SECRET.encode())))
    assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 404 "))
    log.wait_for("request")
    log.assert_nobody_blames_the_server()
    assert [record for record in log.records() if "traceback" in record] == []


PAGE = "/gradio_api"


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/queue/join", "/run/generate", "/call/generate", "/upload", "/cancel"])
def test_a_broken_chunk_for_the_page_is_a_400_without_a_traceback(page_server: RunningServer, path: str) -> None:
    wait_for(lambda: page_server.status("/config") == 200, SOON_S, "the page")
    log = Log(page_server)
    kind = "multipart/form-data; boundary=x" if path == "/upload" else "application/json"
    data = broken_chunk(f"{PAGE}{path}", kind, b'5\r\n{"proXXXX\r\n')
    assert send_raw(page_server, data).startswith(b"HTTP/1.1 400 ")
    time.sleep(0.5)  # requests of the page are not logged, so there is no line to wait for
    log.assert_nobody_blames_the_server()
    assert [record for record in log.records() if "traceback" in record] == []


@pytest.mark.slow
def test_mistakes_of_visitors_are_not_logged_as_errors(page_server: RunningServer) -> None:
    wait_for(lambda: page_server.status("/config") == 200, SOON_S, "the page")
    log, client = Log(page_server), page_server.client
    for data in ([SECRET], [SECRET] * 13, [{"path": f"/etc/{SECRET}", "meta": {"_type": "gradio.FileData"}}] * 13):
        client.post(f"{PAGE}/run/generate", json={"data": data})
        client.post(f"{PAGE}/run/read_parameters", json={"data": data[:1]})
        client.post(f"{PAGE}/call/generate", json={"data": data})
    client.get("/v1/models")
    log.wait_for("request", endpoint="/v1/models")
    log.assert_nobody_blames_the_server()


@pytest.mark.slow
def test_every_log_line_is_json_without_prompts(text_server: RunningServer) -> None:
    log, client = Log(text_server), text_server.client
    hello = [{"role": "user", "content": SECRET}]
    bodies: dict[str, list[dict[str, Any]]] = {
        GENERATIONS: [{"prompt": f"({SECRET}:999)"}, {"prompt": SECRET, "sampler": SECRET},
                      {"prompt": SECRET, "model": SECRET}, {"prompt": SECRET, "size": SECRET}, {"prompt": {SECRET: 1}},
                      {"prompt": SECRET, SECRET: 1}],
        "/v1/chat/completions": [{"messages": hello, "max_tokens": 2}, {"messages": [{"role": SECRET, "content": "a"}]},
                                 {"messages": SECRET}, {"messages": hello, "stop": [SECRET] * 9}],
        "/v1/completions": [{"prompt": SECRET, "max_tokens": 2}, {"prompt": SECRET, "logit_bias": {SECRET: 1}}],
        "/v1/prompts/rewrite": [{"prompt": SECRET, "style": SECRET}, {"prompt": f"two {SECRET}"}],
    }  # fmt: skip
    for path, each in bodies.items():
        for body in each:
            client.post(path, json=body)
            client.post(path, json=body | {"stream": True})
    client.get(f"/{SECRET}?{SECRET}={SECRET}")
    client.get(f"/v1/models/{SECRET}")
    log.wait_for("request", endpoint="/v1/models/{name:path}")
    log.assert_nobody_blames_the_server()
    assert text_server.errors.read_text().count("\n") == len(text_server.errors.read_text().splitlines())
    for line in text_server.errors.read_text().splitlines():
        assert {"ts", "level", "event"} <= set(json.loads(line))


def records_of(program: str, caplog: pytest.LogCaptureFixture) -> list[Any]:
    """Return the log records of a process that runs ``program``."""

    async def run() -> None:
        with EngineOutput() as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", program, stdout=output.end, stderr=output.end, env=dict(os.environ)
            )
        await process.wait()
        await output.wait_until_read(SOON_S)

    asyncio.run(run())
    return [(record.levelname, vars(record).get("text") or vars(record).get("json_line")) for record in caplog.records]


def test_output_of_the_engines_libraries_is_logged_line_by_line(caplog: pytest.LogCaptureFixture) -> None:
    program = f"""
import os
os.write(1, b"[W1234 context.cpp:1] cublas is slow\\n")
os.write(2, b"token '{SECRET}' is odd\\n\\n")
os.write(2, b'{{"ts": "2026", "level": "info", "event": "ready"}}\\n')
os.write(2, b'{{"ts": broken\\n' + b"x" * 400_000 + b"\\nlast words")
"""
    records = records_of(program, caplog)
    assert records[:3] == [
        ("WARNING", "[W1234 context.cpp:1] cublas is slow"),
        ("WARNING", "token … is odd"),
        ("WARNING", '{"ts": "2026", "level": "info", "event": "ready"}'),
    ]
    assert records[3] == ("WARNING", "{…: broken")
    assert records[-1] == ("WARNING", "last words")
    assert all(len(text) <= 400 for _, text in records)


def test_the_last_output_of_a_crashed_engine_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    records = records_of("import faulthandler, ctypes; faulthandler.enable(); ctypes.string_at(0)", caplog)
    assert ("WARNING", "Fatal Python error: Segmentation fault") in records


@pytest.mark.slow
def test_engine_output_goes_through_the_server_log(server: RunningServer) -> None:
    assert Path(f"/proc/{server.engine.pid}/fd/2").readlink() != Path(f"/proc/{server.process.pid}/fd/2").readlink()


def test_refusals_within_the_application_are_not_logged_as_errors(caplog: pytest.LogCaptureFixture) -> None:
    from diffserve.service.http.middleware import BodyLimit, Outermost

    async def reads_it_all(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass

    async def run() -> httpx.Response:
        app = Outermost(BodyLimit(reads_it_all, max_bytes=10))
        transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:

            async def long() -> Any:
                yield b"x" * 11

            return await client.post("/", content=long())

    caplog.set_level("INFO")
    assert asyncio.run(run()).status_code == 413
    assert {record.levelname for record in caplog.records} == {"INFO"}
