"""Tests of ``diffserve jobs`` with a server."""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from diffserve.cli import main
from diffserve.client import Client
from tests.service.server import GENERATIONS, SOON_S, RunningServer, running_server, wait_for

BODY = {"prompt": "a red fox", "num_inference_steps": 2, "size": "64x64", "seed": 1}
LONG = BODY | {"num_inference_steps": 900, "size": "256x256"}
Run = Callable[..., tuple[int, list[str], str]]


@pytest.fixture(scope="module")
def jobs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(Path("embedded"), tmp_path_factory.mktemp("jobs")) as server:
        server.wait_until_ready()
        yield server


@pytest.fixture
def client(jobs_server: RunningServer) -> Iterator[Client]:
    with Client(jobs_server.url) as client:
        yield client


@pytest.fixture
def run(jobs_server: RunningServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run ``diffserve jobs`` and return its exit code, the lines of its output, and its errors."""
    monkeypatch.setenv("DIFFSERVE_SERVER", jobs_server.url)

    def run_main(*words: object) -> tuple[int, list[str], str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main(["jobs", *map(str, words)])
        captured = capsys.readouterr()
        return int(caught.value.code or 0), captured.out.splitlines(), captured.err

    return run_main


def test_an_unreachable_server_and_missing_ids_are_errors_of_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["list"], ["watch", "a"], ["pause", "a"]):
        with pytest.raises(SystemExit) as caught:
            main(["jobs", *words, "--server", "http://127.0.0.1:9"])
        assert caught.value.code == 2
        assert capsys.readouterr().err.startswith("diffserve: no server answers at http://127.0.0.1:9;")
    with pytest.raises(SystemExit) as caught:
        main(["jobs", "cancel"])
    assert caught.value.code == 2
    assert capsys.readouterr().err == "diffserve: no job is given; give IDs of jobs, or --status queued.\n"
    with pytest.raises(SystemExit):
        main(["jobs", "show", ""])
    assert capsys.readouterr().err == "diffserve: the ID for /v1/jobs is empty; give an ID.\n"


def test_watch_waits_while_the_server_refuses_for_now(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diffserve.cli.jobs.RETRY_S", 0.0)
    monkeypatch.setattr("diffserve.cli.jobs.MAX_SILENCE_S", 1.0)
    codes = ["database_unreachable", "rate_limit_exceeded", "queue_full", "engine_unavailable"]
    stored = {"id": "fox", "endpoint": GENERATIONS, "attempts": 1, "created_at": 1, "expires_at": 2}

    def event(status: str, **job: object) -> bytes:
        data = {"type": f"job.{status}", "id": "fox", "status": status, "at": 1.0, **job}
        return b"data: " + json.dumps(data).encode() + b"\n\n"

    def failure(code: str) -> bytes:
        return json.dumps({"error": {"message": f"{code}.", "code": code, "type": "server_error"}}).encode()

    answers = [(200, event("queued") + b"data: " + failure("database_unreachable") + b"\n\n")]
    answers += [(429 if code == "rate_limit_exceeded" else 503, failure(code)) for code in codes]
    answers += [(200, event("succeeded", job=stored | {"status": "succeeded"}))]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers[0] if len(answers) == 1 else answers.pop(0)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(SystemExit) as watched:
            main(["jobs", "watch", "fox", "--json", "--server", url])
        states = [json.loads(line)["status"] for line in capsys.readouterr().out.splitlines()]
        assert (watched.value.code, states) == (0, ["queued", "succeeded"])
        answers[:] = [(200, event("queued")), (503, failure("database_unreachable"))]
        with pytest.raises(SystemExit) as given_up:
            main(["jobs", "watch", "fox", "--server", url])
        assert (given_up.value.code, capsys.readouterr().err) == (2, "diffserve: database_unreachable.\n")
        server.shutdown()


@pytest.mark.slow
def test_a_job_is_watched_shown_and_its_images_are_written(run: Run, client: Client, tmp_path: Path) -> None:
    client.put_job("fox", GENERATIONS, BODY | {"n": 2, "output_format": "jpeg"})
    code, lines, _ = run("watch", "fox")
    assert (code, [line.split()[-1] for line in lines if "%" not in line]) == (0, ["queued", "running", "succeeded"])
    assert [json.loads(line)["status"] for line in run("watch", "fox", "--json")[1]] == [
        "queued", "running", "succeeded",
    ]  # fmt: skip
    code, lines, _ = run("show", "fox")
    shown = dict(line.split(maxsplit=1) for line in lines)
    assert (code, shown["status"], shown["prompt"]) == (0, "succeeded", "a red fox")
    assert json.loads(run("show", "fox", "--json")[1][0])["attempts"] == 1
    code, lines, _ = run("result", "fox", "-o", tmp_path / "out")
    names = ["fox-1.jpg", "fox-2.jpg"]
    assert (code, lines) == (0, [str(tmp_path / "out" / name) for name in names])
    images = [entry["b64_json"] for entry in json.loads(run("result", "fox")[1][0])["data"]]
    assert [(tmp_path / "out" / name).read_bytes() for name in names] == [base64.b64decode(image) for image in images]
    file = tmp_path / "out" / names[0]
    _, _, error = run("result", "fox", "-o", file)
    assert error == f"diffserve: --output is {str(file)!r}, which is a file; give a folder.\n"
    tools = [{"type": "image_generation", "output_format": "webp", "num_inference_steps": 2}]
    client.put_job("apple", "/v1/responses", {"input": "a red apple", "tools": tools})
    assert run("watch", "apple")[0] == 0
    assert run("result", "apple", "-o", tmp_path / "out")[:2] == (0, [str(tmp_path / "out" / "apple.webp")])
    assert (tmp_path / "out" / "apple.webp").read_bytes().startswith(b"RIFF")
    client.put_job("bad", GENERATIONS, BODY | {"loras": [{"name": "none"}]})
    code, lines, _ = run("watch", "bad")
    assert (code, "none" in lines[-1]) == (1, True)
    code, lines, error = run("result", "bad")
    assert (code, lines, "none" in error) == (2, [], True)


@pytest.mark.slow
def test_jobs_are_listed_paused_resumed_cancelled_and_run_again(run: Run, client: Client) -> None:
    names = [f"job-{number}" for number in range(3)]
    for name in names:
        client.put_job(name, GENERATIONS, LONG)
    code, lines, _ = run("pause", *names)
    assert (code, lines) == (0, [f"{name} is paused" for name in names])
    _, lines, _ = run("list", "--status", "paused")
    assert [line.split()[:2] for line in lines] == [["id", "status"], *([name, "paused"] for name in names[::-1])]
    code, lines, error = run("list", "--status", "paused", "--limit", "2", "--json")
    assert ([json.loads(line)["id"] for line in lines], "more jobs" in error) == (names[:0:-1], True)
    assert run("resume", names[0])[0] == 0
    code, _, error = run("resume", names[0])
    assert code == 2
    assert error.startswith("diffserve: job-0 is ")
    assert error.endswith("; only a paused job can be resumed.\n")
    code, lines, error = run("cancel", "job-0", "none")
    assert (code, lines, "none is not cancelled" in error) == (1, ["job-0 is cancelled"], True)
    code, lines, _ = run("cancel", "--status", "paused", "--endpoint", GENERATIONS, "--json")
    assert (code, json.loads(lines[0])["cancelled"]) == (0, names[1:])
    assert run("retry", "job-0")[0] == 0
    assert run("cancel", "job-0")[0] == 0
    code, _, error = run("list", "--status", "done")
    assert (code, "status" in error, "done" in error) == (2, True, True)
    code, _, error = run("show", "none")
    assert (code, error) == (2, 'diffserve: you have no job "none".\n')


@pytest.mark.slow
def test_watch_continues_after_a_restart_of_the_server(tmp_path: Path) -> None:
    env = {"DIFFSERVE_SERVE_DATA_DIR": str(tmp_path / "data")}
    with running_server(Path("embedded"), tmp_path / "first", env=env) as server:
        with Client(server.url) as client:
            client.put_job("long", GENERATIONS, LONG | {"num_inference_steps": 300})
        port = server.port
        command = [sys.executable, "-m", "diffserve", "jobs", "watch", "long", "--json", "--server", server.url]
        events: list[dict[str, Any]] = []
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:

            def read() -> None:
                assert process.stdout is not None
                events.extend(json.loads(line) for line in process.stdout)

            reading = threading.Thread(target=read)
            reading.start()
            wait_for(lambda: any("progress" in event for event in events), SOON_S, "progress")
            server.process.send_signal(signal.SIGKILL)
            server.process.wait()
            same_port = (
                f"import sys; from diffserve.cli import main; main(['serve', *sys.argv[1:], '--port', '{port}'])"
            )
            with running_server(Path("embedded"), tmp_path / "second", env=env, command=["-c", same_port]):
                assert process.wait(2 * SOON_S) == 0
            reading.join()
    states = [event["status"] for event in events if "progress" not in event]
    assert states == ["queued", "running", "queued", "running", "succeeded"]
