"""A cluster under load with changing replicas and invalid files: every request is answered."""

from __future__ import annotations

import time

import pytest

from diffserve.api.errors import ConfigError
from diffserve.cluster.state import StateFile
from tests.cluster.load import PATIENCE_S, load, picture_in
from tests.cluster.running import TWO, Cluster
from tests.service.server import GENERATIONS, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

AS_ASKED = "[replicas]\nmin = 0\nmax = 2\ncpus = 1.0\n[scaling]\nrows_per_replica = 150\nidle_s = 0.5\n"


def test_invalid_files_are_refused_and_the_cluster_continues_unchanged(cluster: Cluster) -> None:
    for files, message in (
        ({"config": "[engine]\nthreads = 0\n"}, "threads"),
        ({"cluster": TWO.replace("max = 2", "max = 3")}, "replicas.max, cpus and gpus and the stages stay"),
    ):
        cluster.write(**files)
        with pytest.raises(ConfigError, match=message):
            StateFile(cluster.folder).redeploy()
    cluster.write()
    StateFile(cluster.folder).redeploy()
    assert cluster.num_ready == 2


def test_replicas_scale_with_the_work_down_to_zero_without_losses(cluster: Cluster) -> None:
    cluster.write(AS_ASKED)
    StateFile(cluster.folder).redeploy()
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
