"""The upscaler stage: its sprites, its pairs of images, a short training run, and the published figures."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import mean

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from PIL import Image
from safetensors import safe_open

from diffserve.experiments.metrics.fidelity import psnr_db
from diffserve.models.upscalers import read_upscaler
from diffserve.runtime import choose_device
from diffserve.runtime.upscaling.network import Upscaler
from diffserve.training import upscaler_training
from diffserve.training.card import RESULTS, UPSCALER
from diffserve.training.eval.upscaler import compare, enlarge
from diffserve.training.training_loop import TrainSettings
from diffserve.training.upscaler_sprites import FACTOR, LARGE_PX, align, large_sprite, render_large
from diffserve.training.upscaler_training import (
    CROP_PX,
    SHAPE,
    batches,
    build_upscaler,
    charbonnier,
    enlarge_by,
    pairs,
    reduce,
    round_trip,
    save_upscaler,
    train_upscaler,
)
from diffserve.training.vae_training import build_vae
from diffserve.world.render import TILE_PX, render, sprite
from diffserve.world.scenes import OBJECTS, is_held_out, scenes

PUBLISHED = json.loads((RESULTS / "upscaler.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def vae() -> AutoencoderKL:
    torch.manual_seed(0)
    return build_vae().eval()


def reduced(pixels: np.ndarray) -> np.ndarray:
    """Return an image (H, W, C) reduced by ``FACTOR`` by the mean."""
    height, width, channels = pixels.shape
    blocks = pixels.reshape(height // FACTOR, FACTOR, width // FACTOR, FACTOR, channels)
    return np.asarray(blocks.mean((1, 3)))


def test_every_large_sprite_is_its_sprite_in_four_times_the_resolution() -> None:
    errors = {name: psnr_db(reduced(large_sprite(name, LARGE_PX)), sprite(name, TILE_PX), peak=1.0) for name in OBJECTS}
    assert min(errors.values()) > 28.0, sorted(errors, key=lambda name: errors[name])[:5]


def test_a_large_scene_is_the_scene_in_four_times_the_resolution() -> None:
    for scene in islice(scenes(4, held_out=False), 6):
        large = render_large(scene)
        assert large.shape == (512, 512, 3)
        assert psnr_db(reduced(large), render(scene)) > 27.0
        softened = enlarge(render(scene), Image.Resampling.LANCZOS)
        steepest = [np.abs(np.diff(pixels.astype(int), axis=1)).max() for pixels in (large, softened)]
        assert steepest[0] > 1.2 * steepest[1], "the truth has sharper edges than any enlargement by a filter"


def test_alignment_finds_scale_and_shift() -> None:
    small = torch.from_numpy(sprite("fox", TILE_PX).copy()).permute(2, 0, 1)[None]
    moved = torch.zeros(1, 4, 512, 512)
    large = torch.nn.functional.interpolate(small, (330, 350), mode="bicubic", antialias=True).clamp(0, 1)
    moved[:, :, 70:400, 100:450] = large
    aligned = align(moved, small, steps=80)
    error = (torch.nn.functional.avg_pool2d(aligned, FACTOR) - small).square().mean()
    assert float(error) < 1e-3


def test_pairs_mix_three_kinds_of_inputs_of_training_scenes(vae: AutoencoderKL) -> None:
    kinds = dict.fromkeys(("rendered", "reduced", "autoencoder"), 0)
    for scene, small, truth in islice(pairs(vae, seed=1), 40):
        assert not is_held_out(scene)
        assert np.array_equal(truth, render_large(scene))
        assert small.shape == (128, 128, 3)
        filters = [reduce(truth, resampling) for resampling in upscaler_training.FILTERS]
        is_rendered = np.array_equal(small, render(scene))
        is_reduced = any(np.array_equal(small, each) for each in filters)
        kinds["rendered" if is_rendered else "reduced" if is_reduced else "autoencoder"] += 1
    assert all(count >= 4 for count in kinds.values()), kinds


def test_crops_show_the_same_part_in_both_resolutions(vae: AutoencoderKL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upscaler_training, "POOL_SCENES", 8)
    monkeypatch.setattr(upscaler_training, "ROUND_TRIP_SHARE", 0.0)  # this autoencoder is not trained
    for small, truth in islice(batches(vae, batch_size=4, seed=2), 3):
        assert small.shape == (4, 3, CROP_PX, CROP_PX)
        assert truth.shape == (4, 3, FACTOR * CROP_PX, FACTOR * CROP_PX)
        for crop, large in zip(small, truth, strict=True):
            pair = (part.permute(1, 2, 0).numpy() for part in (torch.nn.functional.avg_pool2d(large, FACTOR), crop))
            assert psnr_db(*pair, peak=1.0) > 22.0


def test_round_trips_differ_with_noise(vae: AutoencoderKL) -> None:
    pixels = render(next(scenes(1, held_out=False)))[None]
    torch.manual_seed(0)
    clean, again, noisy = round_trip(vae, pixels), round_trip(vae, pixels), round_trip(vae, pixels, 0.5)
    assert clean.shape == pixels.shape
    assert np.array_equal(clean, again)
    assert not np.array_equal(clean, noisy)


def test_a_new_network_begins_near_the_nearest_neighbor() -> None:
    torch.manual_seed(0)
    pixels = render(next(scenes(1, held_out=False)))[:16, :16]
    nearest = pixels.repeat(FACTOR, 0).repeat(FACTOR, 1)
    assert np.abs(enlarge_by(build_upscaler(), pixels).astype(int) - nearest).max() <= 16


def test_the_loss_is_the_mean_absolute_error_far_from_zero() -> None:
    assert float(charbonnier(torch.full((2, 3), 0.5), torch.zeros(2, 3))) == pytest.approx(0.5, abs=1e-5)


@pytest.mark.slow
def test_a_short_run_learns_and_continues(vae: AutoencoderKL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upscaler_training, "POOL_SCENES", 12)
    monkeypatch.setattr(upscaler_training, "ROUND_TRIP_SHARE", 0.0)
    monkeypatch.setattr(upscaler_training, "SHAPE", replace(SHAPE, features=16, num_convs=2))
    settings = TrainSettings(150, 6, 2e-3, warmup=5, ema=0.9)
    torch.manual_seed(0)
    start = build_upscaler()
    before = compare(lambda pixels: enlarge_by(start, pixels), count=4)
    trained = train_upscaler(settings, tmp_path, vae, made_from="this")
    after = compare(lambda pixels: enlarge_by(trained, pixels), count=4)
    gains = [document["inputs"]["rendered"]["upscaler_db"] for document in (before, after)]
    assert gains[1] > gains[0] + 0.2
    assert json.loads((tmp_path / "upscaler.json").read_text(encoding="utf-8"))["iterations_done"] == 150
    again = train_upscaler(settings, tmp_path, vae, made_from="this")
    assert all(
        torch.equal(first, second) for first, second in zip(trained.parameters(), again.parameters(), strict=True)
    )
    file = save_upscaler(trained, tmp_path / "a" / "small.safetensors")
    served = Upscaler.load(file, choose_device("cpu", "float32"))
    pixels = render(next(scenes(1, held_out=True)))
    assert np.abs(served.upscale(pixels).astype(int) - enlarge_by(trained, pixels)).max() <= 2


def test_the_shipped_upscaler_is_small_and_in_sixteen_bits() -> None:
    assert UPSCALER.stat().st_size < 2_000_000
    assert read_upscaler(UPSCALER).shape == SHAPE
    with safe_open(UPSCALER, framework="np") as tensors:
        assert {tensors.get_slice(name).get_dtype() for name in tensors.keys()} == {"F16"}  # noqa: SIM118 - not a dict


def test_the_published_figures_are_of_this_file_and_two_decibels_above_lanczos() -> None:
    assert PUBLISHED["sha256"] == hashlib.sha256(UPSCALER.read_bytes()).hexdigest()
    assert PUBLISHED["count"] >= 64
    assert set(PUBLISHED["inputs"]) == {"rendered", "reduced by the mean", "autoencoder"}
    for kind in ("rendered", "reduced by the mean"):
        row = PUBLISHED["inputs"][kind]
        assert row["gain_db"] >= 2.0
        assert row["gain_interval_db"][0] >= 2.0
        assert row["gain_db"] == pytest.approx(row["upscaler_db"] - row["lanczos_db"], abs=0.01)


def test_a_sample_confirms_the_published_gains() -> None:
    served = Upscaler.load(UPSCALER, choose_device("cpu", "float32"))
    sample = compare(served.upscale, count=3)["inputs"]
    for kind, row in sample.items():
        assert row["first_gains_db"] == pytest.approx(PUBLISHED["inputs"][kind]["first_gains_db"][:3], abs=0.05)
        assert mean(row["first_gains_db"]) == pytest.approx(row["gain_db"], abs=0.01)
