"""Sessions and files of the page belong to the API key that made them."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from gradio_client import Client
from PIL import Image

from diffserve.store import Database, Keys
from tests.service.server import START_S, RunningServer, running_server, wait_for

pytestmark = pytest.mark.slow

API = "/gradio_api"


class Callers:
    """Two HTTP clients of one page with different API keys."""

    def __init__(self, server: RunningServer, keys: dict[str, str]) -> None:
        self.headers = {name: {"Authorization": f"Bearer {text}"} for name, text in keys.items()}
        self.ann, self.bob = (
            httpx.Client(base_url=server.url, headers=header, timeout=120, trust_env=False)
            for header in self.headers.values()
        )


@pytest.fixture(scope="module")
def callers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callers]:
    folder = tmp_path_factory.mktemp("keyed-page")
    keys = Keys(Database(folder / "data"))
    texts = {name: keys.add(name, ["generate"])[0] for name in ("ann", "bob")}
    with running_server(Path("embedded"), folder, page=True) as server:
        server.wait_until_ready()
        both = Callers(server, texts)
        wait_for(lambda: both.ann.get("/config").status_code == 200, START_S, "the page")
        yield both
        both.ann.close()
        both.bob.close()


def event_named(client: httpx.Client, name: str) -> int:
    events = client.get("/config").json()["dependencies"]
    return next(int(event["id"]) for event in events if event["api_name"] == name)


def upload(client: httpx.Client) -> str:
    """Upload an image and return its path on the server."""
    data = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(data, "PNG")
    answer = client.post(f"{API}/upload", files={"files": ("start.png", data.getvalue(), "image/png")})
    assert answer.status_code == 200, answer.text
    [path] = answer.json()
    return str(path)


def result_of(client: httpx.Client, session: str) -> dict[str, Any]:
    """Return the final message about the event of ``session``."""
    with client.stream("GET", f"{API}/queue/data", params={"session_hash": session}) as stream:
        messages = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: ")]
    return next(message for message in reversed(messages) if message["msg"] not in ("close_stream", "heartbeat"))


def read_parameters(client: httpx.Client, path: str, session: str) -> str:
    """Request the parameters in an uploaded file and return the id of the event."""
    file = {"path": path, "meta": {"_type": "gradio.FileData"}}
    body = {"data": [file], "fn_index": event_named(client, "read_parameters"), "session_hash": session}
    answer = client.post(f"{API}/queue/join", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["event_id"])


def test_an_upload_is_served_only_to_the_key_that_sent_it(callers: Callers) -> None:
    path = upload(callers.ann)
    assert callers.ann.get(f"{API}/file={path}").status_code == 200
    refused = callers.bob.get(f"{API}/file={path}")
    assert refused.status_code == 403
    assert refused.json()["error"]["code"] == "file_not_allowed"
    folder, _, name = path.rpartition("/")
    assert callers.bob.get(f"{API}/file={folder}/../{Path(folder).name}/{name}").status_code == 403
    assert upload(callers.bob) == path, "equal files have one path"
    assert callers.bob.get(f"{API}/file={path}").status_code == 200


def test_an_event_may_not_read_an_upload_of_another_key(callers: Callers) -> None:
    data = io.BytesIO()
    Image.new("RGB", (64, 64), "blue").save(data, "PNG")
    [path] = callers.ann.post(f"{API}/upload", files={"files": ("blue.png", data.getvalue(), "image/png")}).json()
    read_parameters(callers.bob, path, "bobs")
    message = result_of(callers.bob, "bobs")
    assert not message["success"]
    assert "another key" in message["output"]["error"]
    read_parameters(callers.ann, path, "anns")
    assert result_of(callers.ann, "anns")["success"]


def test_events_of_a_session_reach_only_its_key(callers: Callers) -> None:
    event = read_parameters(callers.ann, upload(callers.ann), "shared")
    cancelled = callers.bob.post(f"{API}/cancel", json={"session_hash": "shared", "fn_index": 0, "event_id": event})
    assert cancelled.status_code == 400
    assert "no such event" in cancelled.text
    assert result_of(callers.bob, "shared")["session_not_found"]
    assert result_of(callers.ann, "shared")["success"]


def test_a_generated_image_is_served_only_to_the_key_it_was_shown_to(callers: Callers, tmp_path: Path) -> None:
    url = str(callers.ann.base_url).rstrip("/")
    client = Client(
        url, headers=callers.headers["ann"], verbose=False, analytics_enabled=False, download_files=False,
        httpx_kwargs={"timeout": 120, "trust_env": False},
    )  # fmt: skip
    picture: Any = client.predict("a fox", steps="2", seed="5", api_name="/generate")[0]
    client.close()
    path = picture["value"]["path"] if "value" in picture else picture["path"]
    file = callers.ann.get(f"{API}/file={path}")
    assert file.status_code == 200
    assert file.content.startswith(b"\x89PNG")
    assert callers.bob.get(f"{API}/file={path}").status_code == 403
