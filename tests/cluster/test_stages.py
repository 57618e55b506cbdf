"""Separate stages in a cluster: answers equal a local server's, lost stages lose no request, transfers are counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.running import Cluster, answers, bare, running_cluster
from tests.service.server import GENERATIONS, SOON_S, RunningServer, assert_interruptible, wait_for
from tests.service.test_bad_input import PIXEL

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

APART = "[stages]\ntogether = false\n[encode]\ncpus = 0.5\n[decode]\ncpus = 0.5\n"
LONG: dict[str, Any] = {"prompt": "a fox that runs", "num_inference_steps": 400, "seed": 5}


@pytest.fixture(scope="module")
def apart(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    pytest.importorskip("ray", reason="the extra cluster is not installed")
    with running_cluster(tiny_model("sd15"), tmp_path_factory.mktemp("apart"), APART) as cluster:
        assert sorted(replica["name"] for replica in cluster.state) == ["decode-0", "denoise-0", "encode-0"]
        yield cluster


def number(server: RunningServer, name: str) -> float:
    """Return the value of a metric with its labels."""
    lines = server.client.get("/metrics").text.splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"diffserve_{name} "))


def test_a_cluster_of_stages_answers_as_a_local_server_does(apart: Cluster, local: RunningServer) -> None:
    actual, expected = answers(apart.server), answers(local)
    assert [answer[0] for answer in expected][:5] == [200, 200, 200, 400, 404]
    for answer, expected_answer in zip(actual, expected, strict=True):
        assert answer == expected_answer


@pytest.mark.parametrize("stage", ["decode-0", "denoise-0"])
def test_a_killed_stage_is_awaited_and_finished_work_is_retained(
    apart: Cluster, local: RunningServer, stage: str
) -> None:
    asking = ThreadPoolExecutor(1).submit(apart.server.client.post, GENERATIONS, json=LONG, timeout=10 * SOON_S)
    wait_for(
        lambda: [replica for replica in apart.state if replica["name"] == "denoise-0" and replica["num_requests"]],
        SOON_S,
        "steps",
    )
    apart.process_of(stage).kill()
    answer = asking.result()
    assert answer.status_code == 200
    assert bare(answer.json()) == bare(local.client.post(GENERATIONS, json=LONG, timeout=10 * SOON_S).json())
    assert apart.log_events("replica lost")[-1]["replica"] == stage
    wait_for(lambda: set(apart.states) == {"ready"}, 3 * SOON_S, "all stages")
    assert number(apart.server, 'engine_requests_total{kind="image",outcome="finished"}') > 0.0


def test_images_finished_together_are_decoded_in_turn(apart: Cluster) -> None:
    body = {"prompt": "a fox", "num_inference_steps": 1, "seed": 1, "n": 8}  # the queue limit is three
    assert len(apart.server.client.post(GENERATIONS, json=body, timeout=3 * SOON_S).json()["data"]) == 8


def test_the_decoding_stage_upscales_by_networks(apart: Cluster, local: RunningServer) -> None:
    body = {"image": PIXEL, "upscaler": "embedded-4x"}
    answers = [server.client.post("/v1/images/upscale", json=body) for server in (apart.server, local)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert bare(answers[0].json()["data"]) == bare(answers[1].json()["data"])


def test_transfers_between_stages_are_counted_in_bytes_and_seconds(apart: Cluster) -> None:
    stages = ("encode", "denoise", "decode")
    before = {stage: number(apart.server, f'stage_bytes_total{{stage="{stage}"}}') for stage in stages}
    counted = {stage: number(apart.server, f'stage_seconds_count{{stage="{stage}"}}') for stage in stages}
    body = {"prompt": "another fox", "num_inference_steps": 2, "seed": 1, "n": 2, "size": "64x64"}
    assert apart.server.client.post(GENERATIONS, json=body).status_code == 200
    after = {stage: number(apart.server, f'stage_bytes_total{{stage="{stage}"}}') for stage in stages}
    assert after["decode"] - before["decode"] == 2 * 64 * 64 * 3
    assert after["denoise"] - before["denoise"] == 2 * (4 * 8 * 8) * 4  # float32
    assert after["encode"] - before["encode"] > 0
    again = {stage: number(apart.server, f'stage_seconds_count{{stage="{stage}"}}') for stage in stages}
    assert {stage: again[stage] - counted[stage] for stage in stages} == {"encode": 1, "denoise": 1, "decode": 2}


def test_a_disconnect_leaves_nothing_in_any_stage(apart: Cluster) -> None:
    with apart.server.client.stream("POST", GENERATIONS, json=LONG | {"stream": True, "partial_images": 1}) as stream:
        next(stream.iter_bytes())
    apart.server.wait_until_idle()


def test_interrupted_task_answers_with_the_unfinished_image(apart: Cluster) -> None:
    assert_interruptible(apart.server)
