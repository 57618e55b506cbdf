"""Overload benchmark: ten times the capacity of a server for a minute; admission, rejection latency and recovery.

    python benchmarks/bench_overload.py --model embedded

A server is started with ``--backlog-s`` as ``serve.max_backlog_s``. Then, in this order: single requests; enough
concurrent requests to fill the ticks, which measures the capacity; an open loop at ``--times`` that rate, during which
a guest with another key requests an image now and then; the capacity again, because the machine's speed may have
changed; and single requests until one is as fast as at first.

Responses are timed in this process, which competes with the server for the cores. On a busy machine the capacity
changes from minute to minute, so images per CPU second of the engine are reported too. Progress goes to stderr, one
JSON document to stdout and to results/.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.open_loop import Answer, ask, flood, goodput, quantile, saturate
from benchmarks.report import RESULTS, ROOT, hardware, versions, write
from diffserve.service.http.addresses import MAX_KEYS_PER_ADDRESS

LISTENING = re.compile(r"listening on (http://\S+),")
START_S = 300.0
NORMAL = 1.1
"""So many times the usual time of a single request counts as back to normal."""

RECOVERY_S = 25.0
SLOWEST_MACHINE = 1.5
NUM_SOLO = 7
GUEST_EVERY_S = 3.0
GOALS = {"rejection_p99_s": 0.05, "goodput_share": 0.9, "recovery_s": 5.0}


def say(text: str) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Load:
    """Settings of the load."""

    url: str
    pid: int
    num_steps: int
    num_workers: int
    saturated_s: float
    flood_s: float
    times: float

    def sender(self, key: str) -> Callable[[int], Awaitable[Answer]]:
        """Return a function that requests an image by seed."""

        async def send(seed: int) -> Answer:
            return await ask(
                self.url, {"prompt": "a fox on the beach", "seed": seed, "num_inference_steps": self.num_steps}, key=key
            )

        return send


@dataclass(frozen=True)
class CpuSeconds:
    """CPU seconds of the server: of the API process (``door``) and of its child processes (``engine``)."""

    door: float
    engine: float

    @classmethod
    def of(cls, pid: int) -> CpuSeconds:
        """Return the CPU seconds until now."""
        process = psutil.Process(pid)
        times = [child.cpu_times() for child in process.children(recursive=True)]
        process_times = process.cpu_times()
        return cls(
            process_times.user + process_times.system,
            sum(child_times.user + child_times.system for child_times in times),
        )


async def measure(load: Load) -> dict[str, Any]:
    """Run all phases in order."""
    send = load.sender("load")
    alone = [await send(seed) for seed in range(NUM_SOLO)]
    solo_s = statistics.median(answer.seconds for answer in alone[1:])
    say(f"a picture alone: {solo_s:.3f} s")
    before, before_cpu = await _saturated(load)
    say(f"saturated: {before:.2f} pictures/s")
    rate_per_s = load.times * before
    say(f"flood: {rate_per_s:.1f} requests/s for {load.flood_s:g} s")
    started_s, cpu = time.perf_counter(), CpuSeconds.of(load.pid)
    guests = asyncio.create_task(_guests(load, started_s + load.flood_s - 1.0))
    lags = asyncio.create_task(_lag(started_s + load.flood_s))
    flooding = asyncio.create_task(flood(send, rate_per_s=rate_per_s, seconds=load.flood_s))
    await asyncio.sleep(started_s + load.flood_s - time.perf_counter())
    now = CpuSeconds.of(load.pid)
    recovery_s, probes = await _recover(load, solo_s)
    answers = await flooding
    after, after_cpu = await _saturated(load)
    say(f"saturated afterwards: {after:.2f} pictures/s")
    document = judge(answers, started_s, load.flood_s, statistics.mean((before, after)), recovery_s)
    num_painted = goodput(answers, started_s, started_s + load.flood_s) * load.flood_s
    per_cpu_s = {
        "saturated": round(statistics.mean((before_cpu, after_cpu)), 3),
        "flood": round(num_painted / (now.engine - cpu.engine), 3),
    }
    waits = [answer.seconds for answer in await guests]
    guest_s = {"times": len(waits), "median": round(quantile(waits, 0.5), 3), "max": round(max(waits, default=0.0), 3)}
    return {
        "solo_s": round(solo_s, 4),
        "saturated_per_s": {"before": round(before, 3), "after": round(after, 3)},
        "offered_per_s": round(rate_per_s, 2),
        **document,
        "pictures_per_engine_cpu_s": per_cpu_s,
        "front_door_cores": round((now.door - cpu.door) / load.flood_s, 3),
        "probes_after_s": [round(probe, 3) for probe in probes],
        "guest_s": guest_s,
        "client_loop_lag_p99_s": round(quantile(await lags, 0.99), 4),
    }


def judge(
    answers: Sequence[Answer], started_s: float, flood_s: float, saturated_per_s: float, recovery_s: float | None
) -> dict[str, Any]:
    """Compare the results of the overload with the goals."""
    refused = [answer for answer in answers if answer.status == 429]
    painted = [answer.seconds for answer in answers if answer.status == 200]
    retry_after_s = [answer.retry_after_s for answer in refused]
    share = goodput(answers, started_s, started_s + flood_s) / saturated_per_s
    rejection_p99_s = quantile([answer.seconds for answer in refused], 0.99)
    return {
        "statuses": {
            str(status): number for status, number in sorted(Counter(answer.status for answer in answers).items())
        },
        "rejection_s": {
            "p50": round(quantile([answer.seconds for answer in refused], 0.5), 4),
            "p99": round(rejection_p99_s, 4),
            "max": round(max((answer.seconds for answer in refused), default=0.0), 4),
        },
        "retry_after_s": {str(delay_s): number for delay_s, number in sorted(Counter(map(str, retry_after_s)).items())},
        "painted_s": {"p50": round(quantile(painted, 0.5), 3), "p99": round(quantile(painted, 0.99), 3)},
        "goodput_share": round(share, 3),
        "recovery_s": recovery_s if recovery_s is None else round(recovery_s, 2),
        "goals": {
            "only 200 and 429": {answer.status for answer in answers} <= {200, 429},
            "every 429 says when": all(delay_s is not None and 1 <= delay_s <= 60 for delay_s in retry_after_s),
            "rejections p99 under 50 ms": rejection_p99_s < GOALS["rejection_p99_s"],
            "goodput at least 90 % of saturated": share >= GOALS["goodput_share"],
            "back to normal within 5 s": recovery_s is not None and recovery_s <= GOALS["recovery_s"],
        },
    }


async def _saturated(load: Load) -> tuple[float, float]:
    """Measure images per second with full ticks, and per CPU second of the engine, after a quarter for warm-up.

    Every worker has its own key, so that none is rejected: rejections take time from the engine. An address has
    ``MAX_KEYS_PER_ADDRESS`` keys at most.
    """
    started_s = time.perf_counter()
    senders = [load.sender(f"worker {number}") for number in range(load.num_workers)]

    async def send(number: int) -> Answer:
        return await senders[number % load.num_workers](number)

    working = asyncio.create_task(saturate(send, num_workers=load.num_workers, seconds=load.saturated_s))
    await asyncio.sleep(0.25 * load.saturated_s)
    before = CpuSeconds.of(load.pid)
    await asyncio.sleep(0.75 * load.saturated_s)
    after = CpuSeconds.of(load.pid)
    rate = goodput(await working, started_s + 0.25 * load.saturated_s, started_s + load.saturated_s)
    return rate, rate * 0.75 * load.saturated_s / (after.engine - before.engine)


async def _guests(load: Load, until_s: float) -> list[Answer]:
    """Request an image from another client now and then."""
    send, answers = load.sender("guest"), []
    while time.perf_counter() < until_s:
        answers.append(await send(0))
        await asyncio.sleep(GUEST_EVERY_S)
    return answers


async def _recover(load: Load, solo_s: float) -> tuple[float | None, list[float]]:
    """Measure the seconds from the end of the overload to the first single request that is as fast as before.

    The reference is the time before the overload, or the final time if that is larger (by less than half), because the
    speed of a shared machine varies. Also returns the time of each request.
    """
    send, ended_s = load.sender("later"), time.perf_counter()
    probes: list[tuple[float, Answer]] = []
    while (began_s := time.perf_counter() - ended_s) < RECOVERY_S:
        probes.append((began_s, await send(1)))
        await asyncio.sleep(0.1)
    settled_s = statistics.median(answer.seconds for _, answer in probes[-NUM_SOLO:])
    usual_s = NORMAL * max(solo_s, min(settled_s, SLOWEST_MACHINE * solo_s))
    recovered = [began_s for began_s, answer in probes if answer.status == 200 and answer.seconds <= usual_s]
    return recovered[0] if recovered else None, [answer.seconds for _, answer in probes]


async def _lag(until_s: float) -> list[float]:
    """Measure the lag of this process's event loop."""
    lags = []
    while (now_s := time.perf_counter()) < until_s:
        await asyncio.sleep(0.02)
        lags.append(time.perf_counter() - now_s - 0.02)
    return lags


@contextmanager
def serving(model: str, *, backlog_s: float, engine: str = "") -> Iterator[tuple[str, int]]:
    """Yield address and process id of a ready server, and stop it afterwards; ``engine`` adds to that config table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "serve.toml").write_text(f"[serve]\nmax_backlog_s = {backlog_s}\npage = false\n[engine]\n{engine}\n")
        command = ["-m", "diffserve", "serve", "--model", model, "--port", "0", "--config", str(folder / "serve.toml")]
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            env = os.environ | {"PYTHONPATH": str(ROOT)}
            process = subprocess.Popen([sys.executable, *command], stdout=out, stderr=err, env=env)
            try:
                yield _ready(process, folder), process.pid
            finally:
                process.terminate()
                process.wait(60)


def _ready(process: subprocess.Popen[bytes], folder: Path) -> str:
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s and process.poll() is None:
        match = LISTENING.search((folder / "out").read_text())
        try:
            if match:
                with urllib.request.urlopen(f"{match[1]}/readyz", timeout=5.0):
                    return match[1]
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.1)
    raise RuntimeError(f"the server did not become ready: {(folder / 'err').read_text()[-1000:]}")


def main(
    model: Annotated[str, typer.Option(help="Model that the server loads.")] = "embedded",
    backlog_s: Annotated[float, typer.Option(help="serve.max_backlog_s of the server.")] = 4.0,
    num_steps: Annotated[int, typer.Option(help="Denoising steps per image.")] = 25,
    num_workers: Annotated[
        int,
        typer.Option(
            min=1, max=MAX_KEYS_PER_ADDRESS, help="Concurrent requests that fill every tick; one API key each."
        ),
    ] = MAX_KEYS_PER_ADDRESS,
    saturated_s: Annotated[float, typer.Option(help="Seconds of each of the two capacity measurements.")] = 20.0,
    flood_s: Annotated[float, typer.Option(help="Seconds of overload.")] = 60.0,
    times: Annotated[float, typer.Option(help="Load as a multiple of the capacity.")] = 10.0,
    output: Annotated[Path | None, typer.Option(help="File for the JSON results; default: in results/.")] = None,
) -> None:
    """Overload a server and report the results."""
    with serving(model, backlog_s=backlog_s) as (url, pid):
        load = Load(url, pid, num_steps, num_workers, saturated_s, flood_s, times)
        results = asyncio.run(measure(load))
    now = datetime.datetime.now(datetime.UTC)
    document = {
        "benchmark": "overload",
        "date": now.isoformat(timespec="seconds"),
        "model": Path(model).name,
        "settings": {
            "max_backlog_s": backlog_s, "num_steps": num_steps, "num_workers": num_workers,
            "saturated_s": saturated_s, "flood_s": flood_s, "times": times,
        },
        "hardware": hardware("cpu") | {"load_average_at_end": [round(load, 2) for load in os.getloadavg()]},
        "versions": versions(),
        **results,
    }  # fmt: skip
    write(document, output or RESULTS / f"overload-{Path(model).name}-{now:%Y-%m-%d}.json")
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    typer.run(main)
