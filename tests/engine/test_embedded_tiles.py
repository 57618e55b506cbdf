"""The embedded model beyond its largest side: no seam at the edges of tiles, and bounded memory at 1024 px."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from diffserve.api.tiles import plan_tiles
from diffserve.api.types import DiffusionParams, GenerationRequest
from diffserve.engine import Engine
from tests.device import DEVICE
from tests.readme import ROOT

pytestmark = pytest.mark.slow
PROMPTS = ("two red apples on green grass", "a blue house by the sea", "a penguin on ice")

PAINT_1024 = """
import os
from benchmarks.bench_concurrency import forget_highest, highest_bytes
from diffserve.api.types import DiffusionParams, GenerationRequest
from diffserve.engine import Engine

engine = Engine.from_pretrained("embedded-turbo", device="cpu")
[small] = engine.generate(GenerationRequest(prompt="a red fox", seed=1))
before = highest_bytes(os.getpid())
forget_highest(os.getpid())
[large] = engine.generate(GenerationRequest(prompt="a red fox", seed=1, diffusion=DiffusionParams(hires_scale=8.0)))
assert large.pixels.shape == (1024, 1024, 3), large.pixels.shape
print(highest_bytes(os.getpid()) - before)
"""


def second_pass(engine: Engine, prompt: str, seed: int, **fields: Any) -> NDArray[np.uint8]:
    """Return an image of 192x128 px after a second pass of the same size, in tiles of 128 px or whole."""
    params = DiffusionParams(num_steps=15, hires_scale=1.0, hires_strength=0.2, **fields)
    [result] = engine.generate(
        GenerationRequest(prompt=prompt, seed=seed, width_px=192, height_px=128, diffusion=params)
    )
    return result.pixels


def step_at(pixels: NDArray[np.uint8], columns: list[int]) -> float:
    """Return the mean step between the columns x - 1 and x beyond what the columns around them let expect."""
    values = pixels.astype(np.float64).mean(-1)  # (height, width)
    steps = np.diff(values, axis=1)  # step i lies before column i + 1
    return float(np.mean([np.abs(steps[:, x - 1] - 0.5 * (steps[:, x - 2] + steps[:, x])).mean() for x in columns]))


def test_no_step_shows_at_the_edges_of_tiles() -> None:
    engine = Engine.from_pretrained("embedded", device=str(DEVICE))
    info = engine.info
    layout = plan_tiles(192, 128, 128, 32, info.vae_factor, info.size_multiple_px)
    assert layout is not None
    edges = sorted({left * layout.factor for left in layout.lefts if left} | {128})
    assert edges == [64, 128]
    sums = {"untiled": 0.0, "tiled": 0.0, "abutting": 0.0}
    for seed, prompt in enumerate(PROMPTS):
        untiled = second_pass(engine, prompt, seed, tile_size=0)
        tiled = second_pass(engine, prompt, seed, tile_size=128, tile_overlap=32)
        abutting = second_pass(engine, prompt, seed, tile_size=64, tile_overlap=0)
        assert not np.array_equal(tiled, untiled)
        for name, pixels in (("untiled", untiled), ("tiled", tiled), ("abutting", abutting)):
            sums[name] += step_at(pixels, edges)
    print(sums)
    assert sums["tiled"] <= 1.1 * sums["untiled"]
    assert sums["abutting"] > 1.1 * sums["untiled"], "the measure sees tiles without overlap"


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the high-water mark cannot be reset here")
def test_1024_px_take_less_than_a_gibibyte_more() -> None:
    """Run in a process of its own: ``ru_maxrss`` would include the peak of the process that started it."""
    done = subprocess.run([sys.executable, "-c", PAINT_1024], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert 0 < int(done.stdout) < 1 << 30
