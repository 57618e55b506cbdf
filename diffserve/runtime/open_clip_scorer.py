"""CLIP models in OpenCLIP's layout as scorers: HPSv2 (Wu et al. 2023, arXiv 2306.09341), a ViT-H-14.

Its file names tensors as OpenCLIP does, and it is mapped to transformers' ``CLIPModel``. Head widths and the activation
are not visible in shapes, so they are those of ViT-H-14.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from diffserve.api.errors import ModelLoadError
from diffserve.models.model_files import model_path, refuse_pickle
from diffserve.runtime.clip_scorer import CLIP_MEAN, CLIP_STD, ClipScorer, Preparation
from diffserve.runtime.loading.checkpoint import Checkpoint
from diffserve.runtime.loading.components import build_clip, load_tokenizer
from diffserve.runtime.loading.single_file_layout import add_open_clip_tensor, infer_open_clip, open_clip_key
from diffserve.runtime.loading.weight_loading import TensorSource, fill_renamed
from diffserve.runtime.precision import DeviceChoice
from diffserve.runtime.text.clip_vocabulary import END, VOCABULARY_SIZE, clip_tokenizer

VISUAL: Final = "visual."
FIRST: Final = "visual.conv1.weight"
VISION_HEAD_WIDTH: Final = 80
_VISION_WORDS: Final = {
    "embeddings.class_embedding": "class_embedding",
    "embeddings.patch_embedding.weight": "conv1.weight",
    "pre_layrnorm.": "ln_pre.",
    "post_layernorm.": "ln_post.",
}
PROJECTIONS: Final = {"visual_projection.weight": "visual.proj", "text_projection.weight": "text_projection"}


def load_hps(path: str | Path, choice: DeviceChoice) -> ClipScorer:
    """Load HPSv2 from a directory with its one safetensors file, or with a CLIP model in transformers' layout.

    Raises:
        ModelLoadError: The directory has other files, or the tensors are not those of such a model.
    """
    directory = model_path(path)
    if (directory / "config.json").is_file():
        return ClipScorer.load(directory, choice)
    files = sorted(directory.glob("*.safetensors"))
    if len(files) != 1:
        for pickle in sorted(directory.glob("*.pt")):
            refuse_pickle(pickle)
        raise ModelLoadError(
            f"{directory} has {len(files)} safetensors files; HPSv2 is one, or a CLIP model directory."
        )
    checkpoint = Checkpoint.open(files)
    if FIRST not in checkpoint:
        raise ModelLoadError(f"{files[0]} has no tensor {FIRST!r}, which OpenCLIP's models have.")
    try:
        config = _infer_config(checkpoint)
    except (KeyError, ValueError, IndexError) as error:
        raise ModelLoadError(f"the shapes of the tensors of {files[0]} are not those of HPSv2 ({error}).") from None
    network = build_clip(config, str(files[0]))
    fill_renamed(network, checkpoint, _add, choice)
    side_px = config["vision_config"]["image_size"]
    prepare = Preparation(side_px, (side_px, side_px), int(Image.Resampling.BICUBIC), CLIP_MEAN, CLIP_STD)
    has_own = config["text_config"]["vocab_size"] != VOCABULARY_SIZE
    # OpenCLIP pads with "!", but a tokenizer with that pad mark would also read it as padding in prompts
    tokenizer = load_tokenizer(directory) if has_own else clip_tokenizer(pad=END)
    return ClipScorer(files[0].stem, network, tokenizer, prepare, choice.device)


def letterbox(pixels: NDArray[np.uint8], side_px: int) -> NDArray[np.uint8]:
    """Scale an image to a longest side of ``side_px`` and pad it with black to a square, as HPSv2 prepares images."""
    height, width = pixels.shape[:2]
    scale = side_px / max(height, width)
    size = (round(width * scale), round(height * scale))
    square = Image.new("RGB", (side_px, side_px))
    image = Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)
    square.paste(image, ((side_px - size[0]) // 2, (side_px - size[1]) // 2))
    return np.asarray(square)


def _infer_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Infer the configuration of a ``CLIPModel`` from the shapes of OpenCLIP's tensors."""
    text = infer_open_clip(checkpoint, "", drop_last=False)
    shapes = {key: entry.shape for key, entry in checkpoint.entries.items()}
    width, _, _, patch_px = shapes[FIRST]
    num_patches = shapes[f"{VISUAL}positional_embedding"][0] - 1
    vision = {
        "hidden_size": width,
        "intermediate_size": shapes[f"{VISUAL}transformer.resblocks.0.mlp.c_fc.weight"][0],
        "num_hidden_layers": sum(key.startswith(VISUAL) and key.endswith(".ln_1.weight") for key in shapes),
        "num_attention_heads": max(1, width // VISION_HEAD_WIDTH),
        "image_size": round(num_patches**0.5) * patch_px,
        "patch_size": patch_px,
        "hidden_act": "gelu",
    }
    return {"text_config": text, "vision_config": vision, "projection_dim": text["projection_dim"]}


def _add(source: TensorSource, name: str) -> str:
    """Add a parameter of transformers' ``CLIPModel`` from OpenCLIP's tensor."""
    if name in PROJECTIONS:
        key = PROJECTIONS[name]
        return source.add(name, key, source.checkpoint.entries[key].shape[::-1], lambda tensor: tensor.T)
    key = name.removeprefix("vision_model.")
    if key != name:
        for word, original in _VISION_WORDS.items():
            key = key.replace(word, original)
    key, third = open_clip_key(key)
    return add_open_clip_tensor(source, name, key if not name.startswith("vision_model.") else VISUAL + key, third)
