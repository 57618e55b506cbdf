"""Clients that generate images while a cluster changes; each must get every image, always the same."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx

from tests.cluster.running import Cluster
from tests.service.server import GENERATIONS, SOON_S

PATIENCE_S = 4 * SOON_S


class Load:
    """Clients that generate images one after the other."""

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
                if reply.status_code == 429:  # the queue may be full on a slow machine
                    time.sleep(0.2)
                    continue
                pictures.append(picture_in(reply))
                self.num_done += 1
        return pictures

    def end(self) -> list[list[str]]:
        """Stop the clients and return what each got; raise AssertionError if a request was refused or lost."""
        self._is_over.set()
        return [client.result() for client in self._clients]


def picture_in(reply: httpx.Response) -> str:
    """Return the image in an answer, complete or at the end of a stream."""
    assert reply.status_code == 200, reply.text[:500]
    if not reply.headers["content-type"].startswith("text/event-stream"):
        return str(reply.json()["data"][0]["b64_json"])
    last = [line for line in reply.text.splitlines() if line.startswith("data: {")][-1]
    event: dict[str, Any] = json.loads(last.removeprefix("data: "))
    assert "b64_json" in event, last[:500]
    return str(event["b64_json"])


@contextmanager
def load(cluster: Cluster, num_clients: int, num_steps: int) -> Iterator[Load]:
    """Run clients during the block, and check that each got at least one image and always the same."""
    with ThreadPoolExecutor(num_clients) as pool:
        clients = Load(cluster.server.url + GENERATIONS, num_clients, num_steps, pool)
        try:
            yield clients
        finally:
            results = clients.end()
    assert all(len(each) >= 1 and len(set(each)) == 1 for each in results)
