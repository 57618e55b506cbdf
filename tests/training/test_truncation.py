"""Truncation of the distilled model's low-rank change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import CLIPTokenizer

from diffserve.api.errors import ConfigError
from diffserve.training import denoiser_training, train
from diffserve.training.card import SHIPPED
from diffserve.training.denoiser_training import TEXT_WIDTH, Denoiser
from diffserve.training.distillation import ADAPTER_FILE, LowRankChange, load_adapter, save_adapter
from diffserve.training.truncation import MAX_BYTES, Moments, measure_moments, truncate
from diffserve.training.vae_training import LATENT_CHANNELS
from tests.tiny_models import EMBEDDED, unet

RANK = 8


@pytest.fixture(scope="module")
def tokenizer() -> CLIPTokenizer:
    return CLIPTokenizer.from_pretrained(SHIPPED["weights"] / "tokenizer")


@pytest.fixture(scope="module")
def denoiser(tokenizer: CLIPTokenizer) -> Denoiser:
    """Build a denoiser whose UNet has the shipped layout and a third of its width."""
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(denoiser_training, "build_unet", lambda: unet(EMBEDDED, context=TEXT_WIDTH))
        return Denoiser(tokenizer).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def change(denoiser: Denoiser) -> LowRankChange:
    """Build a change of uneven layers: every second one is ten times as large."""
    torch.manual_seed(1)
    change = LowRankChange(denoiser.unet, RANK)
    for index, up in enumerate(change.up):
        torch.nn.init.normal_(up, std=0.02 if index % 2 else 0.002)
    return change.requires_grad_(False)


@pytest.fixture(scope="module")
def moments(denoiser: Denoiser, change: LowRankChange, tokenizer: CLIPTokenizer) -> list[Moments]:
    return measure_moments(change, denoiser, tokenizer, num_captions=4)


def num_bytes(change: LowRankChange) -> int:
    return sum(2 * factor.numel() for factor in change.parameters())


def unweighted(change: LowRankChange) -> list[Moments]:
    """Build moments that weight all inputs and gradients equally, which makes truncation a plain SVD."""
    return [Moments(down @ down.T, torch.eye(len(up))) for down, up in zip(change.down, change.up, strict=True)]


@torch.no_grad()
def velocity(denoiser: Denoiser, change: LowRankChange) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    points = torch.randn(8, LATENT_CHANNELS, 16, 16, generator=generator)
    context = torch.randn(8, 32, TEXT_WIDTH, generator=generator)
    return change.velocity(denoiser.unet, points, torch.tensor([999, 749, 499, 249] * 2), context)


def test_a_truncated_change_fits_its_bytes_and_ranks_follow_the_effect_of_layers(
    change: LowRankChange, moments: list[Moments]
) -> None:
    limit = num_bytes(change) // 3
    small = truncate(change, moments, limit)
    largest_rank = max(2 * (down.shape[1] + len(up)) for down, up in zip(change.down, change.up, strict=True))
    assert limit - largest_rank < num_bytes(small) <= limit
    ranks = [len(down) for down in small.down]
    assert ranks == [up.shape[1] for up in small.up]
    assert 1 <= min(ranks) < max(ranks) <= RANK
    assert sum(ranks[1::2]) > 2 * sum(ranks[0::2])


def test_truncation_by_effect_is_nearer_to_the_full_change_than_a_plain_svd_of_that_size(
    denoiser: Denoiser, change: LowRankChange, moments: list[Moments]
) -> None:
    limit, full = num_bytes(change) // 3, velocity(denoiser, change)
    by_effect, plain = (
        float((velocity(denoiser, truncate(change, metric, limit)) - full).square().mean())
        for metric in (moments, unweighted(change))
    )
    assert by_effect < 0.9 * plain


def test_with_room_for_every_rank_truncation_changes_no_weight(
    denoiser: Denoiser, change: LowRankChange, moments: list[Moments]
) -> None:
    same = truncate(change, moments, num_bytes(change))
    before, after = change.weights(denoiser.unet), same.weights(denoiser.unet)
    assert all(torch.allclose(after[name], weight, atol=1e-5) for name, weight in before.items())


def test_a_saved_change_of_uneven_ranks_is_read_back_in_16_bits(
    denoiser: Denoiser, change: LowRankChange, moments: list[Moments], tmp_path: Path
) -> None:
    small = truncate(change, moments, num_bytes(change) // 3)
    again = load_adapter(save_adapter(tmp_path, small), denoiser.unet)
    assert again.layers == small.layers
    assert [factor.shape for factor in again.parameters()] == [factor.shape for factor in small.parameters()]
    assert torch.allclose(velocity(denoiser, again), velocity(denoiser, small), atol=1e-2)


def test_a_directory_without_an_adapter_is_an_error_that_names_the_file(denoiser: Denoiser, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{ADAPTER_FILE} does not exist: name the directory of an adapter"):
        load_adapter(tmp_path, denoiser.unet)


def test_the_shipped_change_is_truncated_to_the_limit_of_the_recipe() -> None:
    factors = load_file(SHIPPED["turbo"] / ADAPTER_FILE)
    ranks = [len(factor) for name, factor in factors.items() if ".lora_A." in name]
    assert sum(factor.nbytes for factor in factors.values()) <= MAX_BYTES
    assert len(set(ranks)) > 10


@pytest.mark.slow
def test_train_truncate_writes_an_adapter_within_its_bytes(tmp_path: Path) -> None:
    train.truncate(tmp_path, "cpu", full=SHIPPED["turbo"], weights=SHIPPED["weights"], max_bytes=1_000_000)
    assert 990_000 < sum(factor.nbytes for factor in load_file(tmp_path / "turbo" / ADAPTER_FILE).values()) <= 1_000_000
