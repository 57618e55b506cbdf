"""The preview stage: its batches, its augmentation of latents, and a short training run."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F

from diffserve.runtime import choose_device
from diffserve.runtime.vae.preview import PreviewConfig, PreviewDecoder, load_preview
from diffserve.training import preview_training
from diffserve.training.latents import LatentScenes
from diffserve.training.preview_training import (
    CONFIG,
    batches,
    fidelity_db,
    like_estimates,
    save_preview,
    train_preview,
)
from diffserve.training.training_loop import TrainSettings
from diffserve.training.vae_training import build_vae, to_unit
from diffserve.world.render import render
from diffserve.world.scenes import scenes


def shelf(count: int, width_px: int = 128, height_px: int = 128, seed: int = 0) -> LatentScenes:
    """Create scenes whose latents identify them: latent i is filled with i."""
    selected = list(islice(scenes(seed, held_out=False), count))
    numbers = torch.arange(count).view(-1, 1, 1, 1)
    return LatentScenes(selected, numbers.expand(-1, 8, height_px // 8, width_px // 8).half())


def pooled(count: int) -> tuple[LatentScenes, Tensor]:
    """Create scenes whose latents are their pooled colors, and their images: an easy task for a short run."""
    selected = list(islice(scenes(0, held_out=False), count))
    pictures = to_unit(np.stack([render(scene) for scene in selected]))
    return LatentScenes(selected, F.avg_pool2d(pictures, 8).repeat(1, 3, 1, 1)[:, :8].half()), pictures


def test_a_picture_is_of_the_scene_that_its_latent_encodes() -> None:
    data = [shelf(4), shelf(4, 192, 128, seed=1)]
    orientations = set()
    for latents, pictures in islice(batches(data, batch_size=6, seed=0), 6):
        wide = latents.shape[-1] == 24
        assert latents.shape == ((4, 8, 16, 24) if wide else (6, 8, 16, 16))
        orientations.add(wide)
        for latent, picture in zip(latents, pictures, strict=True):
            scene = data[wide].scenes[int(latent[0, 0, 0])]
            assert torch.equal(picture, to_unit(render(scene, 192 if wide else 128, 128)[None])[0])
    assert orientations == {False, True}


def test_mixed_latents_show_equally_mixed_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(preview_training, "MOST_NOISE", 0.0)
    monkeypatch.setattr(preview_training, "STRETCHED_SHARE", 0.0)
    clean = torch.randn(64, 3, 4, 4)
    latents, pictures = like_estimates(clean, 2 * clean)
    assert torch.allclose(2 * latents, pictures)
    unmixed_share = (latents == clean).flatten(1).all(dim=1).float().mean()
    assert 0.5 < float(unmixed_share) < 0.9


def test_stretched_and_noisy_latents_show_the_clean_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(preview_training, "MIXED_SHARE", 0.0)
    clean, truth = torch.ones(400, 1, 8, 8), torch.rand(400, 3, 8, 8)
    latents, pictures = like_estimates(clean, truth)
    assert torch.equal(pictures, truth)
    stretch = latents.mean(dim=(1, 2, 3))
    assert 0.1 < float((stretch > 1.2).float().mean()) < 0.25
    assert float(stretch.min()) > 0.8
    assert float(stretch.max()) < preview_training.MOST_STRETCH + 0.2
    noise = latents.std(dim=(1, 2, 3))
    assert 0.15 < float(noise.max()) < 0.3
    assert float(noise.min()) < 0.05


@pytest.mark.slow
def test_a_short_run_learns_what_the_latents_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = PreviewConfig(latent_channels=8, widths=(16,), num_blocks=(1,), factor=8)
    monkeypatch.setattr(preview_training, "CONFIG", small)
    data, pictures = pooled(8)
    settings = TrainSettings(60, 4, 1e-2, warmup=5, ema=0.9)
    iterations: list[int] = []
    trained = train_preview(settings, tmp_path, [data], lambda _, iteration: iterations.append(iteration), 25)
    assert iterations == [25, 50]
    with torch.inference_mode():
        error = (trained(data.latents.float()) - pictures).abs().mean()
    assert float(error) < 0.5 * float((pictures - pictures.mean()).abs().mean())
    assert json.loads((tmp_path / "preview.json").read_text(encoding="utf-8"))["iterations_done"] == 60
    again = train_preview(settings, tmp_path, [data])
    assert all(
        torch.equal(first, second) for first, second in zip(trained.parameters(), again.parameters(), strict=True)
    )


def test_the_saved_decoder_shows_the_same_in_sixteen_bits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = PreviewDecoder(CONFIG).eval()
    file = save_preview(net, tmp_path / "preview") / "diffusion_pytorch_model.safetensors"
    with safe_open(file, framework="np") as tensors:
        assert {tensors.get_slice(name).get_dtype() for name in tensors.keys()} == {"F16"}  # noqa: SIM118 - not a dict
    assert file.stat().st_size < 1_000_000
    runner = load_preview(file.parent, choose_device("cpu", "float32"))
    assert runner is not None
    latents = torch.randn(2, 8, 16, 24)
    with torch.inference_mode():
        expected = net(latents).clamp(-1, 1).add(1).mul(127.5).permute(0, 2, 3, 1).numpy()
    assert np.abs(runner.preview_later(latents).pixels.read().numpy() - expected).max() <= 1.0


@torch.no_grad()
def paint_evenly(layer: Any, value: float) -> None:
    """Make ``layer`` return ``value`` for any input."""
    layer.weight.zero_()
    layer.bias.fill_(value)


def test_fidelity_is_the_psnr_against_the_autoencoders_own_decode() -> None:
    vae, net = build_vae().eval(), PreviewDecoder(CONFIG).eval()
    paint_evenly(vae.decoder.conv_out, 0.2)
    paint_evenly(net.conv_out, 0.0)
    # an error of 0.2 everywhere in a range of 2
    assert fidelity_db(net, vae, seed=3, num_scenes=2) == pytest.approx(20.0, abs=1e-3)
