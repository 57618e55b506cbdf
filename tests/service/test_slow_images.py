"""Images that are built to take long to decode are refused by every route and delay no other request."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message

from diffserve.media import decoders
from diffserve.service.app import create_app
from diffserve.service.engine.client import EngineClient
from diffserve.service.lifecycle import Gate
from diffserve.settings.layers import load_settings
from tests.image_bombs import jpeg, scans
from tests.service.server import RunningServer
from tests.test_decoders import slow_file, slow_process

__all__ = ["slow_process"]  # a fixture

BOMB = scans(4096, 10_000)
TEXT = base64.b64encode(BOMB).decode()
URL = f"data:image/jpeg;base64,{TEXT}"
GOOD = base64.b64encode(jpeg(128)).decode()
EDIT = {"prompt": "a fox", "num_inference_steps": 2}
TOOL = {"type": "image_generation", "num_inference_steps": 2}
ROUTES: dict[str, Callable[[str], tuple[str, dict[str, Any]]]] = {
    "edit": lambda url: ("/v1/images/edits", {"json": EDIT | {"images": [{"image_url": url}]}}),
    "mask": lambda url: ("/v1/images/edits", {"json": EDIT | {"image": GOOD, "mask": {"image_url": url}}}),
    "form": lambda _: ("/v1/images/edits", {"data": EDIT, "files": {"image": ("a.jpg", BOMB)}}),
    "variation": lambda _: ("/v1/images/variations", {"files": {"image": ("a.jpg", BOMB)}}),
    "controlnet": lambda url: (
        "/v1/images/generations", {"json": EDIT | {"controlnets": [{"name": "edges", "image": url}]}},
    ),
    "img2img": lambda url: ("/sdapi/v1/img2img", {"json": {"prompt": "a", "init_images": [url]}}),
    "img2img mask": lambda url: ("/sdapi/v1/img2img", {"json": {"prompt": "a", "init_images": [GOOD], "mask": url}}),
    "a1111 controlnet": lambda url: (
        "/sdapi/v1/txt2img",
        {
            "json": {
                "prompt": "a", "alwayson_scripts": {"controlnet": {"args": [{"model": "edges", "image": url}]}}
            }
        },
    ),
    "png-info": lambda url: ("/sdapi/v1/png-info", {"json": {"image": url}}),
    "verify": lambda url: ("/v1/provenance/verify", {"json": {"image": url}}),
    "response": lambda url: (
        "/v1/responses",
        {
            "json": {
                "tools": [TOOL],
                "input": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "input_text", "text": "a fox"}, {"type": "input_image", "image_url": url}
                        ],
                    }
                ],
            }
        },
    ),
    "chat": lambda url: (
        "/v1/chat/completions",
        {
            "json": {
                "modalities": ["image", "text"],
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "a fox"}, {"type": "image_url", "image_url": {"url": url}}
                        ],
                    }
                ],
            }
        },
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES)
def test_every_route_with_images_refuses_a_file_of_many_scans_at_once(page_server: RunningServer, route: str) -> None:
    path, options = ROUTES[route](URL)
    page_server.client.post("/v1/provenance/verify", json={"image": GOOD})  # warms up the decoder
    started_s = time.monotonic()
    answer = page_server.client.post(path, **options)
    assert answer.status_code == 400, answer.text[:500]
    assert '"code":"image_too_complex"' in answer.text
    assert time.monotonic() - started_s < 10.0


@pytest.mark.slow
def test_a_stored_file_of_many_scans_is_refused_when_used(page_server: RunningServer) -> None:
    files = {"file": ("a.jpg", BOMB)}
    file_id = page_server.client.post("/v1/files", files=files, data={"purpose": "vision"}).json()["id"]
    answer = page_server.client.post("/v1/images/edits", json=EDIT | {"images": [{"file_id": file_id}]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "image_too_complex")
    page_server.client.delete(f"/v1/files/{file_id}")


@pytest.mark.slow
@pytest.mark.parametrize("event", ["read_parameters", "read_control"])
def test_the_page_refuses_an_upload_of_many_scans(page_server: RunningServer, event: str) -> None:
    page = page_server.client
    upload = {"files": ("a.jpg", BOMB, "image/jpeg")}
    place = page.post("/gradio_api/upload", files=upload).json()[0]
    body = {"data": [{"path": place, "meta": {"_type": "gradio.FileData"}}]}
    started_s = time.monotonic()
    answer = page.post(f"/gradio_api/run/{event}", json=body)
    assert "scans" in json.dumps(answer.json()["data"])
    assert time.monotonic() - started_s < 10.0
    assert not Path(place).exists()


@pytest.mark.slow
def test_an_edit_passes_many_files_of_many_scans(page_server: RunningServer) -> None:
    answers: list[int] = []

    def send() -> None:
        upload = {"image": ("a.jpg", BOMB)}
        answers.append(
            httpx.post(f"{page_server.url}/v1/images/edits", data=EDIT, files=upload, timeout=300.0).status_code
        )

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    started_s = time.monotonic()
    edit = page_server.client.post("/v1/images/edits", json=EDIT | {"image": GOOD, "size": "128x128"})
    assert edit.status_code == 200
    assert time.monotonic() - started_s < 30.0
    for thread in threads:
        thread.join()
    assert answers == [400] * 8


@pytest.mark.slow
def test_a_disconnect_frees_the_decoding_place(
    slow_process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = decoders.Decoders(1)
    monkeypatch.setattr("diffserve.service.images.verification.shared_decoders", lambda: pool)

    async def verify(app: Any, file: bytes, hang_up_after_s: float) -> int:
        """Return the status of the answer to a client that waits this long."""
        body = json.dumps({"image": base64.b64encode(file).decode()}).encode()
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        statuses = []

        async def receive() -> Message:
            if messages:
                return messages.pop()
            await asyncio.sleep(hang_up_after_s)
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            statuses.append(message.get("status"))

        scope = {
            "type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "server": ("localhost", 80),
            "path": "/v1/provenance/verify", "raw_path": b"/v1/provenance/verify", "query_string": b"",
            "root_path": "", "client": ("127.0.0.1", 1),
            "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")],
        }  # fmt: skip
        await app(scope, receive, send)
        return int(statuses[0] or 0)

    async def run() -> None:
        config = load_settings(env={"DIFFSERVE_SERVE_DATA_DIR": str(tmp_path)})
        app = create_app(EngineClient(config), config.serve, Gate())
        assert await verify(app, jpeg(), 60.0) == 200
        started_s = time.monotonic()
        assert await verify(app, slow_file(), 1.0) == 499
        assert await verify(app, jpeg(), 60.0) == 200
        assert time.monotonic() - started_s < 8.0
        pool.close()

    asyncio.run(run())
