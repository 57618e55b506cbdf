"""Diffusers directories: model_index.json is checked against the allow-list, and components are loaded one by one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from diffserve.api.errors import ModelLoadError
from diffserve.models.model_files import DIFFUSERS_STEM, find_weights, read_json, refuse_pickle
from diffserve.runtime.loading.checkpoint import Checkpoint, check_manifest
from diffserve.runtime.loading.component_overrides import (
    NO_OVERRIDES,
    TEXT_CLASSES,
    Adapt,
    ComponentOverrides,
    load_text_encoders,
    load_vae,
)
from diffserve.runtime.loading.components import (
    ALLOWED_CLASSES,
    IGNORED_COMPONENTS,
    build_unet,
    load_component,
)
from diffserve.runtime.loading.scheduler_config import read_scheduler
from diffserve.runtime.loading.weight_loading import LoadedParts
from diffserve.runtime.precision import DeviceChoice
from diffserve.runtime.unet.pruning import shrink_to_stored_widths

REQUIRED = ("unet", "vae", "scheduler")
TEXT_PARTS = ("text_encoder", "tokenizer")


def load_directory(
    path: Path, choice: DeviceChoice, overrides: ComponentOverrides = NO_OVERRIDES, *, adapt: Adapt | None = None
) -> LoadedParts:
    """Load the diffusers directory ``path``. Raises ModelLoadError with the file and the problem.

    ``overrides``: components read from elsewhere. ``adapt(component, source)`` may change the tensors of text encoders
    and UNet.
    """
    check_manifest(path)
    index = read_index(path)
    scheduler_config = read_scheduler(path, index)
    suffixes = _text_encoders(index)
    classes = [
        TEXT_CLASSES[suffix] if overrides.text_encoder else index[f"text_encoder{suffix}"][1] for suffix in suffixes
    ]
    encoders, text_files = load_text_encoders(
        overrides.text_directories(suffixes, path), choice.of("text"), classes, adapt, suffixes
    )
    unet_config = read_json(path / "unet" / "config.json")
    unet_choice = choice.of("unet")
    unet = build_unet(unet_config, str(path / "unet" / "config.json"), unet_choice)
    unet_files = shrink_to_stored_widths(unet, path / "unet")
    weights = Checkpoint.open(find_weights(path / "unet", DIFFUSERS_STEM, dtype=choice.dtype))
    load_component(unet, weights, unet_choice, quantize=choice.unet_scheme, adapt=adapt and partial(adapt, "unet"))
    vae = overrides.loaded_vae or load_vae(
        overrides.vae_place(path / "vae"), choice.of("vae"), is_sdxl="_2" in suffixes
    )
    return LoadedParts(
        unet=unet,
        vae=vae.network,
        encoders=encoders,
        scheduler_config=scheduler_config,
        zero_empty_negative=bool(index.get("force_zeros_for_empty_prompt", True)),
        vae_dtype=vae.dtype,
        files=(*text_files, *unet_files, *weights.files, *vae.files),
    )


def read_index(path: Path) -> dict[str, Any]:
    """Read model_index.json of ``path``, checked against the allow-list; absent components (null) are left out."""
    file = path / "model_index.json"
    if not file.is_file():
        _explain_missing_index(path)
    index = {name: value for name, value in read_json(file).items() if value not in (None, [None, None])}
    for name, value in index.items():
        if name.startswith("_") or name in IGNORED_COMPONENTS or not isinstance(value, list):
            continue
        _check_component(file, name, value)
    needed = (*REQUIRED, *(f"{name}{suffix}" for suffix in _text_encoders(index) for name in TEXT_PARTS))
    missing = [name for name in needed if not isinstance(index.get(name), list)]
    if missing:
        raise ModelLoadError(f"{file} names no {' and no '.join(missing)}; diffserve needs {', '.join(needed)}.")
    return index


def _text_encoders(index: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the suffixes of the text encoders' names: SDXL has two, its refiner only the second one."""
    if "text_encoder_2" not in index:
        return ("",)
    return ("_2",) if "text_encoder" not in index and "tokenizer" not in index else ("", "_2")


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
