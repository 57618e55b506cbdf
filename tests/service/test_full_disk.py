"""A data folder on a full file system: new jobs are refused, images are made, and it recovers without a restart."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diffserve.store.files import SPARE_BYTES
from tests.service.server import GENERATIONS, SOON_S, RunningServer, error_of, running_server, wait_for

pytestmark = pytest.mark.slow
JOBS = "/v1/jobs"
BODY = {"prompt": "a red fox", "num_inference_steps": 2, "size": "64x64", "seed": 1}
LONG = BODY | {"num_inference_steps": 300, "size": "128x128"}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system with a little more space than the server reserves."""
    folder = tmp_path / "data"
    folder.mkdir()
    size = f"size={SPARE_BYTES + (32 << 20)}"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", folder], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("only root can mount a file system")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(disk: Path) -> Path:
    """Fill the file system to its last byte and return the file to delete."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 20, 1):
            try:
                while True:
                    file.write(bytes(4096 * size if size == 1 else size))
            except OSError:
                continue
    assert os.statvfs(disk).f_bavail == 0
    return ballast


def job_of(server: RunningServer, name: str) -> dict[str, Any]:
    job: dict[str, Any] = server.client.get(f"{JOBS}/{name}").raise_for_status().json()
    return job


def test_a_full_disk_refuses_jobs_and_nothing_else_and_loses_none(disk: Path, tmp_path: Path) -> None:
    with running_server(Path("embedded"), tmp_path, config="[serve]\ncheckpoint_every_s = 0.2\n") as server:
        server.wait_until_ready()
        server.client.put(f"{JOBS}/running", json={"endpoint": GENERATIONS, "body": LONG}).raise_for_status()
        wait_for(lambda: job_of(server, "running")["status"] == "running", SOON_S, "the job's start")
        wait_for(lambda: any("capture" in path.name for path in (disk / "jobs").glob("*")), SOON_S, "a capture")
        ballast = fill(disk)
        refused = server.client.post(JOBS, json={"endpoint": GENERATIONS, "body": BODY | {"prompt": "fox " * 2000}})
        assert (refused.status_code, error_of(refused)["code"]) == (507, "no_room")
        answers = [server.client.post(GENERATIONS, json=BODY | {"seed": seed}, timeout=120) for seed in (1, 2)]
        assert [answer.status_code for answer in answers] == [200, 200]
        waits = "a job waits until it can be stored"
        wait_for(lambda: waits in server.errors.read_text(), 180.0, "the end of the job's work")
        assert job_of(server, "running")["status"] == "running"
        ballast.unlink()
        wait_for(lambda: job_of(server, "running")["status"] == "succeeded", SOON_S, "the result")
        assert job_of(server, "running")["attempts"] == 1
        assert len(server.client.get(f"{JOBS}/running/result").json()["data"]) == 1
        server.client.put(f"{JOBS}/later", json={"endpoint": GENERATIONS, "body": BODY}).raise_for_status()
        wait_for(lambda: job_of(server, "later")["status"] == "succeeded", SOON_S, "a later job")
        counted = lambda: server.client.get("/v1/usage").json()["total"]["pictures"] == 4  # noqa: E731
        wait_for(counted, SOON_S, "the usage of images that were made while the disk was full")
        assert "Traceback" not in server.errors.read_text()
