"""Shipped weights are checked against their manifest: a flipped bit is found at load, by the name of its file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from diffserve.api.errors import ModelLoadError
from diffserve.runtime import load_model
from diffserve.runtime.language import load_language_model
from diffserve.runtime.loading.checkpoint import MANIFEST_FILE, NOT_COVERED, check_manifest, write_manifest
from diffserve.training.card import SHIPPED

LOADERS: dict[str, Callable[[Path], object]] = {
    "weights": load_model,
    "turbo": load_model,
    "rewriter": load_language_model,
}


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_file_that_ships_is_listed_and_is_the_one_that_is_listed(name: str) -> None:
    directory = SHIPPED[name]
    listed = json.loads((directory / MANIFEST_FILE).read_text(encoding="utf-8"))
    shipped = {path for path in directory.rglob("*") if path.is_file() and path.name not in NOT_COVERED}
    assert listed.keys() == {path.relative_to(directory).as_posix() for path in shipped}
    check_manifest(directory)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("weights", "unet/diffusion_pytorch_model.safetensors"),
        ("weights", "vae/config.json"),
        ("weights", "preview/diffusion_pytorch_model.safetensors"),
        ("turbo", "pytorch_lora_weights.safetensors"),
        ("rewriter", "model.safetensors"),
        ("rewriter", "tokenizer.json"),
    ],
)
def test_flipped_bit_in_shipped_weights_is_found_at_load(name: str, file: str, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(SHIPPED[name], tmp_path / name))
    flip_a_bit(copy / file)
    with pytest.raises(ModelLoadError, match=rf"{file} is damaged: .* copy it again") as caught:
        LOADERS[name](copy)
    assert "\n" not in caught.value.message


def test_missing_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a", encoding="utf-8")
    write_manifest(tmp_path)
    check_manifest(tmp_path)
    (tmp_path / "a").unlink()
    with pytest.raises(ModelLoadError, match=r"a cannot be read"):
        check_manifest(tmp_path)


def test_later_weight_entries_may_change(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a", encoding="utf-8")
    write_manifest(tmp_path)
    (tmp_path / "fewest_steps.json").write_text("{}", encoding="utf-8")
    check_manifest(tmp_path)
    (tmp_path / MANIFEST_FILE).unlink()
    (tmp_path / "a").write_text("b", encoding="utf-8")
    check_manifest(tmp_path)
