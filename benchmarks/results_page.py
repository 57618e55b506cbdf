"""Renders the page RESULTS.md from the JSON in results/: ``python benchmarks/results_page.py``.

The newest document of each benchmark counts. A figure that was never measured is listed as owed, with the command that
measures it.
"""

from __future__ import annotations

import json
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu.table import goals as gpu_goals

RESULTS: Final = Path(__file__).resolve().parent / "results"
PAGE: Final = RESULTS.parent / "RESULTS.md"
SIGNS: Final[dict[str, Callable[[float, float], bool]]] = {"at least": operator.ge, "at most": operator.le}
OWED: Final = "owed"

INTRODUCTION: Final = """# Results

Written by `python benchmarks/results_page.py` from the newest JSON of each benchmark in `results/`; `LOG.md` has
what was learned from them. A figure is a median, with the least and the most where there are several; a ratio is of
runs of the same round. What is *owed* has not been measured in this form yet; the command of its section
measures it.
"""
NEAR: Final = 0.1
"""Largest relative difference between the simulator and the engine that counts as agreement."""


class Goal(NamedTuple):
    """Goal of a figure: ``sign`` is "at least" or "at most"."""

    sign: str
    bound: float

    def __str__(self) -> str:
        return f"{self.sign} {self.bound:g}"

    def holds(self, figure: Any) -> str:
        """Return "yes" or "no": whether the median of a figure reaches the goal."""
        median = figure["median"] if isinstance(figure, Mapping) else figure
        return "yes" if SIGNS[self.sign](median, self.bound) else "no"


class Row(NamedTuple):
    """A figure with its goal: ``path`` leads to it in a document; a part ``key=value`` finds an element of a list."""

    what: str
    goal: Goal
    path: str


Documents = Mapping[str, dict[str, Any]]


def gpu_runs(folder: Path) -> list[dict[str, Any]]:
    """Results of ``gpu_suite.py`` in ``folder`` in order of time, each with its ``file``.

    notes  text of the file that has the name of the document and the ending ``.md``, or "".
    """
    runs = []
    for file in folder.glob("gpu-suite*.json"):
        notes = file.with_suffix(".md")
        text = notes.read_text(encoding="utf-8") if notes.is_file() else ""
        runs.append({**json.loads(file.read_text(encoding="utf-8")), "file": file.name, "notes": text})
    return sorted(runs, key=lambda run: str(run["date"]))


def newest(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the newest document of each benchmark, with its ``file``."""
    documents: dict[str, dict[str, Any]] = {}
    for file in sorted([*folder.glob("*.json"), *folder.glob("simulator-*/validation.json")]):
        document = {**json.loads(file.read_text(encoding="utf-8")), "file": file.relative_to(folder).as_posix()}
        name = document.get("benchmark", "")
        if document.get("date", "") >= documents.get(name, {}).get("date", ""):
            documents[name] = document
    return documents


def follow(document: Any, path: str) -> Any:
    """Return the value at ``path``, or ``None`` if the path does not exist."""
    for part in path.split("/"):
        key, is_search, value = part.partition("=")
        if is_search and isinstance(document, list):
            document = next((element for element in document if str(element.get(key)) == value), None)
        else:
            document = document.get(part) if isinstance(document, Mapping) else None
    return document


def figure(value: Any) -> str:
    """Format a figure as median, minimum and maximum."""
    if isinstance(value, Mapping) and "median" in value:
        spread = f" ({value['min']:.3g} to {value['max']:.3g})" if "min" in value else ""
        return f"{value['median']:.3g}{spread}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def goals(document: dict[str, Any] | None, rows: Sequence[Row]) -> str:
    """Render each row's figure and whether it meets its goal."""
    figures = [(row, follow(document, row.path)) for row in rows]
    return table(
        ("what", "goal", "measured", "holds"),
        (
            (
                row.what,
                str(row.goal),
                OWED if value is None else figure(value),
                "" if value is None else row.goal.holds(value),
            )
            for row, value in figures
        ),
    )


def provenance_of(document: dict[str, Any]) -> str:
    """Describe machine, date and command of a document."""
    machine, model = document.get("hardware", {}), document.get("model", {})
    load = machine.get("load_average_at_start", [None])[0]
    threads = machine.get("torch_threads")
    parts = [
        document.get("date", "")[:10],
        machine["gpu"]["name"] if machine.get("gpu") else machine.get("cpu"),
        None if threads is None else f"{threads} thread{'s' * (threads > 1)}",
        None if load is None else f"load {load:g} at start",
        " ".join(str(model[key]) for key in ("id", "dtype") if key in model),
    ]
    about = ", ".join(part for part in parts if part)
    return f"{about}{': ' if about else ''}`{document.get('command', '')}` ([JSON](results/{document['file']})).\n"


def cost_curve(document: dict[str, Any]) -> str:
    """Render the cost of a call by rows."""
    points = document["cost_curve"]["points"]
    return table(
        ("rows", *(str(point["rows"]) for point in points)),
        [
            ("ms a row", *(figure(point["ms_per_row"]) for point in points)),
            ("share of peak", *(figure(point["share_of_peak"]) for point in points)),
        ],
    )


def unet(document: dict[str, Any]) -> str:
    """Return a table of milliseconds a row and relative errors, by arm and rows."""
    points = document["points"]
    names = dict.fromkeys(name for point in points for name in (*point["arms"], *point["left_out"]))

    def cells(name: str) -> Iterator[str]:
        for point in points:
            arm = point["arms"].get(name)
            yield f"{figure(arm['row_ms'])}, error {arm['relative_error']:.1g}" if arm else "left out"

    rows = [(name.replace("ours", "diffserve"), *cells(name)) for name in names]
    return table(("ms a row, error against float32", *(f"{point['rows']} rows" for point in points)), rows)


def ladder(document: dict[str, Any]) -> str:
    """Return a table of images per second by rung and arm."""
    names = dict.fromkeys(name for rung in document["ladder"] for name in rung["images_per_s"])
    rows = [
        (rung["rung"], *(figure(rung["images_per_s"].get(name, "")) for name in names)) for rung in document["ladder"]
    ]
    return table(("images/s", *names), rows)


def goodput(document: dict[str, Any]) -> str:
    """Return a table of goodput, p50 and p99 by load and arm."""
    rows = [
        (figure(point["load"]), name, *(figure(arm[key]) for key in ("requests", "goodput", "p50_s", "p99_s")))
        for point in document["points"]
        for name, arm in point["arms"].items()
    ]
    return table(("load", "arm", "requests", "goodput", "p50, s", "p99, s"), rows)


def simulated(document: dict[str, Any]) -> str:
    """Return a table that compares the engine's figures with those of the simulator, by load."""
    names = ("p50_s", "p99_s", "goodput")
    rows = [
        (
            figure(point["load"]),
            str(point["measured"]["requests"]),
            *(f"{figure(point['measured'][name])}, {figure(point['simulated'][name])}" for name in names),
            "yes" if all(abs(point["relative_error"][name] or 0.0) <= NEAR for name in names) else "no",
        )
        for point in document["points"]
    ]
    heads = ("p50, s: engine, simulator", "p99, s", "goodput")
    return table(("load", "requests", *heads, f"within {NEAR:.0%}"), rows)


def processes(document: dict[str, Any]) -> str:
    """Return a table of throughput and latency of both arms."""
    names = ("one", "many")
    rows = [
        (what, *(figure(document[key][name]) for name in names), figure(document["many_over_one"][key]))
        for what, key in (("pictures/s", "pictures_per_s"), ("one picture alone, s", "alone_s"))
    ]
    return table(("", *names, "many over one"), rows)


class Design(NamedTuple):
    """A section: the ``benchmark`` whose document it shows, the ``command`` that makes it, the ``rows`` with goals.

    note  what the section does not show, and where that is
    """

    title: str
    benchmark: str
    command: str
    rows: tuple[Row, ...] = ()
    shown: Callable[[dict[str, Any]], str] | None = None
    note: str = ""


DESIGNS: Final = (
    Design("D1 Cost of a UNet call by rows", "engine", "bench_engine.py", shown=cost_curve),
    Design(
        "D7 The UNet step against CPU peers",
        "unet",
        "bench_unet.py",
        tuple(
            Row(
                f"diffserve over {peer}, {rows} row{'s' * (rows > 1)}",
                Goal("at most", limit),
                f"points/rows={rows}/arms/{arm}/ours_over_it",
            )
            for peer, arm, goals in (
                ("eager torch", "torch", {2: 1 / 1.6, 16: 1 / 1.25}),
                ("OpenVINO bf16", "openvino-bf16", dict.fromkeys((1, 2, 4, 8, 16), 1.0)),
            )
            for rows, limit in goals.items()
        ),
        unet,
    ),
    Design(
        "D2, D4 Saturated throughput: everything the same, and everything mixed",
        "engine",
        "bench_engine.py --rungs same,+guidance --divisor 3 --serial-copies 1",
        (
            Row(
                "over diffusers behind a lock, mixed", Goal("at least", 3.0), "ladder/rung=+guidance/engine_over_serial"
            ),
            Row(
                "over the same, compiled, mixed",
                Goal("at least", 1.8),
                "ladder/rung=+guidance/engine_over_serial-compiled",
            ),
            Row(
                "over a same-size static batch, mixed",
                Goal("at least", 1.0),
                "ladder/rung=+guidance/engine_over_static",
            ),
            Row("over a same-size static batch, same", Goal("at least", 1.0), "ladder/rung=same/engine_over_static"),
        ),
        ladder,
    ),
    Design(
        "What the promise of bytes costs, SD 1.5's size at 256 px",
        "deterministic",
        "bench_deterministic.py",
        (
            Row("seconds over the free mode", Goal("at most", 1.15), "found/deterministic_over_free"),
            Row("seconds over diffusers", Goal("at most", 1.15), "found/deterministic_over_diffusers"),
        ),
    ),
    Design(
        "D3 Goodput, open loop, SLO 3 times alone",
        "goodput",
        "bench_goodput.py --minutes 6",
        (
            Row("over serial, load 0.95", Goal("at least", 2.0), "points/load=0.95/ours_over/serial/goodput"),
            Row("over same-key, load 0.95", Goal("at least", 1.3), "points/load=0.95/ours_over/same-key/goodput"),
            Row("mean latency over serial, load 0.3", Goal("at most", 1.03), "points/load=0.3/ours_over/serial/mean_s"),
        ),
        goodput,
    ),
    Design(
        "The simulator against painted traces, at shares of busy time",
        "simulator",
        "validate_simulator.py --loads 0.3,0.7,0.95 --requests 400",
        shown=simulated,
    ),
    Design(
        "Latency of one key while another key asks for ten times the capacity",
        "fairness",
        "bench_fairness.py",
        (Row("p95 over the quiet one", Goal("at most", 2.0), "p95_ratio"),),
    ),
    Design(
        "What the server itself takes",
        "overhead",
        "bench_overhead.py",
        (
            Row("own time of a picture of 64 px, ms", Goal("at most", 5.0), "request_ms/64x64/whole"),
            Row("its memory, with the page, bytes", Goal("at most", 200e6), "memory/page/after_100_pictures_bytes"),
            Row("a step with 1,000 idle readers, over one without", Goal("at most", 1.1), "readers/ratio"),
        ),
    ),
    Design(
        "Eight rows with eight reference images (IP-Adapter plus, random weights)",
        "references",
        "bench_references.py",
        (
            Row("UNet calls over plain ones, CPU time", Goal("at most", 1.3), "call/references_over_plain_cpu_time"),
            Row("engine over plain rows, wall time", Goal("at most", 1.3), "references_over_plain"),
        ),
    ),
    Design("Engines of one thread", "processes", "bench_processes.py", shown=processes),
    Design(
        "D5 Prompt rewriting",
        "rewriter",
        "bench_rewriter.py",
        (
            Row(
                "tokens/s over generate_batch, 8 users",
                Goal("at least", 2.0),
                "crowd/over_generate_batch_by_s/engine/median_of_pairs",
            ),
            Row(
                "first token, warm over cold, 8 users",
                Goal("at most", 0.25),
                "first/8 at once/warm_over_cold_by_s/median_of_pairs",
            ),
            Row(
                "first token, warm over cold, one user",
                Goal("at most", 0.25),
                "first/alone/warm_over_cold_by_s/median_of_pairs",
            ),
            Row(
                "prompt lookup, one user",
                Goal("at least", 1.3),
                "lookup/as the rewriter asks/speedup_by_s/median_of_pairs",
            ),
        ),
    ),
    Design(
        "D6 Pictures and rewrites together",
        "colocation",
        "bench_colocation.py",
        (
            Row(
                "median time of a token over alone, 8 rewrites",
                Goal("at most", 3.0),
                "points/rewrites=8/token_p50_ratio",
            ),
            Row("UNet rows kept, 8 rewrites", Goal("at least", 0.7), "points/rewrites=8/unet_rows_kept"),
        ),
    ),
    Design(
        "D8 Memory after thousands of requests",
        "memory",
        "bench_memory.py",
        (
            Row("engine, MB for 1000 requests", Goal("at most", 1.0), "found/engine/mb_per_1000"),
            Row("front door, MB for 1000 requests", Goal("at most", 1.0), "found/server/mb_per_1000"),
        ),
    ),
    Design(
        "D8 Memory by number of clients",
        "concurrency",
        "bench_concurrency.py",
        (
            Row(
                "engine's highest mark, most clients over one",
                Goal("at most", 1.5),
                "engine_most_clients_over_fewest",
            ),
        ),
        note="The peak of a device's memory is among the points of `gpu_suite.py`.",
    ),
)


def exactness(documents: Documents) -> str:
    """Render the exactness results (D9) of all documents."""
    rows = []
    if result := follow(documents.get("engine"), "exactness"):
        rows.append(("engine", "bytes as painted alone", f"{result['bytes_equal_to_solo_run']} of {result['images']}"))
        error = f"{result['max_latent_error_against_diffusers']:.2g}, spread {result['latent_std']:.2g}"
        rows.append(("engine", "largest error of a latent against diffusers", error))
    for point in follow(documents.get("goodput"), "points") or ():
        name = f"goodput, load {point['load']:g}"
        rows.append((name, "the same bytes under every policy", point["pictures_equal_in_all_arms"]))
        rows.append((name, "bytes as painted alone, a sample", point["sample_equal_alone"]))
    for name, equal in (follow(documents.get("processes"), "pictures_equal_in_all_rounds") or {}).items():
        rows.append((f"processes, {name}", "the same bytes by whichever engine", equal))
    if equal := follow(documents.get("rewriter"), "crowd/equal_answers"):
        rows.append(("rewriter", "greedy answers as generate_batch gives", equal))
    return table(("of", "what", "found"), rows) if rows else f"{OWED}\n"


def gpu(runs: Sequence[dict[str, Any]]) -> str:
    """Render each GPU goal as measured by every run of the suite, the outcome of the rows, and notes."""
    parts = []
    for number, run in enumerate(runs, start=1):
        parts.append(f"Run {number}: {provenance_of(run)}" + (f"{sentence(run['note'])}\n" if run.get("note") else ""))
    if not runs:
        parts.append("No GPU has been measured, so all are owed: `python benchmarks/gpu_suite.py`, nine minutes.\n")
    columns = [gpu_goals(run) for run in runs] or [gpu_goals({"rows": {}})]
    rows = []
    for goals_of_runs in zip(*columns, strict=True):
        goal = goals_of_runs[0]
        measured = [each for each in goals_of_runs if each.measured is not None]
        rows.append(
            (
                goal.name,
                f"at {'least' if goal.at_least else 'most'} {goal.target:g}",
                *(OWED if each.measured is None else f"{each.measured:.4g}" for each in goals_of_runs),
                measured[-1].verdict if measured else "not measured",
            )
        )
    heads = [f"run {number}" for number in range(1, len(runs) + 1)] or ["measured"]
    parts.append(table(("what", "goal", *heads, "verdict"), rows))
    if runs:
        names = dict.fromkeys(name for run in runs for name in run["rows"])
        ended = [(name, *(_ended(run["rows"].get(name)) for run in runs)) for name in names]
        parts.append(table(("row of the suite", *heads), ended))
    parts += [run["notes"] for run in runs if run["notes"]]
    return "\n".join(parts)


def sentence(text: str) -> str:
    """Format ``text`` as a sentence."""
    return f"{text[0].upper()}{text[1:]}."


def _ended(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    state = "cut" if row["state"] == "running" else row["state"]
    return f"{state}, {row['wall_s']:g} s" if "wall_s" in row else state


def page(documents: Documents, runs: Sequence[dict[str, Any]]) -> str:
    """Render the page from the newest document of each benchmark and the runs of the GPU suite."""
    parts = [INTRODUCTION]
    for design in DESIGNS:
        document = documents.get(design.benchmark)
        parts.append(f"## {design.title}\n")
        if document is None:
            parts.append(f"Owed: `python benchmarks/{design.command}`.\n")
        else:
            parts.append(provenance_of(document))
            if design.shown is not None:
                parts.append(design.shown(document))
        if design.rows:
            parts.append(goals(document, design.rows))
        if design.note:
            parts.append(f"{design.note}\n")
    parts += ["## D9 Exactness\n", exactness(documents), "## On a GPU\n", gpu(runs)]
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(newest(RESULTS), gpu_runs(RESULTS)), encoding="utf-8")
