"""Server lifecycle: a load that fails, an engine that dies, a full queue, a server that is stopped or killed."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.service.server import ROOT, SOON_S, RunningServer, error_of, files_of, running_server, wait_for

pytestmark = pytest.mark.slow

LONG = {"num_steps": 1000, "sampler": "ddim"}
FULL_PRECISION = '[model]\ndtype = "float32"\n'
SERVE = """
import sys
from diffserve.settings.layers import load_settings
from diffserve.service.run import serve
serve(load_settings(model=sys.argv[2], config=sys.argv[6], env={"DIFFSERVE_SERVE_PORT": "0"}))
"""
TELL_MODULES = SERVE + 'print("loaded:", *sorted({name.partition(".")[0] for name in sys.modules}), flush=True)\n'

Model = Callable[[str], Path]


@pytest.fixture(scope="module")
def lasting(tiny_model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Run a small server that survives losses of its engine, until the last test that uses it."""
    config = FULL_PRECISION + "[engine]\nmax_rows = 2\nmax_lanes = 1\nmax_waiting = 3\n"
    with running_server(tiny_model("sd15"), tmp_path_factory.mktemp("lasting"), config=config) as server:
        yield server


def test_a_lost_engine_is_503_at_once_and_returns_with_the_same_images(lasting: RunningServer) -> None:
    lasting.wait_until_ready()
    before = files_of(lasting.paint(seed=77))
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(lasting.paint, **LONG) for _ in range(2)]  # type: ignore[arg-type]
        wait_for(lambda: lasting.num_requests() == 2, SOON_S, "both to be taken")
        engine = lasting.engine
        engine.kill()
        for future in waiting:
            response = future.result(timeout=SOON_S)
            assert response.status_code == 503
            assert error_of(response)["code"] == "engine_unavailable"
            assert re.fullmatch(r"\d+", response.headers["retry-after"])
    assert lasting.status("/livez") == 200
    assert lasting.status("/readyz") == 503
    assert lasting.paint().status_code == 503
    lasting.wait_until_ready()
    assert lasting.engine.pid != engine.pid
    assert files_of(lasting.paint(seed=77)) == before


def test_a_hanging_engine_is_not_ready_until_it_continues(lasting: RunningServer) -> None:
    lasting.wait_until_ready()
    engine = lasting.engine
    engine.suspend()
    try:
        wait_for(lambda: lasting.status("/readyz") == 503, SOON_S, "readiness to end")
        assert lasting.status("/livez") == 200
    finally:
        engine.resume()
    wait_for(lambda: lasting.status("/readyz") == 200, SOON_S, "readiness")
    assert len(files_of(lasting.paint())) == 1


def test_a_full_queue_refuses_with_429_and_finishes_accepted_requests(lasting: RunningServer) -> None:
    lasting.wait_until_ready()
    with ThreadPoolExecutor(6) as pool:
        responses = list(pool.map(lambda seed: lasting.paint(seed=seed, num_steps=60), range(6)))
    assert {response.status_code for response in responses} == {200, 429}
    for response in responses:
        if response.status_code == 429:
            error = error_of(response)
            assert (error["code"], error["type"]) == ("queue_full", "rate_limit_error")
            assert 1 <= int(response.headers["retry-after"]) <= 60
        else:
            assert len(files_of(response)) == 1
    assert lasting.status("/readyz") == 200


def test_the_engine_does_not_outlive_a_killed_server(lasting: RunningServer) -> None:
    lasting.wait_until_ready()
    engine = lasting.engine
    with socket.create_connection(("127.0.0.1", lasting.port)) as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        lasting.process.kill()
        lasting.process.wait(SOON_S)
    engine.wait(SOON_S)
    assert not engine.is_running()


def test_a_stopped_server_finishes_its_work_exits_with_0_and_never_loaded_torch(
    tiny_model: Model, tmp_path: Path
) -> None:
    config, script = FULL_PRECISION + "[serve]\ndebug = true\nshutdown_timeout_s = 300.0\n", tmp_path / "tell.py"
    config += '[engine]\ncompile = "warm"\n'  # this script does not read the environment
    script.write_text(TELL_MODULES)
    with (
        running_server(tiny_model("sd15"), tmp_path, config=config, command=[str(script)]) as server,
        ThreadPoolExecutor(2) as pool,
    ):
        server.wait_until_ready()
        assert len(files_of(server.paint(size="512x512"))) == 1
        waiting = pool.submit(server.paint, num_steps=120, sampler="ddim")
        watching = pool.submit(server.paint, num_steps=120, sampler="ddim", stream=True)
        wait_for(lambda: server.num_requests() == 2, SOON_S, "both to be taken")
        engine = server.engine
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: server.status("/readyz") == 503, SOON_S, "readiness to end")
        refused = server.paint()
        assert refused.status_code == 503
        assert "shutting down" in error_of(refused)["message"]
        wait_for(lambda: '"error":"draining"' in server.errors.read_text(), SOON_S, "the reason in the log")
        assert server.status("/livez") == 200
        assert len(files_of(waiting.result(timeout=300))) == 1
        assert '"type":"image_generation.completed"' in watching.result(timeout=300).text
        assert server.process.wait(SOON_S) == 0
        assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE
        (loaded_line,) = [line for line in server.output.read_text().splitlines() if line.startswith("loaded:")]
    assert {"fastapi", "schedulers", "PIL"} <= set(loaded_line.split())
    assert not {"torch", "diffusers", "transformers", "pickle5"} & set(loaded_line.split())


def test_requests_unfinished_at_shutdown_get_503(tiny_model: Model, tmp_path: Path) -> None:
    config = FULL_PRECISION + "[serve]\nshutdown_timeout_s = 0.3\n"
    with running_server(tiny_model("sd15"), tmp_path, config=config) as server, ThreadPoolExecutor(2) as pool:
        server.wait_until_ready()
        waiting = pool.submit(server.paint, **LONG)  # type: ignore[arg-type]
        watching = pool.submit(server.paint, **LONG, stream=True)  # type: ignore[arg-type]
        wait_for(lambda: server.num_requests() == 2, SOON_S, "both to be taken")
        server.process.send_signal(signal.SIGTERM)
        assert waiting.result(timeout=SOON_S).status_code == 503
        last = watching.result(timeout=SOON_S).text.rstrip().rpartition("\n")[2]
        assert '"code":"engine_unavailable"' in last
        assert server.process.wait(SOON_S) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_to_all_processes_lets_running_and_queued_images_finish(
    tiny_model: Model, tmp_path: Path, number: signal.Signals
) -> None:
    """Send signals to every process: a closed terminal sends SIGHUP that way, systemd SIGTERM."""
    config = FULL_PRECISION + "[engine]\nmax_rows = 2\nmax_lanes = 1\n[serve]\nshutdown_timeout_s = 300.0\n"
    with running_server(tiny_model("sd15"), tmp_path, config=config) as server, ThreadPoolExecutor(4) as pool:
        server.wait_until_ready()
        start = server.paint().json()["data"][0]["b64_json"]
        edit = {"prompt": "a red fox", "image": start, "num_inference_steps": 2}
        assert len(files_of(server.client.post("/v1/images/edits", json=edit))) == 1, "which starts a decoder process"
        painting = [pool.submit(server.paint, num_steps=60) for _ in range(3)]
        wait_for(lambda: server.num_requests() == 3, SOON_S, "all to be accepted, two of them in the queue")
        process = psutil.Process(server.process.pid)
        for each in (process, *process.children(recursive=True)):
            each.send_signal(number)
        assert [len(files_of(each.result(timeout=300))) for each in painting] == [1, 1, 1]
        assert server.process.wait(SOON_S) == 0
        assert "Traceback" not in server.errors.read_text()


def test_a_server_under_nohup_outlives_its_terminal(tiny_model: Model, tmp_path: Path) -> None:
    script = tmp_path / "nohup.py"
    script.write_text("import signal, sys\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + SERVE)
    with running_server(tiny_model("sd15"), tmp_path, command=[str(script)]) as server:
        server.wait_until_ready()
        server.process.send_signal(signal.SIGHUP)
        assert len(files_of(server.paint())) == 1
        assert server.status("/readyz") == 200


def test_the_engine_does_not_outlive_a_server_killed_while_it_loads(tiny_model: Model, tmp_path: Path) -> None:
    with running_server(tiny_model("sd15"), tmp_path, config=FULL_PRECISION) as server:
        assert server.status("/livez") == 200
        assert server.status("/readyz") == 503
        assert error_of(server.paint())["code"] == "engine_unavailable"
        assert server.client.get("/v1/models").status_code == 503
        engine = wait_for(lambda: server.engine, SOON_S, "the engine's process")
        server.process.kill()
        server.process.wait(SOON_S)
        engine.wait(SOON_S)  # Python may be importing, during which the socket is not read


def test_every_load_failure_is_one_line_and_exit_code_2(tiny_model: Model, tmp_path: Path) -> None:
    pickled = tmp_path / "pickled"
    for folder in ("unet", "vae", "text_encoder", "tokenizer", "scheduler"):
        (pickled / folder).mkdir(parents=True)
        for config in (tiny_model("sd15") / folder).glob("*.json"):
            (pickled / folder / config.name).write_bytes(config.read_bytes())
    (pickled / "model_index.json").write_bytes((tiny_model("sd15") / "model_index.json").read_bytes())
    (pickled / "unet" / "diffusion_pytorch_model.bin").write_bytes(b"\x80\x04.")
    missing = tmp_path / "nowhere"
    for model in (missing, pickled):
        done = subprocess.run(
            [sys.executable, "-m", "diffserve", "serve", "--model", str(model), "--port", "0"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=280,
            env={**os.environ, "DIFFSERVE_SERVE_PAGE": "false", "DIFFSERVE_SERVE_DATA_DIR": str(tmp_path / "data")},
        )
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1, done.stderr
        assert done.stderr.startswith("diffserve: ")
        assert model.name in done.stderr


def test_a_port_in_use_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "diffserve", "serve", "--port", str(port)],
            cwd=ROOT,
            env={**os.environ, "DIFFSERVE_SERVE_DATA_DIR": str(tmp_path / "data")},
            capture_output=True,
            text=True,
            timeout=280,
        )
    assert done.returncode == 2
    assert (
        done.stderr
        == f"diffserve: cannot listen on 127.0.0.1:{port}: Address already in use; try another --host or --port.\n"
    )


def test_a_second_signal_stops_at_once(tiny_model: Model, tmp_path: Path) -> None:
    with running_server(tiny_model("sd15"), tmp_path, config=FULL_PRECISION) as server:
        server.wait_until_ready()
        thread = threading.Thread(target=lambda: server.paint(**LONG))  # type: ignore[arg-type]
        thread.start()
        wait_for(lambda: server.num_requests() == 1, SOON_S, "it to be taken")
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(SOON_S) == 0
        thread.join(SOON_S)
