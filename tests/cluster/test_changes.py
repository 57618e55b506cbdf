"""A cluster under load while replicas come and go, and while they take other settings: every request is answered."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from diffserve.cluster.state import StateFile
from diffserve.errors import ConfigError
from tests.cluster.running import CONFIG, TWO, Cluster
from tests.service.server import GENERATIONS, SOON_S, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

FEWER_CALLS = f"{CONFIG}trace_ticks = 7\n"
AS_ASKED = "[replicas]\nmin = 0\nmax = 2\ncpus = 1.0\n[scaling]\nrows_per_replica = 150\nidle_s = 0.5\n"
PATIENCE_S = 4 * SOON_S


class Load:
    """Clients that paint, one picture after the other."""

    def __init__(self, url: str, num_clients: int, num_steps: int, pool: ThreadPoolExecutor) -> None:
        self.num_done = 0
        self._url = url
        self._body = {"num_inference_steps": num_steps, "seed": 3}
        self._is_over = threading.Event()
        self._clients: list[Future[list[str]]] = [pool.submit(self._paint, number) for number in range(num_clients)]

    def _paint(self, number: int) -> list[str]:
        pictures = []
        with httpx.Client(timeout=PATIENCE_S) as client:
            while not self._is_over.is_set():
                body = self._body | {"prompt": f"a fox, {number}", "stream": number % 2 == 1}
                reply = client.post(self._url, json=body)
                if reply.status_code == 429:  # on a slow machine there may be no room: it is said, and nothing lost
                    time.sleep(0.2)
                    continue
                pictures.append(picture_in(reply))
                self.num_done += 1
        return pictures

    def end(self) -> list[list[str]]:
        """What each client got. AssertionError where one was refused, or its picture lost."""
        self._is_over.set()
        return [client.result() for client in self._clients]


def picture_in(reply: httpx.Response) -> str:
    """The picture that is told, whole or at the end of a stream."""
    assert reply.status_code == 200, reply.text[:500]
    if not reply.headers["content-type"].startswith("text/event-stream"):
        return str(reply.json()["data"][0]["b64_json"])
    last = [line for line in reply.text.splitlines() if line.startswith("data: {")][-1]
    event: dict[str, Any] = json.loads(last.removeprefix("data: "))
    assert "b64_json" in event, last[:500]
    return str(event["b64_json"])


@contextmanager
def load(cluster: Cluster, num_clients: int, num_steps: int) -> Iterator[Load]:
    """Clients at work; afterwards each had one picture at least, and the same every time."""
    with ThreadPoolExecutor(num_clients) as pool:
        clients = Load(cluster.server.url + GENERATIONS, num_clients, num_steps, pool)
        try:
            yield clients
        finally:
            told = clients.end()
    assert all(len(each) >= 1 and len(set(each)) == 1 for each in told)


def test_other_settings_are_taken_replica_by_replica_under_load_and_nothing_is_lost(cluster: Cluster) -> None:
    known = {cluster.process_of(one["name"]).pid for one in cluster.state}
    with load(cluster, 3, 20) as clients:
        wait_for(lambda: clients.num_done > 3, SOON_S, "pictures")
        cluster.write(config=FEWER_CALLS)
        command = [sys.executable, "-m", "diffserve", "cluster", "redeploy", "--data-dir", str(cluster.folder)]
        told = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert (told.returncode, told.stdout) == (0, "redeployed\n"), told.stderr
        before = clients.num_done
        wait_for(lambda: clients.num_done > before + 3, SOON_S, "pictures of replicas with other settings")
        assert cluster.num_ready == 2
    assert not known & {cluster.process_of(one["name"]).pid for one in cluster.state}
    assert len(cluster.told("replica has other settings")) == 2
    assert 7 <= len(cluster.server.client.get("/debug/trace").json()["unet_calls"]) <= 14


def test_files_that_are_wrong_are_refused_and_all_goes_on_as_it_was(cluster: Cluster) -> None:
    for files, said in (
        ({"config": "[engine]\nthreads = 0\n"}, "threads"),
        ({"cluster": TWO.replace("max = 2", "max = 3")}, "replicas.max, cpus and gpus and the stages stay"),
    ):
        cluster.write(**files)
        with pytest.raises(ConfigError, match=said):
            StateFile(cluster.folder).renew()
    cluster.write()
    StateFile(cluster.folder).renew()
    assert cluster.num_ready == 2


def test_replicas_come_with_the_work_and_go_with_it_down_to_none_and_nothing_is_lost(cluster: Cluster) -> None:
    cluster.write(AS_ASKED)
    StateFile(cluster.folder).renew()
    with load(cluster, 1, 5):
        wait_for(lambda: cluster.states == ["off", "ready"], PATIENCE_S, "one replica")
        with load(cluster, 3, 60):
            wait_for(lambda: cluster.num_ready == 2, PATIENCE_S, "two replicas")
        wait_for(lambda: cluster.states == ["off", "ready"], PATIENCE_S, "one replica")
    wait_for(lambda: cluster.states == ["off", "off"], PATIENCE_S, "none")
    body = {"prompt": "a fox", "num_inference_steps": 2}
    refused = cluster.server.client.post(GENERATIONS, json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
    assert int(refused.headers["retry-after"]) >= 1
    until_s = time.monotonic() + PATIENCE_S
    while (again := cluster.server.client.post(GENERATIONS, json=body)).status_code == 503:
        assert time.monotonic() < until_s
        time.sleep(0.2)
    assert picture_in(again)
