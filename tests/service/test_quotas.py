"""Daily quotas of keys and users: every entry point refuses a request over quota, and no client retries it."""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from PIL import Image

from diffserve.api.errors import QuotaExceeded
from diffserve.client import Client, StoredBatch, batch_lines
from diffserve.store import Database, Keys
from diffserve.store.usage import Usage, UsageCounts, day_of
from tests.service.server import GENERATIONS, SOON_S, RunningServer, error_of, running_server, wait_for

pytestmark = pytest.mark.slow
HEADER = "X-Forwarded-User"
PROXY = f'[serve]\ntrusted_proxies = ["127.0.0.1"]\ntrusted_user_header = "{HEADER}"\nuser_images_per_day = 2\n'
BODY = {"prompt": "a red fox", "num_inference_steps": 1, "size": "64x64", "seed": 1}
BIG = 10**6


def png() -> str:
    file = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


IMAGE_WORK: dict[str, dict[str, Any]] = {
    GENERATIONS: BODY,
    "/v1/images/edits": BODY | {"image": png()},
    "/v1/images/variations": {"image": png()},
    "/v1/images/upscale": {"image": png(), "upscaler": "lanczos", "scale": 2},
    "/v1/responses": {"input": "a fox", "tools": [{"type": "image_generation"}]},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a fox"}], "modalities": ["image"]},
    "/sdapi/v1/txt2img": {"prompt": "a fox", "steps": 1},
    "/sdapi/v1/img2img": {"prompt": "a fox", "steps": 1, "init_images": [png()]},
    "/sdapi/v1/extra-single-image": {"image": png(), "upscaling_resize": 2, "upscaler_1": "Lanczos"},
}


class Served:
    """A server, and the keys of its database."""

    def __init__(self, server: RunningServer, folder: Path) -> None:
        self.server = server
        self.database = Database(folder)
        self.keys = Keys(self.database)
        self._num_keys = 0

    def key(self, **quotas: float) -> tuple[dict[str, str], str]:
        """Return the headers and the ID of a new key."""
        self._num_keys += 1
        text, key = self.keys.add(f"app-{self._num_keys}", **quotas)  # type: ignore[arg-type]
        headers = {"Authorization": f"Bearer {text}"}
        is_known = lambda: self.server.client.get("/v1/usage", headers=headers).status_code == 200  # noqa: E731
        wait_for(is_known, SOON_S, "the new key")
        return headers, key.id

    def use(self, key_id: str, **used: float) -> None:
        """Record usage of today."""
        Usage(self.database).add({(key_id, day_of(time.time())): UsageCounts(**used)})  # type: ignore[arg-type]

    def post(self, path: str, body: object, headers: dict[str, str]) -> httpx.Response:
        return self.server.client.post(path, json=body, headers=headers, timeout=120)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("quotas")
    with running_server(Path("embedded"), folder, config=PROXY) as server:
        server.wait_until_ready()
        yield Served(server, folder / "data")


def test_a_request_over_quota_is_answered_with_the_renewal_and_is_not_retried(served: Served) -> None:
    headers, key_id = served.key(images_per_day=3)
    assert served.post(GENERATIONS, BODY | {"n": 2}, headers).status_code == 200
    refused = served.post(GENERATIONS, BODY | {"n": 2}, headers)
    assert (refused.status_code, error_of(refused)["code"]) == (429, "insufficient_quota")
    message = error_of(refused)["message"]
    assert "the quota is 3 images per day; 2 are used, and this request needs 2. It renews at " in message
    assert refused.headers["x-should-retry"] == "false"
    assert 1 <= int(refused.headers["retry-after"]) <= 86400
    usage = served.server.client.get("/v1/usage", headers=headers).json()
    assert (usage["quota"]["images_per_day"], usage["quota"]["images_left"]) == (3, 1)
    assert usage["total"]["pictures"] == 2
    assert usage["total"]["device_s"] > 0.0
    assert served.post(GENERATIONS, BODY, headers).status_code == 200
    assert served.post(GENERATIONS, BODY, headers).status_code == 429
    served.keys.change_quotas(key_id, images_per_day=4)
    wait_for(lambda: served.post(GENERATIONS, BODY, headers).status_code == 200, SOON_S, "the new quota")


@pytest.mark.parametrize("quota", ["images_per_day", "device_seconds_per_day"])
def test_every_entry_point_obeys(served: Served, quota: str) -> None:
    headers, key_id = served.key(**{quota: 5})
    served.use(key_id, pictures=5, device_s=5.0)
    for path, body in IMAGE_WORK.items():
        refused = served.post(path, body, headers)
        answer = refused.json()
        code = answer["code"] if path.startswith("/sdapi") else answer["error"]["code"]
        assert (path, refused.status_code, code) == (path, 429, "insufficient_quota"), refused.text


def test_device_time_is_a_quota_of_texts_too(served: Served) -> None:
    headers, key_id = served.key(device_seconds_per_day=5)
    rewrite = {"prompt": "a fox pls"}
    assert served.post("/v1/prompts/rewrite", rewrite, headers).status_code == 200
    served.use(key_id, device_s=5.0)
    for path, body in (
        ("/v1/prompts/rewrite", rewrite),
        ("/v1/completions", {"prompt": "a fox", "max_tokens": 2}),
    ):
        refused = served.post(path, body, headers)
        assert (refused.status_code, error_of(refused)["code"]) == (429, "insufficient_quota"), refused.text


def test_the_openai_client_sends_a_request_over_quota_once(served: Served) -> None:
    headers, key_id = served.key(images_per_day=1)
    served.use(key_id, pictures=1)
    sent: list[httpx.Request] = []
    key = headers["Authorization"].removeprefix("Bearer ")
    with httpx.Client(event_hooks={"request": [sent.append]}) as http:
        client = openai.OpenAI(base_url=f"{served.server.url}/v1", api_key=key, http_client=http, max_retries=3)
        with pytest.raises(openai.RateLimitError) as refused:
            client.images.generate(prompt="a fox")
    assert (refused.value.code, refused.value.type, len(sent)) == ("insufficient_quota", "insufficient_quota", 1)
    with Client(served.server.url, api_key=key) as key_client, pytest.raises(QuotaExceeded) as exceeded:
        key_client.generate("a fox")
    assert exceeded.value.retry_after_s == pytest.approx(int(refused.value.response.headers["retry-after"]), abs=60)


def test_concurrent_requests_do_not_exceed_the_quota(served: Served) -> None:
    headers, _ = served.key(images_per_day=5)

    def status_of(number: int) -> int:
        return served.post(GENERATIONS, BODY | {"seed": number}, headers).status_code

    with ThreadPoolExecutor(12) as pool:
        statuses = sorted(pool.map(status_of, range(12)))
    assert statuses == [200] * 5 + [429] * 7
    assert served.server.client.get("/v1/usage", headers=headers).json()["quota"]["images_left"] == 0


def test_a_job_and_the_lines_of_a_batch_over_quota_fail_with_the_code(served: Served) -> None:
    headers, key_id = served.key(images_per_day=1)
    served.use(key_id, pictures=1)
    job = served.post("/v1/jobs", {"endpoint": GENERATIONS, "body": BODY}, headers).json()

    def job_over() -> dict[str, Any] | None:
        state = served.server.client.get(f"/v1/jobs/{job['id']}", headers=headers).json()
        return state if state["finished_at"] else None

    assert wait_for(job_over, SOON_S, "the job's end")["error"]["code"] == "insufficient_quota"
    key = headers["Authorization"].removeprefix("Bearer ")
    with Client(served.server.url, api_key=key) as client:
        file = client.upload(batch_lines([BODY]))
        batch = client.begin_batch(file.id)

        def batch_over() -> StoredBatch | None:
            current = client.batch(batch.id)
            return current if current.is_over else None

        ended = wait_for(batch_over, SOON_S, "the batch's end")
        assert ended.error_file_id is not None
        assert b"insufficient_quota" in client.file_content(ended.error_file_id)


def test_users_of_a_proxy_have_the_default_quota_or_their_own(served: Served) -> None:
    served.keys.add("bob@example.org", images_per_day=3, is_user=True)

    def post(user: str, count: int) -> httpx.Response:
        return served.post(GENERATIONS, BODY | {"n": count}, {HEADER: user})

    wait_for(lambda: post("bob@example.org", 3).status_code == 200, SOON_S, "bob's own limits")
    assert "3 images per day" in error_of(post("bob@example.org", 1))["message"]
    assert post("alice", 3).status_code == 429
    assert post("alice", 2).status_code == 200
    assert "2 images per day" in error_of(post("alice", 1))["message"]
    served.keys.revoke("user:bob@example.org")
    wait_for(lambda: post("bob@example.org", 1).status_code == 403, SOON_S, "the block")
    served.keys.add("bob@example.org", images_per_day=0, is_user=True)
    wait_for(lambda: post("bob@example.org", 3).status_code == 200, SOON_S, "the end of the block")


def test_the_count_survives_a_restart(tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    text, _ = Keys(Database(tmp_path / "data")).add("app", images_per_day=2)
    headers = {"Authorization": f"Bearer {text}"}
    statuses = []
    for _ in range(2):
        with running_server(tiny_model("sd15"), tmp_path) as server:
            server.wait_until_ready()
            for _ in range(2):
                statuses.append(server.client.post(GENERATIONS, json=BODY, headers=headers, timeout=60).status_code)
    assert statuses == [200, 200, 429, 429]
