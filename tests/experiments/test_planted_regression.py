"""A small error of the network in one cell is found with far fewer images than the default number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from diffserve.engine import Engine
from diffserve.experiments.analysis import Analysis
from diffserve.experiments.engine_generator import request_for
from diffserve.experiments.estimates import Measure
from diffserve.experiments.metrics.fidelity import psnr_db
from diffserve.experiments.plan import DEFAULT_PROMPTS, DEFAULT_SEEDS, Cell, Place, SweepPlan
from diffserve.experiments.prompts import held_out_prompts
from diffserve.experiments.records import Distance, ImageRecord
from diffserve.experiments.verdicts import WORSE, compare_cells
from diffserve.settings.config import EngineConfig

NOISE = 0.01
"""Standard deviation of the noise relative to that of the network's output."""

PLAN = SweepPlan(
    samplers=("ddim", "euler"),
    steps=(20,),
    guidance=(3.0,),
    prompts=held_out_prompts(8),
    num_seeds=3,
    reference_steps=40,
)
"""24 images per cell at the model's guidance scale, which amplifies the noise.

Without guidance the same noise was not distinguishable: with 36 images at 20 steps, nor with 256 images at 6 steps.
"""


def pixels_of(engine: Engine, cell: Cell) -> list[np.ndarray]:
    """Return the images of ``cell``, generated with the unchanged engine."""
    return [result.pixels for result in engine.generate([request_for(PLAN, cell, place) for place in PLAN.places])]


def record_of(place: Place, pixels: np.ndarray, converged: np.ndarray) -> ImageRecord:
    return ImageRecord(
        prompt_index=place[0],
        seed_index=place[1],
        seed=PLAN.seed_of(place),
        spacing="trailing",
        evaluations=20,
        engine_s=0.0,
        features=(),
        distance=Distance(psnr_db=psnr_db(pixels, converged)),
    )


@pytest.mark.slow
def test_noise_of_one_percent_on_the_output_of_the_network_is_distinguishable() -> None:
    """The cell of euler stands for a second run of ddim, in which the network's output has noise."""
    assert len(PLAN.places) < DEFAULT_PROMPTS * DEFAULT_SEEDS
    engine = Engine.from_pretrained("embedded", dtype="float32", config=EngineConfig(compile="off"))
    ddim, noisy = PLAN.cells
    converged, clean = pixels_of(engine, PLAN.references[0]), pixels_of(engine, ddim)
    generator = torch.Generator().manual_seed(0)

    def add_noise(_module: torch.nn.Module, _inputs: Any, output: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        noise = torch.randn(output[0].shape, generator=generator)
        return (output[0] + NOISE * output[0].std() * noise,)

    engine.model.unet.network.register_forward_hook(add_noise)
    damaged = pixels_of(engine, ddim)
    assert 0 < np.mean([np.abs(a.astype(int) - b).mean() for a, b in zip(clean, damaged, strict=True)]) < 5
    records = {
        cell: {place: record_of(place, *pair) for place, *pair in zip(PLAN.places, pixels, converged, strict=True)}
        for cell, pixels in ((ddim, clean), (noisy, damaged))
    }
    (comparison,) = compare_cells(Analysis(PLAN, records), [Measure.PSNR_DB])
    assert comparison.verdict == WORSE, comparison.difference
