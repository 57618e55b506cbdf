"""VAE and text encoders of a model, from its own directory or from a configured path.

A VAE can also be in the original layout: part of a single-file checkpoint, or a file by itself, as
sd-vae-ft-mse-840000 and sdxl_vae are published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from diffserve.api.errors import ModelLoadError
from diffserve.api.types import ModelProfile
from diffserve.models.model_files import (
    DIFFUSERS_STEM,
    TRANSFORMERS_STEM,
    find_weights,
    model_path,
    read_json,
    refuse_pickle,
)
from diffserve.runtime.loading.checkpoint import Checkpoint
from diffserve.runtime.loading.components import (
    build_text_encoder,
    build_vae,
    load_component,
    load_tokenizer,
)
from diffserve.runtime.loading.single_file_config import infer_vae
from diffserve.runtime.loading.single_file_keys import VAE_PREFIX, add_vae_tensor, vae_key
from diffserve.runtime.loading.weight_loading import TensorSource, fill_renamed, vae_precision
from diffserve.runtime.precision import DeviceChoice
from diffserve.runtime.text.encoding import TextEncoder


class LoadedVAE(NamedTuple):
    """A VAE, its compute dtype, and the files that it came from."""

    network: Any
    dtype: torch.dtype
    files: list[Path]


def read_original_vae(
    checkpoint: Checkpoint, prefix: str, config: Mapping[str, Any], choice: DeviceChoice, *, is_sdxl: bool
) -> tuple[LoadedVAE, set[str]]:
    """Load the VAE of ``config`` from the tensors below ``prefix``; return it and the tensors' names.

    Raises ModelLoadError.
    """
    network = build_vae(config, checkpoint.where())
    num_levels = len(network.config.block_out_channels)

    def add(source: TensorSource, name: str) -> str:
        return add_vae_tensor(source, name, prefix + vae_key(name, num_levels))

    precision = vae_precision(choice, config, is_sdxl=is_sdxl)
    used = fill_renamed(network, checkpoint, add, precision, channels_last=True)
    return LoadedVAE(network, precision.compute_dtype, checkpoint.files), used


def load_vae_file(file: Path, choice: DeviceChoice, *, is_sdxl: bool) -> LoadedVAE:
    """Load the VAE in ``file``, in the original layout, or in diffusers' layout with config.json in the same folder.

    The original layout has no scaling factor, so that of the model's family is used. Raises ModelLoadError.
    """
    refuse_pickle(file)
    checkpoint = Checkpoint.open([file])
    for prefix in ("", VAE_PREFIX):
        if f"{prefix}decoder.mid.block_1.conv1.weight" in checkpoint:
            config = infer_vae(checkpoint, prefix, is_sdxl=is_sdxl)
            return read_original_vae(checkpoint, prefix, config, choice, is_sdxl=is_sdxl)[0]
    config_file = file.with_name("config.json")
    if "decoder.conv_in.weight" not in checkpoint or not config_file.is_file():
        raise ModelLoadError(
            f"{file} is no VAE in the original layout (it has no decoder.mid.block_1 tensors), and no config.json "
            "beside it says what else it is; name a VAE's file or directory (model.vae)."
        )
    config = read_json(config_file)
    precision = vae_precision(choice, config, is_sdxl=is_sdxl)
    network = load_component(build_vae(config, str(config_file)), checkpoint, precision, channels_last=True)
    return LoadedVAE(network, precision.compute_dtype, checkpoint.files)


TEXT_CLASSES: Final = {"": "CLIPTextModel", "_2": "CLIPTextModelWithProjection"}

Adapt = Callable[[str, TensorSource], None]


@dataclass(frozen=True)
class ComponentOverrides:
    """Components that replace the model's own; ``None``: its own.

    Attributes:
        vae: A VAE directory of diffusers, a whole model, or a VAE file.
        text_encoder: A text encoder directory of transformers with its tokenizer inside or next to it, or a whole
            model.
        made_vae: A loaded VAE to use.
    """

    vae: Path | None = None
    text_encoder: Path | None = None
    loaded_vae: LoadedVAE | None = None

    @classmethod
    def of(cls, profile: ModelProfile | None) -> ComponentOverrides:
        """Return the overrides of ``profile``."""
        paths = (profile.vae, profile.text_encoder) if profile else ("", "")
        vae, text_encoder = (model_path(name) if name else None for name in paths)
        return cls(vae, text_encoder)

    def vae_place(self, default: Path) -> Path:
        """Return the VAE's directory or file, by default ``default``. Raises ModelLoadError for an invalid override."""
        if self.vae is None:
            return default
        return self.vae if self.vae.is_file() else _component(self.vae, "vae", "vae")

    def text_directories(self, suffixes: Sequence[str], default: Path | None = None) -> list[tuple[Path, Path]]:
        """Return (text encoder, tokenizer) directories for each of ``suffixes``, by default those in ``default``.

        Raises ModelLoadError if the override is not valid.
        """
        if self.text_encoder is None:
            assert default is not None, "a single file has its own layout"
            return [(default / f"text_encoder{suffix}", default / f"tokenizer{suffix}") for suffix in suffixes]
        encoders = [_component(self.text_encoder, f"text_encoder{suffix}", "text_encoder") for suffix in suffixes]
        if len(set(encoders)) < len(encoders):
            raise ModelLoadError(
                f"{self.text_encoder} is one text encoder, and the model has {len(encoders)}; "
                "name a model's directory, with text_encoder and text_encoder_2 (model.text_encoder)."
            )
        tokenizers = [
            directory.with_name(f"tokenizer{suffix}") for directory, suffix in zip(encoders, suffixes, strict=True)
        ]
        return [
            (encoder, tokenizer if tokenizer.is_dir() else encoder)
            for encoder, tokenizer in zip(encoders, tokenizers, strict=True)
        ]


NO_OVERRIDES: Final = ComponentOverrides()


def load_vae(directory: Path, choice: DeviceChoice, *, is_sdxl: bool) -> LoadedVAE:
    """Load the VAE from a directory or a file. Raises ModelLoadError."""
    if directory.is_file():
        return load_vae_file(directory, choice, is_sdxl=is_sdxl)
    file = directory / "config.json"
    config = read_json(file)
    network = build_vae(config, str(file))
    precision = vae_precision(choice, config, is_sdxl=is_sdxl)
    checkpoint = Checkpoint.open(find_weights(directory, DIFFUSERS_STEM, dtype=choice.dtype))
    load_component(network, checkpoint, precision, channels_last=True)
    return LoadedVAE(network, precision.compute_dtype, checkpoint.files)


def load_text_encoders(
    directories: Sequence[tuple[Path, Path]],
    choice: DeviceChoice,
    classes: Sequence[str],
    adapt: Adapt | None = None,
    suffixes: Iterable[str] = TEXT_CLASSES,
) -> tuple[tuple[TextEncoder, ...], list[Path]]:
    """Load the text encoders in ``directories`` with their tokenizers; return them and their files.

    Raises ModelLoadError.
    """
    encoders, files = [], []
    for (directory, tokenizer), suffix, cls in zip(directories, suffixes, classes, strict=False):
        file = directory / "config.json"
        network = build_text_encoder(cls, read_json(file), str(file))
        checkpoint = Checkpoint.open(find_weights(directory, TRANSFORMERS_STEM, dtype=choice.dtype))
        adapt_encoder = adapt and partial(adapt, f"text_encoder{suffix}")
        load_component(network, checkpoint, choice, quantize=choice.text_scheme, adapt=adapt_encoder)
        encoders.append(TextEncoder.pair(load_tokenizer(tokenizer), network))
        files += checkpoint.files
    return tuple(encoders), files


def _component(path: Path, name: str, setting: str) -> Path:
    """Return the directory of component ``name``: in the model's directory ``path``, or ``path`` itself."""
    for directory in (path / name, path):
        if (directory / "config.json").is_file():
            return directory
    raise ModelLoadError(
        f"{path} holds neither {name}/config.json nor config.json; name a directory as diffusers writes it, "
        f"with safetensors in it (model.{setting})."
    )
