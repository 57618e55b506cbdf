"""Adapter models: a directory with a LoRA and the name of its base model.

adapter.json                       {"base": "embedded"}, or a diffusers directory relative to this one; optionally
                                   with sampler, num_steps and guidance_scale
pytorch_lora_weights.safetensors   as diffusers' save_lora_weights writes it
scheduler/scheduler_config.json    optional replacement of the base's; the LoRA is merged at load, at no cost per
step
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec

from diffserve.api.errors import ModelLoadError
from diffserve.disk_cache import DiskCache
from diffserve.models.model_files import find_weights, read_json
from diffserve.models.profiles import ADAPTER_FILE, AdapterSpec
from diffserve.runtime.loading.checkpoint import check_manifest, digest_files
from diffserve.runtime.loading.component_overrides import NO_OVERRIDES, ComponentOverrides
from diffserve.runtime.loading.directory import load_directory
from diffserve.runtime.loading.family import BUILT_IN
from diffserve.runtime.loading.lora import LoRAFile
from diffserve.runtime.loading.weight_loading import LoadedParts
from diffserve.runtime.precision import DeviceChoice

LORA_STEM: Final = "pytorch_lora_weights"


@dataclass(frozen=True)
class Adapter:
    """An adapter's directory, resolved; ``base`` is the diffusers directory that it changes."""

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
        raise ModelLoadError(f"{file}: its base {spec.base!r} is an adapter too; name the model beneath it.")
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
