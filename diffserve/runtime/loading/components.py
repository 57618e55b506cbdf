"""Model components: the allowed classes, how each is built, and where VAE and text encoders are loaded from.

Nothing else is instantiated. VAE and text encoders come from the model's own directory or from a configured path. A VAE
can also be in the original layout: part of a single-file checkpoint, or a file by itself, as sd-vae-ft-mse-840000 and
sdxl_vae are published.
"""

from __future__ import annotations

import math
import re
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
    KNOWN_CONDITIONS,
    TRANSFORMERS_STEM,
    find_weights,
    model_path,
    read_json,
    refuse_pickle,
)
from diffserve.runtime.loading.checkpoint import Checkpoint
from diffserve.runtime.loading.library_imports import hushed, import_quietly
from diffserve.runtime.loading.single_file_layout import VAE_PREFIX, add_vae_tensor, infer_vae, vae_key
from diffserve.runtime.loading.weight_loading import TensorSource, build_on_meta, fill, fill_renamed, vae_precision
from diffserve.runtime.precision import TORCH_DTYPES, DeviceChoice
from diffserve.runtime.text.encoding import TextEncoder
from diffserve.runtime.unet.layers import use_halved_gates, use_steady_layers

TINY_VAE: Final = "AutoencoderTiny"
"""TAESD (https://github.com/madebyollin/taesd): a small autoencoder without a latent distribution."""

#: Component of a model_index.json -> class names that may stand there.
ALLOWED_CLASSES: Final[Mapping[str, tuple[str, ...]]] = {
    "unet": ("UNet2DConditionModel",),
    "vae": ("AutoencoderKL", TINY_VAE),
    "text_encoder": ("CLIPTextModel", "CLIPTextModelWithProjection"),
    "text_encoder_2": ("CLIPTextModelWithProjection",),
    "tokenizer": ("CLIPTokenizer", "CLIPTokenizerFast"),
    "tokenizer_2": ("CLIPTokenizer", "CLIPTokenizerFast"),
    "preview": ("PreviewDecoder", TINY_VAE),
}
#: Components that generation does not need; their entries are never read.
IGNORED_COMPONENTS: Final = frozenset({"safety_checker", "feature_extractor", "image_encoder"})
OLD_ATTENTION_WORDS: Final = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
OLD_ATTENTION = re.compile(rf"(?<=\.attentions\.0)\.({'|'.join(OLD_ATTENTION_WORDS)})\.")
PREFIX = "text_model."
RGB: Final = 3
OFFLINE: Final = {"local_files_only": True, "trust_remote_code": False}


def build_unet(config: Mapping[str, Any], where: str, choice: DeviceChoice) -> Any:
    """Build ``UNet2DConditionModel``, empty. Raises ModelLoadError if it needs unsupported conditions."""
    for name, supported in KNOWN_CONDITIONS.items():
        if config.get(name, supported[0]) not in supported:
            problem = f"{where}: {name} is {config[name]!r}; diffserve only supports text-to-image UNets without it."
            if config[name] == "ip_image_proj":
                problem = f"{problem[:-1]}: it belongs to an IP-Adapter, so give the original UNet."
            raise ModelLoadError(problem)
    network = build("UNet2DConditionModel", config, where)
    if choice.device.type == "cpu":
        use_steady_layers(network, choice.compute_dtype)
    elif choice.device.type == "cuda" and choice.is_unet_whole and choice.dtype in TORCH_DTYPES:
        use_halved_gates(network)
    return network


def build_vae(config: Mapping[str, Any], where: str) -> Any:
    """Build the VAE of ``config``, empty. Raises ModelLoadError for a class or for values that are not served."""
    supported = ALLOWED_CLASSES["vae"]
    class_name = config.get("_class_name", supported[0])
    if class_name not in supported:
        raise ModelLoadError(f"{where} is of a {class_name}; diffserve builds {' or '.join(supported)} there.")
    other = "name another VAE (--vae, model.vae)"
    for name in ("in_channels", "out_channels"):
        if config.get(name, RGB) != RGB:
            raise ModelLoadError(f"{where}: {name} is {config[name]!r}; images have {RGB} (RGB): {other}.")
    scale = config.get("scaling_factor", 1.0)
    if not _is_number(scale) or scale <= 0.0:
        usual = "0.18215 for Stable Diffusion and 0.13025 for SDXL"
        raise ModelLoadError(f"{where}: scaling_factor is {scale!r}; it must be a positive number, {usual}.")
    channels = config.get("latent_channels", 4)
    for name in ("latents_mean", "latents_std"):
        values = config.get(name)
        if values and not (isinstance(values, list) and len(values) == channels and all(map(_is_number, values))):
            raise ModelLoadError(f"{where}: {name} is {values!r}; it must be a list of {channels} numbers or null.")
    if not _is_number(config.get("shift_factor") or 0.0):
        raise ModelLoadError(f"{where}: shift_factor is {config['shift_factor']!r}; it must be a number or null.")
    if class_name == TINY_VAE:
        config = {key: value for key, value in config.items() if key != "block_out_channels"}  # written, never read
    return build(class_name, config, where)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def build(name: str, config: Mapping[str, Any], where: str) -> Any:
    """Build diffusers' class ``name``, empty."""
    cls = import_quietly("diffusers", name)
    settings = {key: value for key, value in config.items() if not key.startswith("_")}
    return _build(name, where, lambda: cls.from_config(settings))


NOT_SETTINGS: Final = frozenset(
    {"architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "_name_or_path"}
)
"""Entries of transformers' configurations that are no arguments of a configuration class."""


def build_text_encoder(name: str, config: Mapping[str, Any], where: str) -> Any:
    """Build ``CLIPTextModel`` or ``CLIPTextModelWithProjection`` (``name``), empty."""
    cls, config_cls = (import_quietly("transformers", part) for part in (name, "CLIPTextConfig"))
    config = config.get("text_config") or config  # in a complete CLIP the vision part has its own
    settings = {key: value for key, value in config.items() if key not in NOT_SETTINGS}
    return _build(name, where, lambda: cls(config_cls(**settings)))


def build_clip(config: Mapping[str, Any], where: str) -> Any:
    """Build transformers' ``CLIPModel``, text and vision, empty."""
    cls, config_cls = (import_quietly("transformers", name) for name in ("CLIPModel", "CLIPConfig"))
    settings = {name: config[name] for name in ("text_config", "vision_config", "projection_dim") if name in config}
    return _build("CLIPModel", where, lambda: cls(config_cls(**settings)))


def build_clip_vision(config: Mapping[str, Any], where: str) -> Any:
    """Build transformers' ``CLIPVisionModelWithProjection``, empty."""
    name = "CLIPVisionModelWithProjection"
    cls, config_cls = (import_quietly("transformers", part) for part in (name, "CLIPVisionConfig"))
    settings = {key: value for key, value in config.items() if key not in NOT_SETTINGS}
    return _build(name, where, lambda: cls(config_cls(**settings)))


def _build(name: str, where: str, make: Callable[[], Any]) -> Any:
    try:
        with hushed("transformers"):
            return build_on_meta(make)
    except Exception as error:  # the libraries raise various errors
        raise ModelLoadError(f"{where}: {name} cannot be built from this configuration ({error}).") from error


def load_component(
    network: Any,
    checkpoint: Checkpoint,
    choice: DeviceChoice,
    *,
    quantize: str | None = None,
    adapt: Callable[[TensorSource], None] | None = None,
    channels_last: bool = False,
) -> Any:
    """Fill ``network`` from a checkpoint of diffusers or transformers; ``adapt`` may change the source."""
    checkpoint.refuse_ip_adapter()
    names: dict[str, str] = {}
    for key in checkpoint.entries:
        other = names.setdefault(_own_name(key, network), key)
        if other != key:
            raise ModelLoadError(f"{checkpoint.where()} holds {other!r} and {key!r}, which are one weight; keep one.")
    source = TensorSource.renamed(checkpoint, names)
    if adapt is not None:
        adapt(source)
    fill(network, source, choice, quantize=quantize, channels_last=channels_last)
    return network


def _own_name(key: str, network: Any) -> str:
    """Return the parameter of ``network`` for the key ``key`` on disk.

    A VAE's attention had other names before diffusers 0.17. A text encoder's tensors have the prefix ``text_model.``;
    its parameters have it in some versions only.
    """
    if type(network).__name__ == "AutoencoderKL":
        return OLD_ATTENTION.sub(lambda match: f".{OLD_ATTENTION_WORDS[match[1]]}.", key)
    if not type(network).__name__.startswith("CLIPText"):
        return key
    bare = key.removeprefix(PREFIX)
    prefixed = any(name.startswith(PREFIX) for name, _ in network.named_parameters())
    return PREFIX + bare if prefixed and not bare.startswith("text_projection") else bare


def load_tokenizer(directory: Path) -> Any:
    """Load ``CLIPTokenizer`` from the files in ``directory`` (vocab.json and merges.txt, or tokenizer.json)."""
    if not directory.is_dir():
        raise ModelLoadError(f"{directory} is missing; a diffusers directory holds the tokenizer's files there.")
    has_pair = (directory / "vocab.json").is_file() and (directory / "merges.txt").is_file()
    if not has_pair and not (directory / "tokenizer.json").is_file():
        raise ModelLoadError(f"{directory} holds neither vocab.json with merges.txt nor tokenizer.json.")
    return read_tokenizer("CLIPTokenizer", directory)


def read_tokenizer(cls: str, directory: Path) -> Any:
    """Load transformers' class ``cls`` from the files in ``directory``."""
    try:
        return import_quietly("transformers", cls).from_pretrained(str(directory), **OFFLINE)
    except Exception as error:  # tokenizers raises nothing more specific
        raise ModelLoadError(f"the tokenizer in {directory} cannot be read ({error}).") from error


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
        pairs = zip(encoders, suffixes, strict=True)
        tokenizers = [encoder.with_name(f"tokenizer{suffix}") for encoder, suffix in pairs]
        pairs_of_folders = zip(encoders, tokenizers, strict=True)
        return [(encoder, tokenizer if tokenizer.is_dir() else encoder) for encoder, tokenizer in pairs_of_folders]


NO_OVERRIDES: Final = ComponentOverrides()


def load_vae(path: Path, choice: DeviceChoice, *, is_sdxl: bool) -> LoadedVAE:
    """Load the VAE in a directory or a file.

    A file is in the original layout, or in diffusers' layout with config.json in the same folder. The original layout
    has no scaling factor, so that of the model's family is used.

    Raises:
        ModelLoadError: The VAE cannot be used.
    """
    if path.is_file():
        refuse_pickle(path)
        checkpoint = Checkpoint.open([path])
        for prefix in ("", VAE_PREFIX):
            if f"{prefix}decoder.mid.block_1.conv1.weight" in checkpoint:
                config = infer_vae(checkpoint, prefix, is_sdxl=is_sdxl)
                return read_original_vae(checkpoint, prefix, config, choice, is_sdxl=is_sdxl)[0]
        file = path.with_name("config.json")
        if "decoder.conv_in.weight" not in checkpoint or not file.is_file():
            raise ModelLoadError(
                f"{path} is not a VAE in the original layout (it has no decoder.mid.block_1 tensors), and there is no "
                "config.json next to it; name a VAE's file or directory (model.vae)."
            )
        config = read_json(file)
    else:
        file = path / "config.json"
        config = read_json(file)
        checkpoint = Checkpoint.open(find_weights(path, DIFFUSERS_STEM, dtype=choice.dtype))
    precision = vae_precision(choice, config, is_sdxl=is_sdxl)
    network = load_component(build_vae(config, str(file)), checkpoint, precision, channels_last=True)
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
