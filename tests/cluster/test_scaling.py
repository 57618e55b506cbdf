"""``cluster.toml`` and the number of replicas that the scaler requests."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from diffserve.api.errors import ConfigError
from diffserve.cluster.config import ClusterConfig, ReplicaConfig, ScalingConfig, read_arguments, read_cluster
from diffserve.cluster.pool import Scaler
from diffserve.cluster.ray_calls import FIXED, SERVED, check_environment
from diffserve.cluster.state import ClusterState, StateFile

UP_TO_THREE = ClusterConfig(
    replicas=ReplicaConfig(min=0, max=3), scaling=ScalingConfig(rows_per_replica=10.0, idle_s=5.0)
)


def test_a_file_overrides_some_defaults(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("[replicas]\nmin = 0\nmax = 3\n[scaling]\nrows_per_replica = 10\nidle_s = 5\n")
    assert read_cluster(path) == UP_TO_THREE
    assert read_cluster(None) == ClusterConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[replicas]\nmaxx = 3", "unknown key replicas.maxx; did you mean max?"),
        ("[replica]\nmax = 3", "unknown table [replica]; did you mean replicas?"),
        ("[replicas]\nmax = 0", "replicas.max is 0"),
        ("[replicas]\nmin = 3\nmax = 2", "replicas.min is 3"),
        ("[replicas]\ncpus = -1.0", "replicas.cpus is -1.0"),
        ("[replicas]\nmax = 'two'", "replicas.max"),
        ("[scaling]\nrows_per_replica = 0", "scaling.rows_per_replica is 0"),
        ("[decode]\nmax = 2", "[decode] has no effect while stages.together is true; set stages.together to false."),
        ("[stages]\ntogether = false\n[encode]\nmin = 2", "encode.min is 2; it must be between 0 and max, 1."),
        ("[stages]\ntogether = false\n[decode]\ngpus = -0.5", "decode.gpus is -0.5; it must be 0 or more."),
        ("max = ", "is not valid TOML"),
    ],
)
def test_an_invalid_file_is_reported_with_the_fix(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_cluster(path)
    assert message in refused.value.message


def test_a_ray_serve_application_takes_its_files_from_arguments(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(
        "[replicas]\nmin = 0\nmax = 3\n[scaling]\nrows_per_replica = 10\nidle_s = 5\n"
    )
    (tmp_path / "serve.toml").write_text("[serve]\nshutdown_timeout_s = 7\n")
    files = {"cluster": str(tmp_path / "cluster.toml"), "config": str(tmp_path / "serve.toml"), "revision": "2"}
    settings, cluster = read_arguments(files)
    assert (settings.serve.shutdown_timeout_s, cluster) == (7.0, UP_TO_THREE)
    assert read_arguments({})[1] == ClusterConfig()
    with pytest.raises(ConfigError, match=r"unknown argument clusters; did you mean cluster\?"):
        read_arguments({"clusters": "cluster.toml"})


def test_an_external_ray_needs_a_token_and_the_required_proxies() -> None:
    check_environment(FIXED | SERVED)
    with pytest.raises(ConfigError, match="does not require a token; start it with RAY_AUTH_MODE=token"):
        check_environment(SERVED)
    with pytest.raises(ConfigError, match="was not started with RAY_SERVE_ENABLE_HA_PROXY=0"):
        check_environment(FIXED | SERVED | {"RAY_SERVE_ENABLE_HA_PROXY": "1"})


def test_separate_stages_have_separate_replicas(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("[stages]\ntogether = false\n[replicas]\nmax = 2\ngpus = 1.0\n[encode]\ncpus = 0.5\n")
    cluster = read_cluster(path)
    deployments = [
        (deployment.name, deployment.stage, deployment.resources.cpus, deployment.resources.gpus)
        for deployment in cluster.deployments
    ]
    assert deployments == [
        ("encode-0", "encode", 0.5, 0.0),
        ("denoise-0", "denoise", 1.0, 1.0),
        ("denoise-1", "denoise", 1.0, 1.0),
        ("decode-0", "decode", 1.0, 0.0),
    ]
    assert [deployment.name for deployment in cluster.of_stage("denoise").deployments] == ["replica-0", "replica-1"]
    assert cluster.of_stage("encode").replicas == cluster.encode


def test_more_work_adds_replicas_at_once_up_to_the_maximum() -> None:
    scaler = Scaler(UP_TO_THREE)
    counts = [scaler.target(cost, 0, start_s=1.0, now_s=0.0) for cost in (0.0, 0.5, 10.0, 10.5, 1000.0)]
    assert counts == [0, 1, 1, 2, 3]


def test_replicas_are_removed_one_by_one_after_a_quiet_period() -> None:
    scaler = Scaler(UP_TO_THREE)
    assert scaler.target(30.0, 3, start_s=1.0, now_s=0.0) == 3
    assert [scaler.target(0.0, 3, start_s=1.0, now_s=now_s) for now_s in (1.0, 5.9, 6.0)] == [3, 3, 2]
    assert [scaler.target(0.0, 2, start_s=1.0, now_s=now_s) for now_s in (10.9, 11.0)] == [2, 1]
    assert scaler.target(11.0, 1, start_s=1.0, now_s=12.0) == 2
    assert scaler.target(0.0, 2, start_s=1.0, now_s=13.0) == 2


def test_a_slowly_started_replica_is_retained_as_long() -> None:
    scaler = Scaler(UP_TO_THREE)
    assert [scaler.target(0.0, 1, start_s=40.0, now_s=now_s) for now_s in (0.0, 39.0, 40.0)] == [1, 1, 0]
    scaler = Scaler(UP_TO_THREE)
    assert [scaler.target(0.0, 1, start_s=600.0, now_s=now_s) for now_s in (0.0, 49.0, 50.0)] == [1, 1, 0]


def wanted_while(observations: list[tuple[float, float]], start_s: float) -> list[int]:
    """Return the requested number of replicas at each (time, queued work), with one replica running."""
    scaler = Scaler(UP_TO_THREE)
    return [scaler.target(cost, 1, start_s=start_s, now_s=now_s) for now_s, cost in observations]


def test_a_growing_queue_is_extrapolated_by_the_start_time() -> None:
    ramp = [(float(second), float(second)) for second in range(9)]
    assert wanted_while(ramp, 4.0) == [1, 1, 1, 1, 1, 1, 1, 2, 2], "7 are queued, and 4 more will be"
    assert wanted_while(ramp, 0.0) == [1] * 9
    assert wanted_while([(now_s, 6.0) for now_s, _ in ramp], 4.0) == [1] * 9


def test_a_burst_of_requests_is_not_a_trend() -> None:
    burst = [(0.5 * tick, 0.0 if tick < 20 else 9.0 - 0.1 * (tick - 20)) for tick in range(60)]
    assert max(wanted_while(burst, 4.0)) == 1


def test_a_starting_replica_is_never_removed() -> None:
    scaler = Scaler(UP_TO_THREE)
    starting = [scaler.target(0.0, 1, start_s=1.0, now_s=now_s, is_starting=True) for now_s in (0.0, 60.0, 600.0)]
    assert starting == [1, 1, 1]
    assert [scaler.target(0.0, 1, start_s=1.0, now_s=now_s) for now_s in (601.0, 605.9, 606.0)] == [1, 1, 0]


def test_the_state_of_a_killed_front_is_not_used(tmp_path: Path) -> None:
    stranger = subprocess.Popen(["sleep", "60"])
    (tmp_path / "cluster.json").write_text(f'{{"pid": {stranger.pid}, "replicas": []}}')
    state, reader = StateFile(tmp_path), StateFile(tmp_path)
    try:
        with state.locked():
            assert reader.is_locked()
            assert reader.read() is None
            assert not reader.end(1.0)
            state.write(ClusterState(pid=os.getpid()))
            assert reader.read() == ClusterState(pid=os.getpid())
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


KILLED = """
import os, signal, sys
from pathlib import Path
from diffserve.cluster.state import StateFile
state = StateFile(Path(sys.argv[1]))
with state.locked(), state.ray_folder() as folder:
    (folder / "session").mkdir()
    print(folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("who", ["the next front", "cluster down"])
def test_only_leftovers_of_a_killed_fronts_ray_are_removed(tmp_path: Path, who: str) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, timeout=100)
    left, other = Path(killed.stdout.strip()), tmp_path / "diffserve-ray-other"
    other.mkdir()
    assert (left / "session").is_dir()
    state = StateFile(tmp_path)
    if who == "cluster down":
        assert not state.end(1.0)
    else:
        with state.locked():
            pass
    assert not left.exists()
    (tmp_path / "cluster-ray").write_text(str(other))
    with state.locked(), state.ray_folder() as folder:
        assert folder.is_dir()
    assert not folder.exists()
    assert other.is_dir(), "it is not where we make them"
    assert not (tmp_path / "cluster-ray").exists()


def test_a_deployed_front_is_neither_redeployed_nor_ended_locally(tmp_path: Path) -> None:
    state, reader = StateFile(tmp_path), StateFile(tmp_path)
    with state.locked():
        state.write(ClusterState(pid=os.getpid(), is_deployed=True))
        with pytest.raises(ConfigError, match="give its args another revision"):
            reader.redeploy()
        with pytest.raises(ConfigError, match="serve shutdown ends it"):
            reader.end(1.0)


def test_a_waiting_front_gets_the_folder_when_the_other_ends(tmp_path: Path) -> None:
    state, patient = StateFile(tmp_path), StateFile(tmp_path)

    def take() -> bool:
        with patient.locked(60.0):
            return patient.is_locked()

    with ThreadPoolExecutor(1) as pool:
        with state.locked():
            taken = pool.submit(take)
            with pytest.raises(ConfigError, match="a cluster is running in"), StateFile(tmp_path).locked():
                pass
            assert not taken.done()
        assert taken.result()
