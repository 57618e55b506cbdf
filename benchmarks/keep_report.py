"""Copies the report of a sweep to results/, in the size that is committed.

    python benchmarks/keep_report.py report benchmarks/results/sweep-embedded

report.json keeps only the comparisons in the measures that decided the verdicts (``plan.detect``), and six digits of
each number.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from diffserve.experiments.report import CSV, JSON, SUMMARY
from diffserve.experiments.report_figures import OVERVIEW


def rounded(value: Any) -> Any:
    """Return a JSON value with six significant digits in each number that is not whole."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list) else value


def main(
    report: Annotated[Path, typer.Argument(help="Folder of the report.")],
    target: Annotated[Path, typer.Argument(help="Folder to write.")],
) -> None:
    """Copy the tables and the overview of a report."""
    document = json.loads((report / JSON).read_bytes())
    measures = document["plan"]["detect"]
    document["comparisons"] = [each for each in document["comparisons"] if each["measure"] in measures]
    target.mkdir(parents=True, exist_ok=True)
    (target / JSON).write_text(json.dumps(rounded(document), separators=(",", ":")) + "\n", encoding="utf-8")
    for name in (CSV, SUMMARY, OVERVIEW):
        shutil.copyfile(report / name, target / name)


if __name__ == "__main__":
    typer.run(main)
