"""Single safetensors files in the original layout: SD 1.x, SD 2.x and SDXL, inpainting UNets included.

Configurations come from a diffusers directory of the same name next to the file (``model.safetensors`` and ``model/``;
only json and tokenizer files are read), or else from the shapes of the tensors, with CLIP's vocabulary.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from diffserve.api.errors import ModelLoadError
from diffserve.models.model_files import read_json
from diffserve.runtime.loading import single_file_layout as layout
from diffserve.runtime.loading.checkpoint import Checkpoint
from diffserve.runtime.loading.components import (
    NO_OVERRIDES,
    ComponentOverrides,
    LoadedVAE,
    build_text_encoder,
    build_unet,
    load_text_encoders,
    load_tokenizer,
    load_vae,
    read_original_vae,
)
from diffserve.runtime.loading.directory import read_index
from diffserve.runtime.loading.family import (
    REFINER,
    SCHEDULER_FILE,
    SD1,
    SD2,
    SDXL,
    edm_normalization,
    edm_scheduler,
    read_scheduler,
)
from diffserve.runtime.loading.weight_loading import LoadedParts, TensorSource, fill_renamed
from diffserve.runtime.precision import DeviceChoice
from diffserve.runtime.text.clip_vocabulary import END, VOCABULARY_SIZE, clip_tokenizer
from diffserve.runtime.text.encoding import TextEncoder
from schedulers.formulations import is_edm

logger = logging.getLogger(__name__)

#: Tensors of training and of other programs that generation does not need.
LEFT_ALONE = re.compile(
    r"model_ema\..*|(sqrt_.*|log_.*|betas|alphas_cumprod(_prev)?|posterior_.*|lvlb_weights|logvar|scale_factor)"
    r"|first_stage_model\.loss\..*|denoiser\..*|(cond_stage_model|conditioner)\..*(position_ids|logit_scale|attn_mask)"
    r"|v_pred|ztsnr|edm_mean|edm_std|edm_vpred\.sigma_(max|min)|global_step|__.*__|__index_level_\d+__"
)


#: Tensors that must not be ignored: an extended UNet, another kind of noise.
CHANGES_THE_UNET = re.compile(r"model\.diffusion_model\.|edm_")


class EncoderSpec(NamedTuple):
    """One text encoder of a single file.

    Attributes:
        prefix: Prefix of its tensors.
        is_open_clip: Whether it has OpenCLIP's layout.
        cls: Class of transformers to build.
        pad: Padding token.
        drop_last: Whether its last layer is not used.
        suffix: Suffix of its component names in a directory.
    """

    prefix: str
    is_open_clip: bool
    cls: str
    pad: str
    drop_last: bool = False
    suffix: str = ""


ENCODERS = {
    SD1: (EncoderSpec("cond_stage_model.transformer.text_model.", False, "CLIPTextModel", END),),
    SD2: (EncoderSpec("cond_stage_model.model.", True, "CLIPTextModel", "!", drop_last=True),),
    SDXL: (
        EncoderSpec("conditioner.embedders.0.transformer.text_model.", False, "CLIPTextModel", END),
        EncoderSpec("conditioner.embedders.1.model.", True, "CLIPTextModelWithProjection", "!", suffix="_2"),
    ),
    REFINER: (EncoderSpec("conditioner.embedders.0.model.", True, "CLIPTextModelWithProjection", "!", suffix="_2"),),
}


@dataclass
class SingleFile:
    """A single-file checkpoint while its components are read; ``used`` collects the tensors that were read."""

    checkpoint: Checkpoint
    family: str
    config_dir: Path | None
    used: set[str]

    @property
    def where(self) -> str:
        """The file, for an error message."""
        return self.checkpoint.where()

    def ignore(self, *prefixes: str) -> None:
        """Mark the tensors that begin with one of ``prefixes`` as not needed."""
        self.used |= {key for key in self.checkpoint.entries if key.startswith(prefixes)}

    def config(self, component: str, inferred: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the configuration in the directory, or else the one inferred from the shapes."""
        if self.config_dir:
            return read_json(self.config_dir / component / "config.json")
        try:
            return inferred()
        except (IndexError, ValueError) as error:
            raise ModelLoadError(
                f"{self.where}: the shapes of its tensors are not those of an {self.family} {component} ({error})."
            ) from error

    def fill(self, network: Any, add: Callable[[TensorSource, str], str], choice: DeviceChoice, **settings: Any) -> Any:
        """Fill ``network`` from this file by ``weight_loading.fill_renamed``, and return it."""
        self.used |= fill_renamed(network, self.checkpoint, add, choice, **settings)
        return network


def load_single_file(path: Path, choice: DeviceChoice, overrides: ComponentOverrides = NO_OVERRIDES) -> LoadedParts:
    """Load ``path``, with ``overrides`` from elsewhere.

    Raises ModelLoadError with the tensor at fault, or if the file is no such checkpoint.
    """
    checkpoint = Checkpoint.open([path])
    checkpoint.refuse_ip_adapter()
    layout.use_original_names(checkpoint)
    config_dir = path.with_suffix("")
    has_config = (config_dir / "model_index.json").is_file()
    family = layout.detect_layout(checkpoint, needs_text=overrides.text_encoder is None)
    file = SingleFile(checkpoint, family, config_dir if has_config else None, set())
    index = read_index(config_dir) if has_config else {}
    scheduler_config, guess = _scheduler_config(file, index)
    specs, files = ENCODERS[family], [path]
    if overrides.text_encoder is None:
        encoders = tuple(_load_encoder(file, spec, choice.of("text")) for spec in specs)
    else:
        directories = overrides.text_directories([spec.suffix for spec in specs])
        encoders, read = load_text_encoders(directories, choice.of("text"), [spec.cls for spec in specs])
        file.ignore("cond_stage_model.", "conditioner.")
        files += read
    unet = _load_unet(file, encoders[-1], choice.of("unet"))
    if overrides.vae is None and overrides.loaded_vae is None:
        vae = _load_vae(file, choice.of("vae"))
    else:
        vae = overrides.loaded_vae or load_vae(overrides.vae_place(path), choice.of("vae"), is_sdxl=family == SDXL)
        file.ignore(layout.VAE_PREFIX)
    _check_leftovers(file)
    return LoadedParts(
        unet=unet,
        vae=vae.network,
        encoders=encoders,
        scheduler_config=scheduler_config,
        zero_empty_negative=bool(index.get("force_zeros_for_empty_prompt", True)),
        vae_dtype=vae.dtype,
        files=(*files, *vae.files),
        guess_prediction=guess,
    )


def _load_encoder(file: SingleFile, spec: EncoderSpec, choice: DeviceChoice) -> TextEncoder:
    checkpoint, prefix = file.checkpoint, spec.prefix
    if not spec.is_open_clip and not any(key.startswith(prefix) for key in checkpoint.entries):
        prefix = prefix.removesuffix("text_model.")  # some converters drop it

    def inferred() -> dict[str, Any]:
        if spec.is_open_clip:
            return layout.infer_open_clip(checkpoint, prefix, drop_last=spec.drop_last)
        return layout.infer_clip(checkpoint, prefix)

    def add(source: TensorSource, name: str) -> str:
        if not spec.is_open_clip:
            return source.add(name, prefix + name.removeprefix("text_model."))
        bare, third = layout.open_clip_key(name)
        return layout.add_open_clip_tensor(source, name, prefix + bare, third)

    config = file.config(f"text_encoder{spec.suffix}", inferred)
    network = build_text_encoder(spec.cls, config, file.where)
    if file.config_dir:
        tokenizer = load_tokenizer(file.config_dir / f"tokenizer{spec.suffix}")
    elif network.config.vocab_size == VOCABULARY_SIZE:
        tokenizer = clip_tokenizer(pad=spec.pad)
    else:
        raise ModelLoadError(
            f"{file.where}: its text encoder knows {network.config.vocab_size} tokens, CLIP's vocabulary has "
            f"{VOCABULARY_SIZE}; put its tokenizer and configurations in {Path(file.where).with_suffix('')}."
        )
    file.fill(network, add, choice, quantize=choice.text_scheme)
    if spec.drop_last:
        # OpenCLIP's last layer and projection, which SD 2 does not use
        unused = (f"{prefix}transformer.resblocks.{network.config.num_hidden_layers}.", f"{prefix}text_projection")
        file.used |= {key for key in checkpoint.entries if key.startswith(unused)}
    return TextEncoder.pair(tokenizer, network)


def _load_unet(file: SingleFile, last_encoder: TextEncoder, choice: DeviceChoice) -> Any:
    pooled_width = int(last_encoder.network.config.projection_dim)
    config = file.config("unet", lambda: layout.infer_unet(file.checkpoint, file.family, pooled_width))
    network = build_unet(config, file.where, choice)
    layers = network.config.layers_per_block
    with_attention = frozenset(
        level for level, name in enumerate(network.config.up_block_types) if name == "CrossAttnUpBlock2D"
    )

    def add(source: TensorSource, name: str) -> str:
        return source.add(name, layout.unet_key(name, layers, with_attention))

    return file.fill(network, add, choice, quantize=choice.unet_scheme)


def _load_vae(file: SingleFile, choice: DeviceChoice) -> LoadedVAE:
    checkpoint, is_sdxl = file.checkpoint, file.family in (SDXL, REFINER)
    if not any(key.startswith(layout.VAE_PREFIX) for key in checkpoint.entries):
        raise ModelLoadError(
            f"{file.where} holds no VAE; give a complete checkpoint, or name the VAE that belongs to it, a file "
            "or a directory (--vae, model.vae)."
        )
    inferred = partial(layout.infer_vae, checkpoint, layout.VAE_PREFIX, is_sdxl=is_sdxl)
    config = file.config("vae", lambda: inferred() | edm_normalization(checkpoint))
    vae, used = read_original_vae(checkpoint, layout.VAE_PREFIX, config, choice, is_sdxl=is_sdxl)
    file.used |= used
    return vae._replace(files=[])


def _check_leftovers(file: SingleFile) -> None:
    """Log which tensors are unused. Raises ModelLoadError if they change what the UNet computes."""
    left = [key for key in file.checkpoint.entries if key not in file.used and not LEFT_ALONE.fullmatch(key)]
    if foreign := [key for key in left if CHANGES_THE_UNET.match(key)]:
        raise ModelLoadError(
            f"{file.where} has tensors that are not part of an {file.family} model and change what its UNet "
            f"computes: {_shown(foreign)}; give a file without such an extension."
        )
    if left:
        logger.warning(
            "%s: %d tensors that generation does not need are ignored: %s", file.where, len(left), _shown(left)
        )


def _shown(names: list[str]) -> str:
    return ", ".join(repr(name) for name in names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _scheduler_config(file: SingleFile, index: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the scheduler's configuration, and whether its prediction type is a guess to be tested on the UNet."""
    continuous = edm_scheduler(file.checkpoint)
    if file.config_dir:
        config = read_scheduler(file.config_dir, index)
        if continuous and not is_edm(config):
            raise ModelLoadError(
                f"{file.where} is a model of EDM's noise ({continuous['_class_name']}), but "
                f"{file.config_dir / SCHEDULER_FILE} says {config.get('_class_name')}; correct that file."
            )
        return config, False
    if continuous:
        return continuous, False
    declared = _declared_prediction(file)
    zero_snr = "ztsnr" in file.checkpoint
    config = layout.infer_scheduler(file.family, velocity=declared == "v", zero_snr=zero_snr)
    return config, declared is None and file.family == SD2


def _declared_prediction(file: SingleFile) -> str | None:
    """Return "v" or "epsilon" if the file, its metadata or an original yaml with its name says so."""
    if "v_pred" in file.checkpoint:
        return "v"
    stated = file.checkpoint.metadata.get("modelspec.prediction_type", "")
    yaml = Path(file.where).with_suffix(".yaml")
    text = yaml.read_text(encoding="utf-8", errors="replace") if yaml.is_file() else ""
    declared = ("v" if stated.startswith("v") else stated, *re.findall(r"parameterization:\s*\"?(v|eps)", text))
    return next(filter(None, declared), None)
