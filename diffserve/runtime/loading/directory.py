"""Models in directories: diffusers' layout, checked against the allow-list, and adapters (LoRAs) of such models."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from diffserve.api.errors import ModelLoadError
from diffserve.disk_cache import DiskCache
from diffserve.models.model_files import DIFFUSERS_STEM, find_weights, read_json, refuse_pickle
from diffserve.models.profiles import ADAPTER_FILE, AdapterSpec
from diffserve.runtime.loading.checkpoint import Checkpoint, check_manifest, digest_files
from diffserve.runtime.loading.components import (
    ALLOWED_CLASSES,
    IGNORED_COMPONENTS,
    NO_OVERRIDES,
    TEXT_CLASSES,
    Adapt,
    ComponentOverrides,
    build_unet,
    load_component,
    load_text_encoders,
    load_vae,
)
from diffserve.runtime.loading.family import BUILT_IN, read_scheduler
from diffserve.runtime.loading.lora import LoRAFile
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
        raise ModelLoadError(f"{file} needs a component {name!r} ({cls}), which diffserve does not support.")
    if library not in ("diffusers", "transformers") or cls not in ALLOWED_CLASSES[name]:
        allowed = " or ".join(ALLOWED_CLASSES[name])
        raise ModelLoadError(f"{file}: {name} is {value!r}; diffserve builds {allowed} there and runs no other code.")


def _explain_missing_index(path: Path) -> None:
    for file in sorted(path.iterdir()):
        refuse_pickle(file)
    singles = sorted(file.name for file in path.glob("*.safetensors"))
    hint = f"; it holds {singles[0]}, give that file's path" if singles else ""
    raise ModelLoadError(f"{path} has no model_index.json, so it is not a diffusers directory{hint}.")


LORA_STEM: Final = "pytorch_lora_weights"


@dataclass(frozen=True)
class Adapter:
    """An adapter's directory, resolved; ``base`` is the diffusers directory that it changes.

    adapter.json                       {"base": "embedded"}, or a diffusers directory relative to this one; optionally
                                       with sampler, num_steps and guidance_scale
    pytorch_lora_weights.safetensors   as diffusers' save_lora_weights writes it; merged at load, at no cost per step
    scheduler/scheduler_config.json    optional replacement of the base's
    """

    path: Path
    spec: AdapterSpec
    base: Path

    def digest(self, base_digest: str, cache: DiskCache | None = None) -> str:
        """Return the sha256 of the digests of base and LoRA, 64 hexadecimal digits. ``cache``: see ``digest_files``."""
        lora_digest = digest_files(find_weights(self.path, LORA_STEM, dtype="float32"), cache)
        return hashlib.sha256(bytes.fromhex(base_digest) + bytes.fromhex(lora_digest)).hexdigest()


def read_adapter(path: Path) -> Adapter | None:
    """Read the adapter in the directory ``path``; ``None`` without an adapter.json.

    Raises ModelLoadError if it is not valid, or its base does not exist.
    """
    file = path / ADAPTER_FILE
    if not file.is_file():
        return None
    check_manifest(path)
    try:
        spec = msgspec.convert(read_json(file), AdapterSpec)
    except msgspec.ValidationError as error:
        raise ModelLoadError(f"{file}: {str(error)[0].lower()}{str(error)[1:]}.") from None
    base = BUILT_IN.get(spec.base) or path / Path(spec.base).expanduser()
    if (base / ADAPTER_FILE).is_file():
        raise ModelLoadError(f"{file}: its base {spec.base!r} is an adapter too; name the model that it was made for.")
    if not base.is_dir():
        raise ModelLoadError(
            f"{file}: its base {spec.base!r} is not a diffusers directory at {base}; put it there, or name another."
        )
    return Adapter(path, spec, base)


def load_adapted(adapter: Adapter, choice: DeviceChoice, overrides: ComponentOverrides = NO_OVERRIDES) -> LoadedParts:
    """Load the base, with ``overrides``, and merge the LoRA into it.

    Raises ModelLoadError with the tensor or file at fault.
    """
    lora = LoRAFile.open(find_weights(adapter.path, LORA_STEM, dtype="float32"))
    parts = load_directory(adapter.base, choice, overrides, adapt=lora.adapt)
    lora.check_all_used()
    scheduler_file = adapter.path / "scheduler" / "scheduler_config.json"
    return replace(parts, scheduler_config=read_json(scheduler_file)) if scheduler_file.is_file() else parts
