"""Cluster benchmark: the overhead of a request through Ray Serve, and the gain of a second replica.

    python benchmarks/bench_cluster.py --out benchmarks/results/cluster-cost.json
    python benchmarks/bench_cluster.py --requests 200 --steps 4 --model DIR
    python benchmarks/bench_cluster.py --replicas 2 --rounds 8 --out benchmarks/results/cluster-2-replicas.json

Two servers, ``serve`` and ``cluster up`` with one replica of one core, asked for one picture at a time over a
connection each. Without ``--model`` their engines compute nothing (``noop_engine``): what a request then takes is all
the way's own. Each measure is four requests, local, cluster, cluster, local, or the other way round, and the difference
of its halves, from which a machine that grows slower or faster falls out. Told are the medians, the median and the
quartiles of the differences, and between which bounds that median is with a probability of 95 %.

With ``--replicas`` these are two clusters, of one replica and of so many, of a core each; the same clients paint in
both in turns, and told are pictures a second and the ratios. Progress goes to stderr, one JSON document to stdout.
"""

from __future__ import annotations

import gc
import http.client
import json
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.noop_engine import MODULE
from tests.service.server import GENERATIONS, ROOT, START_S, RunningServer, running_server, wait_for
from tests.tiny_models import save_model

CONFIG = "[engine]\nthreads = 1\n"
WARM = 10
CLIENTS_EACH = 8
"""Of a replica: so many pictures share its calls, with one replica and with several."""


def main(
    requests: Annotated[int, typer.Option(min=2, help="Requests per measurement; with --replicas: per round.")] = 200,
    steps: Annotated[
        int | None, typer.Option(help="Denoising steps per image; default: 1, with --replicas 20.")
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, help="Compare the throughput of this many replicas with one.")] = 1,
    rounds: Annotated[int, typer.Option(min=2, help="With --replicas: rounds per cluster.")] = 6,
    model: Annotated[
        Path | None, typer.Option(help="Model directory; default: empty engines, with --replicas a tiny random model.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File for a copy of the JSON results.")] = None,
) -> None:
    """Measure, and print one JSON document."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        directory = model or save_model("sd15", folder / "model")
        if replicas > 1:
            with (
                cluster_of(1, directory, folder / "one") as single,
                cluster_of(replicas, directory, folder / "more") as multiple,
            ):
                report = throughput((single, multiple), replicas, rounds, requests, steps or 20)
        else:
            env = {} if model else without_engines(folder)
            with (
                running_server(directory, folder / "local", config=CONFIG, env=env) as local,
                cluster_of(1, directory, folder / "cluster", env) as cluster,
            ):
                local.wait_until_ready()
                report = own_cost((local, cluster), requests, steps or 1)
            report["engines"] = "of nothing" if model is None else "painting"
    report["command"] = " ".join(["python", "benchmarks/bench_cluster.py", *sys.argv[1:]])
    report["machine"] = f"{platform.machine()}, {os.cpu_count()} cores"
    report["load"] = [round(single, 1) for single in os.getloadavg()]
    if out is not None:
        out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report))


def without_engines(folder: Path) -> dict[str, str]:
    """Return an environment in which Python processes, including Ray replicas, use engines that compute nothing."""
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        f"from diffserve.service.engine import connection\nconnection.ENGINE_MODULE = {MODULE!r}\n"
    )
    return {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}"}


@contextmanager
def cluster_of(
    num_replicas: int, model: Path, folder: Path, env: dict[str, str] | None = None
) -> Iterator[RunningServer]:
    """Run ``cluster up`` with ``num_replicas`` ready replicas of one core each."""
    folder.mkdir()
    (folder / "cluster.toml").write_text(f"[replicas]\nmin = {num_replicas}\nmax = {num_replicas}\ncpus = 1.0\n")
    command = ["-m", "diffserve", "cluster", "up", str(folder / "cluster.toml")]
    with running_server(model, folder / "server", config=CONFIG, command=command, env=env) as server:
        cluster_file = folder / "server" / "data" / "cluster.json"
        server.wait_until_ready()
        wait_for(lambda: cluster_file.read_text().count('"ready"') == num_replicas, START_S, "all replicas")
        print(f"{num_replicas} replicas are ready", file=sys.stderr)
        yield server


def own_cost(pair: tuple[RunningServer, RunningServer], num_measures: int, steps: int) -> dict[str, Any]:
    """Measure the additional time per image of the second server over the first."""
    askers = [Asker(server, steps) for server in pair]
    for seed in range(WARM):
        for asker in askers:
            asker.ask_s(seed)
    here_s: list[float] = []
    there_s: list[float] = []
    gc.disable()  # of this process, which is the clock
    for seed in range(num_measures):
        order = (0, 1, 1, 0) if seed % 2 else (1, 0, 0, 1)
        took = [(place, askers[place].ask_s(seed)) for place in order]
        local, cluster = (sum(seconds for at, seconds in took if at == place) / 2 for place in (0, 1))
        here_s.append(local)
        there_s.append(cluster)
    gc.enable()
    for asker in askers:
        asker.close()
    more_ms = sorted(1e3 * (there - here) for here, there in zip(here_s, there_s, strict=True))
    low, middle, high = statistics.quantiles(more_ms, n=4)
    off = math.ceil(0.98 * math.sqrt(num_measures))  # of ranks: a median's bounds by the sign test, 95 %
    lower, upper = max(0, num_measures // 2 - off), min(num_measures - 1, num_measures // 2 + off)
    return {
        "benchmark": "cluster",
        "num_measures": num_measures,
        "steps": steps,
        "local_ms": round(1e3 * statistics.median(here_s), 2),
        "cluster_ms": round(1e3 * statistics.median(there_s), 2),
        "more_ms": round(middle, 2),
        "more_ms_quartiles": [round(low, 2), round(high, 2)],
        "more_ms_bounds": [round(more_ms[lower], 2), round(more_ms[upper], 2)],
    }


class Asker:
    """One connection to a server for requests of ``steps`` steps."""

    def __init__(self, server: RunningServer, steps: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
        self._asked = {"prompt": "a red fox", "num_inference_steps": steps}

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def ask_s(self, seed: int) -> float:
        """Measure the seconds from sending a request to its last byte."""
        body = json.dumps({**self._asked, "seed": seed})
        begun_s = time.perf_counter()
        self._connection.request("POST", GENERATIONS, body, {"Content-Type": "application/json"})
        reply = self._connection.getresponse()
        content = reply.read()
        took_s = time.perf_counter() - begun_s
        if reply.status != 200:
            raise RuntimeError(f"a server answered {reply.status}: {content[:500]!r}")
        return took_s


def throughput(
    pair: tuple[RunningServer, RunningServer],
    num_replicas: int,
    num_rounds: int,
    num_pictures: int,
    steps: int,
    clients_each: int = CLIENTS_EACH,
) -> dict[str, Any]:
    """Measure images per second of both servers in turns, with enough clients for the second, and their ratio."""
    num_clients = clients_each * num_replicas
    for server in pair:
        painted_per_s(server, num_clients, WARM, steps)
    rates: list[tuple[float, float]] = []
    for number in range(num_rounds):
        first, second = pair if number % 2 else pair[::-1]
        first_rate, second_rate = (painted_per_s(each, num_clients, num_pictures, steps) for each in (first, second))
        rates.append((first_rate, second_rate) if number % 2 else (second_rate, first_rate))
        print(f"round {number + 1}: {rates[-1][0]:.2f} and {rates[-1][1]:.2f} pictures/s", file=sys.stderr)
    ratios = [multiple / single for single, multiple in rates]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "benchmark": "cluster-throughput",
        "replicas": num_replicas,
        "num_rounds": num_rounds,
        "num_pictures": num_pictures,
        "num_clients": num_clients,
        "steps": steps,
        "one_per_s": round(statistics.median(single for single, _ in rates), 3),
        "more_per_s": round(statistics.median(multiple for _, multiple in rates), 3),
        "ratio": round(middle, 3),
        "ratio_quartiles": [round(low, 3), round(high, 3)],
    }


def painted_per_s(server: RunningServer, num_clients: int, num_pictures: int, steps: int) -> float:
    """Measure images per second, each of a different prompt."""
    begun_s = time.perf_counter()
    with ThreadPoolExecutor(num_clients) as pool:
        painted = pool.map(lambda seed: server.paint(f"{seed} foxes", num_steps=steps, seed=seed), range(num_pictures))
        for reply in painted:
            reply.raise_for_status()
    return num_pictures / (time.perf_counter() - begun_s)


if __name__ == "__main__":
    typer.run(main)
