"""The benchmark of memory by number of clients: points of a server that others use, too."""

from __future__ import annotations

import os

import pytest

from benchmarks.bench_concurrency import measure
from tests.service.server import RunningServer


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the high-water mark cannot be reset here")
def test_each_number_of_clients_is_a_point(server: RunningServer) -> None:
    points = measure(server.url, server.process.pid, (1, 3), 2, {"num_inference_steps": 2})
    assert [point["clients"] for point in points] == [1, 3]
    for point in points:
        assert 50e6 < point["highest_bytes"]["server"] < point["highest_bytes"]["engine"] < 2e9
        assert point["images_per_s"] > 0
        assert 0 < point["picture_s"]["median"] <= point["picture_s"]["max"]
