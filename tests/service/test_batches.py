"""Files and batches with the ``openai`` client, under concurrent requests and across server restarts."""

from __future__ import annotations

import base64
import json
import re
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from sqlalchemy import select

from diffserve.store import Database, Keys
from diffserve.store.schema import batches
from tests.service.server import RunningServer, error_of, running_server, wait_for
from tests.service.test_edits import file_of, picture

pytestmark = pytest.mark.slow
GENERATIONS = "/v1/images/generations"
OVER_S = 200.0


def line(name: str, url: str = GENERATIONS, **fields: Any) -> bytes:
    body = {"prompt": "a red fox", "num_inference_steps": 1, "seed": 1, "size": "64x64"} | fields
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body}).encode()


def send(client: OpenAI, *lines: bytes, end: bytes = b"\n") -> str:
    file_id: str = client.files.create(file=("in.jsonl", end.join(lines)), purpose="batch").id
    return file_id


def begin(client: OpenAI, file: str, endpoint: Any = GENERATIONS) -> str:
    batch = client.batches.create(
        input_file_id=file, endpoint=endpoint, completion_window="24h", metadata={"for": "a test"}
    )
    return str(batch.id)


def until_over(client: OpenAI, name: str) -> Any:
    def look() -> Any:
        batch = client.batches.retrieve(name)
        return batch if batch.status in ("completed", "failed", "cancelled", "expired") else None

    return wait_for(look, OVER_S, "the batch")


def lines_of(client: OpenAI, file: str | None) -> dict[str, Any]:
    if file is None:
        return {}
    read = [json.loads(line) for line in client.files.content(file).read().splitlines()]
    by_name = {line["custom_id"]: line for line in read}
    assert len(by_name) == len(read), "each line once"
    return by_name


def test_openai_client_manages_files(client: OpenAI, server: RunningServer) -> None:
    files = [client.files.create(file=(f"../../{n}.jsonl", b"x" * n), purpose="user_data") for n in range(1, 4)]
    assert (files[0].bytes, files[0].filename, files[0].status) == (1, "1.jsonl", "processed")
    assert client.files.retrieve(files[0].id) == files[0]
    assert client.files.content(files[2].id).read() == b"xxx"
    listed = [file.id for file in client.files.list(limit=2, purpose="user_data")]
    assert listed == [file.id for file in reversed(files)], "page after page, the newest first"
    in_order = server.client.get("/v1/files", params={"order": "asc", "limit": 1, "purpose": "user_data"}).json()
    assert (in_order["data"][0]["id"], in_order["has_more"]) == (files[0].id, True)
    page = server.client.get(f"/v1/files/{files[0].id}/content")
    assert page.headers["content-type"] == "application/octet-stream"
    assert "sandbox" in page.headers["content-security-policy"]
    assert page.headers["content-disposition"].startswith("attachment")
    assert all(client.files.delete(file.id).deleted for file in files)
    for name in (files[0].id, "file-x", "..%2f..%2fetc%2fpasswd", "a%00"):
        assert server.client.get(f"/v1/files/{name}").status_code in (400, 404)
    for fields, message in (
        ({"purpose": "world"}, "purpose is"),
        ({}, "purpose is missing"),
        ({"purpose": "batch", "expires_after[seconds]": "1"}, "expires_after"),
    ):
        answer = server.client.post("/v1/files", data=fields, files={"file": b"x"})
        assert answer.status_code == 400
        assert message in error_of(answer)["message"]
    assert error_of(server.client.post("/v1/files", data={"purpose": "batch"}, files={"f": b"x"}))["param"] == "file"
    assert error_of(server.client.get("/v1/files?limit=0"))["param"] == "limit"
    assert error_of(server.client.get("/v1/files?after=x"))["param"] == "after"


def test_openai_client_runs_a_batch(client: OpenAI, server: RunningServer) -> None:
    lines = [line(f"fox-{seed}", seed=seed) for seed in range(5)]
    wrong = [line("bad-size", size="1x1"), line("streamed", stream=True), line("prompt-less", prompt="")]
    wrong.append(line("later", background=True))
    name = begin(client, send(client, *lines, *wrong, b"", end=b"\r\n"))
    batch = until_over(client, name)
    assert (batch.status, batch.metadata, batch.errors) == ("completed", {"for": "a test"}, None)
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (9, 5, 4)
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at < batch.expires_at
    painted = lines_of(client, batch.output_file_id)
    assert set(painted) == {f"fox-{seed}" for seed in range(5)}
    first = painted["fox-3"]["response"]
    assert (first["status_code"], first["body"]["data"][0]["seed"]) == (200, 3)
    by_hand = server.paint(num_steps=1, seed=3, size="64x64").json()
    assert first["body"]["data"][0]["b64_json"] == by_hand["data"][0]["b64_json"], "as if it had been asked by itself"
    failed = lines_of(client, batch.error_file_id)
    assert {key: failed[key]["response"]["body"]["error"]["code"] for key in failed} == {
        "streamed": "unsupported_value", "later": "unsupported_value",
        "bad-size": "invalid_size", "prompt-less": "empty_prompt",
    }  # fmt: skip
    assert name in [batch.id for batch in client.batches.list(limit=1)]
    with pytest.raises(openai.ConflictError, match="nothing to cancel"):
        client.batches.cancel(name)


def test_a_batch_with_invalid_lines_fails_with_their_numbers(client: OpenAI) -> None:
    wrong = [b"{no json", b'{"body": {}}', b"[]", line("m").replace(b"POST", b"GET"), b"\xff"]
    batch = client.batches.retrieve(begin(client, send(client, line("good"), *wrong)))
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
    assert batch.failed_at is not None
    assert batch.errors is not None
    assert [problem.line for problem in batch.errors.data or ()] == [2, 3, 4, 5, 6]
    assert {problem.code for problem in batch.errors.data or ()} == {"invalid_json_line"}
    many = client.batches.retrieve(begin(client, send(client, *[b"no json"] * 60)))
    assert many.status == "failed"
    assert many.errors is not None
    assert [problem.line for problem in many.errors.data or ()] == list(range(1, 21))


def test_openai_client_runs_batches_of_edits_and_chats(text_client: OpenAI, text_server: RunningServer) -> None:
    sent = base64.b64encode(file_of(picture(64, 64))).decode()
    file_id = text_client.files.create(file=("a.png", base64.b64decode(sent)), purpose="vision").id
    edits, chat = "/v1/images/edits", "/v1/chat/completions"
    edit_fields = {"strength": 0.5, "num_inference_steps": 2}
    by_url = line("by-url", edits, images=[{"image_url": f"data:image/png;base64,{sent}"}], **edit_fields)
    by_file = line("by-file", edits, images=[{"file_id": file_id}], **edit_fields)
    edit = begin(text_client, send(text_client, by_url, by_file, line("of-nothing", edits, images=[])), edits)
    chat_fields: dict[str, Any] = {"messages": [{"role": "user", "content": "fox"}], "temperature": 0}
    good, bad = line("ok", chat, prompt=None, **chat_fields), line("bad", chat, prompt=None, messages=[])
    batch_id = begin(text_client, send(text_client, good, bad), chat)
    over = until_over(text_client, edit)
    edited = lines_of(text_client, over.output_file_id)
    files = {line["response"]["body"]["data"][0]["b64_json"] for line in edited.values()}
    assert (set(edited), len(files)) == ({"by-url", "by-file"}, 1), "the same picture, however it was given"
    body = {"prompt": "a red fox", "seed": 1, "size": "64x64", "images": [{"file_id": file_id}]} | edit_fields
    by_hand = text_server.client.post(edits, json=body).json()
    assert files == {by_hand["data"][0]["b64_json"]}
    assert set(lines_of(text_client, over.error_file_id)) == {"of-nothing"}
    over = until_over(text_client, batch_id)
    answer = lines_of(text_client, over.output_file_id)["ok"]["response"]["body"]
    assert answer["choices"] == text_client.chat.completions.create(model="talker", **chat_fields).to_dict()["choices"]
    assert set(lines_of(text_client, over.error_file_id)) == {"bad"}


def test_image_urls_in_the_output_are_those_of_the_address_that_created_the_batch(
    client: OpenAI, server: RunningServer
) -> None:
    over = until_over(client, begin(client, send(client, line("a", response_format="url"))))
    [image] = lines_of(client, over.output_file_id)["a"]["response"]["body"]["data"]
    assert image["url"].startswith(f"{server.url}/v1/")
    assert httpx.get(image["url"]).content.startswith(b"\x89PNG")


def test_a_batch_is_cancelled_and_interactive_requests_go_first(client: OpenAI, server: RunningServer) -> None:
    name = begin(client, send(client, *(line(f"fox-{n}", num_inference_steps=60, seed=n) for n in range(40))))
    wait_for(lambda: client.batches.retrieve(name).request_counts.completed, OVER_S, "a line")
    assert server.paint(num_steps=2).status_code == 200
    assert client.batches.retrieve(name).status == "in_progress", "somebody came between"
    with pytest.raises(openai.ConflictError, match="input of a batch"):
        client.files.delete(client.batches.retrieve(name).input_file_id)
    assert client.batches.cancel(name).status == "cancelling"
    assert client.batches.cancel(name).status in ("cancelling", "cancelled")
    batch = until_over(client, name)
    assert batch.status == "cancelled"
    assert len(lines_of(client, batch.output_file_id)) == batch.request_counts.completed < 40


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "no line"),
        ([line("a"), line("b"), line("a")], "line 3 has the custom_id 'a'"),
        ([line("a"), line("b", url="/v1/chat/completions")], "line 2 is for '/v1/chat/completions'"),
        ([b'{"custom_id":"%d","body":{}}' % n for n in range(50_001)], "more than 50000 lines"),
    ],
)  # rows 65 and 66 of the bad input
def test_an_invalid_file_is_refused(client: OpenAI, lines: list[bytes], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        begin(client, send(client, *lines))


def test_a_too_large_file_is_refused_by_its_length(server: RunningServer) -> None:
    head = "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=b\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=20.0) as connection:
        connection.sendall(f"{head}Content-Length: 220000000\r\n\r\n--b".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 413")
    for path in ("/v1/batches", "/v1/history", "/v1/images/edits"):
        form = server.client.post(path, content=b"x", headers={"Content-Type": "text/plain"})
        assert form.status_code in (405, 415)


def test_an_invalid_batch_is_refused(client: OpenAI, server: RunningServer) -> None:
    file = send(client, line("a"))
    other = client.files.create(file=("a.jsonl", line("a")), purpose="user_data").id
    good = {"input_file_id": file, "endpoint": GENERATIONS, "completion_window": "24h"}
    for changed, status, param in (
        ({"completion_window": "1s"}, 400, "completion_window"),
        ({"endpoint": "/v1/nothing"}, 400, "endpoint"),
        ({"endpoint": "/v1/batches"}, 400, "endpoint"),
        ({"input_file_id": other}, 400, "input_file_id"),
        ({"input_file_id": "file-x"}, 404, None),
        ({"metadata": {"a": "b" * 513}}, 400, "metadata.a"),
    ):
        answer = server.client.post("/v1/batches", json=good | changed)
        assert (answer.status_code, error_of(answer)["param"]) == (status, param)
    assert server.status("/v1/batches/batch_x") == 404


def test_a_batch_survives_restarts_without_repeating_images(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Stop and kill the server midway; other keys see nothing of the batch, and a revoked key ends its batches."""
    keys = Keys(Database(tmp_path / "data"))
    text, other, watcher = (keys.add(scope, [scope])[0] for scope in ("generate", "admin", "metrics"))
    leaving = keys.add("leaving", ["generate"])[0]
    config = '[engine]\nmax_rows = 8\n[model]\ndtype = "float32"\n'
    lines = [line(f"fox-{n}", num_inference_steps=20, seed=n) for n in range(24)]
    name, done = "", 0
    for life in range(3):
        with running_server(tiny_model("sd15"), tmp_path, config=config) as server:
            with OpenAI(base_url=f"{server.url}/v1", api_key=text, max_retries=0) as client:
                if not name:
                    name = begin(client, send(client, *lines))
                batch = client.batches.retrieve(name)
                assert batch.request_counts.completed >= done
                if life == 2:
                    batch = until_over(client, name)
                    painted = lines_of(client, batch.output_file_id)
                    stranger = {"Authorization": f"Bearer {other}"}
                    paths = [f"batches/{name}", f"files/{batch.output_file_id}/content", f"files/{batch.input_file_id}"]
                    for path in paths:
                        assert httpx.get(f"{server.url}/v1/{path}", headers=stranger).status_code == 404
                    assert httpx.get(f"{server.url}/v1/files", headers=stranger).json()["data"] == []
                    metrics = httpx.get(f"{server.url}/metrics", headers={"Authorization": f"Bearer {watcher}"}).text
                    check_revoked(f"{server.url}/v1", leaving, keys, tmp_path / "data")
                    break
                done = wait_for(partial(_done, client, name, done + 3), OVER_S, "some lines")
            if life == 0:
                assert server.stop() == 0, "it does not wait for the batch"
            server.process.kill()
            server.process.wait()
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 24, 0)
    assert {key: painted[key]["response"]["body"]["data"][0]["seed"] for key in painted} == {
        f"fox-{n}": n for n in range(24)
    }
    num_painted = re.search(
        r'^diffserve_engine_requests_total{kind="image",outcome="finished"} (\S+)$', metrics, re.MULTILINE
    )
    assert num_painted is not None
    assert 0 < float(num_painted[1]) <= 24 - done


def _done(client: OpenAI, name: str, min_done: int) -> int | None:
    count: int = client.batches.retrieve(name).request_counts.completed
    return count if count >= min_done else None


def check_revoked(url: str, key: str, keys: Keys, data: Path) -> None:
    """Check that revoking ``key``, named "leaving", fails its batch long before all images are done."""
    with OpenAI(base_url=url, api_key=key, max_retries=0) as client:
        name = begin(client, send(client, *(line(f"fox-{n}", num_inference_steps=50) for n in range(200))))
        wait_for(lambda: _done(client, name, 1), OVER_S, "a line")
    keys.revoke("leaving")

    def ended() -> tuple[str, str] | None:
        with Database(data).reading() as connection:
            row = connection.execute(select(batches.c.status, batches.c.error).where(batches.c.id == name)).one()
        return (row.status, row.error.partition(":")[0]) if row.error else None

    assert wait_for(ended, OVER_S, "the batch's end") == ("failed", "invalid_key")
