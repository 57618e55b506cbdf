"""The HTTP server on the device: 32 clients, a client that leaves, and an engine that is killed and comes back."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.start_row import WEB_PACKAGES
from benchmarks.gpu.worker import Bench, NotMeasurableError
from benchmarks.open_loop import Answer, ask, quantile, saturate

CLIENTS: Final = 32
SECONDS: Final = 8.0
LONG_STEPS: Final = 500
LOG_CHARS: Final = 200_000


def run(bench: Bench) -> None:
    """Serve the embedded model, and ask for images as clients do."""
    missing = [name for name in WEB_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        bench.point("server", lambda: _leave_out(f"{missing[0]} is missing"))
        return
    from tests.service.server import running_server

    config = f'[model]\ndevice = "{bench.device}"\n[engine]\nmax_waiting = 512\n'
    if bench.quick:  # on a CPU a server would compile before it is ready
        config = f'[model]\ndevice = "{bench.device}"\ndtype = "float32"\n[engine]\ncompile = "off"\n'
    started_s = time.monotonic()
    with running_server(Path("embedded"), bench.work / "server", config=config) as server:
        if bench.point("ready", lambda: _ready(server, started_s)) is not None:
            bench.point("clients", lambda: _many_clients(bench, server.url), needs_s=SECONDS + 2)
            bench.point("cancel", lambda: _cancel(server), needs_s=3)
            bench.point("engine killed", lambda: _kill_engine(server), needs_s=8)
            bench.point("stop", lambda: {"exit_code": server.stop()})
        bench.write("server.txt", server.errors.read_text(encoding="utf-8", errors="replace")[-LOG_CHARS:])


def _leave_out(reason: str) -> Any:
    raise NotMeasurableError(reason)


def _ready(server: Any, started_s: float) -> dict[str, Any]:
    server.wait_until_ready()
    return {"ready_s": round(time.monotonic() - started_s, 1)}


def _many_clients(bench: Bench, url: str) -> dict[str, Any]:
    """Measure the rate and the latency of many clients that send the next request after each answer."""
    clients, seconds, steps = (4, 2.0, 1) if bench.quick else (CLIENTS, SECONDS, 20)

    async def send(number: int) -> Answer:
        body = {"prompt": f"a red fox on the beach {number}", "seed": number, "num_inference_steps": steps}
        return await ask(url, body, key=f"client-{number % clients}")

    started_s = time.perf_counter()
    answers = asyncio.run(saturate(send, num_workers=clients, seconds=seconds))
    taken_s = time.perf_counter() - started_s
    painted = [answer.seconds for answer in answers if answer.status == 200]
    refused = sorted({answer.status for answer in answers if answer.status not in (200, 429)})
    return {
        "clients": clients,
        "steps": steps,
        "images": len(painted),
        "images_per_s": round(len(painted) / taken_s, 2),
        "p50_s": round(quantile(painted, 0.5), 3),
        "p99_s": round(quantile(painted, 0.99), 3),
        "problems": [f"an answer of status {status}" for status in refused] or [] if painted else ["no image came"],
    }


def _cancel(server: Any) -> dict[str, Any]:
    """Seconds until the engine is idle after the only client has left in the middle of a long image."""
    import httpx

    before = server.num_ended("cancelled")
    with contextlib.suppress(httpx.ReadTimeout):
        httpx.post(
            f"{server.url}/v1/images/generations",
            json={"prompt": "a red fox", "num_inference_steps": LONG_STEPS, "sampler": "ddim", "seed": 1},
            timeout=httpx.Timeout(30.0, read=0.5),
            trust_env=False,
        )
    left_s = time.monotonic()
    server.wait_until_idle()
    idle_s = time.monotonic() - left_s
    cancelled = server.num_ended("cancelled") - before
    return {"idle_after_s": round(idle_s, 3), "problems": [] if cancelled else ["the request was not cancelled"]}


def _kill_engine(server: Any) -> dict[str, Any]:
    """Seconds until the server is ready again after its engine was killed, and whether it paints the same bytes."""
    before = server.paint(seed=3)
    os.kill(server.engine.pid, signal.SIGKILL)
    killed_s = time.monotonic()
    while server.status("/readyz") == 200 and time.monotonic() < killed_s + 5.0:
        time.sleep(0.02)
    server.wait_until_ready()
    ready_s = time.monotonic() - killed_s
    after = server.paint(seed=3)
    images = [
        response.json()["data"][0]["b64_json"] if response.status_code == 200 else None for response in (before, after)
    ]
    return {
        "ready_after_s": round(ready_s, 2),
        "same_bytes": images[0] == images[1],
        "problems": [] if all(images) else [f"status {before.status_code} before and {after.status_code} after"],
    }
