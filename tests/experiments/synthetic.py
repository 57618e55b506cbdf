"""Records of sweeps that were never painted, with numbers chosen by the test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from diffserve.experiments.analysis import Analysis
from diffserve.experiments.plan import Cell, SweepPlan, Target
from diffserve.experiments.records import Distance, ImageRecord, Parts, SoloTime

NUM_FEATURES = 4
Quality = Callable[[Cell], float]


def plan_of(
    samplers: tuple[str, ...] = ("ddpm", "ddim"), steps: tuple[int, ...] = (10, 100), **options: Any
) -> SweepPlan:
    """Return a plan of 40 prompts, three seeds each unless ``options`` override them."""
    prompts = tuple(f"prompt {index}" for index in range(options.pop("num_prompts", 40)))
    return SweepPlan(samplers=samplers, steps=steps, guidance=(3.0,), prompts=prompts, **{"num_seeds": 3, **options})


def records_of(plan: SweepPlan, exact: Quality, rmse: Quality) -> dict[Cell, dict[tuple[int, int], ImageRecord]]:
    """Return records whose share of exact images is ``exact(cell)`` and whose latent RMSE is about ``rmse(cell)``."""
    records = {}
    for number, cell in enumerate(plan.all_cells):
        rng = np.random.default_rng(number)
        hits = rng.permutation(np.arange(len(plan.places)) < round(exact(cell) * len(plan.places)))
        noise, features = rng.normal(size=len(plan.places)), rng.normal(size=(len(plan.places), NUM_FEATURES))
        records[cell] = {
            place: ImageRecord(
                prompt_index=place[0],
                seed_index=place[1],
                seed=plan.seed_of(place),
                spacing="trailing",
                evaluations=cell.rows,
                engine_s=0.01 * cell.num_steps,
                features=tuple(features[index].tolist()),
                parts=Parts(exact=bool(hits[index]), background=True, objects=True, relation=True, size=True),
                distance=None if cell.is_reference else _distance(float(rmse(cell) * (1 + 0.1 * noise[index]))),
            )
            for index, place in enumerate(plan.places)
        }
    return records


def analysis_of(
    plan: SweepPlan, exact: Quality, rmse: Quality = lambda _: 0.3, seed_spread: Mapping[Target, float] | None = None
) -> Analysis:
    """Return an analysis without distances between sets."""
    return Analysis(plan, records_of(plan, exact, rmse), seed_spread=seed_spread)


def time_of(cell: Cell) -> SoloTime:
    """Ten milliseconds a step, give or take one."""
    return SoloTime((10.0, 9.0, 11.0), tuple(0.01 * cell.num_steps + 0.02 for _ in range(3)))


def _distance(rmse: float) -> Distance:
    return Distance(latent_rmse=rmse, psnr_db=30 - 10 * rmse, ssim=1 - rmse / 2)
