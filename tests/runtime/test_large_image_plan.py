"""Memory of large images, planned by dry runs: 2048 px of SDXL, in one piece and in tiles, without its weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.random_models import save_hollow_model
from diffserve.api.types import DiffusionParams
from diffserve.runtime import load_model
from diffserve.runtime.footprint import plan_large_image
from diffserve.settings.config import EngineConfig

GIB = 1 << 30


@pytest.mark.slow
def test_2048_px_of_sdxl_fit_with_its_weights_on_a_16_gib_device(tmp_path: Path) -> None:
    path = save_hollow_model("sdxl-random", tmp_path, dtype=torch.float16)
    model = load_model(path, device="meta", dtype="float16")
    size, config = (2048, 2048), EngineConfig()
    one_piece = plan_large_image(model, config, size, DiffusionParams())
    tiled = plan_large_image(model, config, size, DiffusionParams(tile_size=1024))
    assert one_piece.tiles is None
    assert tiled.tiles is not None
    assert (tiled.tiles.num_tiles, tiled.tiles.tile_px) == (9, (1024, 1024))
    assert tiled.row.peak_bytes == pytest.approx(one_piece.row.peak_bytes / 4, rel=0.2)
    assert tiled.row.flops < one_piece.row.flops / 4, "attention grows with the square of the cells"
    assert tiled.decode_tile.peak_bytes < tiled.decode.peak_bytes / 10
    assert model.info.weights_bytes + tiled.from_text_bytes < 12 * GIB
    assert tiled.encode_tile.peak_bytes < tiled.encode.peak_bytes / 10
    assert tiled.from_text_bytes <= tiled.from_image_bytes < tiled.encode.peak_bytes
