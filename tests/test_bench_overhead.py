"""The benchmark of what the server itself takes: its no-op engine behind a real server, and every part in small."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.bench_overhead import NOOP, measure_memory, measure_readers, measure_requests, serving, wait_for_page
from tests.service.server import RunningServer

pytestmark = pytest.mark.slow


def test_an_engine_of_nothing_answers_as_engines_do_and_what_that_takes_is_counted() -> None:
    with serving("--model", "embedded", "--no-page", entry=NOOP) as (url, pid):
        measurement = measure_requests(url, pid, 3, 4, "64x64")
        assert 0 < measurement["whole"]["min"] <= measurement["whole"]["median"] <= measurement["whole"]["max"]
        assert measurement["stream"]["median"] > 0
        assert measurement["server_cpu_ms"] > 0
        memory = measure_memory(url, pid)
        assert 30e6 < memory["ready_bytes"] < 200e6, "no torch, and nothing of the page's"


def test_steps_are_counted_with_readers_and_without(page_server: RunningServer) -> None:
    wait_for_page(page_server.url)
    measurement = asyncio.run(measure_readers(page_server.url, page_server.process.pid, 5, 1, 12))
    assert measurement["ratio"]["median"] > 0
    assert measurement["none"]["step_ms"]["median"] > 0
