"""Computes the fewest steps at which each sampler generates correct images, from a sweep's report.

    diffserve sweep --model embedded --samplers euler,heun,... --steps 4,6,8,... --prompts 64 --seeds 1 -o report
    python -m diffserve.training.fewest_steps report/report.json

A count is enough if it and every higher count of the sweep reach at least nine tenths of the exact matches of the best
cell. Samplers that are not in the sweep keep their previous values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from diffserve.models.vocabulary import EMBEDDED_DIRECTORY, FEWEST_STEPS_FILE, FewestSteps, read_fewest_steps

ENOUGH = 0.9


def fewest_of(report: Mapping[str, Any]) -> FewestSteps:
    """Compute the fewest steps by sampler from the content of a ``report.json``, averaged over guidance scales."""
    shares: dict[str, dict[int, list[float]]] = {}
    for entry in report["cells"]:
        cell, exact = entry["cell"], entry["measures"].get("exact")
        if exact is not None and not cell["is_reference"]:
            shares.setdefault(cell["sampler"], {}).setdefault(cell["num_steps"], []).append(exact["value"])
    if not shares:
        raise ValueError("the report says of no cell how many pictures are exact; sweep with the built-in prompts.")
    means = {name: {count: sum(of) / len(of) for count, of in by.items()} for name, by in shares.items()}
    enough = ENOUGH * max(max(by.values()) for by in means.values())
    return FewestSteps(
        digest=report["model"]["digest"],
        max_steps=max(max(by) for by in means.values()),
        steps={name: _fewest(by, enough) for name, by in sorted(means.items())},
    )


def _fewest(share_by_steps: Mapping[int, float], enough: float) -> int | None:
    fewest = None
    for count in sorted(share_by_steps, reverse=True):
        if share_by_steps[count] < enough:
            break
        fewest = count
    return fewest


def main(
    report: Annotated[Path, typer.Argument(help="report.json of a sweep over many step counts")],
    model: Annotated[Path, typer.Option(help="directory of the model that painted")] = EMBEDDED_DIRECTORY,
) -> None:
    """Write fewest_steps.json into the model's directory."""
    fewest = fewest_of(json.loads(report.read_text(encoding="utf-8")))
    previous = read_fewest_steps(model)
    previous_steps = previous.steps if previous and previous.digest == fewest.digest else {}
    fewest = msgspec.structs.replace(fewest, steps=dict(sorted((previous_steps | fewest.steps).items())))
    text = json.dumps(msgspec.to_builtins(fewest), indent=1)
    (model / FEWEST_STEPS_FILE).write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    typer.run(main)
