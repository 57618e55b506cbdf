"""A single safetensors file in the original layout: SD 1.x, SD 2.x and SDXL, inpainting UNets included.

Configurations come from a diffusers directory of the same name beside the file (``model.safetensors`` and ``model/``;
only its json and tokenizer files are read), or else from the shapes of the tensors, with CLIP's own vocabulary.
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
from diffserve.runtime.loading import single_file_config as infer
from diffserve.runtime.loading import single_file_keys as keys
from diffserve.runtime.loading.checkpoint import Checkpoint
from diffserve.runtime.loading.component_overrides import (
    OWN_PARTS,
    LoadedVAE,
    NamedParts,
    load_text_encoders,
    load_vae,
    read_original_vae,
)
from diffserve.runtime.loading.components import build_text_encoder, build_unet, load_tokenizer
from diffserve.runtime.loading.directory import read_index
from diffserve.runtime.loading.family import REFINER, SD1, SD2, SDXL
from diffserve.runtime.loading.scheduler_config import SCHEDULER_FILE, edm_normalization, edm_scheduler, read_scheduler
from diffserve.runtime.loading.single_file_keys import use_original_names
from diffserve.runtime.loading.weight_loading import LoadedParts, TensorSource, fill_renamed
from diffserve.runtime.precision import DeviceChoice
from diffserve.runtime.text.clip_vocabulary import END, VOCABULARY_SIZE, clip_tokenizer
from diffserve.runtime.text.encoding import TextEncoder
from schedulers.formulations import is_edm

logger = logging.getLogger(__name__)

#: Tensors of training and of other programs that single files carry along and that painting does not need.
LEFT_ALONE = re.compile(
    r"model_ema\..*|(sqrt_.*|log_.*|betas|alphas_cumprod(_prev)?|posterior_.*|lvlb_weights|logvar|scale_factor)"
    r"|first_stage_model\.loss\..*|denoiser\..*|(cond_stage_model|conditioner)\..*(position_ids|logit_scale|attn_mask)"
    r"|v_pred|ztsnr|edm_mean|edm_std|edm_vpred\.sigma_(max|min)|global_step|__.*__|__index_level_\d+__"
)


#: What is no mere luggage: a UNet with more to it, noise of another kind.
CHANGES_THE_UNET = re.compile(r"model\.diffusion_model\.|edm_")


class EncoderSpec(NamedTuple):
    """One text encoder of a single file: where it lies, whose layout it has, which class it becomes, and what comes
    behind its name in a directory.
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
    """A single-file checkpoint being taken apart; ``used`` grows as components take their tensors."""

    checkpoint: Checkpoint
    family: str
    beside: Path | None
    used: set[str]

    @property
    def where(self) -> str:
        """The file, for an error message."""
        return self.checkpoint.where()

    def leave(self, *prefixes: str) -> None:
        """Tensors that begin with one of ``prefixes`` are not read, as that part lies elsewhere."""
        self.used |= {key for key in self.checkpoint.entries if key.startswith(prefixes)}

    def config(self, component: str, inferred: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The configuration beside the file, or the one read off its shapes."""
        if self.beside:
            return read_json(self.beside / component / "config.json")
        try:
            return inferred()
        except (IndexError, ValueError) as error:
            raise ModelLoadError(
                f"{self.where}: the shapes of its tensors are not those of an {self.family} {component} ({error})."
            ) from error

    def fill(self, network: Any, add: Callable[[TensorSource, str], str], choice: DeviceChoice, **settings: Any) -> Any:
        """``weight_loading.fill_renamed`` from this file; returns ``network``."""
        self.used |= fill_renamed(network, self.checkpoint, add, choice, **settings)
        return network


def load_single_file(path: Path, choice: DeviceChoice, named: NamedParts = OWN_PARTS) -> LoadedParts:
    """Load ``path``, ``named`` parts from elsewhere.

    Raises ModelLoadError with the tensor at fault, or when the file is no such checkpoint.
    """
    checkpoint = Checkpoint.open([path])
    checkpoint.refuse_ip_adapter()
    use_original_names(checkpoint)
    beside = path.with_suffix("")
    has_config = (beside / "model_index.json").is_file()
    family = infer.detect_layout(checkpoint, needs_text=named.text_encoder is None)
    file = SingleFile(checkpoint, family, beside if has_config else None, set())
    index = read_index(beside) if has_config else {}
    scheduler_config, guess = _scheduler_config(file, index)
    specs, files = ENCODERS[family], [path]
    if named.text_encoder is None:
        encoders = tuple(_load_encoder(file, spec, choice.of("text")) for spec in specs)
    else:
        directories = named.text_directories([spec.suffix for spec in specs])
        encoders, read = load_text_encoders(directories, choice.of("text"), [spec.cls for spec in specs])
        file.leave("cond_stage_model.", "conditioner.")
        files += read
    unet = _load_unet(file, encoders[-1], choice.of("unet"))
    if named.vae is None and named.made_vae is None:
        vae = _load_vae(file, choice.of("vae"))
    else:
        vae = named.made_vae or load_vae(named.vae_place(path), choice.of("vae"), is_sdxl=family == SDXL)
        file.leave(keys.VAE_PREFIX)
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
            return infer.infer_open_clip(checkpoint, prefix, drop_last=spec.drop_last)
        return infer.infer_clip(checkpoint, prefix)

    def add(source: TensorSource, name: str) -> str:
        if not spec.is_open_clip:
            return source.add(name, prefix + name.removeprefix("text_model."))
        bare, third = keys.open_clip_key(name)
        return keys.add_open_clip_tensor(source, name, prefix + bare, third)

    config = file.config(f"text_encoder{spec.suffix}", inferred)
    network = build_text_encoder(spec.cls, config, file.where)
    if file.beside:
        tokenizer = load_tokenizer(file.beside / f"tokenizer{spec.suffix}")
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
    config = file.config("unet", lambda: infer.infer_unet(file.checkpoint, file.family, pooled_width))
    network = build_unet(config, file.where, choice)
    layers = network.config.layers_per_block
    with_attention = frozenset(
        level for level, name in enumerate(network.config.up_block_types) if name == "CrossAttnUpBlock2D"
    )

    def add(source: TensorSource, name: str) -> str:
        return source.add(name, keys.unet_key(name, layers, with_attention))

    return file.fill(network, add, choice, quantize=choice.unet_scheme)


def _load_vae(file: SingleFile, choice: DeviceChoice) -> LoadedVAE:
    checkpoint, is_sdxl = file.checkpoint, file.family in (SDXL, REFINER)
    if not any(key.startswith(keys.VAE_PREFIX) for key in checkpoint.entries):
        raise ModelLoadError(
            f"{file.where} holds no VAE; give a complete checkpoint, or name the VAE that belongs to it, a file "
            "or a directory (--vae, model.vae)."
        )
    inferred = partial(infer.infer_vae, checkpoint, keys.VAE_PREFIX, is_sdxl=is_sdxl)
    config = file.config("vae", lambda: inferred() | edm_normalization(checkpoint))
    vae, used = read_original_vae(checkpoint, keys.VAE_PREFIX, config, choice, is_sdxl=is_sdxl)
    file.used |= used
    return vae._replace(files=[])


def _check_leftovers(file: SingleFile) -> None:
    """Say once which tensors nothing is made of. Raises ModelLoadError where they change what the UNet computes."""
    left = [key for key in file.checkpoint.entries if key not in file.used and not LEFT_ALONE.fullmatch(key)]
    if foreign := [key for key in left if CHANGES_THE_UNET.match(key)]:
        raise ModelLoadError(
            f"{file.where} holds tensors that no part of an {file.family} model takes, and that change what its UNet "
            f"computes: {_shown(foreign)}; give a file without such an extension."
        )
    if left:
        logger.warning(
            "%s: %d tensors that painting does not need are ignored: %s", file.where, len(left), _shown(left)
        )


def _shown(names: list[str]) -> str:
    return ", ".join(repr(name) for name in names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _scheduler_config(file: SingleFile, index: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """(the scheduler's configuration, whether the prediction type is a guess that the UNet should settle)."""
    continuous = edm_scheduler(file.checkpoint)
    if file.beside:
        config = read_scheduler(file.beside, index)
        if continuous and not is_edm(config):
            raise ModelLoadError(
                f"{file.where} is a model of EDM's noise ({continuous['_class_name']}), but "
                f"{file.beside / SCHEDULER_FILE} says {config.get('_class_name')}; mend that file."
            )
        return config, False
    if continuous:
        return continuous, False
    declared = _declared_prediction(file)
    zero_snr = "ztsnr" in file.checkpoint
    config = infer.infer_scheduler(file.family, velocity=declared == "v", zero_snr=zero_snr)
    return config, declared is None and file.family == SD2


def _declared_prediction(file: SingleFile) -> str | None:
    """ "v" or "epsilon" where the file, its metadata or the original yaml beside it says so."""
    if "v_pred" in file.checkpoint:
        return "v"
    stated = file.checkpoint.metadata.get("modelspec.prediction_type", "")
    yaml = Path(file.where).with_suffix(".yaml")
    text = yaml.read_text(encoding="utf-8", errors="replace") if yaml.is_file() else ""
    said = ("v" if stated.startswith("v") else stated, *re.findall(r"parameterization:\s*\"?(v|eps)", text))
    return next(filter(None, said), None)
