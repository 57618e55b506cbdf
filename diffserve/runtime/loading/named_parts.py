"""The VAE and the text encoders of a model, from its own directory or from another one that a setting names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from diffserve.api.errors import ModelLoadError
from diffserve.api.types import ModelProfile
from diffserve.models.model_files import DIFFUSERS_STEM, TRANSFORMERS_STEM, find_weights, model_path, read_json
from diffserve.runtime.loading.checkpoint import Checkpoint
from diffserve.runtime.loading.components import (
    build_text_encoder,
    build_vae,
    load_component,
    load_tokenizer,
)
from diffserve.runtime.loading.original_vae import LoadedVAE, load_vae_file
from diffserve.runtime.loading.weight_loading import TensorSource, vae_precision
from diffserve.runtime.precision import DeviceChoice
from diffserve.runtime.text.encoding import TextEncoder

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
        load_component(network, checkpoint, choice, quantise=choice.text_scheme, adapt=own)
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
