"""A server whose guided pictures are painted by two devices: losing the second one is losing the engine."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.service.server import SOON_S, RunningServer, files_of, running_server, wait_for
from tests.service.test_lost_engine import check_unavailable, losses

SECOND = "diffserve.engine.image.second_process"
CONFIG = """
[model]
dtype = "float32"
[engine]
split_guidance = "cpu"
[serve]
spare_engine = false
"""
LONG: dict[str, Any] = {"num_steps": 1000, "sampler": "ddim", "size": "64x64"}
SHORT: dict[str, Any] = {"num_steps": 2, "size": "64x64"}


def second_of(server: RunningServer) -> psutil.Process:
    """The process that paints unconditional rows."""
    [found] = [one for one in server.engine.children(recursive=True) if SECOND in one.cmdline()]
    return found


@pytest.mark.slow
@pytest.mark.chaos
def test_a_lost_second_device_is_a_lost_engine_and_it_does_not_outlive_its_server(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    with running_server(tiny_model("sd15"), tmp_path, config=CONFIG) as server, ThreadPoolExecutor(1) as pool:
        server.wait_until_ready()
        painted = files_of(server.paint(**SHORT))
        lost, first = server.engine, second_of(server)
        waiting = pool.submit(server.paint, **LONG)
        server.wait_for_requests(1)
        first.kill()
        check_unavailable(waiting.result(timeout=SOON_S))
        wait_for(lambda: not lost.is_running(), SOON_S, "the engine's end")
        server.wait_until_ready()
        assert losses(server)["device"] == 1.0
        assert files_of(server.paint(**SHORT)) == painted
        second = second_of(server)
    wait_for(lambda: not second.is_running(), SOON_S, "the end of its second process")
