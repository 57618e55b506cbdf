"""The last stage: put what was trained into the package, mark it, paint the sample sheets and write the model card.

The card is ``card_template.md`` with tables filled in from ``marks.json``, ``turbo-marks.json``,
``range-marks.json`` and ``times.json``, and from ``training.json``, the bills of all training so far, so no number in
it is written by hand.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from diffserve.embedded.marks import BEST_GUIDANCE, STUDENT, TEACHER, document, judged, paint_held_out
from diffserve.embedded.range_marks import document as range_document
from diffserve.embedded.samples import held_out
from diffserve.embedded.world import CAMOUFLAGED, COLORS, OBJECTS
from diffserve.engine import Engine
from diffserve.types import DiffusionParams, GenerationRequest

ROOM = Path(__file__).parent
TEMPLATE, CARD, LOG = ROOM / "card_template.md", ROOM / "MODEL_CARD.md", ROOM / "training.json"
SHEETS = ROOM.parent.parent / ".assets"
SHIPPED = {"weights": ROOM / "weights", "turbo": ROOM / "turbo", "rewriter": ROOM / "rewriter"}
WORST_SHOWN = 12
TIMED = 5
TIMED_WAYS = {
    "4 steps without guidance": STUDENT,
    "20 steps": DiffusionParams(sampler="ddim", num_steps=20, guidance_scale=BEST_GUIDANCE),
    "30 steps": TEACHER,
}


def install(work: Path) -> None:
    """Copy the exported directories of ``work`` into the package and add their bills to the log."""
    for name, place in SHIPPED.items():
        if (work / name).is_dir():
            shutil.copytree(work / name, place, dirs_exist_ok=True)
    bills = json.loads(LOG.read_text(encoding="utf-8")) if LOG.is_file() else []
    for path in sorted(work.glob("*.json")):
        bill = json.loads(path.read_text(encoding="utf-8"))
        bills = [old for old in bills if (old["stage"], old["begun"]) != (bill["stage"], bill["begun"])] + [bill]
    bills.sort(key=lambda bill: bill["begun"])
    LOG.write_text(json.dumps(bills, indent=2) + "\n", encoding="utf-8")


def measure(*, count: int = 300, range_count: int = 60) -> None:
    """Mark the shipped models with ``count`` held-out captions each (``range_count`` for every guidance scale and
    negative prompt), and paint the sheets."""
    engine = Engine.from_pretrained("embedded")
    _keep(document(engine, judged(paint_held_out(engine, count, TEACHER)), TEACHER), "marks")
    _keep(range_document(engine, range_count), "range-marks")
    paint_sheets(engine)
    _keep(painting_times(engine), "times")
    if SHIPPED["turbo"].is_dir():
        turbo = Engine.from_pretrained("embedded-turbo")
        _keep(document(turbo, judged(paint_held_out(turbo, count, STUDENT)), STUDENT), "turbo-marks")


def painting_times(engine: Engine) -> dict[str, Any]:
    """Seconds that a picture takes on its own, from request to pixels: the median of TIMED after a first one."""
    seconds = {}
    for name, how in TIMED_WAYS.items():
        taken = []
        for seed in range(TIMED + 1):
            started = time.perf_counter()
            engine.generate(GenerationRequest(prompt="a fox in the snow", seed=seed, diffusion=how))
            taken.append(time.perf_counter() - started)
        seconds[name] = round(statistics.median(taken[1:]), 3)
    return {"seconds": seconds, "device": engine.info.device, "dtype": engine.info.dtype, "cores": os.cpu_count()}


def write() -> Path:
    """Write the card from what :func:`measure` has kept."""
    teacher, ranged, times = _kept("marks"), _kept("range-marks"), _kept("times")
    tables = {
        "marks": marks_table(teacher),
        "confusions": confusion_table(teacher),
        "guidance": guidance_table(ranged),
        "negatives": negatives_table(ranged),
        "times": times_table(times),
        "machine": f"{times['cores']} cores of a {times['device']} in {times['dtype']}",
        "bills": bill_table(json.loads(LOG.read_text(encoding="utf-8"))),
        "objects": ", ".join(OBJECTS),
        "student_marks": "The student of these weights has not been trained yet.",
    }
    if SHIPPED["turbo"].is_dir():
        tables["student_marks"] = marks_table(_kept("turbo-marks"))
    text = TEMPLATE.read_text(encoding="utf-8")
    for name, table in tables.items():
        text = text.replace(f"{{{{{name}}}}}", table)
    CARD.write_text(text, encoding="utf-8")
    return CARD


def marks_table(marks: dict[str, Any]) -> str:
    """One row a category: pictures, exact, and each part."""
    rows = [["held-out captions", "pictures", "exact", "background", "objects", "relation too", "size too"]]
    for name, row in marks["marks"].items():
        parts = [f"{row[part]}" for part in ("background", "objects", "relation", "size")]
        rows.append([name, f"{row['count']}", f"{row['exact']} ({row['exact_share']:.0%})", *parts])
    return _table(rows)


def confusion_table(marks: dict[str, Any]) -> str:
    """The objects missed most often, and what was painted in their place."""
    missed = {name: row for name, row in marks["confusions"].items() if row["found"] < row["asked"]}
    worst = sorted(missed.items(), key=lambda item: item[1]["found"] / item[1]["asked"])[:WORST_SHOWN]
    rows = [["asked for", "found", "instead"]]
    for name, row in worst:
        instead = ", ".join(f"{other} ({times})" for other, times in row["instead"].items())
        rows.append([name, f"{row['found']} of {row['asked']}", instead])
    return _table(rows)


def guidance_table(ranged: dict[str, Any]) -> str:
    """Exact matches by guidance scale."""
    marks = ranged["guidance"]
    shares = [f"{exact / ranged['count']:.0%}" for exact in marks.values()]
    return _table([["guidance scale", *marks], [f"exact, of {ranged['count']}", *shares]])


def negatives_table(ranged: dict[str, Any]) -> str:
    """What naming an unasked background or object in the negative prompt does."""
    rows = [["the negative prompt names", "pictures", "it is gone", "and the rest is as asked"]]
    for name in ("background", "objects"):
        row = ranged[f"{name}_kept_away"]
        words = "the background that came unasked" if name == "background" else "an object that came unasked"
        rows.append([words, f"{row['count']}", f"{row['avoided']}", f"{row['right']}"])
    return _table(rows)


def bill_table(bills: Iterable[dict[str, Any]]) -> str:
    """What each leg of the training took."""
    parts = ("stage", "begun", "iterations_done", "batch_size", "learning_rate", "device")
    rows = [["stage", "begun", "iterations", "batch", "learning rate", "device", "hours", "10^15 operations"]]
    for bill in bills:
        told = [f"{bill[part]}" for part in parts]
        rows.append([*told, f"{bill['seconds'] / 3600:.2f}", f"{bill['flops'] / 1e15:.2f}"])
    return _table(rows)


def times_table(times: dict[str, Any]) -> str:
    """Seconds a picture, each painted on its own."""
    return _table([["one picture on its own", *times["seconds"]], ["seconds", *map(str, times["seconds"].values())]])


def _table(rows: list[list[str]]) -> str:
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])


def paint_sheets(engine: Engine) -> list[Path]:
    """Sample sheets as WebP: held-out captions, every object once, and the two other canvases."""
    captions = [words for _, words in held_out(32)]
    singles = [_plain_prompt(name, index) for index, name in enumerate(OBJECTS)]
    return [
        _sheet(engine, captions, 8, SHEETS / "embedded-held-out.webp"),
        _sheet(engine, singles, 12, SHEETS / "embedded-objects.webp"),
        _sheet(engine, captions[:8], 8, SHEETS / "embedded-tall.webp", (128, 192)),
        _sheet(engine, captions[8:14], 6, SHEETS / "embedded-wide.webp", (192, 128)),
    ]


def _plain_prompt(name: str, index: int) -> str:
    colors = [ground for ground in COLORS if (name, ground) not in CAMOUFLAGED]
    return f"a {name} on a {colors[index * 5 % len(colors)]} background"


def _sheet(engine: Engine, prompts: list[str], columns: int, path: Path, size: tuple[int, int] = (128, 128)) -> Path:
    width, height = size
    requests = [
        GenerationRequest(prompt=words, seed=index, width_px=width, height_px=height, diffusion=TEACHER)
        for index, words in enumerate(prompts)
    ]
    pictures = [result.pixels for result in engine.generate(requests)]
    rows = [np.concatenate(pictures[i : i + columns], axis=1) for i in range(0, len(pictures), columns)]
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.concatenate(rows)).save(path, quality=90, method=6)
    return path


def _keep(marks: dict[str, Any], name: str) -> None:
    (ROOM / f"{name}.json").write_text(json.dumps(marks, indent=2) + "\n", encoding="utf-8")


def _kept(name: str) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads((ROOM / f"{name}.json").read_text(encoding="utf-8"))
    return kept
