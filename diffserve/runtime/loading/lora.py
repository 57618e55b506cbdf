"""LoRA files under every name that trainers give their tensors: pairs of matrices by component and layer.

A LoRA (Hu et al., 2021, arXiv 2106.09685) holds a pair for each layer that it changes. The layer's weight W, a matrix
(out, in) or a kernel (out, in, kh, kw), is read as

    W + alpha / rank * up @ down        up (out, rank), down (rank, in) or (rank, in * kh * kw)

Understood are the names of diffusers, old and new, of its attention processors, of PEFT and of kohya's trainer, whose
UNet may be numbered as diffusers or as the original code (SGM) does. Here the pair is merged into a network that loads,
in float32, and only then cast or quantised like any other tensor; ``runtime.low_rank`` has it for single rows instead.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from diffserve.errors import ModelLoadError
from diffserve.loras import OTHER_KINDS
from diffserve.runtime.loading.checkpoint import Checkpoint
from diffserve.runtime.loading.single_file_keys import UNET_PREFIX, unet_key
from diffserve.runtime.loading.weight_loading import TensorSource

UNET: Final = "unet"
PEFT_PREFIX: Final = "base_model.model."
PREFIXES: Final = {
    "unet.": UNET,
    "text_encoder.": "text_encoder",
    "text_encoder_2.": "text_encoder_2",
    "lora_unet_": UNET,
    "lora_te_": "text_encoder",
    "lora_te1_": "text_encoder",
    "lora_te2_": "text_encoder_2",
}
"""How a tensor's name begins -> the component it changes; the prefix is no part of the layer's name."""
BARE: Final = {
    **dict.fromkeys(("down_blocks.", "mid_block.", "up_blocks.", "time_embedding.", "conv_in.", "conv_out."), UNET),
    **dict.fromkeys(("text_model.", "encoder.layers."), "text_encoder"),
}
"""The same where nothing but the layer is named, as by files of one component."""

NAME = re.compile(
    r"(?P<layer>.+)\.(?:(?:lora_linear_layer\.|lora\.|lora_)(?P<half>A|B|down|up)(?:\.default)?\.weight|alpha)"
)
PROCESSOR = re.compile(r"(?:\.processor)?\.to_(q|k|v|out)_lora\.(?=down|up)")
METADATA_KEY: Final = "lora_adapter_metadata"
WORDS_KEY: Final = "modelspec.trigger_phrase"
"""Of the Stability AI Model Metadata Standard, which trainers write."""
KINDS_REFUSED: Final = ("use_dora", "use_rslora", "alpha_pattern")


@dataclass
class LowRank:
    """One layer's change: the names of its tensors in the file, and what ``alpha`` is where no tensor says so."""

    down: str = ""
    up: str = ""
    alpha: str = ""
    declared_alpha: float | None = None


@dataclass
class LoRAFile:
    """The changes in one file, by component and then by layer, whose dots are written as underscores."""

    checkpoint: Checkpoint
    layers: dict[str, dict[str, LowRank]] = field(default_factory=dict)
    _used: set[str] = field(default_factory=set)

    @classmethod
    def open(cls, files: Iterable[Path]) -> LoRAFile:
        """Read the names in ``files``. Raises ModelLoadError for a name that says neither component nor half."""
        lora = cls(Checkpoint.open(files))
        lora.checkpoint.refuse_ip_adapter()
        for key in lora.checkpoint.entries:
            lora._add(key)
        if not lora.layers:
            raise ModelLoadError(f"{lora.checkpoint.where()} holds no tensor; it is no LoRA.")
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
        weights = (name for name in source.readers if name.endswith(".weight"))
        shapes = {name.removesuffix(".weight"): source.readers[name][1] for name in weights}
        for name, change in self.matched(component, shapes, source.checkpoint.where()).items():
            key, shape, read = source.readers[f"{name}.weight"]
            source.readers[f"{name}.weight"] = key, shape, partial(self._read_merged, change, read)
        self._used.add(component)

    def matched(self, component: str, shapes: dict[str, tuple[int, ...]], where: str) -> dict[str, LowRank]:
        """The changes of ``component`` by the names of its layers, whose weights have ``shapes``.

        Raises ModelLoadError where a layer is not in the network, which is that of ``where``, or its shape is another.
        """
        asked = self.layers.get(component, {})
        names = {_flat(name): name for name in shapes}
        if component == UNET and not asked.keys() <= names.keys():
            names |= original_names(shapes)
        for layer, change in asked.items():
            if layer not in names:
                raise self._misfit(change, f"there is no such layer in the {component} of {where}")
            self._check_shapes(change, shapes[names[layer]])
        return {names[layer]: change for layer, change in asked.items()}

    def check_all_used(self) -> None:
        """Raise ModelLoadError when the file changes a component that was not there to adapt."""
        for component in self.layers.keys() - self._used:
            raise ModelLoadError(f"{self.checkpoint.where()} changes a {component}, which the base has not.")

    @property
    def rank(self) -> int:
        """The largest of its layers' ranks."""
        changes = (change for layers in self.layers.values() for change in layers.values())
        return max(self.rank_of(change) for change in changes)

    @property
    def words(self) -> str:
        """What it says that a prompt should say for it."""
        return self.checkpoint.metadata.get(WORDS_KEY, "")

    def rank_of(self, change: LowRank) -> int:
        """How many rows ``down`` has."""
        return self.checkpoint.entries[change.down].shape[0]

    def read(self, change: LowRank) -> tuple[torch.Tensor, torch.Tensor]:
        """down (rank, in) or (rank, in, kh, kw), and up (out, rank) times alpha / rank, in float32."""
        down, up = (self.checkpoint.read(key).float() for key in (change.down, change.up))
        return down, self._scale(change) * up.flatten(1)

    def _add(self, key: str) -> None:
        kind = next((kind for mark, kind in OTHER_KINDS.items() if mark in key), None)
        if kind is not None:
            raise ModelLoadError(
                f"{self.checkpoint.where()} is {kind} (its tensor {key!r} says so); diffserve takes plain LoRA, on "
                "linear layers and convolutions. Merge it into its base with the tool that made it."
            )
        name = PROCESSOR.sub(_of_processor, key.removeprefix(PEFT_PREFIX))
        match = NAME.fullmatch(name)
        prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "")
        component = PREFIXES.get(prefix) or next((BARE[start] for start in BARE if name.startswith(start)), None)
        if match is None or component is None:
            raise ModelLoadError(
                f"tensor {key!r} of {self.checkpoint.where()} is not named as a LoRA of UNet or text encoder; "
                "write it with diffusers' save_lora_weights."
            )
        layers = self.layers.setdefault(component, {})
        change = layers.setdefault(_flat(match["layer"].removeprefix(prefix)), LowRank())
        half = {"A": "down", "B": "up", None: "alpha"}.get(match["half"], match["half"])
        setattr(change, half, key)

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
        down, up = self.read(change)
        weight = read().float()
        return weight + (up @ down.flatten(1)).view_as(weight)

    def _scale(self, change: LowRank) -> float:
        alpha = float(self.checkpoint.read(change.alpha)) if change.alpha else change.declared_alpha
        scale = 1.0 if alpha is None else alpha / self.rank_of(change)
        if not math.isfinite(scale):
            raise ModelLoadError(f"{self.checkpoint.where()}: the alpha of {change.down!r} is {alpha}; it is damaged.")
        return scale


def original_names(layers: Iterable[str]) -> dict[str, str]:
    """A UNet's layers as the original code numbers them, dots written as underscores -> their names in ``layers``."""
    names = [*layers]
    per_block = len({name.split(".")[3] for name in names if name.startswith("down_blocks.0.resnets.")})
    attentions = (re.match(r"up_blocks\.(\d+)\.attentions\.", name) for name in names)
    attention_up = frozenset(int(found[1]) for found in attentions if found)
    return {
        _flat(unet_key(f"{name}.", per_block, attention_up).removeprefix(UNET_PREFIX).rstrip(".")): name
        for name in names
    }


def _flat(layer: str) -> str:
    """A layer's name as kohya's trainer writes it; text encoders carry a prefix in some versions only."""
    return layer.replace(".", "_").removeprefix("text_model_")


def _of_processor(match: re.Match[str]) -> str:
    """A layer as attention processors named it, in today's words; text encoders call theirs otherwise."""
    which = match[1]
    if ".self_attn" in match.string[: match.start() + 1]:
        return f".{which}_proj.lora."
    return f".to_{which}{'.0' * (which == 'out')}.lora."


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
                f"{checkpoint.where()}: {name} is {entries[name]!r}; diffserve takes plain LoRA only. "
                "Fuse it into its base with diffusers' fuse_lora and save that."
            )
    return alpha
