"""Tests of ``diffserve batch``: resuming, failed lines, and errors that stop a batch."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from msgspec.structs import replace

from diffserve.api.errors import DiffserveError, InvalidRequest
from diffserve.cli import main
from diffserve.cli.batch.job_painter import JobPainter
from diffserve.cli.batch.lines import NAME, Manifest, Outcome, read_lines
from diffserve.cli.batch.painters import ServerPainter
from diffserve.cli.batch.runner import paint_line
from diffserve.cli.generate import open_engine
from diffserve.client import Client, JobEvent, JobFailure, ServerLost, StoredJob
from diffserve.media.images import read_infotext
from diffserve.settings.config import Settings
from tests.service.server import RunningServer, running_server, wait_for
from tests.service.test_edits import in_base64, picture

SMALL = in_base64(picture(64, 64))


def write_lines(path: Path, *lines: object) -> Path:
    """Write ``lines`` to ``path``; values that are not strings are write_lines as JSON."""
    rows = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    return path


def outcomes(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / NAME).read_text(encoding="utf-8").splitlines()]


def batch(*arguments: object) -> int:
    """Run ``diffserve batch`` and return its exit code."""
    with pytest.raises(SystemExit) as caught:
        main(["batch", *map(str, arguments)])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_lines_are_prompts_or_requests_and_invalid_lines_have_an_error(tmp_path: Path) -> None:
    (tmp_path / "start.png").write_bytes(b"picture")
    file = write_lines(
        tmp_path / "p.jsonl",
        '"a fox"', "", {"prompt": "owl", "id": "../Owls & more", "n": 2, "output_format": "webp", "seed": None},
        "{nope", "[1]", {"seed": 3}, {"prompt": "x", "id": "Owls-more-1", "output_format": "webp"},
        {"prompt": "x", "id": "."}, {"image": "start.png"}, {"prompt": "x", "image": "gone.png"},
    )  # fmt: skip
    lines = read_lines(file)
    assert [line.number for line in lines] == [1, 3, 4, 5, 6, 7, 8, 9, 10]
    fox, owls, *other_lines = lines
    assert (fox.prompt, fox.names(), fox.error) == ("a fox", ["01.png"], None)
    assert owls.names() == ["Owls-more-1.webp", "Owls-more-2.webp"]
    assert "seed" not in owls.fields
    messages = [str(line.error and line.error.message) for line in other_lines]
    expected = [
        "not JSON",
        "neither",
        "no prompt",
        "already used by line 3",
        "the id is '.'",
        "None",
        "cannot read the image",
    ]
    assert [want for want, text in zip(expected, messages, strict=True) if want not in text] == []
    assert other_lines[5].fields["image"] == base64.b64encode(b"picture").decode()
    text = read_lines(write_lines(tmp_path / "p.txt", '"quoted" stays', "{}"))
    assert [line.prompt for line in text] == ['"quoted" stays', "{}"]
    for bad in (write_lines(tmp_path / "empty.jsonl", " "), tmp_path / "none.jsonl"):
        with pytest.raises(InvalidRequest, match=bad.name):
            read_lines(bad)


def test_two_lines_may_not_have_the_same_id_even_if_their_files_differ(tmp_path: Path) -> None:
    lines = read_lines(
        write_lines(tmp_path / "p.jsonl", {"prompt": "owl", "id": "a"}, {"prompt": "x", "id": "a", "n": 2})
    )
    assert lines[0].error is None
    assert lines[1].error is not None
    assert lines[1].error.message == "its id 'a' is already used by line 1; give another id."


def test_next_run_keeps_only_complete_unchanged_results(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "p.txt", *(f"prompt {index}" for index in range(5)))
    lines, folder = read_lines(file), tmp_path / "out"
    with Manifest.open(folder, lines) as first:
        assert not first.painted
        for line in lines[:4]:
            (folder / line.names()[0]).write_bytes(b"picture")
            digest = line.digest if line.number != 3 else "another"
            first.add(
                Outcome(line=line.number, id=line.id, digest=digest, prompt=line.prompt, files=tuple(line.names()))
            )
        with pytest.raises(InvalidRequest, match="another batch uses"), Manifest.open(folder, lines):
            pass
    results = (folder / NAME).read_bytes()
    (folder / NAME).write_bytes(results[:-20])
    (folder / lines[1].names()[0]).unlink()
    with Manifest.open(folder, lines) as second:
        assert list(second.painted) == [1]
    assert [outcome["line"] for outcome in outcomes(folder)] == [1]


@pytest.mark.slow
def test_stopped_batch_resumes_without_repeating_lines(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    short = [{"prompt": "a fox", "steps": 2, "seed": seed} for seed in range(3)]
    odd = {"prompt": "an owl", "sampler": "nope"}
    file = write_lines(tmp_path / "p.jsonl", *short, odd, {"prompt": "b", "steps": 1000, "n": 8})
    command = [sys.executable, "-m", "diffserve", "batch", str(file), "-o", str(folder), "--server", server.url]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: (folder / NAME).exists() and len(outcomes(folder)) == 4, 120, "four lines")
        server.wait_for_requests(1)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert process.stderr is not None
        assert "stopped; 3 lines are done; run the same command again" in process.stderr.read()
    server.wait_until_idle()
    assert sorted(path.name for path in folder.glob("*.*g")) == ["1.png", "2.png", "3.png"]

    times = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.png")}
    write_lines(file, *short, odd, {"prompt": "b", "steps": 2})
    assert batch(file, "-o", folder, "--server", server.url) == 1
    output = capsys.readouterr()
    assert "4 of 5 lines are done in" in output.out
    assert "3 of them in earlier runs; 1 failed; correct the invalid lines, then run the same command" in output.out
    assert "line 4: sampler is 'nope'" in output.err
    assert {name: (folder / name).stat().st_mtime_ns for name in times} == times
    results = outcomes(folder)
    assert [result["line"] for result in results] == [1, 2, 3, 4, 5]
    assert (results[2]["seeds"], results[2]["recipe"]["num_inference_steps"]) == ([2], 2)
    assert results[3]["error"]["code"] == "unknown_sampler"
    assert "Seed: 2" in str(read_infotext((folder / "3.png").read_bytes()))


@pytest.mark.slow
def test_lines_on_a_server_match_the_answers_of_requests(server: RunningServer, tmp_path: Path) -> None:
    fox = {"prompt": "a fox", "num_inference_steps": 2, "seed": 1}
    start = {"image": SMALL, "strength": 0.5}
    requests = [fox, fox | {"n": 2, "seed": 5, "output_format": "jpeg"}, fox | start, fox | {"sampler": "nope"}]
    file = write_lines(tmp_path / "p.jsonl", *requests)
    with Client(server.url) as client:
        earlier = client.jobs().data
        assert batch(file, "-o", tmp_path / "jobs", "--server", server.url) == 1
        assert client.jobs().data == earlier, "jobs of recorded lines are deleted"
        painter = ServerPainter(client, None)
        for line, outcome in zip(read_lines(file), outcomes(tmp_path / "jobs"), strict=True):
            expected, pictures = paint_line(line, painter, lambda _: None)
            files = [(tmp_path / "jobs" / name).read_bytes() for name in outcome["files"]]
            assert files == [picture.data for picture in pictures]
            assert comparable(outcome) == comparable(json.loads(msgspec.json.encode(expected)))


def comparable(outcome: dict[str, Any]) -> dict[str, Any]:
    """Return a result without times and IDs, which differ from run to run."""
    differing = ("id", "timings", "history_id")
    recipe = {name: value for name, value in outcome["recipe"].items() if name not in differing}
    return {**outcome, "seconds": 0, "recipe": recipe}


@pytest.mark.slow
def test_the_same_command_finds_its_jobs_after_both_processes_were_killed(tmp_path: Path) -> None:
    """Random seeds show that the images are those of the first run's jobs."""
    env = {"DIFFSERVE_SERVE_DATA_DIR": str(tmp_path / "data")}
    lines = [{"prompt": "a fox", "steps": 60, "size": "128x128"} for _ in range(4)]
    file, folder = write_lines(tmp_path / "p.jsonl", *lines), tmp_path / "out"
    with running_server(Path("embedded"), tmp_path / "first", env=env) as server:
        command = [sys.executable, "-m", "diffserve", "batch", str(file), "-o", str(folder), "--server", server.url]
        with subprocess.Popen(command) as process, Client(server.url) as client:
            wait_for(lambda: len(client.jobs().data) == 4, 120, "all jobs")
            process.kill()
        server.process.kill()
        server.process.wait()
    with running_server(Path("embedded"), tmp_path / "second", env=env) as server, Client(server.url) as client:
        names = {job.id for job in client.jobs().data}
        wait_for(lambda: all(job.status == "succeeded" for job in client.jobs().data), 120, "the jobs")
        bodies = [json.loads(client.job_result(name)) for name in names]
        assert batch(file, "-o", folder, "--server", server.url) == 0
        seeds = [seed for outcome in outcomes(folder) for seed in outcome["seeds"]]
        assert sorted(seeds) == sorted(body["data"][0]["seed"] for body in bodies)
        assert len(set(seeds)) == 4
        images = {base64.b64decode(body["data"][0]["b64_json"]) for body in bodies}
        assert {path.read_bytes() for path in folder.glob("*.png")} == images
        assert not client.jobs().data
        assert batch(file, "-o", tmp_path / "other", "--server", server.url) == 0
        assert not set(seeds) & {outcome["seeds"][0] for outcome in outcomes(tmp_path / "other")}


def test_a_line_waits_while_the_server_refuses_for_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffserve.cli.batch.job_painter.RETRY_S", 0.0)
    monkeypatch.setattr("diffserve.cli.batch.job_painter.LOADING_TIMEOUT_S", 0.2)
    job = StoredJob(id="a", endpoint="", status="running", attempts=1, created_at=0, expires_at=0)
    failed_job = replace(job, status="failed", error=JobFailure(code="sick", message="it is sick."))
    refusals = [DiffserveError("", code=code) for code in ("database_unreachable", "rate_limit_exceeded")]
    attempts: Iterator[JobEvent | DiffserveError] = iter(
        [ServerLost(""), *refusals, JobEvent(id="a", status="failed", at=0.0, job=failed_job)]
    )

    class Refusing:
        def put_job(self, *_: object, **__: object) -> StoredJob:
            return job

        @contextmanager
        def job_events(self, _: str) -> Iterator[Iterator[JobEvent]]:
            attempt = next(attempts)
            if isinstance(attempt, DiffserveError) and attempt.code != ServerLost.default_code:
                raise attempt
            yield self.follow(attempt)

        def follow(self, attempt: JobEvent | DiffserveError) -> Iterator[JobEvent]:
            if isinstance(attempt, DiffserveError):
                time.sleep(0.3)  # longer than LOADING_TIMEOUT_S without an event
                raise attempt
            yield attempt

    [line] = read_lines(write_lines(tmp_path / "p.jsonl", "a fox"))
    with pytest.raises(DiffserveError, match="it is sick"):
        JobPainter(cast(Client, Refusing()), None, tmp_path).paint(line, lambda _: None)


@pytest.mark.slow
def test_a_server_that_stores_nothing_answers_lines_as_requests(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "p.jsonl", {"prompt": "a fox", "steps": 2, "seed": 1}, {"prompt": "x", "steps": 0})
    env = {"DIFFSERVE_SERVE_HOST": "0.0.0.0", "DIFFSERVE_SERVE_ALLOW_OPEN": "true"}
    with running_server(Path("embedded"), tmp_path / "server", env=env) as server:
        server.wait_until_ready()
        url = f"http://127.0.0.1:{server.port}"
        with Client(url) as client, pytest.raises(DiffserveError, match="no API keys"):
            client.jobs()
        assert batch(file, "-o", tmp_path / "out", "--server", url) == 1
    first, second = outcomes(tmp_path / "out")
    assert ((tmp_path / "out" / first["files"][0]).is_file(), second["error"]["param"]) == (True, "steps")


@pytest.mark.slow
def test_unreachable_server_and_full_disk_stop_the_batch_with_a_hint(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_lines(tmp_path / "p.jsonl", {"prompt": "a fox", "steps": 2})
    assert batch(file, "-o", tmp_path / "away", "--server", "http://127.0.0.1:9") == 2
    error = capsys.readouterr().err
    assert "no server answers" in error
    assert "diffserve serve; 0 lines are done; run the same command again to continue." in error
    full = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))"
    code, folder = f"{full}; from diffserve.cli import main; main()", tmp_path / "full"
    command = [sys.executable, "-c", code, "batch", str(file), "-o", str(folder), "--server", server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ)
    assert done.returncode == 2
    assert "cannot write" in done.stderr
    assert "the same command" in done.stderr
    assert [path.name for path in folder.iterdir() if path.suffix == ".png"] == []


@pytest.mark.slow
def test_lines_are_batched_and_match_images_generated_alone(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[Any] = []

    def keep(settings: Settings) -> Any:
        engines.append(open_engine(settings))
        return engines[-1]

    monkeypatch.setattr("diffserve.cli.batch.run.open_engine", keep)
    requests = [{"prompt": f"fox {seed}", "steps": 24 + seed, "seed": seed} for seed in range(4)]
    file = write_lines(tmp_path / "p.jsonl", *requests, {"prompt": "x", "model": "another"})
    model = ("--model", tiny_model("sd15"))
    assert batch(file, "-o", tmp_path / "all", *model) == 1
    assert "another" in outcomes(tmp_path / "all")[4]["error"]["message"]
    assert max(tick.num_rows for tick in engines[0].trace) > 2
    write_lines(file, requests[2])
    assert batch(file, "-o", tmp_path / "alone", *model, "--concurrency", 1) == 0
    assert (tmp_path / "alone" / "1.png").read_bytes() == (tmp_path / "all" / "3.png").read_bytes()
