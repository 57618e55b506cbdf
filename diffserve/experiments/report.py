"""Writes the report files of a complete sweep: cells.csv, report.json, plots, report.md and report.html."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from diffserve.api.errors import InvalidRequest
from diffserve.experiments import provenance
from diffserve.experiments.analysis import Analysis, PictureSet
from diffserve.experiments.axes import MODEL, PRECISION, PROMPT, write_settings
from diffserve.experiments.charts import headline, over_seconds, time_measures
from diffserve.experiments.engines import EngineFacts
from diffserve.experiments.estimates import SET_MEASURES, CheckerError, Measure
from diffserve.experiments.findings import Finding, find, join_numbers
from diffserve.experiments.measure import PromptCheck
from diffserve.experiments.metrics.fidelity import latent_rmse
from diffserve.experiments.plan import TIMED_ROUNDS, Cell, EngineKey, Place, SweepPlan, Target
from diffserve.experiments.prompts import draw_pictures, num_drawn_per_prompt
from diffserve.experiments.questions import answer_questions
from diffserve.experiments.records import ImageRecord, SoloTime
from diffserve.experiments.report_figures import CURVES, OVERVIEW, TIME, files_of, sections_of
from diffserve.experiments.report_page import Tables, write_markdown, write_page
from diffserve.experiments.store import DIGEST_DIGITS, Store, write_whole
from diffserve.experiments.summary import CellSummary, summarise, write_csv
from diffserve.experiments.verdicts import LEAST_FRECHET_GAP, LEAST_SEEDS, Comparison, compare_cells
from diffserve.world.checker import SceneSpec

if TYPE_CHECKING:
    from pandas import DataFrame

    from diffserve.experiments.engine_generator import SweepEngine

CSV, JSON, SUMMARY, PAGE = "cells.csv", "report.json", "report.md", "report.html"
RESULTS = (CSV, JSON, SUMMARY, PAGE, OVERVIEW, CURVES, TIME)
FEW_PICTURES = 64  # as many as there are features
TIMED_ALL = f"median of {TIMED_ROUNDS} rounds over all cells after all images were generated"


@dataclass(frozen=True)
class SweepReport:
    """Results of a finished sweep: table rows, findings, comparisons, the checker's error and the written files."""

    plan: SweepPlan
    cells: tuple[CellSummary, ...]
    findings: tuple[Finding, ...]
    comparisons: tuple[Comparison, ...]
    checker: CheckerError | None
    files: tuple[Path, ...]

    @property
    def page(self) -> Path:
        """The report to open in a browser."""
        return next(file for file in self.files if file.name == PAGE)

    def to_frame(self) -> DataFrame:
        """Return the table as a pandas DataFrame with one row per cell, the converged images last."""
        import pandas as pd

        return pd.read_csv(StringIO(write_csv(self.cells)))


def write_report(
    *,
    engine: SweepEngine,
    plan: SweepPlan,
    store: Store,
    times: Mapping[Cell, SoloTime],
    facts: Mapping[EngineKey, EngineFacts],
    initial_machine: Mapping[str, Any],
    weights: Mapping[str, tuple[str, str]] = MappingProxyType({}),
    how_timed: str = TIMED_ALL,
) -> SweepReport:
    """Analyze a complete sweep and write its files, the HTML page last.

    Args:
        engine: The first engine of the plan.
        plan: The plan of the sweep.
        store: Records and converged images.
        times: Time of each cell, measured alone.
        facts: Facts of each engine of the plan.
        initial_machine: State of the machine when the sweep started.
        weights: Folder name and digest of the weights of measures, by name of the measure.
        how_timed: How the times were measured, for the notes.
    """
    check, size = facts[plan.engines[0]].check, engine.info.good_sizes[0]
    drawn = None if check.wishes is None or PROMPT in plan.axes else draw(check.wishes, *size)
    checker = measure_checker(engine, check)
    unlike = {key for key, fact in facts.items() if fact.check.wishes is None or fact.setup["size"] != size}
    analysis = analyse(plan, store, drawn, checker, [cell for key in unlike for cell in plan.cells_of(key)])
    summaries = tuple(summarise(analysis, cell, times[cell]) for cell in plan.all_cells)
    findings = (*answer_questions(analysis), *find(analysis))
    comparisons = tuple(compare_cells(analysis))
    document: dict[str, Any] = {
        "date": provenance.now(),
        "versions": provenance.versions(),
        "machine": initial_machine,
        "model": facts[plan.engines[0]].model,
        **({"models": {_name_of(key): fact.model for key, fact in facts.items()}} if len(facts) > 1 else {}),
        "plan": plan,
        **({"measures": _describe_weights(weights)} if weights else {}),
        "notes": _notes(plan, facts, drawn, initial_machine, how_timed),
        "checker": checker,
        "findings": findings,
        "comparisons": comparisons,
        "fronts": _fronts(summaries),
        "cells": summaries,
    }
    outputs = _outputs(document, plan, analysis, summaries)
    for name, data in outputs.items():
        write_whole(store.folder / name, data)
    files = tuple(store.folder / name for name in outputs)
    return SweepReport(plan, summaries, findings, comparisons, checker, files)


def records_of_looks(plan: SweepPlan, records: Mapping[Place, ImageRecord]) -> dict[Place, ImageRecord]:
    """Return a cell's records up to the last look that is complete."""
    for num_seeds in reversed(plan.looks or (plan.num_seeds,)):
        places = plan.places_until(num_seeds)
        if all(place in records for place in places):
            return {place: records[place] for place in places}
    return dict(records)


def read_deviations(previous: Path, num_seeds: int) -> dict[tuple[Cell, Cell, str], float]:
    """Read the deviations of comparisons from a report.json or the folder that holds it.

    Deviations of reports with more seeds per prompt are scaled up for ``num_seeds``, as if they were due to the seeds
    alone; those of reports with fewer seeds are not scaled down. Both errors are on the safe side.

    Raises:
        InvalidRequest: The file cannot be read or is not a report with comparisons.
    """
    file = previous / JSON if previous.is_dir() else previous
    try:
        document = msgspec.json.decode(file.read_bytes(), type=_PreviousReport)
    except (OSError, msgspec.MsgspecError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a report with comparisons"
        raise InvalidRequest(f"cannot read {str(file)!r}: {why}.", param="previous") from None
    num_prompts = len(document.plan.prompts)
    return {
        (each.cell, each.baseline, each.measure): each.deviation
        * math.sqrt(max(1.0, each.num_pairs / num_prompts / num_seeds))
        for each in document.comparisons
        if each.deviation is not None
    }


class _PreviousReport(msgspec.Struct):
    """The part of a report.json that the power of the next sweep follows from."""

    plan: SweepPlan
    comparisons: tuple[Comparison, ...]


def measure_checker(engine: SweepEngine, check: PromptCheck) -> CheckerError | None:
    """Measure the checker's own error on rendered scenes after the model's autoencoder; see ``PromptCheck.error``."""
    vae = engine.model.vae
    return check.error(*engine.info.good_sizes[0], lambda pixels: vae.decode(vae.encode(pixels[None]))[0])


def analyse(
    plan: SweepPlan,
    store: Store,
    drawn: PictureSet | None,
    checker: CheckerError | None = None,
    undrawn: Iterable[Cell] = (),
) -> Analysis:
    """Build the analysis of all records, including distances between sets; see :class:`Analysis`."""
    records = {cell: records_of_looks(plan, store.records(cell)) for cell in plan.all_cells}
    undrawn = frozenset(undrawn)
    without_distances = Analysis(plan, records, drawn, undrawn=undrawn)
    values = {
        (cell, measure): value
        for cell, measure in product(records, SET_MEASURES)
        if (value := set_value(without_distances, cell, measure)) is not None
    }
    return Analysis(plan, records, drawn, values, seed_spread(plan, store), checker=checker, undrawn=undrawn)


def _outputs(
    document: Mapping[str, Any], plan: SweepPlan, analysis: Analysis, summaries: Sequence[CellSummary]
) -> dict[str, bytes]:
    """Render every file by name, the HTML page last."""
    models = dict.fromkeys(model["id"] for model in _models(document))
    title, facts = f"Sampler sweep of {', '.join(models)}", _facts(document, plan)
    findings, notes = document["findings"], document["notes"]
    sections, tables = sections_of(analysis, summaries), Tables(summaries, document["comparisons"], analysis.checker)
    return {
        CSV: write_csv(summaries, analysis.checker).encode(),
        JSON: msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n",
        **files_of(analysis, summaries),
        SUMMARY: write_markdown(title, facts, findings, OVERVIEW, tables, notes).encode(),
        PAGE: write_page(title, facts, findings, sections, tables, notes, headline(summaries)).encode(),
    }


def draw(wishes: Sequence[SceneSpec], width_px: int, height_px: int) -> PictureSet:
    """Compute the features of rendered scenes of every prompt."""
    from diffserve.experiments.metrics.set_distance import FeatureNetwork

    network, each = FeatureNetwork(), num_drawn_per_prompt(len(wishes))
    features = [network.features(pixels) for pixels in draw_pictures(wishes, width_px, height_px, each=each)]
    return PictureSet(np.stack(features), [index for index in range(len(wishes)) for _ in range(each)], len(wishes))


def set_value(analysis: Analysis, cell: Cell, measure: Measure) -> float | None:
    """Compute a set distance with the metrics library, or ``None`` without a reference or with a single image."""
    from diffserve.experiments.metrics.set_distance import frechet_distance, kernel_distance

    reference = analysis.reference_set(cell, measure)
    painted = analysis.picture_set(cell)
    if reference is None or len(painted.features) < 2:
        return None
    distance = frechet_distance if measure in (Measure.FRECHET, Measure.FRECHET_CONVERGED) else kernel_distance
    return distance(reference.features, painted.features)


def seed_spread(plan: SweepPlan, store: Store) -> dict[Target, float]:
    """Compute by target the mean latent RMSE between converged images of one prompt with consecutive seeds."""
    spreads = {}
    for cell in plan.references:
        distances = []
        for prompt in range(len(plan.prompts)):
            images = [store.load(cell, (prompt, seed)) for seed in range(plan.num_seeds)]
            latents = [image.latents for image in images if image is not None and image.latents is not None]
            distances += [latent_rmse(a, b) for a, b in pairwise(latents)]
        if distances:
            spreads[cell.target] = fmean(distances)
    return spreads


def _fronts(summaries: Sequence[CellSummary]) -> dict[str, Any]:
    """Return by measure the cells on the Pareto front and the cell at its knee."""
    return {
        chart.measure.value: {
            "front": [dot.summary.cell.slug for dot in chart.front],
            "knee": None if chart.knee is None else chart.knee.summary.cell.slug,
        }
        for chart in over_seconds(summaries, time_measures(summaries))
    }


def _name_of(engine: EngineKey) -> str:
    return write_settings(engine).removeprefix(", ")


def _models(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list(document.get("models", {"": document["model"]}).values())


def _describe_weights(weights: Mapping[str, tuple[str, str]]) -> dict[str, str]:
    return {name: f"{folder}, weights {digest[:DIGEST_DIGITS]}" for name, (folder, digest) in weights.items()}


def _count(number: int | str, noun: str) -> str:
    """Return a number or a range such as "4 to 8" with its noun."""
    return f"{number} {noun}" if str(number) == "1" else f"{number} {noun}s"


def _facts(document: Mapping[str, Any], plan: SweepPlan) -> dict[str, str]:
    machine = document["machine"]
    counts = sorted({summary.num_images for summary in document["cells"]})
    num_images = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    load = f", load {machine['load_average'][0]:.1f} at the start" if machine["load_average"] else ""
    return {
        "model": "; ".join(
            f"{model['id']}, weights {model['digest']}, {model['dtype']} on {model['device']}"
            for model in _models(document)
        ),
        "cells": f"{len(plan.cells)}, {_count(num_images, 'image')} each",
        "images": (
            f"{_count(plan.num_seeds, 'seed')} of each prompt, the same in every cell"
            if PROMPT in plan.axes
            else f"{_count(len(plan.prompts), 'prompt')}, {_count(plan.num_seeds, 'seed')} each, the same in every cell"
        ),
        "converged": f"DDIM with {plan.reference_steps} steps from the same seeds",
        "guidance": ", ".join(f"{scale:g}" for scale in plan.guidance),
        **{name: ", ".join(map(str, values)) for name, values in plan.axes.items()},
        **document.get("measures", {}),
        "machine": f"{machine['cpu']}, {machine['cores']} cores{load}",
        "versions": ", ".join(f"{name} {version}" for name, version in document["versions"].items()),
        "date": document["date"].replace("T", " ").replace("+00:00", " UTC"),
    }


def _notes(
    plan: SweepPlan,
    facts: Mapping[EngineKey, EngineFacts],
    drawn: PictureSet | None,
    initial_machine: Mapping[str, Any],
    how_timed: str,
) -> tuple[str, ...]:
    num_images = len(plan.places_until(plan.looks[0] if plan.looks else plan.num_seeds))
    notes = [
        "Paired comparison: every cell generates the same prompts with the same seeds, and so from the same initial "
        "latents; each prompt has its own seeds. Intervals of cells are 95 % bootstrap intervals over prompts: all "
        "images of a prompt are resampled together. Intervals of differences are Student's over the mean differences "
        "of prompts; with fewer than three prompts there are none. Those of distances between sets are bootstrap ones.",
        f"A difference is not distinguishable if its interval holds zero, with fewer than {LEAST_SEEDS} seeds per "
        f"prompt, or for a gap between Frechet distances under {100 * LEAST_FRECHET_GAP:.1f} %, which retraining and "
        "reseeding cause by themselves (arXiv 2606.20536). Intervals are not corrected for the number of comparisons.",
        "Converged: DDIM without added noise, same seed. Latent RMSE, PSNR and SSIM measure the similarity to that "
        "image. They favor DDIM, which converges to it; a sampler that adds noise finds another good image.",
        f"Frechet distance and KID are computed by torchmetrics, {num_images} images per cell, with a fixed network "
        "of random filters (64 features). No trained network ships with this package or is downloaded, so the values "
        "are not comparable with FID or KID in Inception features. The Frechet distance depends on the number of "
        "images: compare equal numbers only. Both look better against the converged images, which share the seeds.",
        f"Milliseconds per step and seconds per image are for one image alone on the engine: {how_timed}. Images per "
        "second are for the full engine: each image is charged its share of every tick that it was part of, by rows, "
        "while the cells shared the engine.",
        "Charts over network evaluations count the two rows of an evaluation with guidance as one; the tables count "
        "rows. They end at the number that every built-in sampler reaches.",
        "The Pareto front uses only the values; check the intervals before you trust a small difference.",
    ]
    if len(plan.looks) > 1:
        notes.append(
            f"Verdicts were looked at after {join_numbers(plan.looks)} seeds per prompt; cells without an open verdict "
            "got no more images. Intervals of differences are repeated confidence intervals with the bounds of Lan and "
            "DeMets (1983) for spending like O'Brien and Fleming's: all looks together have the level of 5 %. "
            "Distances between sets use the images that all cells have."
        )
    if drawn is not None:
        each = len(drawn.features) // len(plan.prompts)
        notes.insert(4, f"Rendered scenes: {each} per prompt, exactly as it says, each with a new random placement.")
    for key, fact in facts.items():
        if fact.check.why_not is not None:
            of = f" for {_name_of(key)}" if key else ""
            notes.append(
                f"Prompt match and the distance to rendered scenes were not measured{of}: {fact.check.why_not}"
            )
    if PROMPT in plan.axes:
        notes.append(
            "Each prompt of the axis has converged images of its own, so PSNR, SSIM and other distances to them are "
            "not compared between prompts. Distances to rendered scenes are not measured."
        )
    if MODEL in plan.axes:
        notes.append(
            "Each model has converged images of its own, so PSNR, SSIM and other distances to them are not compared "
            "between models."
        )
    if PRECISION in plan.axes:
        notes.append(f"Converged images were generated in {plan.axes[PRECISION][0]}.")
    if num_images <= FEW_PICTURES:
        notes.append(f"{num_images} images per cell are too few for a reliable Frechet distance with 64 features.")
    if not all(fact.setup["is_deterministic"] for fact in facts.values()):
        notes.append("On this device, rounding errors depend on the batch that an image was generated in.")
    if initial_machine["load_average"] and initial_machine["load_average"][0] > 0.5 * (initial_machine["cores"] or 1):
        notes.append("The machine was busy when the sweep began, so the times are longer than on an idle machine.")
    return tuple(notes)
