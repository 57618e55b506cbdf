"""``diffserve cluster`` with two replicas, compared with a local server."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from tests.cluster.ports import check_refusals, listening
from tests.cluster.running import Cluster, answers, check_hang_up, parts
from tests.service.server import GENERATIONS, RunningServer, assert_interruptible

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

LONG: dict[str, Any] = {"prompt": "a fox", "num_inference_steps": 600, "seed": 5}


def test_a_cluster_answers_as_a_local_server_does(cluster: Cluster, local: RunningServer) -> None:
    actual, expected = answers(cluster.server), answers(local)
    assert [answer[0] for answer in expected][:5] == [200, 200, 200, 400, 404]
    for answer, expected_answer in zip(actual, expected, strict=True):
        assert answer == expected_answer


def test_interrupted_task_answers_with_the_unfinished_image(cluster: Cluster) -> None:
    assert_interruptible(cluster.server)


def test_only_loopback_ports_are_open_and_every_ray_port_requires_the_token(
    cluster: Cluster,
) -> None:
    token = cluster.folder / "cluster-token"
    for name in ("cluster-token", "cluster.json", "cluster.lock", "cluster-ray"):
        assert (cluster.folder / name).stat().st_mode & 0o777 == 0o600
    assert cluster.folder.stat().st_mode & 0o777 == 0o700
    front = psutil.Process(cluster.server.process.pid)
    ports = listening([front, *cluster.processes])
    assert [port for port in ports if not port.host.is_loopback] == []
    names = {port.name for port in ports}
    assert {"gcs_server", "raylet"} <= names
    assert sum(name.startswith("ray::ServeRep") for name in names) >= 1
    of_ray = [port for port in ports if (port.process, port.number) != (front, cluster.server.port)]
    assert len(of_ray) == len(ports) - 1
    kinds = check_refusals(of_ray, token.read_text())
    assert kinds["grpc"] >= 9, "a GCS, a raylet and its store, an agent, a controller, a front, replicas with two each"
    assert kinds["http"] >= 1, "an agent"


def test_ray_refuses_nodes_without_the_token(cluster: Cluster) -> None:
    token = cluster.folder / "cluster-token"
    (gcs,) = [port for port in listening(cluster.processes) if port.name == "gcs_server"]
    join = f"import ray; ray.init(address='127.0.0.1:{gcs.number}', log_to_driver=False); print(ray.is_initialized())"

    def joins(**environment: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0", **environment}
        return subprocess.run([sys.executable, "-c", join], capture_output=True, text=True, timeout=120, env=env)

    with_token = joins(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token))
    assert with_token.stdout.endswith("True\n")
    refused = joins(RAY_AUTH_MODE="disabled")
    assert refused.returncode != 0
    assert "True" not in refused.stdout
    assert "uthenticat" in refused.stderr + refused.stdout


def test_requests_over_the_limit_get_an_openai_error(cluster: Cluster) -> None:
    url, body = cluster.server.url + GENERATIONS, {"prompt": "a fox", "num_inference_steps": 60}
    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda _: httpx.post(url, json=body, timeout=200), range(16)))
    refused = [reply for reply in replies if reply.status_code != 200]
    assert refused
    for reply in refused:
        assert reply.status_code == 429
        assert int(reply.headers["retry-after"]) >= 1
        assert set(reply.json()["error"]) >= {"message", "type", "param", "code"}


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_disconnect_cancels_the_request_within_a_few_steps(cluster: Cluster, is_streamed: bool) -> None:
    check_hang_up(cluster.server, is_streamed=is_streamed)


def test_requests_of_a_killed_replica_restart_elsewhere_and_streams_end_with_an_error(cluster: Cluster) -> None:
    url, num_lost = cluster.server.url + GENERATIONS, len(cluster.log_events("replica lost"))
    image = httpx.post(url, json=LONG, timeout=200).json()["data"][0]["b64_json"]
    cluster.wait_until_reported_idle()
    with ThreadPoolExecutor(1) as pool:
        painting = pool.submit(httpx.post, url, json=LONG, timeout=200)
        first = cluster.holder()
        assert not painting.done()
        cluster.process_of(first["name"]).kill()
        again = painting.result()
        assert again.status_code == 200, again.text[:500]
        assert again.json()["data"][0]["b64_json"] == image
        [moved] = cluster.log_events("request restarts on another replica")
        assert moved["reason"] == f"replica {first['name']} was lost"

        cluster.server.wait_until_ready()
        cluster.wait_until_reported_idle()
        streaming = pool.submit(httpx.post, url, json=LONG | {"stream": True}, timeout=200)
        second = cluster.holder()
        assert not streaming.done()
        cluster.process_of(second["name"]).kill()
        events = streaming.result()
    assert events.status_code == 200, "it had begun"
    last = parts(events)[-1]
    assert last["error"]["code"] == "engine_unavailable"
    assert "try again" in last["error"]["message"]
    assert "b64_json" not in events.text
    assert len(cluster.log_events("request restarts on another replica")) == 1
    cluster.settle()
    assert httpx.post(url, json=LONG, timeout=200).json()["data"][0]["b64_json"] == image
    assert len(cluster.log_events("replica lost")) == num_lost + 2, "who is begun anew stays"
