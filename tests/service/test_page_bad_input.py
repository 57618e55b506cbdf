"""Invalid requests to the page's own routes: no answer is a 500, and the log has one line without traceback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tests.service.server import RunningServer, wait_for
from ui.create.parameters import FORM_FIELDS, Form

pytestmark = pytest.mark.slow

API = "/gradio_api"
JSON = {"Content-Type": "application/json"}
ODD: tuple[Any, ...] = (None, "", "x", -1, 1e308, 2**70, True, [], {}, [[[]]], {"path": "/etc/passwd"}, {"value": None})


@pytest.fixture
def page(page_server: RunningServer) -> Iterator[httpx.Client]:
    """Yield a client of the page, and check that no request caused a server error."""
    start = page_server.errors.stat().st_size
    yield page_server.client
    lines = page_server.errors.read_bytes()[start:].decode().splitlines()
    assert not [line for line in lines if "Traceback" in line or '"level":"error"' in line]


def events(page: httpx.Client) -> list[dict[str, Any]]:
    """Return the page's events as it lists them to browsers."""
    dependencies: list[dict[str, Any]] = page.get("/config").json()["dependencies"]
    return dependencies


@pytest.mark.parametrize("path", ["/queue/join", "/run/predict", "/run/nosuch", "/run/generate", "/cancel", "/reset"])
@pytest.mark.parametrize(
    "body",
    [
        b'{"data": [NaN], "fn_index": 0, "session_hash": "a"}',
        b'{"data": NaN}',
        b'{"data": "\\ud800"}',
        b'{"data": ["\\ud800"], "fn_index": 5, "session_hash": "\\ud800"}',
        b'{"data": [1e999], "fn_index": 1e999}',
        b'{"data": [], "fn_index": 99999}',
        b'{"data": [], "fn_index": 99999, "session_hash": "a"}',
        b'{"data": [], "fn_index": -1, "session_hash": "a"}',
        b'{"data": [], "fn_index": true, "session_hash": "a"}',
        b'{"data": [], "fn_index": "5", "session_hash": "a"}',
        b'{"data": [], "fn_index": 5, "session_hash": "%s"}' % (b"a" * 10_000),
        b'{"data": [], "fn_index": 5, "batched": true, "session_hash": "a"}',
        b'{"data": [], "fn_index": %s}' % (b"9" * 5000),
        b'{"data": [], "data": []}',
        b"[" * 5000,
        b'"x"',
        b"{",
        b"\xff",
    ],
)
def test_json_that_the_page_never_sends_is_refused(page: httpx.Client, path: str, body: bytes) -> None:
    answer = page.post(API + path, content=body, headers=JSON)
    assert 400 <= answer.status_code < 500, answer.text


@pytest.mark.parametrize("path", ["/queue/join", "/run/generate", "/run/predict", "/cancel", "/reset", "/login"])
def test_json_under_another_name_is_not_even_read(page: httpx.Client, page_server: RunningServer, path: str) -> None:
    stalls = page_server.num_stalls()
    media_type = {"Content-Type": "multipart/form-data; boundary=x"}
    many_keys = b'{"fn_index":5,"data":["x"],"x":{' + b",".join(b'"%d":[]' % n for n in range(200_000)) + b"}}"
    for body in (many_keys, b"[" * 100_000, b'{"fn_index":5,"data":["x"]}'):
        answer = page.post(API + path, content=body, headers=media_type)
        assert answer.status_code in (404, 405, 413, 415), answer.text
        assert len(answer.content) < 1000
    assert page_server.num_stalls() == stalls


def test_every_event_accepts_or_refuses_every_value(page: httpx.Client) -> None:
    answers = [
        page.post(f"{API}/run/predict", json={"data": [odd] * num, "fn_index": event["id"], "session_hash": "bad"})
        for event in events(page)
        if not event["queue"]
        for odd in ODD
        for num in {0, 1, len(event["inputs"])}
    ]
    assert not [answer.text for answer in answers if answer.status_code >= 500]
    assert {answer.status_code for answer in answers} >= {200, 400}


@pytest.mark.parametrize("odd", [None, "x", {"path": "/etc/passwd"}, [[]]], ids=["null", "text", "path", "list"])
def test_a_queued_event_fails_with_a_message(page: httpx.Client, odd: object) -> None:
    for event in events(page):
        if event["queue"] and event["inputs"]:
            body = {"data": [odd] * len(event["inputs"]), "fn_index": event["id"], "session_hash": "queued"}
            answer = page.post(f"{API}/queue/join", json=body)
            if answer.status_code == 422:  # a validator, whose messages are shown at the fields
                messages = [field["message"] for field in answer.json()["detail"] if not field["is_valid"]]
                assert messages
                assert answer.json()["error"]["message"] == " ".join(messages)
                continue
            assert answer.status_code == 200
            with page.stream("GET", f"{API}/queue/data", params={"session_hash": "queued"}) as stream:
                last = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: ")][-1]
            assert last["msg"] in ("process_completed", "close_stream")


def test_head_is_among_the_allowed_methods_of_the_page(page: httpx.Client) -> None:
    answer = page.put("/config")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")


def test_a_missing_session_is_reported(page: httpx.Client) -> None:
    with page.stream("GET", f"{API}/queue/data", params={"session_hash": "nobody"}) as stream:
        assert "session_not_found" in stream.read().decode()


@pytest.mark.parametrize(
    ("value", "status"),
    [
        ("bytes=0-1,3-4", 400),
        ("bytes=--", 400),
        ("bytes=1-2-3", 400),
        ("bytes=0-" + "9" * 5000, 400),
        ("lines=1-2", 400),
        ("bytes=0-5", 200),
        ("bytes=5-0", 200),
        ("bytes=5-", 206),
        ("bytes=-5", 206),
        ("bytes=99999-", 416),
    ],
)
def test_range_requests_get_the_complete_file_or_an_error(page: httpx.Client, value: str, status: int) -> None:
    (name,) = page.post(f"{API}/upload", files={"files": ("a.txt", b"twelve bytes", "text/plain")}).json()
    answer = page.get(f"{API}/file={name}", headers={"Range": value})
    assert answer.status_code == status
    assert status != 200 or answer.content == b"twelve bytes"


@pytest.mark.parametrize(
    ("media_type", "body"),
    [
        ("multipart/form-data", b""),
        ("multipart/form-data; boundary=" + "x" * 300, b"--x"),
        (
            "multipart/form-data; boundary=x",
            b'--x\r\nContent-Disposition: form-data; name="files"\r\n\r\nhi\r\n--x--\r\n',
        ),
        ("multipart/form-data; boundary=x", b"--x\r\nContent-Disposition: form-data\r\n\r\nhi\r\n--x--\r\n"),
        ("multipart/form-data; boundary=x", b"--x\r\nbroken\r\n\r\nhi\r\n--x--\r\n"),
        ("text/plain", b"a"),
    ],
)
def test_an_upload_without_a_form_of_files_is_refused(page: httpx.Client, media_type: str, body: bytes) -> None:
    for path in ("/upload", "/upload?upload_id=watched"):
        answer = page.post(API + path, content=body, headers={"Content-Type": media_type})
        assert 400 <= answer.status_code < 500


@pytest.mark.parametrize(
    "parts",
    [
        [("files", (f"{number}.txt", b"x", "text/plain")) for number in range(1000)],
        [("files", ("a.txt", b"x", "text/plain"))] * 2,
        [("files", ("a.txt", b"x", "text/plain")), ("more", (None, b"x"))],
    ],
    ids=["thousand", "two", "field"],
)
def test_an_upload_is_one_file(page: httpx.Client, parts: list[Any]) -> None:
    folder = uploaded(page, b"one").parent.parent
    before = set(folder.iterdir())
    assert page.post(f"{API}/upload", files=parts).status_code == 400
    assert set(folder.iterdir()) <= before


def uploaded(page: httpx.Client, data: bytes, name: str = "a.png") -> Path:
    """Upload a file with ``data`` and return its path on the server."""
    return Path(page.post(f"{API}/upload", files={"files": (name, data, "image/png")}).json()[0])


def test_reading_an_image_leaves_no_file_and_no_log_line(page_server: RunningServer) -> None:
    page, start = page_server.client, page_server.errors.stat().st_size
    file, text = BytesIO(), PngInfo()
    text.add_text("parameters", "a fox\nSteps: 5, Sampler: DDIM, Seed: 1, Spacing: ZEBRASECRET")
    Image.new("RGB", (8, 8)).save(file, "PNG", pnginfo=text)
    place = uploaded(page, file.getvalue())
    before = set(place.parent.parent.glob("tmp*"))
    body = {"data": [{"path": str(place), "meta": {"_type": "gradio.FileData"}}]}
    answer = page.post(f"{API}/run/read_parameters", json=body)
    assert answer.json()["data"][0] == "a fox"
    assert "ZEBRASECRET" in str(answer.json()["data"][1:]), "who sent it is told"
    assert not place.exists()
    assert set(place.parent.parent.glob("tmp*")) == before
    assert page.get("/openapi.json").status_code == 200
    assert "warning" not in page_server.errors.read_bytes()[start:].decode()


@pytest.mark.parametrize(
    ("samplers", "steps", "prompts", "message"),
    [
        (["ddim"] * 100_000, "5", "a fox", "1 image"),
        (["ddim"], "5," * 240_000 + "5", "a fox", "Steps has 480001 characters"),
        (["ddim"], "5", ",".join(["5"] * 200_000), "The prompts have 399999 characters"),
        (["ddim"], "5", "a fox above " * 2600, "1 image"),
        (["ddim"], "9" * 5000, "a fox", "of 5000 digits"),
        (["x" * 100_000], "5", "a fox", "Samplers[0] has 100000 characters"),
    ],
    ids=["samplers", "steps", "prompts", "caption", "digits", "sampler"],
)
def test_a_form_of_any_length_does_not_stall_the_server(
    page: httpx.Client, samplers: list[str], steps: str, prompts: str, message: str
) -> None:
    """Send long forms; the fixture checks that the event loop did not stall."""
    form = {"data": [samplers, steps, prompts, 1, 0, "3", 20, "", "", "", "", "", "", ""]}
    answer = page.post(f"{API}/run/experiment_estimate", json=form)
    assert answer.status_code == 200
    assert message in answer.json()["data"][0]


def test_texts_that_are_too_long_are_refused(page: httpx.Client) -> None:
    form = [*Form(prompt="x" * 1_000_000, steps="2", seed="3").values, ""]
    painted = page.post(f"{API}/run/generate", json={"data": form, "session_hash": "long"}).json()["data"]
    suggested = page.post(f"{API}/run/suggest", json={"data": form[:1], "session_hash": "long"}).json()["data"]
    assert "The prompt has 1000000 characters" in painted[2]
    assert "The prompt has 1000000 characters" in suggested[1]
    form[FORM_FIELDS.index("steps")] = 0
    answer = page.post(f"{API}/run/generate", json={"data": form, "session_hash": "long"})
    assert answer.status_code == 400, "what an event refuses is the caller's mistake"
    assert "Steps is 0; give a number at least 1" in answer.json()["error"]["message"]


def test_an_unknown_seed_changes_nothing(page: httpx.Client) -> None:
    answer = page.post(f"{API}/run/reuse_seed", json={"data": ["x" * 20_000]})
    assert answer.json()["data"] == [{"__type__": "update"}] * 4


@pytest.mark.parametrize("name", ["X-Forwarded-Host", "X-Forwarded-Proto"])
@pytest.mark.parametrize("value", ["[::", "a b", "x:y:z", "http://x", ""])
def test_unreadable_proxy_headers_are_ignored(page: httpx.Client, name: str, value: str) -> None:
    for path in ("/", "/config"):
        assert page.get(path, headers={name: value}).status_code == 200


def test_errors_of_the_page_are_logged(page_server: RunningServer) -> None:
    answer = page_server.client.post(f"{API}/queue/join", content=b"{", headers=JSON)
    request_id = answer.headers["x-request-id"]

    def lines() -> list[str]:  # the answer may arrive before its log line
        return [line for line in page_server.errors.read_text().split("\n")[:-1] if request_id in line]

    (line,) = wait_for(lines, 30.0, "the line in the log")
    assert json.loads(line)["status"] == 400


def test_the_page_connects_only_to_its_own_server(page: httpx.Client) -> None:
    for url in ("http://127.0.0.1:1/", "http://example.com/", "file:///etc/passwd"):
        assert page.get(f"{API}/file={url}").status_code == 403
