"""Servers whose store is PostgreSQL: a batch across a kill, and jobs of two servers of which one is killed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from diffserve.client import Client
from diffserve.store import Database, Keys
from tests.postgresql import PASSWORD, PostgreSQL, running_postgresql
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


@pytest.mark.slow
def test_two_servers_share_jobs_and_one_finishes_those_of_a_killed_one(postgresql: PostgreSQL, tmp_path: Path) -> None:
    env = {
        "DIFFSERVE_STORE_URL": postgresql.create_database(),
        "DIFFSERVE_SERVE_DATA_DIR": str(tmp_path / "data"),
    }
    names = [f"job-{number}" for number in range(40)]
    with (
        running_server(Path("embedded"), tmp_path / "first", env=env) as first,
        running_server(Path("embedded"), tmp_path / "second", env=env) as second,
        Client(second.url) as client,
    ):
        with Client(first.url) as other:
            for number, name in enumerate(names):
                other.put_job(name, GENERATIONS, BODY | {"seed": number, "num_inference_steps": 40})
            wait_for(lambda: other.job(names[0]).is_over, OVER_S, "a job")
        assert any(not client.job(name).is_over for name in names), "jobs are left when the server is killed"
        first.process.kill()
        first.process.wait()
        wait_for(lambda: all(client.job(name).is_over for name in names), OVER_S, "the jobs' end")
        assert {client.job(name).status for name in names} == {"succeeded"}
        images = {json.loads(client.job_result(name))["data"][0]["b64_json"] for name in names}
        assert len(images) == len(names)


@pytest.mark.slow
def test_a_job_is_watched_while_the_database_is_away(tmp_path: Path) -> None:
    with running_postgresql() as postgresql:
        env = {
            "DIFFSERVE_STORE_URL": postgresql.create_database(),
            "DIFFSERVE_SERVE_DATA_DIR": str(tmp_path / "data"),
        }
        with running_server(Path("embedded"), tmp_path / "server", env=env) as server:
            with Client(server.url) as client:
                client.put_job("long", GENERATIONS, BODY | {"num_inference_steps": 900, "size": "256x256"})
            command = [sys.executable, "-m", "diffserve", "jobs", "watch", "long", "--json", "--server", server.url]
            output = tmp_path / "events"
            with output.open("wb") as file, subprocess.Popen(command, stdout=file) as process:
                wait_for(lambda: b'"progress":0.' in output.read_bytes(), OVER_S, "progress")
                postgresql.stop()
                time.sleep(10.0)
                assert process.poll() is None
                postgresql.start()
                assert process.wait(OVER_S) == 0
    events = [json.loads(line) for line in output.read_text().splitlines()]
    states = [event["status"] for event in events if "progress" not in event]
    assert (states[:2], states[-1]) == (["queued", "running"], "succeeded")
