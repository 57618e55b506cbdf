"""The cluster benchmark at small size, with the clusters and servers of other tests."""

from __future__ import annotations

import pytest

from benchmarks.bench_cluster import own_cost, throughput
from tests.cluster.running import Cluster
from tests.service.server import RunningServer

pytestmark = [pytest.mark.slow, pytest.mark.chaos]


def test_request_overhead_and_replica_throughput_are_reported(cluster: Cluster, local: RunningServer) -> None:
    cost = own_cost((local, cluster.server), 4, 1)
    assert cost["num_measures"] == 4
    assert cost["local_ms"] > 0.0
    assert cost["cluster_ms"] > 0.0
    for low, high in (cost["more_ms_quartiles"], cost["more_ms_bounds"]):
        assert low <= cost["more_ms"] <= high
    result = throughput((local, cluster.server), 1, 2, 6, 2, clients_each=2)
    assert result["num_clients"] == 2
    assert result["one_per_s"] > 0.0
    assert result["more_per_s"] > 0.0
    assert result["ratio_quartiles"][0] <= result["ratio"] <= result["ratio_quartiles"][1]
