"""Every error is answered with the error object, and an expected one is logged in one line without a traceback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from diffserve.service.http.errors import A1111
from tests.service.server import RunningServer, error_of, wait_for

pytestmark = pytest.mark.slow

PAGE = (
    *("/", "/config", "/theme.css", "/assets/none.js", "/static/none", "/robots.txt"),
    *(f"/gradio_api/{name}" for name in ("info", "upload", "queue/join", "run/none", "heartbeat/abc", "cancel")),
)
API = ("/openapi.json", "/metrics", "/docs", "/v1/models", "/v1/images/generations", "/v1/files", "/login", "/v1/none")
DISK_BYTES = 4_000_000


def lines_of(server: RunningServer, request_id: str) -> list[dict[str, object]]:
    """Return the log lines of a request, once its last one is written."""

    def look() -> list[dict[str, object]]:
        lines = server.errors.read_text().split("\n")[:-1]
        records = [json.loads(line) for line in lines if request_id in line]
        return records if any(record["event"] == "request" for record in records) else []

    return wait_for(look, 30.0, "the log line of the request")


@contextmanager
def small_disk(server: RunningServer) -> Iterator[None]:
    """Limit every file of the server's process to ``DISK_BYTES``, so that it sees a full disk."""
    process = psutil.Process(server.process.pid)
    before = process.rlimit(psutil.RLIMIT_FSIZE)
    process.rlimit(psutil.RLIMIT_FSIZE, (DISK_BYTES, before[1]))
    try:
        yield
    finally:
        process.rlimit(psutil.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("path", [*PAGE, *API])
def test_an_unsupported_method_gets_the_error_object(page_server: RunningServer, path: str) -> None:
    for method in ("PUT", "PATCH", "TRACE", "BREW"):
        answer = page_server.client.request(method, path)
        error = error_of(answer)
        if path == "/v1/none":
            assert (answer.status_code, error["code"]) == (404, "unknown_url")
        else:
            assert (answer.status_code, error["code"]) == (405, "method_not_allowed")
            assert answer.headers["allow"]
        assert lines_of(page_server, answer.headers["x-request-id"])[-1]["error"] == error["code"]


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/assets/none.js", 404, "unknown_url"),
        ("/static/none", 404, "unknown_url"),
        ("/pwa_icon", 404, "unknown_url"),
        ("/gradio_api/run-history/buckets", 404, "unknown_url"),  # CVE-2026-134825 of gradio 6.27 to 6.31
        ("/gradio_api/run-history/records", 404, "unknown_url"),
        ("/gradio_api/runs", 404, "unknown_url"),
        ("/gradio_api/file=/etc/passwd", 403, "file_not_allowed"),
        ("/gradio_api/queue/data", 422, "invalid_value"),
        ("/gradio_api/upload_progress", 422, "invalid_value"),
    ],
)
def test_a_refusal_of_the_page_has_the_error_object(
    page_server: RunningServer, path: str, status: int, code: str
) -> None:
    answer = page_server.client.get(path)
    assert (answer.status_code, error_of(answer)["code"]) == (status, code)
    assert page_server.client.head(path).status_code == status


def test_a_refused_upload_to_the_page_gets_the_error_object(page_server: RunningServer) -> None:
    upload, file = "/gradio_api/upload", ("a.png", b"x" * 17_000_000)
    too_large = page_server.client.post(upload, files={"files": file})
    assert (too_large.status_code, error_of(too_large)["code"]) == (413, "body_too_large")
    assert "16000000 bytes" in error_of(too_large)["message"]
    for body in (
        {"content": b"x", "headers": {"content-type": "text/plain"}},
        {"files": {"files": ("a", b"x"), "b": "c"}},
    ):
        answer = page_server.client.post(upload, **body)
        assert (answer.status_code, error_of(answer)["code"]) == (400, "bad_request")
    [place] = page_server.client.post(upload, files={"files": ("a.txt", b"twelve bytes")}).json()
    beyond = page_server.client.get(f"/gradio_api/file={place}", headers={"Range": "bytes=99-"})
    assert (beyond.status_code, error_of(beyond)["code"]) == (416, "invalid_range")
    assert beyond.headers["content-range"] == "bytes */12"
    missing = page_server.client.post("/gradio_api/cancel", json={})
    assert (missing.status_code, "session_hash" in error_of(missing)["message"]) == (422, True)


def test_errors_before_a_route_of_a1111_have_the_shape_that_its_clients_read(page_server: RunningServer) -> None:
    path, json_type = f"{A1111}/txt2img", {"content-type": "application/json"}
    for status, headers, body in (
        (403, {"origin": "https://evil.example"}, b"{}"),
        (403, {"host": "evil.example"}, b"{}"),
        (413, {}, b" " * 21_000_000),
        (415, {"content-encoding": "gzip"}, b"{}"),
    ):
        answer = page_server.client.post(path, content=body, headers=json_type | headers)
        assert answer.status_code == status
        assert answer.json().keys() == {"error", "detail", "body", "errors", "code"}


@pytest.mark.parametrize("path", ["/v1/files", "/v1/images/edits", "/gradio_api/upload"])
def test_a_full_disk_is_answered_507_and_logged_without_a_traceback(page_server: RunningServer, path: str) -> None:
    name = {"/v1/files": "file", "/v1/images/edits": "image"}.get(path, "files")
    data = {"purpose": "batch"} if path == "/v1/files" else {}
    with small_disk(page_server):
        answer = page_server.client.post(path, files={name: ("a.png", b"x" * (2 * DISK_BYTES))}, data=data)
    assert (answer.status_code, error_of(answer)["code"]) == (507, "no_room")
    failure, request = lines_of(page_server, answer.headers["x-request-id"])
    assert (failure["level"], failure["code"], failure["reason"]) == ("error", "no_room", "File too large")
    assert "traceback" not in failure
    assert (request["status"], request["error"]) == (507, "no_room")
