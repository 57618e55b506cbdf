"""One picture that says what an experiment found: charts, and the same seed with growing steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO

from PIL import Image

from diffserve.experiments.charts import common_measures, over_steps
from diffserve.experiments.estimates import Measure
from diffserve.experiments.plan import Cell
from diffserve.experiments.plots.curves import curves, panels, quality_against_time, strip, to_palette
from diffserve.experiments.summary import CellSummary

WANTED = (Measure.EXACT, Measure.FRECHET, Measure.LATENT_RMSE, Measure.FRECHET_CONVERGED, Measure.PSNR_DB)
MOST_PANELS = 3
NUM_COLORS = 256


def overview(summaries: Sequence[CellSummary], prompt: str, thumbnails: Mapping[Cell, bytes]) -> bytes:
    """Up to three measures over steps, the strip of one prompt below where there are ``thumbnails``; small enough to be
    kept with sources, a PNG of 256 colours."""
    shown = [measure for measure in WANTED if measure in common_measures(summaries)][:MOST_PANELS]
    width_inches = 10.5 / max(1, len(shown))
    parts = [panels(over_steps(summaries, shown), height_inches=3.1, width_inches=width_inches, num_columns=3)]
    parts += [strip(f"“{prompt}”, the same seed", thumbnails)] if thumbnails else []
    return to_palette(_stack(parts), NUM_COLORS)


def contact_sheet(summaries: Sequence[CellSummary], prompt: str, thumbnails: Mapping[Cell, bytes]) -> bytes:
    """The strip of one prompt, and all charts below it where anything is measured; a PNG in all its colours."""
    parts = [strip(prompt, thumbnails)]
    if common_measures(summaries):
        parts += [curves(summaries), quality_against_time(summaries)]
    file = BytesIO()
    _stack(parts).save(file, "PNG")
    return file.getvalue()


def _stack(parts: Sequence[bytes]) -> Image.Image:
    """Pictures below each other on white."""
    images = [Image.open(BytesIO(part)).convert("RGB") for part in parts]
    sheet = Image.new("RGB", (max(image.width for image in images), sum(image.height for image in images)), "white")
    top = 0
    for image in images:
        sheet.paste(image, ((sheet.width - image.width) // 2, top))
        top += image.height
    return sheet
