"""Benchmark workloads: a ladder in which each rung mixes one more property. Prompts are new every round."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from diffserve.api.types import DiffusionParams, GenerationRequest

STEPS: Final = (4, 10, 20, 50)
SAMPLERS: Final = ("ddim", "euler", "euler_a", "dpmpp_2m")
GUIDANCE: Final = (1.0, 5.0, 7.5)
RUNGS: Final = ("same", "+steps", "+samplers", "+guidance", "+sizes")
WORDS: Final = ("fox", "cactus", "beach", "boat", "moon", "house", "apple", "owl", "castle", "rose")


@dataclass(frozen=True, slots=True)
class Kind:
    """Requests that differ only in prompt and seed; static batches contain one kind."""

    num_steps: int
    sampler: str
    guidance_scale: float
    width_px: int
    height_px: int


def kinds(rung: str, sizes: Sequence[tuple[int, int]]) -> list[Kind]:
    """Return the sixteen kinds of a rung, which includes all earlier ones of ``RUNGS``."""
    height = RUNGS.index(rung)
    result = []
    for place in range(16):
        width_px, height_px = sizes[place // 2 % min(2, len(sizes)) if height >= 4 else 0]
        result.append(
            Kind(
                num_steps=STEPS[place // 4] if height >= 1 else 20,
                sampler=SAMPLERS[place % 4] if height >= 2 else "ddim",
                guidance_scale=GUIDANCE[place % 3] if height >= 3 else 5.0,
                width_px=width_px,
                height_px=height_px,
            )
        )
    return result


def batches(
    rung: str, sizes: Sequence[tuple[int, int]], *, copies: int, round_index: int, step_divisor: int = 1
) -> list[list[GenerationRequest]]:
    """Return ``copies`` requests of each kind, one batch per kind; prompts and seeds depend on the round.

    ``step_divisor``: fewer steps for a smoke run.
    """
    rng = random.Random(f"{rung} {round_index}")
    result = []
    for place, kind in enumerate(kinds(rung, sizes)):
        params = DiffusionParams(
            sampler=kind.sampler,
            num_steps=max(1, kind.num_steps // step_divisor),
            guidance_scale=kind.guidance_scale,
            spacing="leading",
        )
        result.append(
            [
                GenerationRequest(
                    prompt=f"{' '.join(rng.sample(WORDS, 3))} {round_index} {place} {copy}",
                    seed=rng.randrange(2**31),
                    width_px=kind.width_px,
                    height_px=kind.height_px,
                    diffusion=params,
                    return_latents=True,
                )
                for copy in range(copies)
            ]
        )
    return result


def shuffled(groups: Sequence[Sequence[GenerationRequest]], round_index: int) -> list[GenerationRequest]:
    """Return all requests in an order independent of their kind."""
    mixed = [request for group in groups for request in group]
    random.Random(round_index).shuffle(mixed)
    return mixed
