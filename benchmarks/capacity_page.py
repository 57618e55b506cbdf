"""The page docs/capacity.md from the figures of ``capacity.py``: tables, and where the design would break first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "capacity.md"
ASKED_PER_S: Final = (1, 10, 100, 1_000, 10_000, 100_000)
"""Pictures a second; the last is some nine thousand million a day."""

FRONT_MS: Final = {64: 5.5, 128: 8.7, 512: 54.0}
"""CPU of the process that answers for a picture of so many pixels a side, PNG included: ``bench_overhead.py``."""

BYTES_PER_PIXEL: Final = 1.5
"""Of the PNG of a photograph-like picture; a third more as base64. An assumption: drawn ones take half."""

NIC_GBIT: Final = 10.0

HEAD: Final = """# Capacity

Written by `{command}`, which simulates engines behind a router that sees their work
(`benchmarks/simulator.py`, the scheduler that serves); `--page-only` writes this page from
`benchmarks/results/capacity.json`. The workload is the mixed one: 4 to 50 steps, 20 on average, three of four guided,
many samplers, Poisson arrivals. An SLO is met where {within:.0%} of all requests are done in time, from arrival to
picture.

**No GPU has been measured.** What a call costs on one is *derived*: the roofline of the maker's figures for arithmetic
and memory (`diffserve doctor --gpu`), of which kernels are taken to reach {reached:.0%}, and no less than the launches
of its kernels. Real ones reach a half to three quarters, so a GPU may do half as much again, and less where the CPU
keeps it waiting; `python benchmarks/gpu_suite.py` (nine minutes on a GPU) measures some. The row on two CPU cores is
*measured*. Prices an hour are assumptions ({prices}); costs are proportional
to them, and of the engines alone.
"""

ENGINES: Final = """
## One engine

Milliseconds a row (a guided picture takes two rows a step) in a call of one row and of the most, to decode a picture,
and pictures a second when all ticks are full. {command}
"""

POOLS: Final = """
## A pool at its SLO

The most load, as a share of what full ticks could do, at which the SLO still holds, and what that is in pictures a
second; 0.95 is the most that was looked at. A larger pool bears more: some engine has just become free. {command}
"""

SCALE: Final = """
## From one GPU to the size of the internet

Engines for a load at the SLO, and dollars for a thousand pictures at that load. Up to 64 engines as simulated; beyond,
pools of 64 side by side, each with its own front: nothing is gained by larger ones. Add one engine in ten for those
that start anew or are lost. {command}
"""

BREAKS: Final = """
## Where this design would break first

What a picture takes of the parts that all pictures pass, and how many pictures a second one such part bears. {command}
"""

AFTER: Final = """
In this order:

1. **The process that answers.** It encodes the PNG, in threads of one process: {png}. That is the first wall: {walls}.
   Encoding where the picture is painted would move it; a server for each GPU behind a balancer, as
   `configs/deploy/kubernetes.yaml` has it, goes round it, and that is what the tables assume.
2. **Bytes.** At {gbit:g} Gbit/s a machine sends {nic} pictures of 1024x1024 a second as base64 in JSON (1.5 bytes a
   pixel, an assumption). At {most:,} pictures a second that is {tbit:.1f} Tbit/s: `"response_format": "url"`, an object
   store and a network for delivery, none of which is here.
3. **The store.** One SQLite file for each server: {commits:,.0f} commits a second were measured here, one for a
   picture that is kept in the history, on a disk and cores that others used, too: enough for {fed} of the fastest
   engines above behind one server. It is what cannot be shared: over many servers, history, files and batches are each
   server's own until there is a store for all.
4. **The controller of a cluster.** What Ray's controller and its proxies bear of our requests has not been measured
   here; no request passes the controller, but every replica's health does. Pools of 64 engines, each with a controller
   of its own, do not wait for the answer.
5. **The router** that looks at the work of every engine is one pass over a list: a thousand engines were simulated with
   it (`benchmarks/results/simulator-embedded/thousand-engines.json`).
6. **Bulk** (`diffserve batch --cluster`): a hundred thousand lines are five hundred shards, of which the command keeps
   names only. One file a picture in one folder is what will hurt first, and `--webdataset` is the way round.

Until there are measured GPUs, plan with the derived figures, begin with one pool, and let the age of the queue
(`diffserve_queue_age_seconds`) say when the next is wanted.
"""


def page(document: Mapping[str, Any]) -> str:
    """The whole page."""
    arms = document["arms"]
    command = f"`{document['command']}`"
    prices = ", ".join(f"${arm['price_per_hour']:.2f} {arm['name'].rpartition(', ')[2]}" for arm in _once(arms))
    parts = [
        HEAD.format(
            command=document["command"],
            within=document["within"],
            reached=document["reached_of_roofline"],
            prices=prices,
        ),
        ENGINES.format(command=command),
        _table(("engine", "figures", "one row", "most rows", "decode", "pictures/s"), map(_engine, arms)),
        POOLS.format(command=command),
        _table(("engine", "SLO", "engines", "load", "pictures/s", "p50, s", "p95, s"), _pools(arms)),
        SCALE.format(command=command),
        _table(("engine", *(f"{load:,}/s" for load in ASKED_PER_S), "$ for 1 000"), map(_scale, arms)),
        BREAKS.format(command=command),
        _table(("engine", "front, CPU ms", "a core bears, /s", "engines that a core answers for", "MB on the wire"),
               map(_front, arms)),
        _after(document),
    ]  # fmt: skip
    return "".join(parts)


def engines_for(arm: Mapping[str, Any], load_per_s: float) -> tuple[int, float] | None:
    """How many engines bear ``load_per_s`` at the SLO, and pictures a second of each as they stand together; ``None``
    where none do. By the largest pool that was simulated and is not larger than what is needed."""
    found = None
    for pool in arm["pools"]:
        if not pool["per_s"]:
            continue
        each = pool["per_s"] / pool["engines"]
        number = math.ceil(load_per_s / each - 1e-9)
        if found is None or number >= pool["engines"]:
            found = (max(number, pool["engines"]), each)
    return found


def front_ms(pixels: int) -> float:
    """CPU of the process that answers for a picture; beyond the largest that was measured, by its pixels."""
    side = math.isqrt(pixels)
    largest = max(FRONT_MS)
    return FRONT_MS[side] if side in FRONT_MS else FRONT_MS[largest] * pixels / largest**2


def _engine(arm: Mapping[str, Any]) -> Sequence[str]:
    rows = {int(rows): ms for rows, ms in arm["row_ms"].items()}
    full = arm["pools"][0]["full_per_s"] / arm["pools"][0]["engines"]
    figures = "derived" if arm["derived"] else "measured"
    return (
        arm["name"],
        figures,
        _figure(rows[min(rows)]),
        _figure(rows[max(rows)]),
        _figure(arm["decode_ms"]),
        _figure(full),
    )


def _pools(arms: Iterable[Mapping[str, Any]]) -> Iterable[Sequence[str]]:
    for arm in arms:
        for pool in arm["pools"]:
            slo = f"{arm['slo_s']:g} s"
            if pool["load"] is None:
                yield arm["name"], slo, str(pool["engines"]), "not kept", "", "", ""
            else:
                figures = (_figure(pool[name]) for name in ("per_s", "p50_s", "p95_s"))
                yield arm["name"], slo, str(pool["engines"]), f"{pool['load']:.2f}", *figures


def _scale(arm: Mapping[str, Any]) -> Sequence[str]:
    found = [engines_for(arm, load) for load in ASKED_PER_S]
    last = found[-1]
    dollars = "" if last is None else f"{1000 * arm['price_per_hour'] / 3600 / last[1]:.2g}"
    return arm["name"], *("not kept" if one is None else f"{one[0]:,}" for one in found), dollars


def _front(arm: Mapping[str, Any]) -> Sequence[str]:
    ms = front_ms(arm["pixels"])
    megabytes = arm["pixels"] * BYTES_PER_PIXEL * 4 / 3 / 1e6
    one = engines_for(arm, 1000 / ms)
    bears = "" if one is None else str(int(1000 / ms / one[1]))
    return arm["name"], _figure(ms), _figure(1000 / ms), bears, f"{megabytes:.2f}"


def _after(document: Mapping[str, Any]) -> str:
    walls = []
    commits = 1000 / document["front"]["commit_ms"]
    for arm in document["arms"]:
        one = engines_for(arm, 1000 / front_ms(arm["pixels"]))
        if arm["derived"] and one is not None:
            walls.append(f"{_figure(1 / (1000 / front_ms(arm['pixels']) / one[1]))} cores for each {arm['name']}")
    large = 1024 * 1024 * BYTES_PER_PIXEL * 4 / 3
    most = ASKED_PER_S[-1]
    return AFTER.format(
        png=f"{FRONT_MS[512]:g} ms of CPU at 512x512, measured (`python benchmarks/bench_overhead.py`), and by its "
        "pixels four times as much at 1024x1024",
        walls="; ".join(walls) or "on GPUs alone",
        gbit=NIC_GBIT,
        nic=_figure(NIC_GBIT * 1e9 / 8 / large),
        most=most,
        tbit=most * large * 8 / 1e12,
        commits=commits,
        fed=int(commits / max(pool["per_s"] / pool["engines"] for arm in document["arms"] for pool in arm["pools"])),
    )


def _once(arms: Iterable[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    """One for each kind of engine."""
    return {arm["name"].rpartition(", ")[2]: arm for arm in arms}.values()


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
