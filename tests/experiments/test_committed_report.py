"""The committed report is that of the sweep which the documentation shows, and it is small."""

from __future__ import annotations

import json
import re
from pathlib import Path

from PIL import Image

from diffserve.experiments.axes import numbers, split_axis, whole_numbers
from diffserve.experiments.plan import SweepPlan
from diffserve.experiments.prompts import held_out_prompts
from diffserve.experiments.report import CSV, JSON, SUMMARY
from diffserve.experiments.report_figures import OVERVIEW

ROOT = Path(__file__).resolve().parent.parent.parent
KEPT = ROOT / "benchmarks" / "results" / "sweep-embedded"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8")
MOST_BYTES = 600_000


def test_the_committed_report_is_that_of_the_sweep_in_the_documentation() -> None:
    line = re.search(r"^\.venv/bin/diffserve sweep (--model embedded .*)$", PAGE, flags=re.MULTILINE)
    assert line is not None
    options = dict(re.findall(r"(--?\S+) (\S+)", line[1]))
    plan = json.loads((KEPT / "report.json").read_bytes())["plan"]
    documented = SweepPlan(
        samplers=split_axis(options["--samplers"], "--samplers"),
        steps=whole_numbers(options["--steps"], "--steps"),
        guidance=numbers(options["--guidance"], "--guidance"),
        prompts=held_out_prompts(int(options["--prompts"])),
        num_seeds=int(options["--seeds"]),
    )
    for name in ("samplers", "steps", "guidance", "num_seeds", "reference_steps"):
        assert plan[name] == json.loads(json.dumps(getattr(documented, name)))
    assert len(plan["prompts"]) == len(documented.prompts)


def test_the_kept_report_is_small_and_whole() -> None:
    files = {file.name: file.stat().st_size for file in KEPT.iterdir()}
    assert set(files) == {CSV, JSON, OVERVIEW, SUMMARY}
    assert sum(files.values()) < MOST_BYTES
    with Image.open(KEPT / "overview.png") as image:
        image.verify()
    assert f"]({KEPT.relative_to(ROOT)}/report.md)" in README
    assert f"]({KEPT.relative_to(ROOT)}/overview.png)" in README
