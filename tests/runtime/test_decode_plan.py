"""The plan of a decode, for devices that are not here: dtype and layout of the VAE, images per call, and tiles."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diffserve.api.errors import ConfigError
from diffserve.disk_cache import DiskCache
from diffserve.runtime.loading.weight_loading import is_channels_last, vae_precision
from diffserve.runtime.precision import DeviceChoice
from diffserve.runtime.vae import compiled
from diffserve.runtime.vae.compiled import DecoderPackages
from diffserve.runtime.vae.vae import TILE_SHARES, DecodePlan, plan_decode, tile_cells, vae_dtype
from tests.runtime.conftest import LoadTiny

HALF, BFLOAT, FULL = torch.float16, torch.bfloat16, torch.float32
GIB = 1 << 30
CELL_BYTES = {HALF: 1 << 18, BFLOAT: 1 << 18, FULL: 1 << 19}
"""What decoding one latent cell of SDXL holds: 4 GiB for 1024x1024 pixels in 16 bits."""


@pytest.mark.parametrize(
    ("kind", "capability", "dtype", "expected"),
    [
        ("cuda", (9, 0), HALF, (BFLOAT, False)),  # H100, H200
        ("cuda", (8, 0), HALF, (BFLOAT, False)),  # A100
        ("cuda", (7, 5), HALF, (FULL, False)),  # T4 has no bfloat16 units
        ("cuda", None, HALF, (FULL, False)),  # ROCm
        ("cuda", (9, 0), BFLOAT, (BFLOAT, False)),
        ("cuda", (9, 0), FULL, (FULL, False)),
        ("mps", None, HALF, (FULL, False)),
        ("xpu", None, HALF, (FULL, False)),
        ("cpu", None, HALF, (FULL, True)),
        ("cpu", None, BFLOAT, (BFLOAT, True)),
    ],
)
def test_the_vae_of_sdxl_is_in_bfloat16_where_the_gpu_has_units_for_it(
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    capability: tuple[int, int] | None,
    dtype: torch.dtype,
    expected: tuple[torch.dtype, bool],
) -> None:
    monkeypatch.setattr("diffserve.runtime.loading.weight_loading.compute_capability", lambda device: capability)
    choice = DeviceChoice(torch.device(kind), "any", dtype, "")
    precision = vae_precision(choice, {}, is_sdxl=True)
    assert (precision.compute_dtype, is_channels_last(precision)) == expected
    configured = vae_precision(replace(choice, vae_dtype=FULL), {}, is_sdxl=True)
    assert configured.compute_dtype == FULL, "the configured dtype has precedence"


def test_a_vae_that_does_not_overflow_keeps_the_dtype_of_the_model() -> None:
    assert vae_dtype(HALF, (9, 0), overflows=False) == HALF


@pytest.mark.parametrize(
    ("free_gib", "dtype", "side_px", "num_images", "expected"),
    [
        (60, BFLOAT, 1024, 1, DecodePlan(1, 1.0)),
        (60, BFLOAT, 1024, 4, DecodePlan(4, 1.0)),
        (60, BFLOAT, 512, 16, DecodePlan(16, 1.0)),
        (9, BFLOAT, 1024, 4, DecodePlan(2, 1.0)),
        (9, FULL, 1024, 4, DecodePlan(1, 1.0)),
        (3, BFLOAT, 1024, 4, DecodePlan(1, TILE_SHARES[0])),
        (3, FULL, 1024, 4, DecodePlan(2, TILE_SHARES[1])),
        (0.01, BFLOAT, 1024, 4, DecodePlan(1, TILE_SHARES[-1])),
        (9, BFLOAT, 2048, 1, DecodePlan(1, TILE_SHARES[0])),
    ],
)
def test_images_share_a_call_as_memory_allows_and_one_that_does_not_fit_is_tiled(
    free_gib: float, dtype: torch.dtype, side_px: int, num_images: int, expected: DecodePlan
) -> None:
    most_cells = int(free_gib * GIB / CELL_BYTES[dtype])
    side = side_px // 8
    plan = plan_decode(num_images, side, side, most_cells=most_cells)
    assert plan == expected
    fits = plan.images_per_call * tile_cells(side, side, plan.tile_share) <= most_cells
    assert fits or plan == DecodePlan(1, TILE_SHARES[-1])


def test_a_configured_tile_is_not_exceeded() -> None:
    assert plan_decode(4, 64, 64, most_cells=1 << 20, tile_share=0.5) == DecodePlan(4, 0.5)
    assert plan_decode(4, 64, 64, most_cells=600, tile_share=0.5) == DecodePlan(1, TILE_SHARES[1])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.slow
def test_a_compiled_decoder_is_used_for_its_size_and_deleted_once_it_is_not_faster(
    tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    vae = copy.copy(tiny("sd15").vae)
    latents = torch.randn(3, vae.latent_channels, 8, 8, generator=torch.Generator().manual_seed(0))
    expected = vae.decode(latents).astype(int)
    seconds = iter([1.0, 0.5, 1.0, 0.98])
    packages = DecoderPackages(vae, DiskCache(tmp_path))
    path = packages.path((1, *latents.shape[1:]))
    assert path is not None
    existed: list[bool] = []

    def least_seconds(run: object, device: torch.device) -> float:
        existed.append(path.exists())
        return next(seconds)

    monkeypatch.setattr(compiled, "least_seconds", least_seconds)
    line = packages.make(8, 8)
    assert existed == [False, False], "another process could have loaded a package that was never called"
    assert list(path.parent.iterdir()) == [path]
    assert line.startswith("used: 500.0 ms compiled, 1000.0 ms by the network, error ")
    vae.compiled = DecoderPackages(vae, DiskCache(tmp_path))
    decoded = vae.decode_later(latents)
    with monkeypatch.context() as broken:
        broken.setattr(vae.network, "decode", None)
        again = vae.decode_later(latents)
    for place in range(3):
        assert abs(decoded.picture(place).astype(int) - expected[place]).max() <= 1
        assert (again.picture(place) == decoded.picture(place)).all()
    assert vae.decode_later(torch.zeros(1, vae.latent_channels, 8, 16)).picture(0).shape[1] == 16 * vae.factor
    assert DecoderPackages(vae, DiskCache(tmp_path)).make(8, 8).startswith("not used: 980.0 ms compiled")
    assert not list(tmp_path.rglob("*.pt2"))
    with pytest.raises(ConfigError, match=r"engine\.cache_dir is empty"):
        DecoderPackages(vae, DiskCache(None)).make(8, 8)


def test_a_damaged_package_leaves_decoding_to_the_network(tiny: LoadTiny, tmp_path: Path) -> None:
    vae = copy.copy(tiny("sd15").vae)
    latents = torch.zeros(1, vae.latent_channels, 8, 8)
    expected = vae.decode_later(latents).picture(0)
    vae.compiled = packages = DecoderPackages(vae, DiskCache(tmp_path))
    path = packages.path(tuple(latents.shape))
    assert path is not None
    path.parent.mkdir()
    path.write_bytes(b"damaged")
    assert (vae.decode_later(latents).picture(0) == expected).all()
    assert DecoderPackages(vae, DiskCache(None)).path(tuple(latents.shape)) is None


def test_a_package_that_fails_twice_in_a_row_is_not_used_again(
    tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    vae = tiny("sd15").vae
    failure = RuntimeError("run failed")
    results: list[RuntimeError | torch.Tensor] = [failure, torch.ones(1, 3, 64, 64), failure, failure]
    outcomes = iter(results)

    def package(tensors: list[torch.Tensor]) -> torch.Tensor:
        outcome = next(outcomes)
        if isinstance(outcome, RuntimeError):
            raise outcome
        return outcome

    packages = DecoderPackages(vae, DiskCache(tmp_path))
    monkeypatch.setattr(packages, "_load", lambda shape: package)
    z = torch.zeros(1, vae.latent_channels, 8, 8)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError, match="maybe for lack of memory: run failed"):
            packages(z)
        images = packages(z)
        assert images is None or images.shape == (1, 3, 64, 64)
    assert images is None
    assert packages(z) is None
