"""A VAE in the original layout: a part of a single-file checkpoint, or a file by itself, as sd-vae-ft-mse-840000 and
sdxl_vae are published.
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


TEXT_CLASSES: Final = {"": "CLIPTextModel", "_2": "CLIPTextModelWithProjection"}

Adapt = Callable[[str, TensorSource], None]


@dataclass(frozen=True)
class NamedParts:
    """What is read in place of the model's own parts; ``None``: its own.

    vae           as diffusers writes a VAE, a whole model, or a file that is a VAE
    made_vae      one that is there already, and is used as it is
    text_encoder  as transformers writes a text encoder, its tokenizer in it or beside it, or a whole model
    """

    vae: Path | None = None
    text_encoder: Path | None = None
    made_vae: LoadedVAE | None = None

    @classmethod
    def of(cls, profile: ModelProfile | None) -> NamedParts:
        """Those of ``profile``."""
        named = (profile.vae, profile.text_encoder) if profile else ("", "")
        vae, text_encoder = (model_path(name) if name else None for name in named)
        return cls(vae, text_encoder)

    def vae_place(self, own: Path) -> Path:
        """Directory or file of the VAE: as named, else ``own``. Raises ModelLoadError where it is not as named."""
        if self.vae is None:
            return own
        return self.vae if self.vae.is_file() else _component(self.vae, "vae", "vae")

    def text_directories(self, suffixes: Sequence[str], own: Path | None = None) -> list[tuple[Path, Path]]:
        """(text encoder, its tokenizer) for every one of ``suffixes``: as named, else in the model's directory ``own``.

        Raises ModelLoadError where they are not as named.
        """
        if self.text_encoder is None:
            assert own is not None, "a single file has its own layout"
            return [(own / f"text_encoder{suffix}", own / f"tokenizer{suffix}") for suffix in suffixes]
        found = [_component(self.text_encoder, f"text_encoder{suffix}", "text_encoder") for suffix in suffixes]
        if len(set(found)) < len(found):
            raise ModelLoadError(
                f"{self.text_encoder} is one text encoder, and the model has {len(found)}; "
                "name a model's directory, with text_encoder and text_encoder_2 (model.text_encoder)."
            )
        beside = [directory.with_name(f"tokenizer{suffix}") for directory, suffix in zip(found, suffixes, strict=True)]
        return [(one, other if other.is_dir() else one) for one, other in zip(found, beside, strict=True)]


OWN_PARTS: Final = NamedParts()


def load_vae(directory: Path, choice: DeviceChoice, *, is_sdxl: bool) -> LoadedVAE:
    """The VAE in ``directory``, or the one that a file of that name is. Raises ModelLoadError."""
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
    """(the text encoders in ``directories``, each with its tokenizer's; their files). Raises ModelLoadError."""
    encoders, files = [], []
    for (directory, tokenizer), suffix, cls in zip(directories, suffixes, classes, strict=False):
        file = directory / "config.json"
        network = build_text_encoder(cls, read_json(file), str(file))
        checkpoint = Checkpoint.open(find_weights(directory, TRANSFORMERS_STEM, dtype=choice.dtype))
        own = adapt and partial(adapt, f"text_encoder{suffix}")
        load_component(network, checkpoint, choice, quantize=choice.text_scheme, adapt=own)
        encoders.append(TextEncoder.pair(load_tokenizer(tokenizer), network))
        files += checkpoint.files
    return tuple(encoders), files


def _component(named: Path, name: str, setting: str) -> Path:
    """The directory of component ``name``: in the model's directory ``named``, or ``named`` itself."""
    for directory in (named / name, named):
        if (directory / "config.json").is_file():
            return directory
    raise ModelLoadError(
        f"{named} holds neither {name}/config.json nor config.json; name a directory as diffusers writes it, "
        f"with safetensors in it (model.{setting})."
    )
