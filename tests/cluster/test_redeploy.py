"""Redeployment of a cluster under load: every request is answered.

This file runs as the last one with the shared cluster, so that the earlier settings need not be restored.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cluster.load import load
from tests.cluster.running import CONFIG, Cluster
from tests.service.server import SOON_S, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

KEEPS_LATENTS = f"{CONFIG}latent_cache_bytes = 1_000_000\n"
SIMILAR = {"prompt": "a fox", "num_inference_steps": 2, "similarity_threshold": 0.9}


def test_settings_change_replica_by_replica_under_load_without_losses(cluster: Cluster) -> None:
    process_ids = {cluster.process_of(replica["name"]).pid for replica in cluster.state}
    with load(cluster, 3, 20) as clients:
        wait_for(lambda: clients.num_done > 3, SOON_S, "pictures")
        assert cluster.server.client.post("/v1/images/generations", json=SIMILAR).status_code == 400
        cluster.write(config=KEEPS_LATENTS)
        command = [sys.executable, "-m", "diffserve", "cluster", "redeploy", "--data-dir", str(cluster.folder)]
        completed = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert (completed.returncode, completed.stdout) == (0, "redeployed\n"), completed.stderr
        before = clients.num_done
        wait_for(lambda: clients.num_done > before + 3, SOON_S, "pictures of replicas with other settings")
        assert cluster.num_ready == 2
    assert not process_ids & {cluster.process_of(replica["name"]).pid for replica in cluster.state}
    assert len(cluster.log_events("replica redeployed")) == 2
    for _ in range(4):  # both replicas generate some of them
        assert cluster.server.client.post("/v1/images/generations", json=SIMILAR).status_code == 200
