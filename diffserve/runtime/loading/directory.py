"""A diffusers directory: model_index.json read against the allow-list, components loaded one after the other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from diffserve.errors import ModelLoadError
from diffserve.runtime.loading.checkpoint import Checkpoint, check_manifest, find_weights, read_json, refuse_pickle
from diffserve.runtime.loading.components import (
    ALLOWED_CLASSES,
    IGNORED_COMPONENTS,
    build,
    build_text_encoder,
    build_unet,
    load_component,
    load_tokenizer,
)
from diffserve.runtime.loading.formulation import read_scheduler
from diffserve.runtime.loading.weight_loading import LoadedParts, TensorSource, vae_precision
from diffserve.runtime.precision import DeviceChoice
from diffserve.runtime.text.encoding import TextEncoder
from diffserve.runtime.unet.pruning import shrink_as_told

REQUIRED = ("unet", "vae", "text_encoder", "tokenizer", "scheduler")
DIFFUSERS_STEM = "diffusion_pytorch_model"
TRANSFORMERS_STEM = "model"


Adapt = Callable[[str, TensorSource], None]


def load_directory(path: Path, choice: DeviceChoice, *, adapt: Adapt | None = None) -> LoadedParts:
    """Load the diffusers directory ``path``. Raises ModelLoadError with the file and what is wrong in it.

    ``adapt(component, source)`` may change what text encoders and UNet are filled from.
    """
    check_manifest(path)
    index = read_index(path)
    scheduler_config = read_scheduler(path, index)
    files: list[Path] = []

    def open_weights(component: str, stem: str) -> Checkpoint:
        found = find_weights(path / component, stem, prefer_fp16=choice.dtype == "float16")
        checkpoint = Checkpoint.open(found)
        files.extend(checkpoint.files)
        return checkpoint

    def load_text(suffix: str) -> TextEncoder:
        component = f"text_encoder{suffix}"
        config_file = path / component / "config.json"
        network = build_text_encoder(index[component][1], read_json(config_file), str(config_file))
        weights = open_weights(component, TRANSFORMERS_STEM)
        load_component(network, weights, choice, quantise=choice.text_scheme, adapt=adapt and partial(adapt, component))
        return TextEncoder.pair(load_tokenizer(path / f"tokenizer{suffix}"), network)

    suffixes = ("", "_2") if "text_encoder_2" in index else ("",)
    encoders = tuple(load_text(suffix) for suffix in suffixes)
    unet_config, vae_config = (read_json(path / part / "config.json") for part in ("unet", "vae"))
    unet = build_unet(unet_config, str(path / "unet" / "config.json"), choice)
    files.extend(shrink_as_told(unet, path / "unet"))
    unet_weights = open_weights("unet", DIFFUSERS_STEM)
    load_component(unet, unet_weights, choice, quantise=choice.unet_scheme, adapt=adapt and partial(adapt, "unet"))
    vae = build("AutoencoderKL", vae_config, str(path / "vae" / "config.json"))
    vae_choice = vae_precision(choice, vae_config, is_sdxl=len(encoders) == 2)
    load_component(vae, open_weights("vae", DIFFUSERS_STEM), vae_choice, channels_last=True)
    return LoadedParts(
        unet=unet,
        vae=vae,
        encoders=encoders,
        scheduler_config=scheduler_config,
        zero_empty_negative=bool(index.get("force_zeros_for_empty_prompt", True)),
        vae_dtype=vae_choice.compute_dtype,
        files=tuple(files),
    )


def read_index(path: Path) -> dict[str, Any]:
    """model_index.json of ``path``, every component checked against the allow-list; absent ones (null) left out."""
    file = path / "model_index.json"
    if not file.is_file():
        _explain_missing_index(path)
    index = {name: value for name, value in read_json(file).items() if value not in (None, [None, None])}
    if index.get("requires_aesthetics_score"):
        raise ModelLoadError(f"{file} is a refiner, which repaints pictures only; give the base model's directory.")
    for name, value in index.items():
        if name.startswith("_") or name in IGNORED_COMPONENTS or not isinstance(value, list):
            continue
        _check_component(file, name, value)
    missing = [name for name in REQUIRED if not isinstance(index.get(name), list)]
    missing += ["tokenizer_2"] if "text_encoder_2" in index and "tokenizer_2" not in index else []
    if missing:
        raise ModelLoadError(f"{file} names no {' and no '.join(missing)}; diffserve needs {', '.join(REQUIRED)}.")
    return index


def _check_component(file: Path, name: str, value: list[Any]) -> None:
    library, cls = [*value, None, None][:2]
    if name == "scheduler":
        if library == "diffusers" and isinstance(cls, str) and cls.isidentifier():
            return
        raise ModelLoadError(
            f"{file}: scheduler is {value!r}; diffserve reads diffusers' scheduler configurations only."
        )
    if name not in ALLOWED_CLASSES:
        raise ModelLoadError(f"{file} needs a component {name!r} ({cls}), which diffserve does not serve.")
    if library not in ("diffusers", "transformers") or cls not in ALLOWED_CLASSES[name]:
        allowed = " or ".join(ALLOWED_CLASSES[name])
        raise ModelLoadError(f"{file}: {name} is {value!r}; diffserve builds {allowed} there and runs no other code.")


def _explain_missing_index(path: Path) -> None:
    for file in sorted(path.iterdir()):
        refuse_pickle(file)
    singles = sorted(file.name for file in path.glob("*.safetensors"))
    hint = f"; it holds {singles[0]}, give that file's path" if singles else ""
    raise ModelLoadError(f"{path} has no model_index.json, so it is not a diffusers directory{hint}.")
