"""Parsing of the layers that a LoRA file changes, from tensor names, shapes and metadata, without torch.

The list of LoRAs and the loader both use this module. It supports the tensor names of diffusers (old and new), its
attention processors, PEFT, ComfyUI, and kohya's trainer with UNet layers numbered as in diffusers or in the original
code (SGM).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

UNET: Final = "unet"
TEXT_ENCODERS: Final = ("text_encoder", "text_encoder_2")
MAX_RANK: Final = 256
"""Maximum rank of a LoRA."""

MAX_TENSORS: Final = 20_000
"""Maximum number of tensors in a LoRA file. A LoRA of all layers of SDXL and its text encoders has 3,400."""

MAX_NAME_CHARS: Final = 500
"""Maximum length of a tensor name, which error messages quote."""

WHOLE: Final = -1
"""Value of the rank of an adapter that changes a layer in a way that has no low-rank form."""

PEFT_PREFIX: Final = "base_model.model."
PREFIXES: Final = {
    "unet.": UNET,
    "text_encoder.": TEXT_ENCODERS[0],
    "text_encoder_2.": TEXT_ENCODERS[1],
    "lora_unet_": UNET,
    "lora_te_": TEXT_ENCODERS[0],
    "lora_te1_": TEXT_ENCODERS[0],
    "lora_te2_": TEXT_ENCODERS[1],
    "diffusion_model.": UNET,
    "model.diffusion_model.": UNET,
    "text_encoders.clip_l.transformer.": TEXT_ENCODERS[0],
    "text_encoders.clip_g.transformer.": TEXT_ENCODERS[1],
}
"""Component by prefix of a tensor name; the prefix is not part of the layer name."""
BARE: Final = {
    **dict.fromkeys(("down_blocks.", "mid_block.", "up_blocks.", "time_embedding.", "conv_in.", "conv_out."), UNET),
    "conv_norm_out.": UNET,
    **dict.fromkeys(("text_model.", "encoder.layers."), TEXT_ENCODERS[0]),
}
"""Component by start of the layer name, for files whose tensor names have no component prefix."""

NAME: Final = re.compile(
    r"(?P<layer>.+)\.(?:(?:lora_linear_layer\.|lora\.|lora_)(?P<half>A|B|down|up)(?:\.default)?\.weight"
    r"|hada_w(?P<factor>[12]_[ab])|lokr_(?P<lokr>w[12](?:_[ab])?|t2)|(?P<peft>lora_magnitude_vector)(?:\.default)?(?:\.weight)?"
    r"|(?P<whole>diff|diff_b|w_norm|b_norm|dora_scale)|alpha)"
)
PROCESSOR: Final = re.compile(r"(?:\.processor)?\.to_(q|k|v|out)_lora\.(?=down|up)")
BUNDLED: Final = re.compile(r"bundle_emb\.(?P<word>[^.]+)\.")
"""Tensor names of embeddings that OneTrainer saves with a LoRA."""

METADATA_KEY: Final = "lora_adapter_metadata"
LAYER_NAME: Final = re.compile(r"[\w.]+")
WORDS_KEY: Final = "modelspec.trigger_phrase"
"""Key of the trigger words in the Stability AI Model Metadata Standard, which trainers write."""

IP_ADAPTER: Final = re.compile(r"(image_proj|ip_adapter|encoder_hid_proj\.image_projection_layers)\.|.*\.to_[kv]_ip\.")
"""Tensor names of an IP-Adapter (Ye et al. 2023, arXiv 2308.06721), in a separate file and in a UNet."""
OTHER_KINDS: Final = {
    "hada_t": "LoHa in three factors (Tucker)",
    "oft_": "OFT",
    "on_input": "IA3",
    "lora_mid": "a LoCon in three factors (Tucker)",
}
"""Unsupported kind of adapter by part of a tensor name."""

KNOWN_LAYERS: Final = {
    UNET: re.compile(
        r"(?:down_blocks|mid_block|up_blocks|time_embedding|add_embedding|class_embedding"
        r"|input_blocks_\d|middle_block_\d|output_blocks_\d|time_embed_\d|label_emb_\d|out_\d)\w*|conv_(?:in|norm_out|out)"
    ),
    **dict.fromkeys(TEXT_ENCODERS, re.compile(r"encoder_layers_\d+_\w+|final_layer_norm|text_projection")),
}
"""Layer names of the supported networks, with underscores for dots."""

CROSS_ATTENTION: Final = ("attn2_to_k", "attn2_to_v")
"""Ends of the names of the UNet's layers that read the prompt."""

NORM_LAYER: Final = re.compile(r"(?:.*_)?norm\d?(?:_out)?|.*_in_layers_0|.*_out_layers_0|out_0")


class InvalidLoRAError(Exception):
    """Error of a file that is not a usable LoRA; the message completes a sentence whose subject is the file."""


FIELDS: Final[Mapping[str | None, str]] = {
    **{"A": "down", "B": "up", "down": "down", "up": "up", None: "alpha"},
    **{"1_b": "down", "1_a": "up", "2_b": "second_down", "2_a": "second_up"},
    **{"diff": "weight_delta", "w_norm": "weight_delta", "diff_b": "bias_delta", "b_norm": "bias_delta"},
    **{"dora_scale": "magnitude", "lora_magnitude_vector": "output_magnitude"},
}
"""Field of :class:`LayerChange` by the group that ``NAME`` matches."""


@dataclass
class LayerChange:
    """Names of the tensors that change one layer; "" for absent tensors.

    The product of the matrices ``down`` and ``up`` is added to the weight. The change of a LoHa (Hyeon-Woo et al.,
    "FedPara", arXiv 2108.06098) is the element-wise product of two such products; its rank is the product of the ranks.
    All other changes have no low-rank form.

    Attributes:
        name: Name of the layer in the file.
        down, up: Pair of matrices.
        second_down, second_up: Second pair of a LoHa.
        alpha: Scale of the change times its rank.
        lokr: Factors of a Kronecker product (LoKr, Yeh et al., arXiv 2309.14859), by "w1", "w2_a" and so on.
        weight_delta, bias_delta: Tensors that are added to the weight and the bias.
        magnitude, output_magnitude: Norms of the changed weight per input or per output (DoRA, Liu et al., arXiv
            2402.09353). The shape of ``magnitude`` determines which; ``output_magnitude`` is the form of PEFT.
        declared_alpha: Alpha from the metadata, if there is no tensor ``alpha``.
        is_stabilized: Whether the change is scaled by alpha / sqrt(rank) (rsLoRA, Kalajdzievski 2023, arXiv
            2312.03732) instead of alpha / rank.
    """

    name: str = ""
    down: str = ""
    up: str = ""
    second_down: str = ""
    second_up: str = ""
    alpha: str = ""
    lokr: dict[str, str] = field(default_factory=dict)
    weight_delta: str = ""
    bias_delta: str = ""
    magnitude: str = ""
    output_magnitude: str = ""
    declared_alpha: float | None = None
    is_stabilized: bool = False

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Names of ``down`` and ``up`` of each pair."""
        pairs = ((self.down, self.up), (self.second_down, self.second_up))
        num_pairs = max((number for number, pair in enumerate(pairs, 1) if any(pair)), default=0)
        return pairs[:num_pairs]

    @property
    def dora(self) -> str:
        """Name of the tensor with the magnitudes of a DoRA."""
        return self.magnitude or self.output_magnitude

    @property
    def is_whole(self) -> bool:
        """Whether the change has no low-rank form."""
        return bool(self.lokr or self.weight_delta or self.bias_delta or self.dora)

    @property
    def changes_weight(self) -> bool:
        """Whether the weight of the layer is changed."""
        return bool(self.pairs or self.lokr or self.weight_delta)

    @property
    def first_tensor(self) -> str:
        """Name of one of the tensors, for messages."""
        names = (self.down, self.up, self.second_down, self.second_up, *self.lokr.values(), self.weight_delta)
        return next(filter(None, (*names, self.bias_delta, self.dora, self.alpha)))

    def rank(self, shapes: Mapping[str, Sequence[int]]) -> int:
        """Return the rank of the change, or ``WHOLE``."""
        return WHOLE if self.is_whole else math.prod(shapes[down][0] for down, _ in self.pairs)


@dataclass(frozen=True)
class LoRALayers:
    """Layers that a LoRA file changes.

    Attributes:
        layers: Changes by component and layer name (with underscores for dots).
        rank: Largest rank of a layer; ``WHOLE`` if the change of any layer has no low-rank form.
        words: Trigger words from the metadata.
        bundled_words: Names of embeddings in the file, which are not loaded.
        text_width: Numbers of a prompt token that the changed layers read; 0 if no change shows it.
    """

    layers: dict[str, dict[str, LayerChange]]
    rank: int
    words: str = ""
    bundled_words: tuple[str, ...] = ()
    text_width: int = 0


def read_layers(shapes: Mapping[str, Sequence[int]], metadata: Mapping[str, str]) -> LoRALayers:
    """Parse the layers that a LoRA file changes.

    Args:
        shapes: Shape of each tensor by name.
        metadata: Metadata of the file.

    Raises:
        InvalidLoRAError: The file is not a LoRA, changes a layer twice, or is damaged.
    """
    if len(shapes) > MAX_TENSORS:
        raise InvalidLoRAError(f"holds {len(shapes):,} tensors; at most {MAX_TENSORS:,} are allowed")
    longest = max(map(len, shapes), default=0)
    if longest > MAX_NAME_CHARS:
        raise InvalidLoRAError(
            f"holds a tensor whose name has {longest:,} characters; at most {MAX_NAME_CHARS} are allowed"
        )
    refuse_ip_adapter(shapes)
    layers: dict[str, dict[str, LayerChange]] = {}
    bundled: dict[str, None] = {}
    for key in shapes:
        if match := BUNDLED.match(key):
            bundled[match["word"]] = None
        else:
            _add(layers, key)
    if not layers:
        raise InvalidLoRAError("holds no layer of a LoRA")
    for component, changes in layers.items():
        declared = _Declared.read(metadata, component)
        for change in changes.values():
            _check(change, shapes)
            if declared.is_dora and change.pairs and not change.dora:
                raise InvalidLoRAError(
                    f"says that use_dora is True and holds {change.down!r} without its lora_magnitude_vector; save it "
                    "again with all its tensors"
                )
            change.declared_alpha = declared.alpha_of(change.name)
            change.is_stabilized = declared.is_stabilized
    ranks = [change.rank(shapes) for changes in layers.values() for change in changes.values()]
    rank, words = WHOLE if WHOLE in ranks else max(ranks), metadata.get(WORDS_KEY, "")
    return LoRALayers(layers, rank, words, tuple(bundled), _text_width(layers.get(UNET, {}), shapes))


def _text_width(changes: Mapping[str, LayerChange], shapes: Mapping[str, Sequence[int]]) -> int:
    """Return the inputs of the first cross-attention layer of ``changes`` whose change has a matrix of that size."""
    tensors = (change.down or change.weight_delta for name, change in changes.items() if name.endswith(CROSS_ATTENTION))
    return next((math.prod(shapes[tensor][1:]) for tensor in tensors if tensor), 0)


def check_layers_known(content: LoRALayers) -> None:
    """Check that all layers in ``content`` exist in a supported network.

    Raises:
        InvalidLoRAError: A layer is unknown, or the change does not apply to its type.
    """
    for component, changes in content.layers.items():
        for layer, change in changes.items():
            if not KNOWN_LAYERS[component].fullmatch(layer):
                raise InvalidLoRAError(
                    f"holds {change.first_tensor!r}, and there is no such layer in the supported models "
                    "(Stable Diffusion 1, 2 and XL); it is made for another kind of model"
                )
            if NORM_LAYER.fullmatch(layer) and (change.pairs or change.lokr or change.dora):
                raise InvalidLoRAError(f"holds {change.first_tensor!r}, and a norm layer has no matrix to change")


def refuse_ip_adapter(keys: Iterable[str]) -> None:
    """Check that none of the tensor names ``keys`` belongs to an IP-Adapter.

    Raises:
        InvalidLoRAError: A tensor belongs to an IP-Adapter.
    """
    key = next(filter(IP_ADAPTER.match, keys), None)
    if key is not None:
        raise InvalidLoRAError(
            f"holds an IP-Adapter (its tensor {key!r} says so), which is no part of a model or LoRA; move the file "
            "to the folder of --reference-dir, and name it in references"
        )


def flat_name(layer: str) -> str:
    """Return a layer name in the form of kohya's trainer, without the prefix that some text encoders have."""
    return layer.replace(".", "_").removeprefix("text_model_")


def _add(layers: dict[str, dict[str, LayerChange]], key: str) -> None:
    kind = next((kind for mark, kind in OTHER_KINDS.items() if mark in key), None)
    if kind is not None:
        raise InvalidLoRAError(
            f"is {kind} (its tensor {key!r} says so); diffserve supports LoRA, DoRA, LoHa and LoKr. "
            "Merge it into its base with the tool that made it"
        )
    name = PROCESSOR.sub(_processor_layer, key.removeprefix(PEFT_PREFIX))
    match = NAME.fullmatch(name)
    prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "")
    component = PREFIXES.get(prefix) or next((BARE[start] for start in BARE if name.startswith(start)), None)
    if match is None and component is not None and name.endswith(".bias"):
        raise InvalidLoRAError(
            f"holds the bias of a low-rank matrix ({key!r}), which diffserve does not support; train it without "
            "(lora_bias=False), or merge it into its base with the tool that made it"
        )
    if match is None or component is None:
        raise InvalidLoRAError(
            f"holds a tensor that is not named as a LoRA of a UNet or text encoder ({key!r}); it is made for another "
            "kind of model, or in an unknown format"
        )
    layer = match["layer"].removeprefix(prefix)
    change = layers.setdefault(component, {}).setdefault(flat_name(layer), LayerChange(layer))
    if part := match["lokr"]:
        previous = change.lokr.setdefault(part, key)
        is_twice = previous != key
    else:
        part = FIELDS[match["half"] or match["factor"] or match["whole"] or match["peft"]]
        previous = getattr(change, part)
        is_twice = bool(previous)
        setattr(change, part, key)
    if is_twice:
        raise InvalidLoRAError(f"changes one layer twice, by {previous!r} and {key!r}")


def _check(change: LayerChange, shapes: Mapping[str, Sequence[int]]) -> None:
    """Check the shapes of the tensors of a layer as far as they do not depend on the model."""
    if not change.changes_weight and (change.dora or not change.bias_delta):
        raise InvalidLoRAError(f"holds {change.first_tensor!r}, which has no partner; a change is a pair of matrices")
    for first, second in (
        (change.magnitude, change.output_magnitude),
        (change.pairs and change.first_tensor, next(iter(change.lokr.values()), "")),
    ):
        if first and second:
            raise InvalidLoRAError(f"changes one layer twice, by {first!r} and {second!r}")
    for names in change.pairs:
        if not all(names):
            raise InvalidLoRAError(
                f"holds {next(filter(None, names), change.first_tensor)!r}, which has no partner; a change is a pair "
                "of matrices"
            )
        down, up = (shapes[name] for name in names)
        if len(down) not in (2, 4) or len(up) not in (2, 4) or math.prod(up[1:]) != down[0] or not down[0]:
            raise InvalidLoRAError(
                f"is damaged: {names[0]!r} is {list(down)} and {names[1]!r} is {list(up)}; their ranks must be equal, "
                "and 1 or more"
            )
    if len({(shapes[up][0], math.prod(shapes[down][1:])) for down, up in change.pairs}) > 1:
        raise InvalidLoRAError(
            f"is damaged: {change.down!r} and {change.second_down!r} are of layers of different sizes"
        )
    if change.alpha and math.prod(shapes[change.alpha]) != 1:
        raise InvalidLoRAError(f"is damaged: {change.alpha!r} is {list(shapes[change.alpha])}, not one number")
    if change.lokr:
        _check_lokr(change, shapes)


def _check_lokr(change: LayerChange, shapes: Mapping[str, Sequence[int]]) -> None:
    """Check that the factors of a LoKr are complete and that their ranks fit."""
    sizes = {part: list(shapes[name]) for part, name in change.lokr.items()}
    for factor in ("w1", "w2"):
        parts = {part for part in sizes if part.startswith(factor)}
        if parts not in ({factor}, {f"{factor}_a", f"{factor}_b"}):
            raise InvalidLoRAError(
                f"is damaged: in the layer of {change.first_tensor!r}, {factor} is neither one tensor nor a pair"
            )
    is_tucker = "t2" in sizes
    ranks = [(sizes["w1_a"][1:], sizes["w1_b"][:1])] if "w1_a" in sizes else []
    if is_tucker:
        ends = [sizes.get(f"w2_{half}", [])[:1] for half in "ab"]
        ranks.append((sizes["t2"][:2], ends[0] + ends[1]))
    elif "w2_a" in sizes:
        ranks.append((sizes["w2_a"][1:], sizes["w2_b"][:1]))
    num_dims = {part: (4,) if part == "t2" else (2, 4) if part in ("w2", "w2_b") else (2,) for part in sizes}
    if any(len(size) not in num_dims[part] for part, size in sizes.items()) or any(a != b for a, b in ranks):
        raise InvalidLoRAError(f"is damaged: the factors of {change.first_tensor!r} are {sizes}; they do not fit")


def _processor_layer(match: re.Match[str]) -> str:
    """Convert the layer name of an attention processor to the current form."""
    letters = match[1]
    if ".self_attn" in match.string[: match.start() + 1]:
        return f".{letters}_proj.lora."
    return f".to_{letters}{'.0' * (letters == 'out')}.lora."


@dataclass(frozen=True)
class _Declared:
    """PEFT configuration of one component in the metadata of the file: alphas and kind of scaling."""

    alpha: float | None
    alphas: dict[str, float]
    is_stabilized: bool
    is_dora: bool

    @classmethod
    def read(cls, metadata: Mapping[str, str], component: str) -> _Declared:
        names = ("lora_alpha", "alpha_pattern", "use_rslora", "use_dora")
        try:
            declared: Any = json.loads(metadata.get(METADATA_KEY, "{}"))
            entries = {name: declared.get(f"{component}.{name}") for name in names}
            alpha = None if entries["lora_alpha"] is None else float(entries["lora_alpha"])
            alphas = {str(layer): float(value) for layer, value in (entries["alpha_pattern"] or {}).items()}
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise InvalidLoRAError(f"has {METADATA_KEY} that cannot be read ({error})") from error
        for layer in alphas:
            if not LAYER_NAME.fullmatch(layer):
                raise InvalidLoRAError(
                    f"has an alpha_pattern with {layer!r}, which is not the name of a layer or its end; write the names"
                )
        return cls(alpha, alphas, bool(entries["use_rslora"]), bool(entries["use_dora"]))

    def alpha_of(self, layer: str) -> float | None:
        """Return the alpha of ``layer``: that of the first pattern that equals its name or its end, as in PEFT."""
        matches = (alpha for end, alpha in self.alphas.items() if f".{layer}".endswith(f".{end}"))
        return next(matches, self.alpha)
