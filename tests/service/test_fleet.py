"""Two engines on two cores behind one server: both generate, one is killed during a step and returns."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.service.server import GENERATIONS, SOON_S, START_S, RunningServer, files_of, running_server, wait_for

pytestmark = pytest.mark.slow

NUM_STEPS = 300
STEPS: dict[str, Any] = {"num_steps": NUM_STEPS, "sampler": "ddim"}
NUMBER = re.compile(r'^diffserve_(engine_\w+)\{device="cpu",member="(\d)"\} (\S+)$', re.MULTILINE)
SERVE = ["-m", "diffserve", "serve", "--devices", "cpu,cpu"]


@pytest.fixture(scope="module")
def pair(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Run a server with two engines that are both ready."""
    with running_server(tiny_model("sd15"), tmp_path_factory.mktemp("pair"), command=SERVE) as server:
        wait_for(lambda: metric_by_replica(server, "engine_up") == {"0": 1.0, "1": 1.0}, START_S, "both engines")
        yield server


def metric_by_replica(server: RunningServer, name: str) -> dict[str, float]:
    """Return a gauge by replica."""
    samples = NUMBER.findall(server.client.get("/metrics").text)
    return {member: float(value) for gauge, member, value in samples if gauge == name}


def events(server: RunningServer, event: str) -> list[dict[str, Any]]:
    """Return the records of ``event`` in the log."""
    lines = [json.loads(line) for line in server.errors.read_text().splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == event]


def with_most(server: RunningServer) -> str:
    """Return the replica with more work than the other; "" if neither has any."""
    queues = metric_by_replica(server, "engine_queue_cost")
    return "" if len(set(queues.values())) < 2 else max(queues, key=lambda member: queues[member])


def test_a_killed_engine_affects_neither_the_other_engine_nor_requests_without_streaming(
    pair: RunningServer,
) -> None:
    assert "2 engines: cpu, " in pair.output.read_text()
    parallel = {
        "prompt": "a boat",
        "seed": 5,
        **STEPS,
        "num_steps": NUM_STEPS + 100,
    }  # longer than the rest of the stream
    moved = {"prompt": "an owl", "seed": 6, **STEPS}
    pids = {line["member"]: line["engine_pid"] for line in events(pair, "engine ready")}
    with ThreadPoolExecutor(3) as pool:
        body = {"prompt": "a fox", "num_inference_steps": NUM_STEPS, "stream": True}
        streaming = pool.submit(pair.client.post, GENERATIONS, json=body)
        replica = wait_for(lambda: with_most(pair), SOON_S, "the stream in an engine")
        neighbour = {"0": "1", "1": "0"}[replica]
        answers = [pool.submit(pair.paint, **parallel)]
        wait_for(lambda: with_most(pair) == neighbour, SOON_S, "a picture beside it")
        answers.append(pool.submit(pair.paint, **moved))
        wait_for(lambda: with_most(pair) == replica, SOON_S, "one more where less is to do")
        assert min(metric_by_replica(pair, "engine_queue_cost").values()) > 0.0
        psutil.Process(pids[replica]).kill()
        assert '"code":"engine_unavailable"' in streaming.result(timeout=SOON_S).text
        painted = [files_of(answer.result(timeout=START_S)) for answer in answers]
    [restart] = events(pair, "request restarts on another replica")
    assert restart["member"] == neighbour
    wait_for(lambda: metric_by_replica(pair, "engine_up") == {"0": 1.0, "1": 1.0}, START_S, "the member that was lost")
    again = {line["member"]: line["engine_pid"] for line in events(pair, "engine ready")}
    assert again[neighbour] == pids[neighbour]
    assert again[replica] != pids[replica]
    pair.wait_until_idle()
    assert metric_by_replica(pair, "engine_queue_cost") == {"0": 0.0, "1": 0.0}
    with ThreadPoolExecutor(2) as pool:
        assert painted == list(pool.map(lambda fields: files_of(pair.paint(**fields)), (parallel, moved)))


def test_a_disconnect_frees_the_slot_and_the_statistics_are_sums(pair: RunningServer) -> None:
    wait_for(lambda: metric_by_replica(pair, "engine_up") == {"0": 1.0, "1": 1.0}, START_S, "both engines")
    body = {"prompt": "a rose", "num_inference_steps": 1000, "stream": True}
    with (
        pair.client.stream("POST", GENERATIONS, json=body) as first,
        pair.client.stream("POST", GENERATIONS, json=body) as two,
    ):
        lines = [iter(stream.iter_lines()) for stream in (first, two)]
        assert all(next(line) for line in lines)
        pair.wait_for_requests(2)
        assert min(metric_by_replica(pair, "engine_queue_cost").values()) > 0.0
        both = re.compile(r"^diffserve_live_requests 2\.0$", re.MULTILINE)
        wait_for(lambda: both.search(pair.client.get("/metrics").text), SOON_S, "both, in numbers of a moment ago")
    pair.wait_until_idle()
    calls = pair.client.get("/debug/trace").json()["unet_calls"]
    assert len({request_id for call in calls for request_id in call}) >= 2
