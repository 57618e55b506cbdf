"""An engine that is there and of no use any more: its device is gone, it hangs, or it says nothing."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service.server import (
    GENERATIONS,
    SOON_S,
    START_S,
    RunningServer,
    error_of,
    files_of,
    running_server,
    wait_for,
)

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

FULL_PRECISION = '[model]\ndtype = "float32"\n'
LONG: dict[str, Any] = {"num_steps": 1000, "sampler": "ddim", "guidance_scale": 1.0}
CHAT = {"messages": [{"role": "user", "content": "hello"}]}
WORK: dict[str, dict[str, Any]] = {
    GENERATIONS: {"prompt": "a fox"},
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "once"},
    "/v1/prompts/rewrite": {"prompt": "a fox"},
}

Model = Callable[[str], Path]


def check_unavailable(response: httpx.Response) -> None:
    """A 503 that a client will retry, and knows when."""
    assert response.status_code == 503, response.text[:300]
    assert error_of(response)["code"] == "engine_unavailable"
    assert re.fullmatch(r"\d+", response.headers["retry-after"])
    assert 1 <= int(response.headers["retry-after"]) <= 60
    assert response.headers.get("x-should-retry") != "false"


def reasons(server: RunningServer) -> list[str]:
    """Why engines were lost, as the log tells."""
    lines = [json.loads(line) for line in server.errors.read_text().splitlines() if line.startswith("{")]
    return [line["reason"] for line in lines if line["event"] == "engine lost"]


def losses(server: RunningServer) -> dict[str, float]:
    """What /metrics counts, by kind."""
    found = re.findall(r'diffserve_engine_losses_total\{kind="(\w+)"\} (\S+)', server.client.get("/metrics").text)
    return {kind: float(count) for kind, count in found}


def test_a_device_error_that_sticks_ends_the_engine_with_503_for_all_inside_and_the_next_one_paints(
    tiny_model: Model, tmp_path: Path
) -> None:
    env = {"DIFFSERVE_FAULTS": "unet.sticky@60"}
    with (
        running_server(tiny_model("sd15"), tmp_path, config=FULL_PRECISION, env=env) as server,
        ThreadPoolExecutor(3) as pool,
    ):
        server.wait_until_ready()
        lost = server.engine
        waiting = [pool.submit(server.paint, **LONG) for _ in range(2)]
        watching = pool.submit(server.paint, **LONG, stream=True, partial_images=1)
        for future in waiting:
            check_unavailable(future.result(timeout=SOON_S))
        told = watching.result(timeout=SOON_S)
        assert told.status_code == 503 or '"code":"engine_unavailable"' in told.text.rstrip().rpartition("\n")[2]
        server.wait_until_ready()
        assert server.engine.pid != lost.pid
        assert len(files_of(server.paint())) == 1
        assert "device-side assert" in wait_for(lambda: reasons(server), SOON_S, "the reason in the log")[0]
        assert losses(server) == {"device": 1.0}


def test_one_failed_picture_costs_one_picture_and_a_device_that_fails_in_unknown_words_the_engine(
    tiny_model: Model, tmp_path: Path
) -> None:
    env = {"DIFFSERVE_FAULTS": "unet.error@1,unet.broken@30"}
    with running_server(tiny_model("sd15"), tmp_path, config=FULL_PRECISION, env=env) as server:
        server.wait_until_ready()
        first = server.engine
        failed = server.paint(num_steps=2, guidance_scale=1.0)
        assert (failed.status_code, error_of(failed)["code"]) == (500, "internal_error")
        assert len(files_of(server.paint(num_steps=2))) == 1
        assert server.engine.pid == first.pid
        check_unavailable(server.paint(**LONG))
        server.wait_until_ready()
        assert server.engine.pid != first.pid
        assert losses(server) == {"device": 1.0}


def test_an_engine_that_hangs_inside_a_call_is_replaced_although_it_answers_pings(
    tiny_model: Model, tmp_path: Path
) -> None:
    env = {"DIFFSERVE_FAULTS": "unet.hang@20", "DIFFSERVE_SERVE_HANG_AFTER_S": "2"}
    with running_server(tiny_model("sd15"), tmp_path, config=FULL_PRECISION, env=env) as server:
        server.wait_until_ready()
        lost = server.engine
        check_unavailable(server.paint(**LONG))
        server.wait_until_ready()
        assert server.engine.pid != lost.pid
        assert len(files_of(server.paint())) == 1
        assert "has taken" in wait_for(lambda: reasons(server), SOON_S, "the reason in the log")[0]
        assert losses(server) == {"hang": 1.0}


def test_while_the_engine_is_silent_work_is_refused_at_once_on_every_route_and_then_it_is_replaced(
    tiny_model: Model, tmp_path: Path
) -> None:
    env = {"DIFFSERVE_SERVE_HANG_AFTER_S": "25"}
    with (
        running_server(tiny_model("sd15"), tmp_path, config=FULL_PRECISION, env=env) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        server.wait_until_ready()
        lost = server.engine
        waiting = pool.submit(server.paint, **LONG)
        wait_for(lambda: server.num_requests() == 1, SOON_S, "it to be taken")
        lost.suspend()
        wait_for(lambda: server.status("/readyz") == 503, SOON_S, "readiness to end")
        started_s = time.monotonic()
        for route, body in WORK.items():
            for stream in (False, True):
                check_unavailable(server.client.post(route, json=body | {"stream": stream}))
        assert not waiting.done(), "it took longer to refuse eight requests than to replace the engine"
        assert time.monotonic() - started_s < 20.0
        check_unavailable(waiting.result(timeout=SOON_S))
        wait_for(lambda: server.status("/readyz") == 200, START_S, "readiness")
        assert server.engine.pid != lost.pid
        assert losses(server) == {"silence": 1.0}
