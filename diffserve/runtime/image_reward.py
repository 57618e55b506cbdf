"""ImageReward: a score of an image and its prompt learned from human preferences (Xu et al. 2023, arXiv 2304.05977).

BLIP's text encoder reads the prompt with cross-attention to the image, and five linear layers map its first token to
the score. The published file names tensors as the original BLIP does; transformers' BLIP classes compute the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from diffserve.api.errors import ModelLoadError
from diffserve.models.model_files import find_weights, model_path, read_json
from diffserve.runtime.clip_scorer import CLIP_MEAN, CLIP_STD, Preparation
from diffserve.runtime.loading.checkpoint import Checkpoint
from diffserve.runtime.loading.components import read_tokenizer
from diffserve.runtime.loading.library_imports import import_quietly
from diffserve.runtime.loading.weight_loading import TensorSource, build_on_meta, fill_renamed
from diffserve.runtime.precision import DeviceChoice

STEM: Final = "ImageReward"
TEXT_CONFIG: Final = "med_config.json"
VISION, TEXT, HEAD = "blip.visual_encoder.", "blip.text_encoder.", "mlp.layers."
LINEAR_LAYERS: Final = (0, 2, 4, 6, 7)
"""Indices of the linear layers of the head; dropout is between them."""

REWARD_MEAN, REWARD_STD = 0.16717362830052426, 1.0333394966054072
MAX_TOKENS: Final = 35
VISION_HEAD_WIDTH: Final = 64
VISION_EPS, TEXT_EPS = 1e-6, 1e-12
_VISION_WORDS: Final = {
    "encoder.layers.": "blocks.",
    "embeddings.class_embedding": "cls_token",
    "embeddings.position_embedding": "pos_embed",
    "embeddings.patch_embedding.": "patch_embed.proj.",
    "post_layernorm.": "norm.",
    "layer_norm1.": "norm1.",
    "layer_norm2.": "norm2.",
    "self_attn.projection.": "attn.proj.",
    "self_attn.": "attn.",
}


class ImageRewardScorer:
    """BLIP's two encoders, its tokenizer, and the head of linear layers."""

    def __init__(
        self,
        vision: Any,
        text: Any,
        head: list[tuple[Tensor, Tensor]],
        tokenizer: Any,
        device: torch.device,
    ) -> None:
        self._vision = vision
        self._text = text
        self._head = head
        self._tokenizer = tokenizer
        self._device = device
        side_px = int(vision.config.image_size)
        self._prepare = Preparation(side_px, (side_px, side_px), int(Image.Resampling.BICUBIC), CLIP_MEAN, CLIP_STD)

    @classmethod
    def load(cls, path: str | Path, choice: DeviceChoice) -> ImageRewardScorer:
        """Load a directory with ImageReward.safetensors, med_config.json and the files of BERT's tokenizer.

        Raises:
            ModelLoadError: A file is missing, or the tensors are not those of ImageReward.
        """
        directory = model_path(path)
        checkpoint = Checkpoint.open(find_weights(directory, STEM, dtype="float32"))
        settings = read_json(directory / TEXT_CONFIG)
        if not any((directory / name).is_file() for name in ("vocab.txt", "tokenizer.json")):
            raise ModelLoadError(
                f"{directory} has no vocab.txt; copy the tokenizer's files of bert-base-uncased there."
            )
        vision = build_on_meta(partial(_build, "BlipVisionModel", _vision_config(checkpoint)))
        text = build_on_meta(
            partial(_build, "BlipTextModel", _text_config(checkpoint, settings), add_pooling_layer=False)
        )
        fill_renamed(vision, checkpoint, _add_vision, choice)
        fill_renamed(text, checkpoint, lambda source, name: source.add(name, TEXT + name), choice)
        head = [
            (
                _read(checkpoint, f"{HEAD}{index}.weight").to(choice.device),
                _read(checkpoint, f"{HEAD}{index}.bias").to(choice.device),
            )
            for index in LINEAR_LAYERS
        ]
        return cls(vision.eval(), text.eval(), head, read_tokenizer("BertTokenizer", directory), choice.device)

    @torch.inference_mode()
    def score(self, prompt: str, pixels: NDArray[np.uint8]) -> float:
        """Return the reward of an image (height, width, 3); the mean over the training data is 0, the deviation 1."""
        ids = self._tokenizer(prompt, truncation=True, max_length=MAX_TOKENS, return_tensors="pt").input_ids
        image = self._vision(self._prepare(pixels).to(self._device, self._vision.dtype)).last_hidden_state
        value = self._text(ids.to(self._device), encoder_hidden_states=image).last_hidden_state[:, 0].float()
        for weight, bias in self._head:
            value = F.linear(value, weight, bias)
        return (float(value) - REWARD_MEAN) / REWARD_STD


def _build(name: str, config: Mapping[str, Any], **options: Any) -> Any:
    """Build transformers' class ``name`` of BLIP, empty."""
    config_name = name.replace("Model", "Config")
    return import_quietly("transformers", name)(import_quietly("transformers", config_name)(**config), **options)


def _shape(checkpoint: Checkpoint, key: str) -> tuple[int, ...]:
    if key not in checkpoint:
        raise ModelLoadError(f"{checkpoint.where()} has no tensor {key!r}, which ImageReward has.")
    return checkpoint.entries[key].shape


def _read(checkpoint: Checkpoint, key: str) -> Tensor:
    _shape(checkpoint, key)
    return checkpoint.read(key).float()


def _vision_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Infer the configuration of the vision transformer from its shapes."""
    width, _, _, patch_px = _shape(checkpoint, f"{VISION}patch_embed.proj.weight")
    num_patches = _shape(checkpoint, f"{VISION}pos_embed")[1] - 1
    blocks = {
        key.removeprefix(VISION).split(".")[1] for key in checkpoint.entries if key.startswith(f"{VISION}blocks.")
    }
    return {
        "hidden_size": width,
        "intermediate_size": _shape(checkpoint, f"{VISION}blocks.0.mlp.fc1.weight")[0],
        "num_hidden_layers": len(blocks),
        "num_attention_heads": max(1, width // VISION_HEAD_WIDTH),
        "image_size": round(num_patches**0.5) * patch_px,
        "patch_size": patch_px,
        "layer_norm_eps": VISION_EPS,
    }


def _text_config(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of the text encoder: that of med_config.json, with widths from the tensors."""
    names = ("num_hidden_layers", "num_attention_heads", "intermediate_size", "max_position_embeddings", "hidden_act")
    vocab_size, width = _shape(checkpoint, f"{TEXT}embeddings.word_embeddings.weight")
    key = f"{TEXT}encoder.layer.0.crossattention.self.key.weight"
    return {
        **{name: settings[name] for name in names if name in settings},
        "vocab_size": vocab_size,
        "hidden_size": width,
        "encoder_hidden_size": _shape(checkpoint, key)[1],
        "layer_norm_eps": settings.get("layer_norm_eps", TEXT_EPS),
    }


def _add_vision(source: TensorSource, name: str) -> str:
    """Add a parameter of transformers' vision model from the original BLIP's tensor."""
    key = name
    for word, original in _VISION_WORDS.items():
        key = key.replace(word, original)
    return source.add(name, VISION + key)
