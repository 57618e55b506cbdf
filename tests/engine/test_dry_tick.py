"""A tick as a GPU would meet it: the real engine on Stable Diffusion's shapes, on the meta device.

Nothing may wait for the device between two UNet calls, nothing of main memory may meet a kernel, and transfers and
launches are bounded.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import random_models
from benchmarks.random_models import save_hollow_model
from diffserve.api.types import DiffusionParams, GenerationRequest
from diffserve.engine import Engine
from diffserve.runtime.dry_run import DryRun, ListIndices, Work, dry_run
from diffserve.runtime.footprint import margin
from diffserve.runtime.loading import checkpoint
from diffserve.settings.config import EngineConfig

STEPS = 6
LARGE = pytest.param("sdxl-random", marks=pytest.mark.slow)


@pytest.fixture(autouse=True)
def _undigested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the digests of large sparse files, and cut the text encoders to two layers.

    No test here reads a digest, and no tick encodes a text with the large encoders.
    """
    for shape in (random_models.CLIP_L, random_models.BIG_G):
        monkeypatch.setitem(shape, "num_hidden_layers", 2)
    monkeypatch.setattr(checkpoint, "_sha256", lambda file: hashlib.sha256(file.name.encode()).hexdigest())


def open_engine(name: str, directory: Path, **config: Any) -> Engine:
    """Return an engine on the shapes of ``name``."""
    path = save_hollow_model(name, directory, dtype=torch.float16)
    return Engine.from_pretrained(
        str(path), device="meta", dtype="float16", config=EngineConfig(max_rows=8, deterministic=False, **config)
    )


def ticks(engine: Engine, count: int) -> list[Work]:
    """Return the work of each of ``count`` ticks; raise if a tick waits or mixes groups."""
    tick_work = []
    for _ in range(count):
        with torch.inference_mode(), DryRun() as counted, ListIndices(counted.work):
            engine.tick()
        tick_work.append(counted.work)
    return tick_work


def submit(
    engine: Engine,
    sampler: str,
    seed: int,
    guidance_scale: float = 5.0,
    cache_interval: int = 1,
    preview_every: int = 0,
) -> None:
    """One picture of the model's own size."""
    width_px, height_px = engine.info.good_sizes[0]
    params = DiffusionParams(
        sampler=sampler, num_steps=STEPS, guidance_scale=guidance_scale, cache_interval=cache_interval
    )
    engine.submit(
        GenerationRequest(
            prompt=f"a fox {seed}",
            seed=seed,
            width_px=width_px,
            height_px=height_px,
            diffusion=params,
            preview_every=preview_every,
        )
    )


@pytest.mark.parametrize("name", ["sd15-random", LARGE])
def test_no_tick_waits_for_the_device_and_transfers_are_few(name: str, tmp_path: Path) -> None:
    engine = open_engine(name, tmp_path)
    submit(engine, "ddim", 1)
    submit(engine, "dpmpp_2m", 2, guidance_scale=1.0)
    submit(engine, "euler_a", 3, guidance_scale=7.5)
    ticks(engine, 2)
    calls = len(engine.last_tick.calls)
    num_steady = 1 if name == "sdxl-random" else 2
    steady = ticks(engine, num_steady)
    assert engine.last_tick is not None
    assert [len(engine.last_tick.calls), len(steady)] == [calls, num_steady]
    kernels = {"sd15-random": 800, "sdxl-random": 1960}[name]
    for work in steady:
        assert work.copies <= 3, "what the tick is told, in whole numbers and in fractions, and its noise"
        assert work.fetches == 1, "whether the latents are finite"
        assert work.flops > 0
        assert len(work.kernels) <= calls * (kernels + 30) + 60


def test_without_noise_two_transfers_are_enough(tmp_path: Path) -> None:
    engine = open_engine("tiny-random", tmp_path)
    submit(engine, "ddim", 1)
    submit(engine, "dpmpp_2m", 2)
    ticks(engine, 2)
    assert {work.copies for work in ticks(engine, STEPS - 3)} == {2}


@pytest.mark.slow
def test_full_and_shallow_calls_of_one_tick_do_not_wait_and_shallow_ones_are_little_work(tmp_path: Path) -> None:
    engine = open_engine("sd15-random", tmp_path)
    submit(engine, "ddim", 1, cache_interval=3)
    ticks(engine, 2)
    submit(engine, "dpmpp_2m", 2, cache_interval=3)
    ticks(engine, 1)
    works, shallow = [], []
    for _ in range(STEPS - 2):
        works += ticks(engine, 1)
        assert engine.last_tick is not None
        shallow.append([call.is_shallow for call in engine.last_tick.calls])
    assert shallow == [[False, True], [True], [False, True], [False, True]]
    assert [work.fetches for work in works] == [2, 1, 2, 2]
    assert works[-1].copies == 2 * 2, "the same rows ran three ticks ago, and what they are told is kept"
    full_row = works[0].flops - works[1].flops / 2
    assert works[1].flops / 2 < 0.25 * full_row


def test_eight_newcomers_are_encoded_in_the_launches_of_one_and_nothing_waits(tmp_path: Path) -> None:
    engine = open_engine("tiny-random", tmp_path)
    conditioner = engine.runners.conditioner

    def encode(*texts: tuple[str, None]) -> None:
        conditioner.precompute(texts)
        for text in texts:
            conditioner.condition(*text, width_px=64, height_px=64)
        conditioner.release_precomputed()

    alone = dry_run(lambda: encode(("a fox", None)))
    together = dry_run(lambda: encode(*((f"{number} foxes", None) for number in range(8))))
    assert together.flops == 8 * alone.flops > 0
    assert (together.copies, len(together.kernels)) == (alone.copies, len(alone.kernels))
    weighted = dry_run(lambda: encode(*((f"{number} (foxes:1.3)", None) for number in range(8))))
    assert weighted.flops == together.flops, "none of them waited either"


@pytest.mark.parametrize("decode_tile_px", [0, 48])
def test_pictures_are_painted_from_the_first_tick_to_the_last_without_waiting(
    tmp_path: Path, decode_tile_px: int
) -> None:
    engine = open_engine("tiny-random", tmp_path, decode_tile_px=decode_tile_px)
    for seed in range(3):
        submit(engine, "ddim", seed, preview_every=2)
    works = []
    while engine.has_work:
        works += ticks(engine, 1)
    assert len(works) == STEPS + 1, "newcomers join the steps one tick after they came"
    assert [work.fetches for work in works[1:-1]] == [1, 3, 1, 3, 1], "every other step is shown"
    assert works[-1].fetches == 1 + 2, (
        "whether the latents are finite; three pictures of one call, and whether they are"
    )
    assert engine.stats().num_painted == 3


@pytest.mark.parametrize(("num_fitting", "num_calls"), [(1, 3), (2, 2), (3, 1)])
def test_finished_images_share_as_few_decoder_calls_as_memory_allows(
    tmp_path: Path, num_fitting: int, num_calls: int
) -> None:
    engine = open_engine("tiny-random", tmp_path)
    room, (width_px, height_px) = engine.runners.room, engine.info.good_sizes[0]
    cells = width_px * height_px // engine.model.vae.factor**2
    room._first_bytes = int(margin(engine.model) * room.activations.picture_cell_bytes * (num_fitting * cells + 1))
    for seed in range(3):
        submit(engine, "ddim", seed)
    works = []
    while engine.has_work:
        works += ticks(engine, 1)
    assert engine.stats().num_painted == 3
    assert works[-1].fetches == 1 + 2 * num_calls, "each call fetches its images and whether they are finite"
