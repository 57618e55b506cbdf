"""The last stage: put what was trained into the package, mark it, paint the sample sheets and write the model card.

The card is ``card_template.md`` with tables filled in from ``marks.json``, ``turbo-marks.json``, ``range-marks.json``
and ``part-marks.json``, and from ``training.json``, the bills of all training so far.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from diffserve.embedded.marks import STUDENT, TEACHER, document, judged, paint_held_out
from diffserve.embedded.part_marks import document as part_document
from diffserve.embedded.range_marks import document as range_document
from diffserve.embedded.samples import held_out
from diffserve.engine import Engine
from diffserve.errors import ConfigError
from diffserve.runtime.loading.manifest import write_manifest
from diffserve.types import GenerationRequest
from diffserve.world.checker import EDITION
from diffserve.world.scenes import CAMOUFLAGED, COLORS, OBJECTS

ROOM = Path(__file__).parent
TEMPLATE, CARD = ROOM / "card_template.md", ROOM / "MODEL_CARD.md"
SHEETS = ROOM.parent.parent / ".assets"
SHIPPED = {"weights": ROOM / "weights", "turbo": ROOM / "turbo", "rewriter": ROOM / "rewriter"}
STAGES = ("vae", "denoiser", "finish", "tune", "preview", "student", "rewriter")
TOLD = ("stage", "begun", "iterations_done", "batch_size", "learning_rate", "device")
BILLED = (*TOLD, "seconds", "flops")
WORST_SHOWN = 12


def install(work: Path) -> None:
    """Put the exported models of ``work`` in the place of the package's, and their stages' bills into the log.

    Raises ConfigError, with nothing changed, where ``work`` has no model or a bill is none.
    """
    made = {name: place for name, place in SHIPPED.items() if (work / name).is_dir()}
    if not made:
        raise ConfigError(f"nothing was trained in {work}: it has none of {', '.join(SHIPPED)}.")
    new = [_bill(path) for stage in STAGES if (path := work / f"{stage}.json").is_file()]
    for name, place in made.items():
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(work / name, place)
        write_manifest(place)
    bills = {(bill["stage"], bill["begun"]): bill for bill in [*_kept("training"), *new]}
    _keep(sorted(bills.values(), key=lambda bill: bill["begun"]), "training")


def _bill(path: Path) -> dict[str, Any]:
    bill: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if missing := set(BILLED) - set(bill):
        raise ConfigError(f"{path} is no bill of a training stage: it lacks {', '.join(sorted(missing))}.")
    return bill


def measure(*, count: int = 300, range_count: int = 60) -> None:
    """Mark the shipped models with ``count`` held-out captions each (``range_count`` for every guidance scale and
    negative prompt), and paint the sheets."""
    engine = Engine.from_pretrained("embedded")
    _keep(document(engine, judged(paint_held_out(engine, count, TEACHER)), TEACHER), "marks")
    _keep(range_document(engine, range_count), "range-marks")
    paint_sheets(engine)
    _keep(part_document(engine), "part-marks")
    if SHIPPED["turbo"].is_dir():
        turbo = Engine.from_pretrained("embedded-turbo")
        _keep(document(turbo, judged(paint_held_out(turbo, count, STUDENT)), STUDENT), "turbo-marks")


def write() -> Path:
    """Write the card from what :func:`measure` has kept."""
    teacher, ranged, parts = _kept("marks"), _kept("range-marks"), _kept("part-marks")
    tables = {
        "marks": marks_table(teacher),
        "confusions": confusion_table(teacher),
        "guidance": guidance_table(ranged),
        "negatives": negatives_table(ranged),
        "canvases": canvases_sentence(ranged),
        "round_trip": f"{parts['round_trip_db']:.1f} dB",
        "preview": preview_sentence(parts["preview"]),
        "checker": f"{parts['checker_ms']:.0f} ms",
        "edition": edition_sentence(teacher, ranged, _kept("turbo-marks") if SHIPPED["turbo"].is_dir() else teacher),
        "times": times_table(parts["seconds"]),
        "machine": f"{parts['cores']} cores of a {parts['device']} in {parts['dtype']}",
        "bills": bill_table(_kept("training")),
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


def canvases_sentence(ranged: dict[str, Any]) -> str:
    """Exact matches on the other canvases."""
    told = [f"{exact} at {size}" for size, exact in ranged["canvases"].items()]
    return f"Of the first {ranged['count']} held-out captions it paints {' and '.join(told)} exactly."


def edition_sentence(*marks: dict[str, Any]) -> str:
    """Nothing where all marks were read by the checker as it is, else a warning."""
    if all(one.get("checker") == EDITION for one in marks):
        return ""
    return (
        " **It has been tightened since these marks were taken: smeared faces that it passed then it refuses now, and "
        "marks taken anew will be lower.**"
    )


def bill_table(bills: Iterable[dict[str, Any]]) -> str:
    """What each leg of the training took."""
    rows = [["stage", "begun", "iterations", "batch", "learning rate", "device", "hours", "10^15 operations"]]
    for bill in bills:
        told = [f"{bill[part]}" for part in TOLD]
        rows.append([*told, f"{bill['seconds'] / 3600:.2f}", f"{bill['flops'] / 1e15:.2f}"])
    return _table(rows)


def times_table(seconds: dict[str, float]) -> str:
    """Seconds a picture, each painted on its own."""
    return _table([["one picture on its own", *seconds], ["seconds", *map(str, seconds.values())]])


def preview_sentence(marks: dict[str, Any] | None) -> str:
    """What the preview decoder costs and how close it comes."""
    if marks is None:
        return "These weights have no preview decoder yet."
    cheaper, fidelity = f"{marks['times_cheaper']:.0f}", f"{marks['psnr_db']:.1f} dB"
    return f"A preview takes {cheaper} times fewer operations than a decode, and comes to {fidelity} PSNR against it."


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


def _keep(marks: object, name: str) -> None:
    (ROOM / f"{name}.json").write_text(json.dumps(marks, indent=2) + "\n", encoding="utf-8")


def _kept(name: str) -> Any:
    return json.loads((ROOM / f"{name}.json").read_text(encoding="utf-8"))
