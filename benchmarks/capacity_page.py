"""Renders docs/capacity.md from the figures of ``capacity.py``: tables, and the first bottlenecks of the design."""

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
(`benchmarks/simulator.py`, with the scheduler that serves); `--page-only` writes this page from
`benchmarks/results/capacity.json`. The workload is the mixed one: 4 to 50 steps, 20 on average, three of four guided,
many samplers, Poisson arrivals. An SLO is met where {within:.0%} of all requests are done in time, from arrival to
image.

**Calls of the rows marked *measured* were measured on two CPU cores and on one NVIDIA H200; every figure for another
GPU is predicted.** A prediction takes the vendor's figures for arithmetic and memory (`diffserve doctor --gpu`), the
share of them that kernels reach ({reached:.0%} in UNet calls, {decode_reached:.0%} in the decoder), and the time of a
kernel launch ({launch}); a call takes no less than its launches.

Each predicted figure is followed by its range in parentheses: the prediction with slower assumptions
({slow}) and with faster ones ({fast}).
Ranges of rates hold for one engine and are applied to pools; pools are simulated with the expected assumptions only.

Prices an hour are assumptions ({prices}); costs are proportional to them, and of the engines alone.
"""

H200: Final = """
### Predictions and the H200

The first table has the H200 twice, predicted and measured, because it is the only GPU that was measured
([RESULTS.md](../benchmarks/RESULTS.md#on-a-gpu)). It computes as fast as an H100; only its memory is faster.

- Launches: a kernel of a network takes 32 to 43 microseconds of the CPU in eager calls, Python and libraries included.
  An addition in a loop takes 7 to 11. Small calls agree with the larger figure: an SD 1.5 call has 797 kernels and
  takes 25 to 28 ms with one to four rows. One row of SDXL took longer than its range, while compilers used the CPU.
- CUDA graphs: all calls of this page are eager. Recorded calls, the default, are faster where rows are few (two rows of
  SD 1.5 take 11.0 instead of 28.5 ms) and about as fast at 16 rows. So latencies of pools are too long, not too short.
- Share of the roofline in calls of 16 rows: SDXL reaches 53% to 57% of it, SD 1.5 37% to 39%. The expected share lies
  between them, so SDXL is predicted too slow and SD 1.5 too fast; both measured figures are within the range. So are
  they in the range for the H100.
- Decoder: SDXL's decoder reaches 13% (channels_last) to 22% (contiguous, 4 images). The share of UNet calls would
  predict 37 ms an image. The measured rows use contiguous weights (84.87 ms); SD 1.5's decoder was not measured and
  is a quarter of that by its pixels.
- The measured SDXL calls are those with channels_last weights, while compilers used the GPU; with contiguous
  weights 16 rows take 16.92 instead of 18.1 ms a row.
- 16 guided images of 20 steps on the H200 take 1.257 images/s (SDXL, plain calls) and 1.677 (compiled), and 32 of SD
  1.5 take 8.204 (with graphs) and 10.407 (compiled). The rates of this page are higher because a quarter of their
  requests is not guided and the decoder's weights are contiguous.
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
3. **The store.** SQLite made {commits:,.0f} commits a second here, one for each picture that is kept in the history;
   they are not synced to the disk one by one. That is enough for {fed:,} of the fastest engines above behind one server
   (predicted). The file cannot be shared by machines; servers that share history, files, batches and jobs need
   PostgreSQL (`[store] url`) and one data folder.
4. **The controller of a cluster.** What Ray's controller and its proxies bear of our requests has not been measured
   here; no request passes the controller, but every replica's health does. Pools of 64 engines, each with a controller
   of its own, do not wait for the answer.
5. **The router** that looks at the work of every engine is one pass over a list: a thousand engines were simulated with
   it (`benchmarks/results/simulator-embedded/thousand-engines.json`).
6. **Bulk** (`diffserve batch --cluster`): a hundred thousand lines are five hundred shards, of which the command keeps
   names only. One file a picture in one folder is what will hurt first, and `--webdataset` is the way round.

For a GPU that was not measured, plan with the slow end of the ranges, begin with one pool, and add the next when the
age of the queue (`diffserve_queue_age_seconds`) grows. `python benchmarks/gpu_suite.py` measures a GPU in nine minutes.
"""


def page(document: Mapping[str, Any]) -> str:
    """Render the page."""
    arms, assumptions = document["arms"], document["assumptions"]
    command = f"`{document['command']}`"
    prices = ", ".join(f"${arm['price_per_hour']:.2f} {arm['name'].rpartition(', ')[2]}" for arm in _once(arms))
    parts = [
        HEAD.format(
            command=document["command"],
            within=document["within"],
            reached=assumptions["expected"]["reached"],
            decode_reached=assumptions["expected"]["decode_reached"],
            launch=_launch(document),
            slow=_assumed(assumptions["slow"]),
            fast=_assumed(assumptions["fast"]),
            prices=prices,
        ),
        ENGINES.format(command=command),
        _table(("engine", "figures", "one row", "most rows", "decode", "images/s"),
               map(_engine, _with_predictions(arms))),
        H200,
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
    """Return how many engines serve ``load_per_s`` at the SLO, and the images per second of each in that pool.

    ``None`` if no pool does. Uses the largest simulated pool that is not larger than needed.
    """
    best = None
    for pool in arm["pools"]:
        if not pool["per_s"]:
            continue
        each = pool["per_s"] / pool["engines"]
        number = math.ceil(load_per_s / each - 1e-9)
        if best is None or number >= pool["engines"]:
            best = (max(number, pool["engines"]), each)
    return best


def front_ms(pixels: int) -> float:
    """Return the CPU milliseconds of the API process per image; scaled by pixels beyond the largest measured size."""
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


def _with_predictions(arms: Iterable[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    """Yield each arm, preceded by the prediction of its calls if they were measured on a GPU."""
    for arm in arms:
        if "prediction" in arm:
            yield arm["prediction"]
        yield arm


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
    pools = [engines_for(arm, load) for load in ASKED_PER_S]
    last = pools[-1]
    dollars = "" if last is None else _time(arm, 1000 * arm["price_per_hour"] / 3600 / last[1], digits=2)
    numbers = ("not kept" if pool is None else _engines(arm, pool[0]) for pool in pools)
    return arm["name"], _kind(arm), *numbers, dollars


def _front(arm: Mapping[str, Any]) -> Sequence[str]:
    ms = front_ms(arm["pixels"])
    megabytes = arm["pixels"] * BYTES_PER_PIXEL * 4 / 3 / 1e6
    pool = engines_for(arm, 1000 / ms)
    bears = "" if pool is None else _time(arm, int(1000 / ms / pool[1]))
    return arm["name"], _figure(ms), _figure(1000 / ms), bears, f"{megabytes:.2f}"


def _after(document: Mapping[str, Any]) -> str:
    walls = []
    commits = 1000 / document["front"]["commit_ms"]
    for arm in document["arms"]:
        pool = engines_for(arm, 1000 / front_ms(arm["pixels"]))
        if arm["gpu"] and pool is not None:
            walls.append(f"{_rate(arm, pool[1] * front_ms(arm['pixels']) / 1000)} cores for each {arm['name']}")
    large = 1024 * 1024 * BYTES_PER_PIXEL * 4 / 3
    highest_load = ASKED_PER_S[-1]
    return AFTER.format(
        png=f"{FRONT_MS[512]:g} ms of CPU at 512x512, measured (`python benchmarks/bench_overhead.py`), and by its "
        "pixels four times as much at 1024x1024",
        walls="; ".join(walls) or "on GPUs alone",
        gbit=NIC_GBIT,
        nic=_figure(NIC_GBIT * 1e9 / 8 / large),
        most=highest_load,
        tbit=highest_load * large * 8 / 1e12,
        commits=commits,
        fed=int(commits / max(pool["per_s"] / pool["engines"] for arm in document["arms"] for pool in arm["pools"])),
    )


def _launch(document: Mapping[str, Any]) -> str:
    launch_us = document["assumptions"]["expected"]["launch_us"]
    return f"{launch_us:g} microseconds, {'measured on a GPU' if document['launch_is_measured'] else 'assumed'}"


def _assumed(assumptions: Mapping[str, float]) -> str:
    reached, decode_reached = assumptions["reached"], assumptions["decode_reached"]
    return f"{reached:.0%} and {decode_reached:.0%}, {assumptions['launch_us']:g} microseconds"


def _kind(arm: Mapping[str, Any]) -> str:
    return "predicted" if arm["predicted"] else "measured"


def _ranges(arm: Mapping[str, Any]) -> Mapping[str, Any]:
    return arm["predicted"] or {}


def _with_range(value: float, ends: Sequence[float] | None, digits: int = 3) -> str:
    """Format ``value``, with its range in parentheses if it is predicted."""
    if ends is None:
        return _figure(value, digits)
    return f"{_figure(value, digits)} ({_figure(ends[0], digits)} to {_figure(ends[1], digits)})"


def _rate(arm: Mapping[str, Any], value: float) -> str:
    """Format a figure that is proportional to the rate of an engine."""
    factors = _ranges(arm).get("rate")
    return _with_range(value, None if factors is None else [value * factor for factor in factors])


def _time(arm: Mapping[str, Any], value: float, digits: int = 3) -> str:
    """Format a figure that is inversely proportional to the rate of an engine."""
    factors = _ranges(arm).get("rate")
    return _with_range(value, None if factors is None else [value / factor for factor in reversed(factors)], digits)


def _engines(arm: Mapping[str, Any], number: int) -> str:
    """Format a number of engines with its range."""
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
