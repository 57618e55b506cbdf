"""Learned samplers compared with every built-in sampler at the same number of network evaluations.

    python benchmarks/bench_learned_samplers.py --cache /tmp/cells
    python benchmarks/bench_learned_samplers.py --cache /tmp/cells --sampler-dir searched --prompts 16

The first held-out captions of the embedded model and seeds from ``--first-seed`` are used; a search takes neither (it
uses captions from 200 on and seeds from 10,000 on). PSNR is of final latents, to the converged latents of the same
noise (Heun with 250 steps, 499 evaluations), with the range of the converged latents as peak. Differences are
paired, with bootstrap intervals of 95 %. Samplers that add noise cannot reproduce the converged image of the same
noise, so they run on fewer images. ``exact`` is the share of images that the checker accepts. Finished cells are read
from ``--cache``. One JSON document to stdout and to results/.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.report import default_path, head, write
from diffserve.api.types import DiffusionParams, GenerationRequest, ImageFinished
from diffserve.cli.generate import open_engine
from diffserve.engine import Engine
from diffserve.experiments.intervals import bootstrap_interval
from diffserve.experiments.prompts import held_out_prompts, match_prompts
from diffserve.models.learned_samplers import LearnedSamplers
from diffserve.settings.layers import load_settings
from schedulers import SAMPLERS, compile_table

EVALUATIONS: Final = (4, 5, 6, 8)
GOALS_DB: Final = {4: 3.0, 5: 3.0, 6: 0.0, 8: 0.0}
"""Smallest advantage over the best built-in sampler; the lower end of the interval must be above 0 in any case."""

FLOAT_ERROR: Final = 1e-12
GROUP: Final = 16


class Cell(NamedTuple):
    """Sampler and number of steps."""

    sampler: str
    num_steps: int

    @property
    def file_name(self) -> str:
        """Name of its file in the cache."""
        return f"{self.sampler.replace(':', '-').replace('/', '-')}-{self.num_steps}"


REFERENCE: Final = Cell("heun", 250)


class Painted(NamedTuple):
    """Final latents (B, C, h, w) and pixels (B, H, W, 3) of a cell."""

    latents: np.ndarray
    pixels: np.ndarray


def paint(engine: Engine, cell: Cell, prompts: Sequence[str], first_seed: int, cache: Path | None) -> Painted:
    """Generate the images of a cell, or read them from ``cache``."""
    file = cache / f"{cell.file_name}-{first_seed}.npz" if cache is not None else None
    if file is not None and file.exists():
        content = np.load(file)
        if len(content["latents"]) >= len(prompts):
            return Painted(content["latents"][: len(prompts)], content["pixels"][: len(prompts)])
    results: dict[int, Any] = {}
    for start in range(0, len(prompts), GROUP):
        places: dict[str, int] = {}
        for place in range(start, min(start + GROUP, len(prompts))):
            params = DiffusionParams(sampler=cell.sampler, num_steps=cell.num_steps)
            request = GenerationRequest(
                prompt=prompts[place], seed=first_seed + place, diffusion=params, return_latents=True
            )
            places[engine.submit(request)] = place
        while engine.has_work:
            for event in engine.tick():
                if isinstance(event, ImageFinished):
                    results[places[event.request_id]] = event.result
    order = [results[place] for place in range(len(prompts))]
    painted = Painted(np.stack([each.latents.array for each in order]), np.stack([each.pixels for each in order]))
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez(file, latents=painted.latents, pixels=painted.pixels)
    print(f"{cell.sampler} {cell.num_steps}: {len(prompts)} images", file=sys.stderr, flush=True)
    return painted


def builtin_cell(engine: Engine, sampler: str, evaluations: int) -> Cell | None:
    """Return the cell with the most steps that needs at most ``evaluations``; ``None`` if one step needs more."""
    schedule, spacing = engine.model.schedule, engine.info.default_spacing
    for num_steps in range(evaluations, 0, -1):
        if compile_table(sampler, schedule, num_steps, spacing=spacing).num_rows <= evaluations:
            return Cell(sampler, num_steps)
    return None


def decibels(latents: np.ndarray, target: np.ndarray, peak: float) -> list[float]:
    """Return the PSNR of each image's latents."""
    errors = ((latents - target[: len(latents)]).astype(np.float64) ** 2).mean(axis=(1, 2, 3))
    return [float(value) for value in 10.0 * np.log10(peak**2 / np.maximum(errors, FLOAT_ERROR))]


def difference(first: Sequence[float], second: Sequence[float]) -> dict[str, float]:
    """Return the mean paired difference and its interval."""
    values = [a - b for a, b in zip(first, second, strict=False)]
    low, high = bootstrap_interval(values)
    return {"mean": round(float(np.mean(values)), 3), "low": round(low, 3), "high": round(high, 3)}


def main(
    prompts: Annotated[int, typer.Option(help="Images of each deterministic cell.")] = 64,
    noisy: Annotated[int, typer.Option(help="Images of each cell of a sampler that adds noise.")] = 8,
    first_seed: Annotated[int, typer.Option(help="Seed of the first image.")] = 500_000,
    sampler_dir: Annotated[str, typer.Option(help="Folder of learned samplers, in addition to the model's own.")] = "",
    cache: Annotated[Path | None, typer.Option(help="Folder of finished cells.")] = None,
    output: Annotated[Path | None, typer.Option(help="JSON document to write.")] = None,
) -> None:
    """Compare the learned samplers of the embedded model with the built-in ones."""
    torch.set_grad_enabled(False)
    flags = {"model.dtype": "float32", **({"model.sampler_dir": sampler_dir} if sampler_dir else {})}
    env = {f"DIFFSERVE_{key.upper().replace('.', '_')}": value for key, value in flags.items()}
    engine = open_engine(load_settings(model="embedded", env=env))
    document: dict[str, Any] = head("learned_samplers", "embedded", engine.info)
    captions = held_out_prompts(prompts)
    converged = paint(engine, REFERENCE, captions, first_seed, cache)
    target = converged.latents
    peak = float(target.max() - target.min())

    def measure(cell: Cell, count: int) -> tuple[list[float], list[bool]]:
        painted = paint(engine, cell, captions[:count], first_seed, cache)
        verdicts = match_prompts(list(painted.pixels), captions[:count]).verdicts
        return decibels(painted.latents, target, peak), [verdict.exact for verdict in verdicts]

    verdicts = match_prompts(list(converged.pixels), captions).verdicts
    document |= {
        "prompts": f"held-out captions 0 to {prompts - 1}",
        "seeds": [first_seed, first_seed + prompts - 1],
        "reference": {**REFERENCE._asdict(), "peak": round(peak, 4)},
        "converged_exact": float(np.mean([verdict.exact for verdict in verdicts])),
    }
    learned = LearnedSamplers.of(engine.info).usable()
    values: dict[tuple[int, str], tuple[list[float], list[bool]]] = {}
    for evaluations in EVALUATIONS:
        for name, sampler in SAMPLERS.items():
            cell = builtin_cell(engine, name, evaluations)
            if cell is not None:
                values[evaluations, name] = measure(cell, min(noisy, prompts) if sampler.stochastic else prompts)
        for name, table in learned.items():
            if table.num_rows == evaluations:
                values[evaluations, name] = measure(Cell(name, evaluations), prompts)
    document["cells"] = [
        {
            "sampler": name,
            "evaluations": evaluations,
            "images": len(psnr),
            "psnr_db": round(float(np.mean(psnr)), 3),
            "exact": round(float(np.mean(exact)), 4),
        }
        for (evaluations, name), (psnr, exact) in values.items()
    ]
    document["verdicts"] = verdicts_of(values, list(learned))
    write(document, output or default_path(document))
    print(json.dumps(document, indent=1))


def verdicts_of(
    values: dict[tuple[int, str], tuple[list[float], list[bool]]], learned: Sequence[str]
) -> list[dict[str, Any]]:
    """Compare each learned sampler with the best built-in sampler of as many evaluations, and 5 with the best of 8."""
    best = {
        evaluations: max(
            (name for count, name in values if count == evaluations and name in SAMPLERS),
            key=lambda name, count=evaluations: float(np.mean(values[count, name][0])),  # type: ignore[misc]
        )
        for evaluations in EVALUATIONS
    }
    result = []
    for name in learned:
        same_evaluations = next((count for count, other in values if other == name), None)
        for other in [same_evaluations, 8] if same_evaluations == 5 else [same_evaluations]:
            if same_evaluations is None or other is None:
                continue
            psnr, exact = values[same_evaluations, name]
            builtin_psnr, builtin_exact = values[other, best[other]]
            gain = difference(psnr, builtin_psnr)
            verdict = {
                "sampler": name,
                "evaluations": same_evaluations,
                "builtin": best[other],
                "builtin_evaluations": other,
                "psnr_db_difference": gain,
                "exact_difference": difference(list(map(float, exact)), list(map(float, builtin_exact))),
            }
            if other == same_evaluations:
                verdict["goal_db"] = GOALS_DB[same_evaluations]
                verdict["reached"] = gain["low"] > 0.0 and gain["mean"] >= GOALS_DB[same_evaluations]
            else:
                verdict["reached"] = gain["high"] >= 0.0
            result.append(verdict)
    return result


if __name__ == "__main__":
    typer.run(main)
