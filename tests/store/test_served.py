"""A server whose store is PostgreSQL: work, files and keys, and another server on the same database after a kill."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from diffserve.store import Database, Keys
from tests.postgresql import PASSWORD, PostgreSQL
from tests.service.server import GENERATIONS, running_server, wait_for

BODY = {"prompt": "a red fox", "num_inference_steps": 1, "size": "64x64", "seed": 1}
OVER_S = 100.0


@pytest.mark.slow
def test_a_batch_continues_on_a_new_server_and_the_password_is_not_logged(
    postgresql: PostgreSQL, tmp_path: Path
) -> None:
    url, data = postgresql.create_database(), tmp_path / "data"
    database = Database(data, url)
    text, _ = Keys(database).add("app")
    database.close()
    headers = {"Authorization": f"Bearer {text}"}
    env = {"DIFFSERVE_STORE_URL": url, "DIFFSERVE_SERVE_DATA_DIR": str(data)}
    lines = [{"custom_id": f"fox-{n}", "method": "POST", "url": GENERATIONS, "body": BODY} for n in range(30)]
    content = "\n".join(map(json.dumps, lines)).encode()
    model = Path("embedded")
    with running_server(model, tmp_path / "first", env=env) as server:
        with httpx.Client(base_url=server.url, headers=headers, timeout=60.0) as client:
            assert httpx.post(f"{server.url}{GENERATIONS}", json=BODY, timeout=60.0).status_code == 401
            upload = {"file": ("a.jsonl", content)}
            file = client.post("/v1/files", files=upload, data={"purpose": "batch"}).json()["id"]
            fields = {"input_file_id": file, "endpoint": GENERATIONS, "completion_window": "24h"}
            name = client.post("/v1/batches", json=fields).json()["id"]
            wait_for(lambda: client.get(f"/v1/batches/{name}").json()["request_counts"]["completed"], OVER_S, "a line")
        server.process.kill()
        server.process.wait()
    assert not (data / "diffserve.sqlite").exists()
    with (
        running_server(model, tmp_path / "second", env=env) as server,
        httpx.Client(base_url=server.url, headers=headers, timeout=60.0) as client,
    ):

        def finished() -> dict[str, str] | None:
            batch: dict[str, str] = client.get(f"/v1/batches/{name}").json()
            return batch if batch["status"] == "completed" else None

        batch = wait_for(finished, OVER_S, "the batch's end")
        output = client.get(f"/v1/files/{batch['output_file_id']}/content").text
        images = {json.loads(line)["response"]["body"]["data"][0]["b64_json"] for line in output.splitlines()}
        assert (len(output.splitlines()), len(images)) == (30, 1)
        assert client.get("/v1/usage").json()["total"]["requests"] >= 30
    logs = [(tmp_path / folder / name).read_text() for folder in ("first", "second") for name in ("out", "err")]
    assert not any(PASSWORD in log for log in logs)
