"""Usage is recorded by key and is visible only to that key and to administrators."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from diffserve.store import Database, Keys
from tests.service.server import GENERATIONS, running_server, wait_for

pytestmark = pytest.mark.slow
NAMES = {"app": "generate", "other": "generate", "admin": "admin"}
WIDE = {**os.environ, "COLUMNS": "200"}


def test_usage_is_reported_by_key_and_day(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    data = tmp_path / "data"
    keys = Keys(Database(data))
    headers = {name: {"Authorization": f"Bearer {keys.add(name, [scope])[0]}"} for name, scope in NAMES.items()}
    body = {"prompt": "a red fox", "num_inference_steps": 3, "size": "64x64", "guidance_scale": 3.0}
    with running_server(tiny_model("sd15"), tmp_path) as server:
        server.wait_until_ready()

        def used(name: str, path: str = "") -> httpx.Response:
            return httpx.get(f"{server.url}/v1/usage{path}", headers=headers[name])

        for seed in (1, 2):
            fields = body | {"seed": seed, "n": 2}
            assert httpx.post(f"{server.url}{GENERATIONS}", json=fields, headers=headers["app"], timeout=60).is_success
        refused = httpx.post(f"{server.url}{GENERATIONS}", json={}, headers=headers["app"])
        assert refused.status_code == 400
        wait_for(lambda: used("app").json()["total"]["pictures"] == 4, 10.0, "the books")
        [day] = used("app").json()["data"]
        assert (day["requests"], day["pictures"], day["evaluations"]) == (2, 4, 2 * 2 * 3 * 2)
        assert used("other").json()["data"] == []
        assert used("app", "/keys").status_code == 403
        assert [entry["key_id"] for entry in used("admin", "/keys").json()["data"]] == [day["key_id"]]
        assert used("app", "?days=0").status_code == used("app", "?days=x").status_code == 400
        server.process.kill()
        server.process.wait()
    command = [sys.executable, "-m", "diffserve", "keys", "list", "--data-dir", str(data)]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=120, env=WIDE)
    assert "2 requests, 4 images" in listed.stdout
