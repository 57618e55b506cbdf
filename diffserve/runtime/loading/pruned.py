"""Pruned models on disk: a diffusers directory whose UNet has ``pruned.json`` next to its configuration.

diffusers' configuration has no number of heads per layer, so that file has it: the UNet is built from the configuration
and narrowed before its weights are read. diffusers itself rejects such a UNet by the shapes of its tensors.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Final

import msgspec
from safetensors.torch import save_file

from diffserve.api.errors import ConfigError, ModelLoadError
from diffserve.models.model_files import DIFFUSERS_STEM, find_weights, read_json
from diffserve.models.profiles import ADAPTER_FILE
from diffserve.models.vocabulary import WORLD_FILE
from diffserve.runtime.loading.checkpoint import MANIFEST_FILE, Checkpoint, write_manifest
from diffserve.runtime.loading.components import ALLOWED_CLASSES, build, load_component
from diffserve.runtime.loading.directory import read_index
from diffserve.runtime.loading.family import location_of
from diffserve.runtime.precision import choose_device
from diffserve.runtime.unet.pruning import PRUNED_FILE, Shares, prune, shrink_to_stored_widths, widths_of

CONFIG_FILE: Final = "config.json"
COPIED: Final = frozenset({*ALLOWED_CLASSES, "scheduler", "model_index.json", WORLD_FILE})
"""Parts of a model's directory that are copied; the fewest steps were measured of the original."""


def prune_directory(path: str | Path, target: Path, shares: Shares) -> None:
    """Write a pruned copy of the model at ``path`` to ``target``, complete or not at all.

    Args:
        path: A built-in model or a diffusers directory, pruned or not. Weights keep their dtype.
        target: The new directory.
        shares: Shares of heads and channels to remove from the UNet.

    Raises:
        ConfigError: Nothing would be removed, or ``target`` exists.
        ModelLoadError: The model cannot be read.
    """
    source = location_of(path)
    if target.exists():
        raise ConfigError(f"{target} exists, and nothing is overwritten; give another folder.", param="output")
    if (source / ADAPTER_FILE).is_file():
        raise ModelLoadError(f"{source} is an adapter, which has no UNet; give the model that it was made for.")
    if not source.is_dir():
        raise ModelLoadError(f"{source} is not a folder; only a diffusers directory can be pruned.")
    read_index(source)
    unet = _load_unet(source / "unet")
    before = widths_of(unet)
    prune(unet, shares)
    after = widths_of(unet)
    if after == before:
        problem = f"heads {shares.heads:g} and channels {shares.channels:g} remove nothing from {source}"
        raise ConfigError(f"{problem}: its layers have too few; give larger shares.", param="heads")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        part = Path(mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    except OSError as error:
        raise ConfigError(
            f"{target} cannot be written: {error.strerror}; give another folder.", param="output"
        ) from None
    try:
        copy = shutil.copytree(source, part / target.name, ignore=lambda folder, names: _left(source, folder, names))
        weights = copy / "unet" / f"{DIFFUSERS_STEM}.safetensors"
        save_file(unet.state_dict(), weights, {"format": "pt"})
        shutil.copymode(copy / "unet" / CONFIG_FILE, weights)  # safetensors writes for its owner alone
        (copy / "unet" / PRUNED_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(after)) + b"\n")
        if (source / MANIFEST_FILE).is_file():
            write_manifest(copy)
        os.rename(copy, target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _load_unet(directory: Path) -> Any:
    """Load the UNet in the dtype of its first tensor."""
    file = directory / CONFIG_FILE
    network = build("UNet2DConditionModel", read_json(file), str(file))
    shrink_to_stored_widths(network, directory)
    checkpoint = Checkpoint.open(find_weights(directory, DIFFUSERS_STEM, dtype="float32"))
    stored = checkpoint.read(next(iter(checkpoint.entries))).dtype
    return load_component(network, checkpoint, replace(choose_device("cpu", "float32"), compute_dtype=stored))


def _left(source: Path, folder: str, names: Iterable[str]) -> set[str]:
    """Return the names in ``folder`` that are not copied: the UNet's weights, and files that belong to no component."""
    if Path(folder) == source:
        return set(names) - COPIED
    return set(names) - {CONFIG_FILE} if Path(folder) == source / "unet" else set()
