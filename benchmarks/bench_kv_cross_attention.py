"""Cost and savings of keeping the UNet's cross-attention keys and values in pages, against diffusers' own attention.

    python benchmarks/bench_kv_cross_attention.py --model embedded
    python benchmarks/bench_kv_cross_attention.py --model sd15-random --device cuda --dtype float16 --rows 2,8

Four measurements. A UNet step: the same rows with embeddings (plain) and with keys and values gathered from pages
(paged), in alternating order. Gathering: paid once for as long as the same rows run together. Texts of one and of two
windows: in one call behind a mask, or in two calls. A prompt: encoding it, plain and paged, when it is new, when its
prefix is cached, and when it is fully cached. Progress goes to stderr, one JSON document to stdout and to results/.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from benchmarks.cost_curve import seconds_of_call
from benchmarks.random_models import NAMES, save_random_model
from benchmarks.report import RESULTS, head, write
from diffserve.runtime import DiffusionModel, choose_device, load_model
from diffserve.runtime.kv import PagePlan
from diffserve.runtime.text.conditioning import (
    AnyConditioning,
    Conditioner,
    ConditioningRow,
    PagedConditioner,
    image_specs,
    make_conditioner,
)
from diffserve.runtime.unet.cross_attention import Contexts
from diffserve.runtime.unet.random_rows import random_inputs
from diffserve.settings.config import EngineConfig

START = "a fox next to a cactus on the beach at night with two apples"
"""With the start mark at least one logical page of tokens."""
Arms = dict[str, Callable[[], object]]


def say(text: str) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def open_model(name: str, device: str, dtype: str) -> DiffusionModel:
    """Load "embedded", a model of random weights, or a diffusers directory."""
    if name not in NAMES:
        return load_model(name, device=device, dtype=dtype)
    with tempfile.TemporaryDirectory() as scratch:
        say(f"making {name}")
        directory = save_random_model(name, Path(scratch), dtype=choose_device(device, dtype).compute_dtype)
        return load_model(directory, device=device, dtype=dtype)


def in_turn(arms: Arms, rounds: int) -> dict[str, list[float]]:
    """Measure the seconds of each arm, ``rounds`` times in alternating order, after one warm-up call of each."""
    for call in arms.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for index in range(rounds):
        for name in arms if index % 2 == 0 else reversed(arms):
            seconds[name].append(seconds_of_call(arms[name]))
    return seconds


def milliseconds(seconds: list[float]) -> dict[str, float]:
    """Return median, minimum and maximum in milliseconds."""
    return {
        "median": round(1e3 * statistics.median(seconds), 3),
        "min": round(1e3 * min(seconds), 3),
        "max": round(1e3 * max(seconds), 3),
    }


def ratio(seconds: dict[str, list[float]], numerator: str, denominator: str) -> dict[str, float]:
    """Compute the ratio of two arms: of the medians, of the minima, and the median over neighboring pairs."""
    mine, other = seconds[numerator], seconds[denominator]
    return {
        "of_medians": round(statistics.median(mine) / statistics.median(other), 4),
        "of_least": round(min(mine) / min(other), 4),
        "median_of_pairs": round(statistics.median(a / b for a, b in zip(mine, other, strict=True)), 4),
    }


def unet_steps(model: DiffusionModel, ways: dict[str, Conditioner], rows: int, rounds: int) -> dict[str, Any]:
    """Measure one UNet call of ``rows`` equal rows at the native size, plain and paged."""
    width_px, height_px = model.info.good_sizes[0]
    inputs = random_inputs(model, (height_px, width_px, model.text.window_tokens), rows)
    embeddings = inputs.pop("contexts")
    contexts_by_way = {name: way.of_embeddings(embeddings) for name, way in ways.items()}

    def step(name: str) -> Tensor:
        return model.unet.predict(contexts=contexts_by_way[name], **inputs).cpu()

    seconds = in_turn({name: partial(step, name) for name in ways}, rounds)
    point = {
        "rows": rows,
        "ms": {name: milliseconds(times) for name, times in seconds.items()},
        "paged_over_plain": ratio(seconds, "paged", "plain"),
        "max_difference": float((step("paged") - step("plain")).abs().max()),
    }
    say(f"{rows:3} rows {point['ms']} paged/plain {point['paged_over_plain']}")
    return point


def gathering(model: DiffusionModel, ways: dict[str, Conditioner], rows: int, rounds: int) -> dict[str, Any]:
    """Measure stacking the conditioning of ``rows`` different prompts, once per set of rows that runs together."""
    size: dict[str, Any] = dict(zip(("width_px", "height_px"), model.info.good_sizes[0], strict=True))
    arms: Arms = {}
    open_conditionings: list[AnyConditioning] = []
    for name, way in ways.items():
        conditionings = [way.condition(f"{number} {START}", None, **size) for number in range(rows)]
        arms[name] = partial(way.contexts, [ConditioningRow(conditioning, False) for conditioning in conditionings])
        open_conditionings += conditionings
    seconds = in_turn(arms, rounds)
    for conditioning in open_conditionings:
        conditioning.close()
    point = {"rows": rows, "ms": {name: milliseconds(times) for name, times in seconds.items()}}
    say(f"gathering {point}")
    return point


def lengths(model: DiffusionModel, way: PagedConditioner, rows: int, rounds: int) -> dict[str, Any]:
    """Compare ``rows`` rows of one window and as many of two: in one masked call, and in one call per length."""
    width_px, height_px = model.info.good_sizes[0]
    size: dict[str, Any] = {"width_px": width_px, "height_px": height_px}
    inputs = random_inputs(model, (height_px, width_px, 1), 2 * rows)
    del inputs["contexts"]
    conditionings = [way.condition(text, None, **size) for text in (START, f"{START} BREAK {START}")]
    rows_of = [[ConditioningRow(conditioning, False)] * rows for conditioning in conditionings]
    parts = [(slice(0, rows), way.contexts(rows_of[0])), (slice(rows, 2 * rows), way.contexts(rows_of[1]))]
    single_call = [(slice(0, 2 * rows), way.contexts([*rows_of[0], *rows_of[1]]))]

    def run(calls: list[tuple[slice, Contexts]]) -> Tensor:
        return torch.cat(
            [
                model.unet.predict(contexts=contexts, **{name: value[part] for name, value in inputs.items()})
                for part, contexts in calls
            ]
        ).cpu()

    seconds = in_turn({"two calls": partial(run, parts), "one call": partial(run, single_call)}, rounds)
    point = {
        "rows": [rows, rows],
        "ms": {name: milliseconds(times) for name, times in seconds.items()},
        "one_over_two": ratio(seconds, "one call", "two calls"),
        "max_difference": float((run(single_call) - run(parts)).abs().max()),
    }
    for conditioning in conditionings:
        conditioning.close()
    say(f"lengths {point}")
    return point


def prompts(model: DiffusionModel, rounds: int) -> dict[str, Any]:
    """Measure encoding one prompt by how much of it is cached.

    Pages are exact (cut at logical pages) or free (in one piece).
    """
    size: dict[str, Any] = dict(zip(("width_px", "height_px"), model.info.good_sizes[0], strict=True))
    numbers = itertools.count(1000)

    def plain() -> None:
        model.text.encode(f"{next(numbers)} {START}", "", **size)

    def paged(way: Conditioner, text: str) -> None:
        way.condition(text.format(next(numbers)), None, **size).close()

    arms: Arms = {"plain, new": plain}
    for name in ("exact", "free"):
        way = make_conditioner(model, EngineConfig(), is_exact=name == "exact")
        arms[f"{name}, new"] = partial(paged, way, "{} " + START)
        arms[f"{name}, beginning known"] = partial(paged, way, START + ", and {} of them")
        arms[f"{name}, said before"] = partial(paged, way, START)
    with torch.inference_mode():
        seconds = in_turn(arms, rounds)
    milliseconds_by_arm = {name: milliseconds(times) for name, times in seconds.items()}
    for name, times in milliseconds_by_arm.items():
        say(f"{name:26} {times} ms")
    return milliseconds_by_arm


def main(
    model: Annotated[
        str, typer.Option(help=f"Model: embedded, {', '.join(NAMES)}, or a diffusers directory.")
    ] = "embedded",
    device: Annotated[str, typer.Option(help="Device: auto, cpu, cuda, ...")] = "auto",
    dtype: Annotated[str, typer.Option(help="Precision: auto, float32, bfloat16, float16 or int8.")] = "auto",
    rows: Annotated[str, typer.Option(help="Comma-separated rows per UNet call.")] = "1,2,4,8,16",
    rounds: Annotated[int, typer.Option(help="Interleaved rounds per pair.")] = 30,
    out: Annotated[Path | None, typer.Option(help="File for the JSON results.")] = None,
) -> None:
    """Measure, and print one JSON document as the last line of stdout."""
    loaded = open_model(model, device, dtype)
    if not torch.cuda.is_available():
        say("no GPU on this machine: these are CPU figures")
    document = head("kv_cross_attention", Path(model).name, loaded.info)
    arguments = [Path(word).name for word in sys.argv[1:]]
    document["command"] = " ".join(["python", "benchmarks/bench_kv_cross_attention.py", *arguments])
    info = loaded.info
    day = document["date"][:10]
    path = (
        out or RESULTS / f"kv-cross-attention-{Path(model).name}-{info.device.replace(':', '')}-{info.dtype}-{day}.json"
    )
    ways: dict[str, Conditioner] = {
        name: make_conditioner(loaded, EngineConfig(cross_attention=name), is_exact=True) for name in ("plain", "paged")
    }
    document["settings"] = {"rounds": rounds, "tokens": loaded.text.window_tokens, "native_size": info.good_sizes[0]}
    document["tenants"] = tenants(loaded)
    with torch.inference_mode():
        document["unet_step"] = [unet_steps(loaded, ways, int(count), rounds) for count in rows.split(",")]
        document["gathering"] = [gathering(loaded, ways, int(count), rounds) for count in rows.split(",")]
        way = make_conditioner(loaded, EngineConfig(), is_exact=False)
        assert isinstance(way, PagedConditioner)
        document["lengths"] = [lengths(loaded, way, max(1, int(count) // 2), rounds) for count in rows.split(",")]
    document["prompt_ms"] = prompts(loaded, rounds)
    write(document, path)
    print(json.dumps(document))


def tenants(model: DiffusionModel) -> dict[str, Any]:
    """Return the memory of a one-window prompt in each tenant."""
    specs = image_specs(model, is_exact=True)
    page_bytes = PagePlan.smallest_page_bytes(specs)
    description: dict[str, Any] = {}
    for spec in specs:
        plan = PagePlan(spec, page_bytes)
        num_bytes = sum(map(spec.layer_bytes, range(len(spec.layers))))
        description[spec.tenant.split(":")[0]] = {
            "layers": len(spec.layers),
            "bytes_per_token": num_bytes // spec.page_tokens,
            "pages": plan.num_pages(model.text.window_tokens),
            "page_bytes": page_bytes,
            "used_share_of_a_sheet": round(num_bytes / (plan.num_groups * page_bytes), 3),
        }
    return description


if __name__ == "__main__":
    typer.run(main)
