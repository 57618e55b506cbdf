"""A model that is a small change of another: a directory with a LoRA, and the name of the base it belongs to.

    adapter.json                       {"base": "embedded"}; the base is "embedded" or a diffusers directory, relative
                                       to this one; beside it sampler, num_steps and guidance_scale may stand
    pytorch_lora_weights.safetensors   as diffusers' save_lora_weights writes it
    scheduler/scheduler_config.json    instead of the base's; may be absent

Text encoder, VAE and tokenizer are the base's own, so a second model costs its LoRA on disk and nothing else. The LoRA
is merged while the network loads (``loading.lora``): a merged network runs exactly as fast as its base.
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
from diffserve.runtime.loading.component_overrides import OWN_PARTS, NamedParts
from diffserve.runtime.loading.directory import load_directory
from diffserve.runtime.loading.family import BUILT_IN
from diffserve.runtime.loading.lora import LoRAFile
from diffserve.runtime.loading.weight_loading import LoadedParts
from diffserve.runtime.precision import DeviceChoice

LORA_STEM: Final = "pytorch_lora_weights"


@dataclass(frozen=True)
class Adapter:
    """An adapter's directory, read and resolved: ``base`` is the diffusers directory that it changes."""

    path: Path
    spec: AdapterSpec
    base: Path

    def digest(self, base_digest: str, cache: DiskCache | None = None) -> str:
        """sha256 over the digest of the base and that of the LoRA, 64 hexadecimal digits. ``cache``: as for files."""
        own = digest_files(find_weights(self.path, LORA_STEM, dtype="float32"), cache)
        return hashlib.sha256(bytes.fromhex(base_digest) + bytes.fromhex(own)).hexdigest()


def read_adapter(path: Path) -> Adapter | None:
    """The adapter in the directory ``path``, or None where there is no adapter.json.

    Raises ModelLoadError for one that cannot be used, or whose base is not there.
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


def load_adapted(adapter: Adapter, choice: DeviceChoice, named: NamedParts = OWN_PARTS) -> LoadedParts:
    """Load the base, ``named`` parts of it from elsewhere, with the LoRA merged into it.

    Raises ModelLoadError with the tensor or file at fault.
    """
    lora = LoRAFile.open(find_weights(adapter.path, LORA_STEM, dtype="float32"))
    parts = load_directory(adapter.base, choice, named, adapt=lora.adapt)
    lora.check_all_used()
    own = adapter.path / "scheduler" / "scheduler_config.json"
    return replace(parts, scheduler_config=read_json(own)) if own.is_file() else parts
