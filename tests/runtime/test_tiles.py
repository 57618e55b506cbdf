"""Tiles: what is done piece by piece is what is done at once, as far as it looks no further than the overlap."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from diffserve.runtime.vae.vae import TILE_SHARES, in_tiles, spans
from tests.runtime.conftest import LoadTiny


def local(z: Tensor) -> Tensor:
    """Decode with a kernel of direct neighbors, two pixels for each cell."""
    blurred = F.avg_pool2d(F.pad(z, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    return F.interpolate(blurred, scale_factor=2.0, mode="nearest")


@pytest.mark.parametrize("share", TILE_SHARES)
@pytest.mark.parametrize("size", [(8, 8), (16, 24), (24, 17), (9, 64), (41, 40)])
def test_tiles_cover_all_and_overlap(size: tuple[int, int], share: float) -> None:
    for num_cells in size:
        actual = spans(num_cells, share)
        assert (actual[0][0], actual[-1][1]) == (0, num_cells)
        assert len({stop - start for start, stop in actual}) == 1
        assert all(after < stop for (_, stop), (after, _) in itertools.pairwise(actual))


@pytest.mark.parametrize("share", TILE_SHARES)
def test_the_pieces_make_the_whole(share: float) -> None:
    z = torch.randn((1, 3, 64, 48), generator=torch.Generator().manual_seed(0))
    full_output, pieces = local(z), in_tiles(local, z, 2, share)
    assert pieces.shape == full_output.shape
    assert torch.allclose(pieces, full_output, atol=1e-5)


@pytest.mark.parametrize("share", TILE_SHARES)
def test_the_pieces_of_an_encoder_make_the_whole(share: float) -> None:
    images = torch.randn((1, 3, 128, 96), generator=torch.Generator().manual_seed(0))

    def halve(part: Tensor) -> Tensor:
        return F.avg_pool2d(part, 2)

    pieces = in_tiles(halve, images, 2, share, is_encoding=True)
    assert torch.allclose(pieces, halve(images), atol=1e-5)


def test_an_image_encoded_in_tiles_is_nearly_that_of_one_piece(tiny: LoadTiny) -> None:
    vae = tiny("sd15").vae
    images = np.random.default_rng(0).integers(0, 256, (2, 128, 192, 3), dtype=np.uint8)
    in_one, in_pieces = vae.encode(images), vae.encode(images, tile_share=TILE_SHARES[0])
    assert in_pieces.shape == in_one.shape
    assert 0 < (in_pieces - in_one).abs().mean() < 0.2 * in_one.abs().mean()
    generators = [[torch.Generator().manual_seed(seed) for seed in (1, 2)] for _ in range(2)]
    sampled = [vae.encode(images, each, share) for each, share in zip(generators, (1.0, TILE_SHARES[0]), strict=True)]
    states = [[generator.get_state().tolist() for generator in each] for each in generators]
    assert states[0] == states[1], "tiles draw as much noise as one piece"
    assert not torch.equal(sampled[0], sampled[1])


def test_tiles_are_smaller_than_the_whole() -> None:
    sizes: list[int] = []

    def noted(z: Tensor) -> Tensor:
        sizes.append(z.shape[-1] * z.shape[-2])
        return local(z)

    for share, limit in zip(TILE_SHARES, (0.42, 0.15, 0.07), strict=True):
        in_tiles(noted, torch.zeros((1, 3, 64, 64)), 2, share)
        assert max(sizes) <= limit * 64 * 64
        sizes.clear()


def test_a_large_picture_is_decoded_in_tiles_where_that_is_asked_for(tiny: LoadTiny) -> None:
    vae = tiny("sd15").vae
    z = torch.randn((2, vae.latent_channels, 16, 24), generator=torch.Generator().manual_seed(0))
    in_pieces, in_one = vae.decode_later(z, TILE_SHARES[0]), vae.decode_later(z)
    for place, (image, tiled) in enumerate(zip(vae.decode(z), vae.decode_in_tiles(z), strict=True)):
        assert (in_one.picture(place) == image).all()
        assert (in_pieces.picture(place) == tiled).all()
        assert (image != tiled).any()
