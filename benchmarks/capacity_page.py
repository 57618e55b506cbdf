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

NOTHING_MEASURED: Final = "No GPU has been measured: every figure for a GPU on this page is predicted."
LAUNCH_MEASURED: Final = (
    "The time of a kernel launch was measured on a GPU: every other figure for a GPU on this page is predicted."
)

HEAD: Final = """# Capacity

Written by `{command}`, which simulates engines behind a router that sees their work
(`benchmarks/simulator.py`, with the scheduler that serves); `--page-only` writes this page from
`benchmarks/results/capacity.json`. The workload is the mixed one: 4 to 50 steps, 20 on average, three of four guided,
many samplers, Poisson arrivals. An SLO is met where {within:.0%} of all requests are done in time, from arrival to
image.

**{measured}** A prediction takes the vendor's figures for arithmetic
and memory (`diffserve doctor --gpu`), the share of them that kernels reach ({reached:.0%}), and the time of a kernel
launch ({launch}); a call takes no less than its launches.

Behind each predicted figure stands its range in parentheses, the error bar: the same prediction with slower
assumptions ({slow}) and with faster ones ({fast}). For comparison, published
times of diffusers on an A100 are 23% (SD 1.5, eager) to 68% (SDXL, compiled) of this roofline. Ranges of rates hold for
one engine and are applied to pools; pools are simulated with the expected assumptions only.
`python benchmarks/gpu_suite.py` measures the figures on a GPU in nine minutes.

The row on two CPU cores is *measured*. Prices an hour are assumptions ({prices}); costs are proportional to them, and
of the engines alone.
"""

ENGINES: Final = """
## One engine

Milliseconds a row (a guided image takes two rows a step) in a call of one row and in a call of the most rows, to decode
an image, and images a second when all ticks are full. {command}
"""

POOLS: Final = """
## A pool at its SLO

The most load, as a share of what full ticks could do, at which the SLO still holds, and the images a second at that
load; 0.95 is the highest load that was simulated. A larger pool has a higher limit: some engine has just become free.
{command}
"""

SCALE: Final = """
## From one GPU to the size of the internet

Engines for a load at the SLO, and dollars for a thousand images at that load. Up to 64 engines are simulated; beyond,
these are pools of 64, each with its own front: larger pools gain nothing. Add one engine in ten for those that restart
or are lost. {command}
"""

BREAKS: Final = """
## Where this design would break first

What an image takes of the parts that all images pass, and how many images a second one such part can take. {command}
"""

AFTER: Final = """
In this order:

1. **The process that answers.** It encodes the PNG, in threads of one process: {png}.
   That is the first limit (predicted): {walls}.
   Encoding where the picture is painted would move it; a server for each GPU behind a balancer, as
   `configs/deploy/kubernetes.yaml` has it, goes round it, and that is what the tables assume.
2. **Bytes.** At {gbit:g} Gbit/s a machine sends {nic} pictures of 1024x1024 a second as base64 in JSON (1.5 bytes a
   pixel, an assumption). At {most:,} pictures a second that is {tbit:.1f} Tbit/s: `"response_format": "url"`, an object
   store and a network for delivery, none of which is here.
3. **The store.** One SQLite file for each server: {commits:,.0f} commits a second were measured here, one for a
   picture that is kept in the history, on a disk and cores that others used, too: enough for {fed} of the fastest
   engines above behind one server (predicted). It is what cannot be shared: over many servers, history, files and
   batches are each server's own until there is a store for all.
4. **The controller of a cluster.** What Ray's controller and its proxies bear of our requests has not been measured
   here; no request passes the controller, but every replica's health does. Pools of 64 engines, each with a controller
   of its own, do not wait for the answer.
5. **The router** that looks at the work of every engine is one pass over a list: a thousand engines were simulated with
   it (`benchmarks/results/simulator-embedded/thousand-engines.json`).
6. **Bulk** (`diffserve batch --cluster`): a hundred thousand lines are five hundred shards, of which the command keeps
   names only. One file a picture in one folder is what will hurt first, and `--webdataset` is the way round.

Until there are measured GPUs, plan with the slow end of the ranges, begin with one pool, and add the next when the age
of the queue (`diffserve_queue_age_seconds`) grows.
"""


def page(document: Mapping[str, Any]) -> str:
    """The whole page."""
    arms, assumptions = document["arms"], document["assumptions"]
    command = f"`{document['command']}`"
    prices = ", ".join(f"${arm['price_per_hour']:.2f} {arm['name'].rpartition(', ')[2]}" for arm in _once(arms))
    parts = [
        HEAD.format(
            command=document["command"],
            within=document["within"],
            reached=assumptions["expected"]["reached"],
            measured=LAUNCH_MEASURED if document["launch_is_measured"] else NOTHING_MEASURED,
            launch=_launch(document),
            slow=_assumed(assumptions["slow"]),
            fast=_assumed(assumptions["fast"]),
            prices=prices,
        ),
        ENGINES.format(command=command),
        _table(("engine", "figures", "one row", "most rows", "decode", "images/s"), map(_engine, arms)),
        POOLS.format(command=command),
        _table(("engine", "figures", "SLO", "engines", "load", "images/s", "p50, s", "p95, s"), _pools(arms)),
        SCALE.format(command=command),
        _table(("engine", "figures", *(f"{load:,}/s" for load in ASKED_PER_S), "$ for 1 000"), map(_scale, arms)),
        BREAKS.format(command=command),
        _table(("engine", "front, CPU ms", "images/s of a core", "engines that a core answers for", "MB on the wire"),
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
    ranges = {int(rows): ends for rows, ends in _ranges(arm).get("row_ms", {}).items()}
    return (
        arm["name"],
        _kind(arm),
        _with_range(rows[min(rows)], ranges.get(min(rows))),
        _with_range(rows[max(rows)], ranges.get(max(rows))),
        _with_range(arm["decode_ms"], _ranges(arm).get("decode_ms")),
        _rate(arm, full),
    )


def _pools(arms: Iterable[Mapping[str, Any]]) -> Iterable[Sequence[str]]:
    for arm in arms:
        for pool in arm["pools"]:
            slo = f"{arm['slo_s']:g} s"
            if pool["load"] is None:
                yield arm["name"], _kind(arm), slo, str(pool["engines"]), "not kept", "", "", ""
            else:
                times = (_time(arm, pool[name]) for name in ("p50_s", "p95_s"))
                load, rate = f"{pool['load']:.2f}", _rate(arm, pool["per_s"])
                yield arm["name"], _kind(arm), slo, str(pool["engines"]), load, rate, *times


def _scale(arm: Mapping[str, Any]) -> Sequence[str]:
    found = [engines_for(arm, load) for load in ASKED_PER_S]
    last = found[-1]
    dollars = "" if last is None else _time(arm, 1000 * arm["price_per_hour"] / 3600 / last[1], digits=2)
    numbers = ("not kept" if one is None else _engines(arm, one[0]) for one in found)
    return arm["name"], _kind(arm), *numbers, dollars


def _front(arm: Mapping[str, Any]) -> Sequence[str]:
    ms = front_ms(arm["pixels"])
    megabytes = arm["pixels"] * BYTES_PER_PIXEL * 4 / 3 / 1e6
    one = engines_for(arm, 1000 / ms)
    bears = "" if one is None else _time(arm, int(1000 / ms / one[1]))
    return arm["name"], _figure(ms), _figure(1000 / ms), bears, f"{megabytes:.2f}"


def _after(document: Mapping[str, Any]) -> str:
    walls = []
    commits = 1000 / document["front"]["commit_ms"]
    for arm in document["arms"]:
        one = engines_for(arm, 1000 / front_ms(arm["pixels"]))
        if arm["predicted"] and one is not None:
            walls.append(f"{_rate(arm, one[1] * front_ms(arm['pixels']) / 1000)} cores for each {arm['name']}")
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


def _launch(document: Mapping[str, Any]) -> str:
    launch_us = document["assumptions"]["expected"]["launch_us"]
    return f"{launch_us:g} microseconds, {'measured on a GPU' if document['launch_is_measured'] else 'assumed'}"


def _assumed(assumptions: Mapping[str, float]) -> str:
    return f"{assumptions['reached']:.0%}, {assumptions['launch_us']:g} microseconds"


def _kind(arm: Mapping[str, Any]) -> str:
    return "predicted" if arm["predicted"] else "measured"


def _ranges(arm: Mapping[str, Any]) -> Mapping[str, Any]:
    return arm["predicted"] or {}


def _with_range(value: float, ends: Sequence[float] | None, digits: int = 3) -> str:
    """``value``, and its range in parentheses where it is predicted."""
    if ends is None:
        return _figure(value, digits)
    return f"{_figure(value, digits)} ({_figure(ends[0], digits)} to {_figure(ends[1], digits)})"


def _rate(arm: Mapping[str, Any], value: float) -> str:
    """A figure that is proportional to the rate of an engine."""
    factors = _ranges(arm).get("rate")
    return _with_range(value, None if factors is None else [value * factor for factor in factors])


def _time(arm: Mapping[str, Any], value: float, digits: int = 3) -> str:
    """A figure that is inversely proportional to the rate of an engine."""
    factors = _ranges(arm).get("rate")
    return _with_range(value, None if factors is None else [value / factor for factor in reversed(factors)], digits)


def _engines(arm: Mapping[str, Any], number: int) -> str:
    """So many engines, and the range of that number."""
    factors = _ranges(arm).get("rate")
    if factors is None:
        return f"{number:,}"
    low, high = (max(1, math.ceil(number / factor - 1e-9)) for factor in reversed(factors))
    return f"{number:,} ({low:,} to {high:,})"


def _once(arms: Iterable[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    """One for each kind of engine."""
    return {arm["name"].rpartition(", ")[2]: arm for arm in arms}.values()


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _figure(value: float, digits: int = 3) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.{digits}g}"
