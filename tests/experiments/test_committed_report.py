"""The committed report: it is that of the documented sweep, it is small, and the documented claims follow from it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import msgspec
from PIL import Image

from diffserve.experiments.estimates import Measure
from diffserve.experiments.findings import Finding
from diffserve.experiments.plan import SweepPlan
from diffserve.experiments.plan_reading import read_plan
from diffserve.experiments.report import CSV, JSON, SUMMARY
from diffserve.experiments.report_figures import OVERVIEW
from diffserve.experiments.summary import CellSummary
from diffserve.runtime.loading.family import learned_samplers_of
from schedulers.learned import is_learned

ROOT = Path(__file__).resolve().parent.parent.parent
KEPT = ROOT / "benchmarks" / "results" / "sweep-embedded"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8")
MOST_BYTES = 600_000
LEAST_PAIRS: Final = 256


class Report(msgspec.Struct):
    """The parts of report.json that claims follow from."""

    plan: SweepPlan
    cells: list[CellSummary]
    findings: list[Finding]

    def value(self, sampler: str, steps: int, measure: Measure) -> float:
        """Return a measure of a cell."""
        [cell] = [
            each
            for each in self.cells
            if (each.cell.sampler, each.cell.num_steps, each.cell.is_reference) == (sampler, steps, False)
        ]
        return cell.measures[measure.value].value


REPORT = msgspec.json.decode((KEPT / JSON).read_bytes(), type=Report)


def test_the_committed_report_is_that_of_the_sweep_in_the_documentation() -> None:
    line = re.search(r"^\.venv/bin/diffserve sweep (--model embedded .* --until-decided .*)$", PAGE, flags=re.MULTILINE)
    assert line is not None
    options = dict(re.findall(r"(--?\S+) ([^\s-]\S*)", line[1]))
    documented = read_plan(
        [("samplers", options["--samplers"]), ("steps", options["--steps"])],
        prompts=int(options["--prompts"]),
        guidance=3.0,
        num_seeds=int(options["--seeds"]),
        until_decided=True,
        max_images=int(options["--max-images"]),
        learned_steps=learned_samplers_of("embedded").steps_of,
    )
    assert REPORT.plan.all_cells == documented.all_cells
    for name in ("prompts", "num_seeds", "looks", "detect", "reference_steps", "first_seed"):
        assert getattr(REPORT.plan, name) == getattr(documented, name), name


def test_the_kept_report_is_small_and_complete() -> None:
    files = {file.name: file.stat().st_size for file in KEPT.iterdir()}
    assert set(files) == {CSV, JSON, OVERVIEW, SUMMARY}
    assert sum(files.values()) < MOST_BYTES
    with Image.open(KEPT / "overview.png") as image:
        image.verify()
    assert f"]({KEPT.relative_to(ROOT)}/report.md)" in README
    assert f"]({KEPT.relative_to(ROOT)}/overview.png)" in README


def test_headlines_follow_from_the_report_and_are_decided_with_256_pairs() -> None:
    headlines = re.findall(r"^\| (learned:\S+ against .*) \| (.*) \|$", PAGE, flags=re.MULTILINE)
    assert len(headlines) == 4
    verdicts = {finding.claim: finding.verdict for finding in REPORT.findings}
    images = {each.cell.label: each.num_images for each in REPORT.cells}
    for claim, verdict in headlines:
        assert verdicts[claim].split(";")[0] == verdict
        assert verdict.startswith("better by"), claim
        [other] = re.findall(r" than (.+)$", verdict)
        assert min(images[claim.split()[0]], images[other]) >= LEAST_PAIRS
        [finding] = [each for each in REPORT.findings if each.claim == claim]
        low = re.search(r"95 % interval (-?[\d.]+) to", finding.verdict)
        assert low is not None
        assert float(low[1]) > 0
    gain = re.search(r"better by ([\d.]+ dB)", headlines[1][1])
    assert gain is not None
    num_built_in = len({each.cell.sampler for each in REPORT.cells if not is_learned(each.cell.sampler)})
    sentence = f"come {gain[1]} closer to the converged image than the best of {num_built_in} built-in samplers."
    assert sentence in re.sub(r"\s+", " ", README)


def test_the_other_documented_figures_are_those_of_the_report() -> None:
    built_in = {cell.cell.sampler for cell in REPORT.cells if not is_learned(cell.cell.sampler)}
    matches = {name: REPORT.value(name, 8, Measure.EXACT) for name in built_in}
    many = [name for name, share in matches.items() if share >= 0.97]
    assert f"With 8 steps, {len(many)} of {len(built_in)} built-in samplers match at least 97 %" in PAGE
    sentence = f"With 8 steps {len(many)} of {len(built_in)} built-in samplers match at least 97 % of 43 prompts."
    assert sentence in README.replace("\n", " ")
    assert len(REPORT.plan.prompts) == 43
    plms = [REPORT.value("plms", steps, Measure.EXACT) for steps in (10, 20)]
    dpmpp_3m = [REPORT.value("dpmpp_3m_sde", steps, Measure.EXACT) for steps in (8, 10)]
    assert "PLMS needs more than 10 steps, DPM++ 3M SDE more than 8." in PAGE
    assert plms[0] < 0.5 < 0.9 < plms[1]
    assert dpmpp_3m[0] < 0.9 < dpmpp_3m[1]
    ten, twenty = (REPORT.value("dpmpp_2m karras", steps, Measure.PSNR_DB) for steps in (10, 20))
    assert f"DPM++ 2M Karras is the closest: {ten:.1f} dB with 10 steps and {twenty:.1f} dB with 20." in PAGE
    for steps, best in ((10, ten), (20, twenty)):
        cells = [cell.cell for cell in REPORT.cells if cell.cell.num_steps == steps]
        assert best == max(REPORT.value(cell.sampler, steps, Measure.PSNR_DB) for cell in cells)
    ddim, ddpm = (REPORT.value(name, 20, Measure.PSNR_DB) for name in ("ddim", "ddpm"))
    assert f"DDIM with 20 steps is {ddim:.1f} dB PSNR from its converged image" in PAGE
    assert f"DDPM converges to another image ({ddpm:.1f} dB)" in PAGE
