"""A VAE in the original layout: a part of a single-file checkpoint, or a file by itself, as sd-vae-ft-mse-840000 and
sdxl_vae are published.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from diffserve.api.errors import ModelLoadError
from diffserve.models.model_files import read_json, refuse_pickle
from diffserve.runtime.loading.checkpoint import Checkpoint
from diffserve.runtime.loading.components import build_vae, load_component
from diffserve.runtime.loading.single_file_config import infer_vae
from diffserve.runtime.loading.single_file_keys import VAE_PREFIX, add_vae_tensor, vae_key
from diffserve.runtime.loading.weight_loading import TensorSource, fill_renamed, vae_precision
from diffserve.runtime.precision import DeviceChoice


class LoadedVAE(NamedTuple):
    """A VAE, what it computes in, and the files that it came from."""

    network: Any
    dtype: torch.dtype
    files: list[Path]


def read_original_vae(
    checkpoint: Checkpoint, prefix: str, config: Mapping[str, Any], choice: DeviceChoice, *, is_sdxl: bool
) -> tuple[LoadedVAE, set[str]]:
    """(the VAE of ``config`` from the tensors below ``prefix``, their names). Raises ModelLoadError."""
    network = build_vae(config, checkpoint.where())
    num_levels = len(network.config.block_out_channels)

    def add(source: TensorSource, name: str) -> str:
        return add_vae_tensor(source, name, prefix + vae_key(name, num_levels))

    precision = vae_precision(choice, config, is_sdxl=is_sdxl)
    used = fill_renamed(network, checkpoint, add, precision, channels_last=True)
    return LoadedVAE(network, precision.compute_dtype, checkpoint.files), used


def load_vae_file(file: Path, choice: DeviceChoice, *, is_sdxl: bool) -> LoadedVAE:
    """The VAE that is all of ``file``, in the original layout, or as diffusers writes it with config.json beside it.

    The original layout says nothing of the scaling factor: it is that of the model's family. Raises ModelLoadError.
    """
    refuse_pickle(file)
    checkpoint = Checkpoint.open([file])
    for prefix in ("", VAE_PREFIX):
        if f"{prefix}decoder.mid.block_1.conv1.weight" in checkpoint:
            config = infer_vae(checkpoint, prefix, is_sdxl=is_sdxl)
            return read_original_vae(checkpoint, prefix, config, choice, is_sdxl=is_sdxl)[0]
    beside = file.with_name("config.json")
    if "decoder.conv_in.weight" not in checkpoint or not beside.is_file():
        raise ModelLoadError(
            f"{file} is no VAE in the original layout (it has no decoder.mid.block_1 tensors), and no config.json "
            "beside it says what else it is; name a VAE's file or directory (model.vae)."
        )
    config = read_json(beside)
    precision = vae_precision(choice, config, is_sdxl=is_sdxl)
    network = load_component(build_vae(config, str(beside)), checkpoint, precision, channels_last=True)
    return LoadedVAE(network, precision.compute_dtype, checkpoint.files)
