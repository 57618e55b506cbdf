"""A model that is a small change of another: a directory with a LoRA, and the name of the base it belongs to.

    adapter.json                       {"base": "embedded"}; the base is "embedded" or a diffusers directory, relative
                                       to this one; beside it sampler, num_steps and guidance_scale may stand
    pytorch_lora_weights.safetensors   as diffusers' save_lora_weights writes it
    scheduler/scheduler_config.json    instead of the base's; may be absent

Text encoder, VAE and tokenizer are the base's own, so a second model costs its LoRA on disk and nothing else.

A LoRA (Hu et al., 2021, arXiv 2106.09685) holds pairs of matrices, merged while the network loads. The layer's weight
W, a matrix (out, in) or a kernel (out, in, kh, kw), is read as

    W + alpha / rank * up @ down        up (out, rank), down (rank, in) or (rank, in * kh * kw)

in float32, and only then cast or quantised like any other tensor: a merged network runs exactly as fast as its base.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from diffserve.disk_cache import DiskCache
from diffserve.errors import ModelLoadError
from diffserve.profiles import ADAPTER_FILE, AdapterSpec
from diffserve.runtime.loading.checkpoint import Checkpoint, check_manifest, digest_files, find_weights, read_json
from diffserve.runtime.loading.directory import load_directory
from diffserve.runtime.loading.family import BUILT_IN
from diffserve.runtime.loading.weight_loading import LoadedParts, TensorSource
from diffserve.runtime.precision import DeviceChoice

#: How a tensor's name begins -> the component it changes: diffusers' names, and those of kohya's trainer.
PREFIXES: Final = {
    "unet.": "unet",
    "text_encoder.": "text_encoder",
    "text_encoder_2.": "text_encoder_2",
    "lora_unet_": "unet",
    "lora_te_": "text_encoder",
    "lora_te1_": "text_encoder",
    "lora_te2_": "text_encoder_2",
}
NAME = re.compile(r"(?P<layer>.+)\.(?:(?:lora_linear_layer\.|lora\.|lora_)(?P<half>A|B|down|up)\.weight|alpha)")
METADATA_KEY: Final = "lora_adapter_metadata"
KINDS_REFUSED: Final = ("use_dora", "use_rslora", "alpha_pattern")
LORA_STEM: Final = "pytorch_lora_weights"


@dataclass
class LowRank:
    """One layer's change: the names of its tensors in the file, and what ``alpha`` is where no tensor says so."""

    down: str = ""
    up: str = ""
    alpha: str = ""
    declared_alpha: float | None = None


@dataclass
class LoRA:
    """The changes in one file, by component and then by layer, whose dots are written as underscores."""

    checkpoint: Checkpoint
    layers: dict[str, dict[str, LowRank]] = field(default_factory=dict)
    _used: set[str] = field(default_factory=set)

    @classmethod
    def open(cls, files: Iterable[Path]) -> LoRA:
        """Read the names in ``files``. Raises ModelLoadError for a name that says neither component nor half."""
        lora = cls(Checkpoint.open(files))
        for key in lora.checkpoint.entries:
            lora._add(key)
        for component, layers in lora.layers.items():
            alpha = _declared_alpha(lora.checkpoint, component)
            for change in layers.values():
                if not (change.down and change.up):
                    raise ModelLoadError(
                        f"tensor {change.down or change.up or change.alpha!r} of {lora.checkpoint.where()} has no "
                        "partner: a change is a pair of matrices."
                    )
                change.declared_alpha = alpha
        return lora

    def adapt(self, component: str, source: TensorSource) -> None:
        """Let the tensors that this file changes be read from ``source`` as changed.

        Raises ModelLoadError where a layer is not in the network, or its shape is another.
        """
        weights = {_flat(name.removesuffix(".weight")): name for name in source.readers if name.endswith(".weight")}
        for layer, change in self.layers.get(component, {}).items():
            if layer not in weights:
                raise self._misfit(change, f"there is no such layer in the {component} of {source.checkpoint.where()}")
            key, shape, read = source.readers[weights[layer]]
            self._check_shapes(change, shape)
            source.readers[weights[layer]] = (key, shape, partial(self._read_merged, change, read))
        self._used.add(component)

    def check_all_used(self) -> None:
        """Raise ModelLoadError when the file changes a component that was not there to adapt."""
        for component in self.layers.keys() - self._used:
            raise ModelLoadError(f"{self.checkpoint.where()} changes a {component}, which the base has not.")

    def _add(self, key: str) -> None:
        match = NAME.fullmatch(key)
        prefix = next((prefix for prefix in PREFIXES if key.startswith(prefix)), None)
        if match is None or prefix is None:
            raise ModelLoadError(
                f"tensor {key!r} of {self.checkpoint.where()} is not named as a LoRA of UNet or text encoder; "
                "write it with diffusers' save_lora_weights."
            )
        layers = self.layers.setdefault(PREFIXES[prefix], {})
        change = layers.setdefault(_flat(match["layer"].removeprefix(prefix)), LowRank())
        kind = {"A": "down", "B": "up", None: "alpha"}.get(match["half"], match["half"])
        setattr(change, kind, key)

    def _check_shapes(self, change: LowRank, shape: tuple[int, ...]) -> None:
        down, up = (self.checkpoint.entries[key].shape for key in (change.down, change.up))
        if len(shape) not in (2, 4):
            raise self._misfit(change, f"its layer's weight has shape {list(shape)}, neither matrix nor kernel")
        if len(down) < 2 or len(up) < 2 or math.prod(up[1:]) != down[0]:
            raise ModelLoadError(
                f"{self.checkpoint.where()}: {change.down!r} is {list(down)} and {change.up!r} is {list(up)}; "
                "their ranks differ, so the file is damaged."
            )
        if (up[0], math.prod(down[1:])) != (shape[0], math.prod(shape[1:])):
            raise self._misfit(change, f"down {list(down)} and up {list(up)} do not fit a weight {list(shape)}")

    def _misfit(self, change: LowRank, problem: str) -> ModelLoadError:
        return ModelLoadError(
            f"tensor {change.down!r} of {self.checkpoint.where()}: {problem}; this adapter was made for another base."
        )

    def _read_merged(self, change: LowRank, read: Callable[[], torch.Tensor]) -> torch.Tensor:
        down, up = (self.checkpoint.read(key).float().flatten(1) for key in (change.down, change.up))
        weight = read().float()
        return weight + (self._scale(change) * up @ down).view_as(weight)

    def _scale(self, change: LowRank) -> float:
        rank = self.checkpoint.entries[change.down].shape[0]
        alpha = float(self.checkpoint.read(change.alpha)) if change.alpha else change.declared_alpha
        return 1.0 if alpha is None else alpha / rank


def _flat(layer: str) -> str:
    """A layer's name as kohya's trainer writes it; text encoders carry a prefix in some versions only."""
    return layer.replace(".", "_").removeprefix("text_model_")


def _declared_alpha(checkpoint: Checkpoint, component: str) -> float | None:
    """alpha from the file's metadata, where PEFT's configuration was saved with it."""
    try:
        declared: Any = json.loads(checkpoint.metadata.get(METADATA_KEY, "{}"))
        entries = {name: declared.get(f"{component}.{name}") for name in ("lora_alpha", *KINDS_REFUSED)}
        alpha = None if entries["lora_alpha"] is None else float(entries["lora_alpha"])
    except (ValueError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{checkpoint.where()}: its {METADATA_KEY} cannot be read ({error}).") from error
    for name in KINDS_REFUSED:
        if entries[name]:
            raise ModelLoadError(
                f"{checkpoint.where()}: {name} is {entries[name]!r}; diffserve merges plain LoRA only. "
                "Fuse it into its base with diffusers' fuse_lora and save that."
            )
    return alpha


@dataclass(frozen=True)
class Adapter:
    """An adapter's directory, read and resolved: ``base`` is the diffusers directory that it changes."""

    path: Path
    spec: AdapterSpec
    base: Path

    def digest(self, base_digest: str, cache: DiskCache | None = None) -> str:
        """sha256 over the digest of the base and that of the LoRA, 64 hexadecimal digits. ``cache``: as for files."""
        own = digest_files(find_weights(self.path, LORA_STEM, prefer_fp16=False), cache)
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


def load_adapted(adapter: Adapter, choice: DeviceChoice) -> LoadedParts:
    """Load the base with the LoRA merged into it. Raises ModelLoadError with the tensor or file at fault."""
    lora = LoRA.open(find_weights(adapter.path, LORA_STEM, prefer_fp16=False))
    parts = load_directory(adapter.base, choice, adapt=lora.adapt)
    lora.check_all_used()
    own = adapter.path / "scheduler" / "scheduler_config.json"
    return replace(parts, scheduler_config=read_json(own)) if own.is_file() else parts
