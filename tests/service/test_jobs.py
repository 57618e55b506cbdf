"""Jobs over HTTP: bad input, results, events, cancel and retry, and restarts after SIGKILL and SIGTERM."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from diffserve.api.errors import DiffserveError
from diffserve.client import Client, JobEvent, JobProgress, StoredJob, batch_lines
from diffserve.service.http.middleware import PICTURE_BODY_BYTES, TEXT_BODY_BYTES
from diffserve.service.lifecycle import WARNINGS
from diffserve.service.stored.job_runner import JOBS_AT_ONCE
from diffserve.store import Database, Keys
from diffserve.store.batches import Batch, Batches
from diffserve.store.files import Files
from diffserve.store.jobs import Job, Jobs
from tests.service.server import GENERATIONS, SOON_S, RunningServer, error_of, running_server, wait_for
from tests.service.test_edits import file_of, in_base64, picture

pytestmark = pytest.mark.slow
JOBS = "/v1/jobs"
MODEL = Path("embedded")
BODY = {"prompt": "a red fox", "num_inference_steps": 2, "size": "64x64", "seed": 1}
EDITS = "/v1/images/edits"
PICTURE = file_of(picture(64, 64))
SMALL = in_base64(picture(64, 64))
FEW_STEPS = {"prompt": "a red fox", "num_inference_steps": "2"}
Ended = TypeVar("Ended", Job, Batch)
LONG = BODY | {"num_inference_steps": 400, "size": "256x256"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(MODEL, tmp_path_factory.mktemp("jobs")) as server:
        server.wait_until_ready()
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[Client]:
    with Client(server.url) as client:
        yield client


def over(stored: Ended | None) -> Ended | None:
    return stored if stored is not None and stored.is_over else None


def until_over(client: Client, name: str) -> StoredJob:
    def finished() -> StoredJob | None:
        job = client.job(name)
        return job if job.is_over else None

    return wait_for(finished, SOON_S, "the job's end")


def test_the_result_is_the_answer_of_the_request(server: RunningServer, client: Client) -> None:
    created = server.client.post(JOBS, json={"endpoint": "images/generations", "body": BODY})
    assert (created.status_code, created.json()["endpoint"]) == (202, GENERATIONS)
    assert created.json()["status"] in ("queued", "running")
    job = until_over(client, created.json()["id"])
    assert (job.status, job.attempts, job.error, job.has_result) == ("succeeded", 1, None, True)
    result = server.client.get(f"{JOBS}/{job.id}/result")
    answer = server.client.post(GENERATIONS, json=BODY)
    assert (result.status_code, result.headers["content-type"]) == (200, "application/json")
    assert result.json()["data"][0]["b64_json"] == answer.json()["data"][0]["b64_json"]
    assert result.json().keys() == answer.json().keys()
    for endpoint in (GENERATIONS, "/images/generations"):
        assert client.jobs(endpoint=endpoint, status="succeeded", limit=1).data[0].id == job.id
    assert client.delete_job(job.id)
    assert not client.delete_job(job.id)


def test_a_job_with_an_id_of_the_client_is_created_once(server: RunningServer, client: Client) -> None:
    fields = {"endpoint": GENERATIONS, "body": BODY}
    answers = [server.client.put(f"{JOBS}/mine-1", json=fields) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [202, 200]
    other = server.client.put(f"{JOBS}/mine-1", json=fields | {"body": BODY | {"seed": 2}})
    assert (other.status_code, error_of(other)["code"]) == (409, "job_exists")
    assert until_over(client, "mine-1").attempts == 1
    assert json.loads(client.job_result("mine-1"))["data"]
    client.put_job("mine_2", GENERATIONS, BODY | {"prompt": "an owl"})
    assert [(job.id, job.prompt) for job in client.jobs(prefix="mine-").data] == [("mine-1", "a red fox")]
    assert [job.prompt for job in client.jobs(prefix="mine_").data] == ["an owl"]
    lists = client.begin_job("/v1/completions", {"model": "none", "prompt": ["a", "b"]})
    assert client.job(lists.id).prompt is None


@pytest.mark.parametrize(
    ("fields", "code", "param", "part"),
    [
        ({"endpoint": ...}, "missing_required_parameter", "endpoint", "endpoint"),
        ({"body": ...}, "missing_required_parameter", "body", "body"),
        ({"body": []}, "invalid_value", "body", "[]"),
        ({"endpoint": "/v1/models"}, "invalid_value", "endpoint", "/v1/models"),
        ({"endpoint": "/v1/jobs"}, "invalid_value", "endpoint", "/v1/jobs"),
        ({"body": {"prompt": ""}}, "empty_prompt", "prompt", "empty"),
        ({"body": {"prompt": "a", "n": 99}}, "invalid_value", "n", "99"),
        ({"body": BODY | {"stream": True}}, "unsupported_value", "stream", "stream is true"),
        (
            {"endpoint": "/v1/responses", "body": {"input": "a", "background": True}},
            *("unsupported_value", "background", "background is true"),
        ),
        ({"timeout_s": 0}, "invalid_value", "timeout_s", "0"),
        ({"timeout_s": 1e9}, "invalid_value", "timeout_s", "1000000000"),
    ],
)
def test_bad_jobs_are_refused(server: RunningServer, fields: dict[str, Any], code: str, param: str, part: str) -> None:
    merged = {"endpoint": GENERATIONS, "body": BODY} | fields
    answer = server.client.post(JOBS, json={name: value for name, value in merged.items() if value is not ...})
    error = error_of(answer)
    assert (answer.status_code, error["code"], error["param"]) == (400, code, param)
    assert part in error["message"]


def test_unknown_fields_of_a_job_are_named_in_a_warning(server: RunningServer) -> None:
    answer = server.client.post(JOBS, json={"endpoint": GENERATIONS, "body": BODY, "webhook": "https://example.org"})
    assert answer.status_code == 202
    assert answer.headers[WARNINGS] == "unknown fields were ignored: webhook."


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e400"])
def test_numbers_that_are_not_finite_are_refused(server: RunningServer, number: str) -> None:
    body = f'{{"endpoint": "{GENERATIONS}", "body": {{"prompt": "a", "guidance_scale": {number}, "x": [{number}]}}}}'
    answer = server.client.post(JOBS, content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, error_of(answer)["code"]) == (400, "invalid_json")
    assert "numbers must be finite" in error_of(answer)["message"]


def test_bodies_are_as_long_as_the_endpoint_itself_takes(server: RunningServer) -> None:
    for endpoint, num_bytes in ((GENERATIONS, PICTURE_BODY_BYTES), ("/v1/completions", TEXT_BODY_BYTES)):
        body = {"prompt": "a" * num_bytes}
        for path, fields in ((endpoint, body), (JOBS, {"endpoint": endpoint, "body": body})):
            answer = server.client.post(path, json=fields)
            assert (answer.status_code, error_of(answer)["code"]) == (413, "body_too_large"), path


def test_bad_ids_and_states_are_refused(server: RunningServer, client: Client) -> None:
    fields = {"endpoint": GENERATIONS, "body": BODY}
    for name in ("a.b", "-a", "a" * 65, "%20", "ä"):
        assert server.client.put(f"{JOBS}/{name}", json=fields).status_code == 400, name
    assert error_of(server.client.get(f"{JOBS}/nö-🦊"))["message"] == 'you have no job "nö-🦊".'
    posts = [("POST", f"/{action}") for action in ("cancel", "pause", "resume", "retry")]
    for method, path in (("GET", ""), ("GET", "/result"), ("GET", "/events"), ("DELETE", ""), *posts):
        assert error_of(server.client.request(method, f"{JOBS}/none{path}"))["code"] == "job_not_found"
    bad_filter = server.client.get(f"{JOBS}?status=done")
    assert (bad_filter.status_code, error_of(bad_filter)["param"]) == (400, "status")
    assert error_of(bad_filter)["message"].startswith('status is "done"; it must be')
    job = client.begin_job(GENERATIONS, BODY)
    until_over(client, job.id)
    codes = {"/cancel": "job_over", "/retry": "job_not_failed", "/pause": "job_over", "/resume": "job_not_paused"}
    for path, code in codes.items():
        answer = server.client.post(f"{JOBS}/{job.id}{path}")
        assert (answer.status_code, error_of(answer)["code"]) == (409, code)
    bad_place = server.client.get(f"{JOBS}/{job.id}/events", headers={"Last-Event-ID": "x"})
    assert bad_place.status_code == 400


def test_an_error_answer_is_the_result_of_a_failed_job(server: RunningServer, client: Client) -> None:
    body = BODY | {"loras": [{"name": "none"}]}
    job = until_over(client, client.begin_job(GENERATIONS, body).id)
    answer = server.client.post(GENERATIONS, json=body)
    assert job.status == "failed"
    assert job.error is not None
    assert (job.error.code, job.error.message) == (error_of(answer)["code"], error_of(answer)["message"])
    with pytest.raises(DiffserveError, match="none"):
        client.job_result(job.id)


def test_a_job_tells_its_position_progress_and_estimate(server: RunningServer, client: Client) -> None:
    first = client.begin_job(GENERATIONS, LONG)
    later_jobs = [client.begin_job(GENERATIONS, LONG | {"seed": seed}) for seed in range(JOBS_AT_ONCE + 2)]
    wait_for(lambda: (client.job(first.id).progress or 0.0) > 0.0, SOON_S, "the first steps")
    wait_for(lambda: len(client.jobs(status="running").data) == JOBS_AT_ONCE, SOON_S, "all places of jobs")
    jobs = {job.id: job for job in client.jobs(limit=JOBS_AT_ONCE + 3).data}
    running, *_, before, last = (jobs[job.id] for job in (first, *later_jobs))
    assert running.status == "running"
    assert (running.position, before.position, last.position) == (None, 2, 3)
    assert (before.progress, last.progress) == (None, None)
    assert running.estimated_seconds is not None
    assert before.estimated_seconds is not None
    assert last.estimated_seconds is not None
    assert 0.0 < running.estimated_seconds < last.estimated_seconds
    assert before.estimated_seconds < last.estimated_seconds
    client.cancel_jobs([job.id for job in later_jobs])
    progress_values: list[float] = []
    with client.job_events(first.id) as events:
        for event in events:
            if isinstance(event, JobProgress):
                progress_values.append(event.progress)
                if len(progress_values) == 3:
                    break
    assert 0.0 < progress_values[0] < progress_values[1] < progress_values[2] <= 1.0
    assert client.cancel_job(first.id).progress is None


def test_a_paused_job_waits_and_continues_from_its_captured_state(server: RunningServer, client: Client) -> None:
    body = LONG | {"num_inference_steps": 300}
    job = client.begin_job(GENERATIONS, body)
    wait_for(lambda: (client.job(job.id).progress or 0.0) > 0.4, SOON_S, "a captured state")
    paused = client.pause_job(job.id)
    assert (paused.status, paused.attempts, paused.progress) == ("paused", 0, None)
    assert client.pause_job(job.id).status == "paused"
    assert client.jobs(status="paused").data[0].id == job.id
    assert server.paint(num_steps=1).status_code == 200, "the engine works for later_jobs"
    resumed = client.resume_job(job.id)
    assert resumed.status in ("queued", "running")
    answer = server.client.post(f"{JOBS}/{job.id}/resume")
    assert (answer.status_code, error_of(answer)["code"]) == (409, "job_not_paused")
    wait_for(lambda: (client.job(job.id).progress or 0.0) > 0.0, SOON_S, "the first steps")
    progress = client.job(job.id).progress
    assert progress is not None
    assert progress > 0.2, "the first steps are not computed again"
    over = until_over(client, job.id)
    assert (over.status, over.attempts) == ("succeeded", 1)
    image = json.loads(client.job_result(job.id))["data"][0]["b64_json"]
    assert image == server.client.post(GENERATIONS, json=body).json()["data"][0]["b64_json"]
    assert read_events(server, job.id)[1:4] == [(2, "job.running"), (3, "job.paused"), (4, "job.queued")]


def test_many_jobs_are_cancelled_with_one_request(server: RunningServer, client: Client) -> None:
    running = client.begin_job(GENERATIONS, LONG | {"num_inference_steps": 900})
    wait_for(lambda: client.job(running.id).status == "running", SOON_S, "the start")
    later_jobs = [client.begin_job(GENERATIONS, LONG | {"num_inference_steps": 900, "seed": seed}) for seed in range(9)]
    paused_job = client.pause_job(later_jobs[0].id)
    assert client.cancel_jobs([running.id, "none"], status=["running"]).not_cancelled == ("none",)
    assert client.cancel_jobs(status=["queued", "running"], endpoint="/v1/embeddings").cancelled == ()
    assert set(client.cancel_jobs(status=["queued", "running"]).cancelled) == {job.id for job in later_jobs[1:]}
    answer = client.cancel_jobs([job.id for job in later_jobs])
    assert (answer.cancelled, len(answer.not_cancelled)) == ((paused_job.id,), 8)
    assert server.paint(num_steps=1).status_code == 200


@pytest.mark.parametrize(
    ("body", "param", "part"),
    [
        ({}, "ids", "ids and status are missing"),
        ({"endpoint": GENERATIONS}, "ids", "ids and status are missing"),
        ({"ids": []}, "ids", "ids is an empty list; give at least one entry."),
        ({"ids": "a"}, "ids", "a"),
        ({"ids": [1]}, "ids[0]", "1"),
        ({"ids": ["a"] * 1001}, "ids", "1000"),
        ({"status": ["succeeded"]}, "status[0]", "succeeded"),
    ],
)
def test_bad_cancellations_are_refused(server: RunningServer, body: dict[str, Any], param: str, part: str) -> None:
    answer = server.client.post(f"{JOBS}/cancel", json=body)
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)
    assert part in error_of(answer)["message"]


PREFER = {"Prefer": "wait=5, Respond-Async; a=b"}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (GENERATIONS, {"json": BODY}),
        ("/images/generations/", {"json": BODY}),
        ("/sdapi/v1/txt2img", {"json": {"prompt": "a red fox", "steps": 2, "width": 64, "height": 64, "seed": 1}}),
        ("/v1/responses", {"json": {"input": "a red fox", "tools": [{"type": "image_generation"}]}}),
        ("/v1/images/upscale", {"json": {"image": SMALL}}),
        ("/v1/images/upscale", {"files": {"image": PICTURE}, "data": {"scale": "2"}}),
        (EDITS, {"files": {"image": PICTURE}, "data": FEW_STEPS | {"seed": "1"}}),
        (EDITS, {"files": [("image[]", PICTURE)], "data": FEW_STEPS | {"n": "2"}}),
    ],
)
def test_a_request_that_prefers_no_waiting_becomes_a_job(
    server: RunningServer, client: Client, path: str, fields: dict[str, Any]
) -> None:
    accepted = server.client.post(path, headers=PREFER, **fields)
    assert (accepted.status_code, accepted.headers["preference-applied"]) == (202, "respond-async"), accepted.text
    job = accepted.json()
    assert (accepted.headers["location"], job["object"]) == (f"{JOBS}/{job['id']}", "job")
    over = until_over(client, job["id"])
    assert over.status == "succeeded", over.error
    result = server.client.get(f"{accepted.headers['location']}/result")
    answer = server.client.post(path, **fields)
    assert (result.status_code, result.json().keys()) == (200, answer.json().keys())
    if fields.get("data", {"seed": 1}).get("seed"):
        assert images_of(result) == images_of(answer)


def images_of(answer: httpx.Response) -> list[str]:
    """Return the images of an answer of OpenAI's images API or of A1111's API."""
    body = answer.json()
    return list(body["images"]) if "images" in body else [entry["b64_json"] for entry in body.get("data", ())]


def test_an_idempotency_key_gives_the_same_job(server: RunningServer, client: Client) -> None:
    headers = {"Prefer": "respond-async", "Idempotency-Key": "mine"}
    first, again = (server.client.post(GENERATIONS, headers=headers, json=BODY) for _ in range(2))
    assert (first.status_code, again.status_code, again.json()["id"]) == (202, 202, first.json()["id"])
    assert ("idempotent-replayed" in first.headers, again.headers["idempotent-replayed"]) == (False, "true")
    other = server.client.post(GENERATIONS, headers=headers, json=BODY | {"seed": 2})
    assert (other.status_code, error_of(other)["code"]) == (422, "idempotency_key_reused")
    bad = server.client.post(GENERATIONS, headers=headers | {"Idempotency-Key": "x" * 256}, json=BODY)
    assert (bad.status_code, error_of(bad)["param"]) == (400, "Idempotency-Key")
    assert until_over(client, first.json()["id"]).status == "succeeded"


def test_an_idempotency_key_is_used_either_for_a_job_or_for_an_answer(server: RunningServer, client: Client) -> None:
    """A request that was repeated with another preference does not compute its image twice."""
    for index, (first, second) in enumerate((({}, PREFER), (PREFER, {}))):
        key = {"Idempotency-Key": f"either-{index}"}
        body = BODY | {"seed": 70 + index}
        began = server.client.post(GENERATIONS, headers=first | key, json=body)
        assert began.status_code in (200, 202)
        if first:
            assert until_over(client, began.json()["id"]).status == "succeeded"
        again = server.client.post(GENERATIONS, headers=second | key, json=body)
        assert (again.status_code, error_of(again)["code"]) == (422, "idempotency_key_reused")
        assert first == {} or began.json()["id"] in error_of(again)["message"]


def test_bad_requests_and_streams_are_answered_at_once(server: RunningServer) -> None:
    bodies: tuple[Any, ...] = ({"prompt": ""}, BODY | {"n": 99}, [], "x")
    for body in bodies:
        direct, preferring = (server.client.post(GENERATIONS, json=body, headers=each) for each in ({}, PREFER))
        assert (preferring.status_code, error_of(preferring)) == (direct.status_code, error_of(direct))
    not_json = server.client.post(GENERATIONS, content=b"{", headers=PREFER | {"Content-Type": "application/json"})
    assert (not_json.status_code, error_of(not_json)["type"]) == (400, "invalid_request_error")
    form = server.client.post(EDITS, files={"picture": PICTURE}, data={"prompt": "a"}, headers=PREFER)
    assert (form.status_code, error_of(form)["param"]) == (400, "picture")
    stream = server.client.post(GENERATIONS, json=BODY | {"stream": True}, headers=PREFER)
    assert (stream.status_code, stream.headers["content-type"].partition(";")[0]) == (200, "text/event-stream")
    assert "preference-applied" not in stream.headers


def test_a_background_response_ignores_the_preference(server: RunningServer) -> None:
    body = {"input": "a red fox", "tools": [{"type": "image_generation"}], "background": True}
    headers = PREFER | {"Idempotency-Key": "background"}
    first, again = (server.client.post("/v1/responses", headers=headers, json=body) for _ in range(2))
    assert (first.status_code, first.json()["object"], first.json()["background"]) == (200, "response", True)
    assert "preference-applied" not in first.headers
    assert (again.status_code, again.json()["id"]) == (200, first.json()["id"])


def read_events(server: RunningServer, name: str, last: str | None = None) -> list[tuple[int, str]]:
    headers = {} if last is None else {"Last-Event-ID": last}
    ids, types = [], []
    with server.client.stream("GET", f"{JOBS}/{name}/events", headers=headers) as stream:
        for line in stream.iter_lines():
            if line.startswith("id: "):
                ids.append(int(line.removeprefix("id: ")))
            elif line.startswith("event: "):
                types.append(line.removeprefix("event: "))
    return list(zip(ids, types, strict=True))


def test_events_continue_after_the_last_event_id(server: RunningServer, client: Client) -> None:
    job = client.begin_job(GENERATIONS, BODY)
    with client.job_events(job.id) as events:
        received = [event for event in events if isinstance(event, JobEvent)]
    assert [event.status for event in received] == ["queued", "running", "succeeded"]
    assert received[-1].job == client.job(job.id)
    every = read_events(server, job.id)
    assert every == [(1, "job.queued"), (2, "job.running"), (3, "job.succeeded")]
    assert [read_events(server, job.id, str(last)) for last in range(4)] == [every[last:] for last in range(4)]
    end = server.client.get(f"{JOBS}/{job.id}/events", headers={"Last-Event-ID": "3"})
    assert (end.status_code, end.content) == (204, b"")  # a browser stops connecting again
    with client.job_events(job.id, 3) as events:
        assert list(events) == []


def test_cancel_stops_the_work_and_retry_runs_it_again(server: RunningServer, client: Client) -> None:
    job = client.begin_job(GENERATIONS, LONG | {"num_inference_steps": 900})
    wait_for(lambda: client.job(job.id).status == "running", SOON_S, "the start")
    assert error_of(server.client.delete(f"{JOBS}/{job.id}"))["code"] == "job_running"
    assert error_of(server.client.get(f"{JOBS}/{job.id}/result"))["code"] == "no_result"
    assert client.cancel_job(job.id).status == client.cancel_job(job.id).status == "cancelled"
    assert server.paint(num_steps=1).status_code == 200
    retried = client.retry_job(job.id)
    assert retried.status in ("queued", "running")
    assert client.cancel_job(job.id).status == "cancelled"
    assert client.delete_job(job.id)


def jobs_of(url: str, text: str | None = None) -> Callable[[], list[StoredJob]]:
    def look() -> list[StoredJob]:
        with Client(url, api_key=text) as client:
            return list(client.jobs(limit=100, order="asc").data)

    return look


def test_jobs_survive_a_kill_and_a_drain_and_end_once(tmp_path: Path) -> None:
    env = {"DIFFSERVE_SERVE_DATA_DIR": str(tmp_path / "data")}
    bodies = [BODY | {"seed": seed, "num_inference_steps": 60, "size": "128x128"} for seed in range(12)]
    with running_server(MODEL, tmp_path / "first", env=env) as server:
        with Client(server.url) as client:
            for number, body in enumerate(bodies):
                client.put_job(f"job-{number}", GENERATIONS, body)
            wait_for(lambda: client.job("job-0").is_over, SOON_S, "a job")
        server.process.kill()
        server.process.wait()
    with running_server(MODEL, tmp_path / "second", env=env) as server:
        with Client(server.url) as client:
            client.begin_job(GENERATIONS, LONG | {"num_inference_steps": 900})
            wait_for(lambda: client.job("job-5").is_over, SOON_S, "a job")
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(SOON_S)
    with running_server(MODEL, tmp_path / "third", env=env) as server, Client(server.url) as client:
        *first, long = jobs_of(server.url)()
        assert (long.status in ("queued", "running"), long.attempts <= 1) == (True, True), "draining is no attempt"
        client.cancel_job(long.id)
        wait_for(lambda: server.paint().status_code == 200, SOON_S, "the engine")
        for number, job in enumerate(first):
            assert until_over(client, job.id).status == "succeeded"
            answer = server.client.post(GENERATIONS, json=bodies[number])
            assert answer.status_code == 200, answer.text
            image = json.loads(client.job_result(job.id))["data"][0]["b64_json"]
            assert image == answer.json()["data"][0]["b64_json"]
            ends = [event for event in read_events(server, job.id) if event[1] == "job.succeeded"]
            assert len(ends) == 1
        wait_for(lambda: not list((tmp_path / "data" / "jobs").glob("*capture*")), SOON_S, "removed captures")
    names = [path.name for path in (tmp_path / "data" / "jobs").iterdir()]
    assert (len(names), [name for name in names if not name[0].isdigit() or "." in name]) == (12, [])


@pytest.mark.parametrize("is_killed", ["server", "engine"])
def test_images_of_a_job_continue_where_they_were(tmp_path: Path, is_killed: str) -> None:
    """After the kill of a process, the new one computes fewer rows than for the same images from the start."""
    num_steps = 120  # all of them are in the trace
    env = {"DIFFSERVE_SERVE_DATA_DIR": str(tmp_path / "data"), "DIFFSERVE_SERVE_CHECKPOINT_EVERY_S": "0.1"}
    body = BODY | {"num_inference_steps": num_steps, "n": 2, "sampler": "euler_a"}
    files = tmp_path / "data" / "jobs"
    with ExitStack() as stack:
        server = stack.enter_context(running_server(MODEL, tmp_path / "first", env=env))
        with Client(server.url) as client:
            client.put_job("long", GENERATIONS, body)
        changes = Changes(files / "1-capture-0")
        wait_for(lambda: changes.count() > 3, SOON_S, "captured states")
        if is_killed == "engine":
            server.engine.kill()
        else:
            server.process.kill()
            server.process.wait()
            server = stack.enter_context(running_server(MODEL, tmp_path / "second", env=env))
        with Client(server.url) as client:
            job = until_over(client, "long")
            assert (job.status, job.attempts) == ("succeeded", 2)
            entries = json.loads(client.job_result("long"))["data"]
        continued = rows_of_last_request(server)
        expected = server.client.post(GENERATIONS, json=body).json()["data"]
        undisturbed = rows_of_last_request(server)
        assert 0 < continued < undisturbed
        assert [entry["b64_json"] for entry in entries] == [entry["b64_json"] for entry in expected]
        assert [path.name for path in files.iterdir() if "capture" in path.name] == []


def rows_of_last_request(server: RunningServer) -> int:
    """Return the number of UNet rows of the request that the engine computed last."""
    calls: list[list[str]] = server.client.get("/debug/trace").json()["unet_calls"]
    return sum(call.count(calls[-1][0]) for call in calls)


class Changes:
    """Counts how often a file was seen with another content."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: set[int] = set()

    def count(self) -> int:
        with suppress(FileNotFoundError):
            self._seen.add(self._path.stat().st_mtime_ns)
        return len(self._seen)


def test_keys_see_their_own_jobs_only_and_a_revoked_key_runs_none(tmp_path: Path) -> None:
    keys = Keys(Database(tmp_path / "server" / "data"))
    (first, _), (second, _) = keys.add("first"), keys.add("second")
    with running_server(MODEL, tmp_path / "server") as server:
        with Client(server.url, api_key=first) as client, Client(server.url, api_key=second) as other:
            client.put_job("mine", GENERATIONS, BODY)
            other.put_job("mine", GENERATIONS, BODY | {"seed": 2})
            results = [json.loads(each.job_result(until_over(each, "mine").id)) for each in (client, other)]
            images = [result["data"][0]["b64_json"] for result in results]
            assert images[0] != images[1]
            assert [len(each.jobs().data) for each in (client, other)] == [1, 1]
            very_long = LONG | {"num_inference_steps": 1000, "n": 4}
            long_jobs = [client.begin_job(GENERATIONS, very_long | {"seed": seed}) for seed in range(JOBS_AT_ONCE + 1)]
            first_long_job = long_jobs[0]
            wait_for(lambda: len(client.jobs(status="running").data) == JOBS_AT_ONCE, SOON_S, "all places of jobs")
            other.put_job("short", GENERATIONS, BODY)
            assert until_over(other, "short").status == "succeeded"
            assert len(client.jobs(status="running").data) == JOBS_AT_ONCE, "another key does not wait for long jobs"
            file = client.upload(batch_lines([very_long]))
            batch = client.begin_batch(file.id)
            wait_for(lambda: client.job(first_long_job.id).progress, SOON_S, "progress of the job")
        assert httpx.get(f"{server.url}{JOBS}").status_code == 401
        keys.revoke("first")
        database, owner = Database(tmp_path / "server" / "data"), keys.all()[0].id
        batches = Batches(database, Files(database, 1 << 20))
        job = wait_for(lambda: over(Jobs(database).get(owner, first_long_job.id)), SOON_S, "the end of the job")
        assert (job.status, job.error) == ("failed", "invalid_key: its API key is not valid any more.")
        stored = wait_for(lambda: over(batches.get(batch.id)), SOON_S, "the end of the batch")
        assert (stored.status, stored.error) == ("failed", "invalid_key: its API key is not valid any more.")
