"""The card stage: install the trained weights, evaluate them, generate the sample sheets and write the model card.

The card is ``card_template.md`` with tables filled in from the documents of ``eval/results`` and from
``training.json``, the time and operations of all training stages.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from diffserve.api.errors import ConfigError
from diffserve.engine import Engine
from diffserve.models.upscalers import EMBEDDED_UPSCALER, OWN_UPSCALERS
from diffserve.runtime.loading.checkpoint import write_manifest
from diffserve.runtime.model import OWN_LORAS
from diffserve.training.adapters import LESSONS
from diffserve.training.eval import adapters, captions, parts, ranges, upscaler
from diffserve.training.eval.captions import DISTILLED, paint
from diffserve.training.samples import sheet
from diffserve.world.captions import held_out
from diffserve.world.checker import EDITION
from diffserve.world.scenes import CAMOUFLAGED, COLORS, OBJECTS

HERE = Path(__file__).parent
ROOM = HERE.parent / "embedded"
TEMPLATE, CARD = HERE / "card_template.md", ROOM / "MODEL_CARD.md"
RESULTS = HERE / "eval" / "results"
SHEETS = HERE.parent.parent / ".assets"
SHIPPED = {
    "weights": ROOM / "weights",
    "turbo": ROOM / "turbo",
    "rewriter": ROOM / "rewriter",
    OWN_LORAS: ROOM / "weights" / OWN_LORAS,
    OWN_UPSCALERS: ROOM / "weights" / OWN_UPSCALERS,
}
UPSCALER = SHIPPED[OWN_UPSCALERS] / f"{EMBEDDED_UPSCALER}.safetensors"
STAGES = ("vae", "denoiser", "finish", "tune", "preview", "distill", "upscaler", "rewriter", *LESSONS)
BILL_COLUMNS = ("stage", "begun", "iterations_done", "batch_size", "learning_rate", "device")
BILLED = (*BILL_COLUMNS, "seconds", "flops")
WORST_SHOWN = 12


def install(work: Path) -> None:
    """Copy the exported models of ``work`` into the package and add the bills of their stages to ``training.json``.

    Raises:
        ConfigError: ``work`` has no model or a bill lacks a field; nothing is changed then.
    """
    trained = {name: place for name, place in SHIPPED.items() if (work / name).is_dir()}
    if not trained:
        raise ConfigError(f"nothing was trained in {work}: it has none of {', '.join(SHIPPED)}.")
    new = [_bill(path) for stage in STAGES if (path := work / f"{stage}.json").is_file()]
    for name, place in trained.items():
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(work / name, place)
    for place in filter(Path.is_dir, SHIPPED.values()):  # the LoRA directory is inside the weights directory
        write_manifest(place)
    log = ROOM / "training.json"
    bills = {(bill["stage"], bill["begun"]): bill for bill in [*_read(log), *new]}
    _write(sorted(bills.values(), key=lambda bill: bill["begun"]), log)


def _bill(path: Path) -> dict[str, Any]:
    bill: dict[str, Any] = _read(path)
    if missing := set(BILLED) - set(bill):
        raise ConfigError(f"{path} is no bill of a training stage: it lacks {', '.join(sorted(missing))}.")
    return bill


def measure(*, count: int = 300, range_count: int = 60) -> None:
    """Evaluate the shipped models on held-out captions and generate the sample sheets.

    Args:
        count: captions for each model.
        range_count: captions for each guidance scale, canvas and negative prompt.
    """
    engine = Engine.from_pretrained("embedded")
    _write(captions.evaluate(engine, count), RESULTS / "captions.json")
    _write(ranges.evaluate(engine, range_count), RESULTS / "ranges.json")
    paint_sheets(engine)
    _write(adapters.evaluate(engine), RESULTS / "adapters.json")
    _write(parts.evaluate(engine), RESULTS / "parts.json")
    _write(upscaler.evaluate(UPSCALER, engine), RESULTS / "upscaler.json")
    if SHIPPED["turbo"].is_dir():
        turbo = Engine.from_pretrained("embedded-turbo")
        _write(captions.evaluate(turbo, count, DISTILLED), RESULTS / "turbo-captions.json")


def write() -> Path:
    """Write the card from the results of :func:`measure`."""
    teacher, ranged, part = (_read(RESULTS / f"{name}.json") for name in ("captions", "ranges", "parts"))
    turbo = _read(RESULTS / "turbo-captions.json") if SHIPPED["turbo"].is_dir() else None
    tables = {
        "scores": score_table(teacher),
        "confusions": confusion_table(teacher),
        "guidance": guidance_table(ranged),
        "negatives": negatives_table(ranged),
        "canvases": canvases_sentence(ranged),
        "round_trip": f"{part['round_trip_db']:.1f} dB",
        "preview": preview_sentence(part["preview"]),
        "checker": f"{part['checker_ms']:.0f} ms",
        "edition": edition_sentence(teacher, ranged, turbo or teacher),
        "times": _table([["one picture on its own", *part["seconds"]], ["seconds", *part["seconds"].values()]]),
        "machine": f"{part['cores']} cores of a {part['device']} in {part['dtype']}",
        "bills": bill_table(_read(ROOM / "training.json")),
        "objects": ", ".join(OBJECTS),
        "upscaler_scores": upscaler_table(_read(RESULTS / "upscaler.json")),
        "adapters": adapters_sentence(_read(RESULTS / "adapters.json")),
        "turbo_scores": score_table(turbo) if turbo else "No model has been distilled from these weights yet.",
    }
    text = TEMPLATE.read_text(encoding="utf-8")
    for name, table in tables.items():
        text = text.replace(f"{{{{{name}}}}}", table)
    CARD.write_text(text, encoding="utf-8")
    return CARD


def score_table(evaluated: dict[str, Any]) -> str:
    """Format the scores as a table, one row per category."""
    rows = [["held-out captions", "pictures", "exact", "background", "objects", "relation too", "size too"]]
    for name, row in evaluated["scores"].items():
        shares = [row[part] for part in ("background", "objects", "relation", "size")]
        rows.append([name, row["count"], f"{row['exact']} ({row['exact_share']:.0%})", *shares])
    return _table(rows)


def confusion_table(evaluated: dict[str, Any]) -> str:
    """Format the most frequently missing objects, and what was generated instead, as a table."""
    missed = {name: row for name, row in evaluated["confusions"].items() if row["recognized"] < row["requested"]}
    worst = sorted(missed.items(), key=lambda item: item[1]["recognized"] / item[1]["requested"])[:WORST_SHOWN]
    rows = [["asked for", "found", "instead"]]
    for name, row in worst:
        instead = ", ".join(f"{other} ({times})" for other, times in row["instead"].items())
        rows.append([name, f"{row['recognized']} of {row['requested']}", instead])
    return _table(rows)


def guidance_table(ranged: dict[str, Any]) -> str:
    """Format the exact matches by guidance scale as a table."""
    shares = [f"{exact / ranged['count']:.0%}" for exact in ranged["guidance"].values()]
    return _table([["guidance scale", *ranged["guidance"]], [f"exact, of {ranged['count']}", *shares]])


def negatives_table(ranged: dict[str, Any]) -> str:
    """Format the effect of negative prompts that name an unrequested background or object as a table."""
    rows = [["the negative prompt names", "pictures", "it is gone", "and the rest is as asked"]]
    for name, words in (("background", "the background"), ("objects", "an object")):
        row = ranged[f"{name}_kept_away"]
        rows.append([f"{words} that came unasked", row["count"], row["avoided"], row["right"]])
    return _table(rows)


def canvases_sentence(ranged: dict[str, Any]) -> str:
    """Describe the exact matches on the other canvases."""
    counts = [f"{exact} at {size}" for size, exact in ranged["canvases"].items()]
    return f"Of the first {ranged['count']} held-out captions it paints {' and '.join(counts)} exactly."


def edition_sentence(*evaluated: dict[str, Any]) -> str:
    """Return a warning if any result was read by an older edition of the checker, else an empty string."""
    if all(document.get("checker") == EDITION for document in evaluated):
        return ""
    return (
        " **It has been tightened since these pictures were read: smeared faces that it passed then it refuses now, "
        "and scores taken anew will be lower.**"
    )


def bill_table(bills: Iterable[dict[str, Any]]) -> str:
    """Format the time and operations of each training stage as a table."""
    rows = [["stage", "begun", "iterations", "batch", "learning rate", "device", "hours", "10^15 operations"]]
    for bill in bills:
        cells = [bill[part] for part in BILL_COLUMNS]
        rows.append([*cells, f"{bill['seconds'] / 3600:.2f}", f"{bill['flops'] / 1e15:.2f}"])
    return _table(rows)


def preview_sentence(preview: dict[str, Any] | None) -> str:
    """Describe the cost and the fidelity of the preview decoder."""
    if preview is None:
        return "These weights have no preview decoder yet."
    cheaper, fidelity = f"{preview['times_cheaper']:.0f}", f"{preview['psnr_db']:.1f} dB"
    return f"A preview takes {cheaper} times fewer operations than a decode, and comes to {fidelity} PSNR against it."


def upscaler_table(evaluated: dict[str, Any]) -> str:
    """Format the PSNR of the upscaler and of two filters against the truth, and the paired gain, as a table."""
    rows = [["input at 128 px", "upscaler", "Lanczos", "bicubic", "gain over Lanczos (95 % interval)", "scenes worse"]]
    for kind, row in evaluated["inputs"].items():
        low, high = row["gain_interval_db"]
        scores = [f"{row[f'{name}_db']:.2f} dB" for name in ("upscaler", "lanczos", "bicubic")]
        gain = f"{row['gain_db']:.2f} dB ({low:.2f} to {high:.2f})"
        rows.append([kind, *scores, gain, f"{row['worse_than_lanczos']} of {evaluated['count']}"])
    return _table(rows)


def adapters_sentence(evaluated: dict[str, Any]) -> str:
    """Describe the scores of the shipped adapters."""
    alone, mixed, drawn = (evaluated[part] for part in ("gift_alone", "gift_among_others", "sepia"))
    return (
        f"Of {alone['count']} pictures of a gift, on every background but red, the checker, told of gifts, reads "
        f"{alone['read']} as that and nothing else, and {alone['exact']} are exact, bow and all; of {mixed['count']} "
        f"held-out ones of gifts among others {mixed['read']} and {mixed['exact']}. With sepia "
        f"{drawn['nearer_to_sepia']} of {drawn['count']} pictures are nearer to an old photograph of the same seed's "
        f"picture than to that picture (mean colour errors {drawn['error_to_sepia']:.2f} and "
        f"{drawn['error_to_plain']:.2f})."
    )


def _table(rows: list[list[Any]]) -> str:
    head, *body = (f"| {' | '.join(map(str, row))} |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])


def paint_sheets(engine: Engine) -> list[Path]:
    """Write the sample sheets as WebP: held-out captions, every object once, and the two other canvases."""
    prompts = [words for _, words in held_out(32)]
    singles = [_plain_prompt(name, index) for index, name in enumerate(OBJECTS)]
    return [
        _sheet(engine, prompts, 8, "held-out"),
        _sheet(engine, singles, 12, "objects"),
        _sheet(engine, prompts[:8], 8, "tall", (128, 192)),
        _sheet(engine, prompts[8:14], 6, "wide", (192, 128)),
    ]


def _plain_prompt(name: str, index: int) -> str:
    colors = [ground for ground in COLORS if (name, ground) not in CAMOUFLAGED]
    return f"a {name} on a {colors[index * 5 % len(colors)]} background"


def _sheet(engine: Engine, prompts: list[str], columns: int, name: str, size: tuple[int, int] = (128, 128)) -> Path:
    return sheet(paint(engine, prompts, size=size), columns, SHEETS / f"embedded-{name}.webp", quality=90, method=6)


def _write(document: object, path: Path) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
