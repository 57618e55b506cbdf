"""CLIP scores: the cosine of an image and its prompt (Radford et al. 2021, arXiv 2103.00020, section 2.3).

Any CLIP model on disk works, such as PickScore. Images are prepared as its ``preprocessor_config.json`` says: shortest
edge, crop, scale, normalization.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from diffserve.api.errors import ModelLoadError, ModelNotFound
from diffserve.models.model_files import find_weights, model_path, read_json
from diffserve.runtime.loading.checkpoint import Checkpoint
from diffserve.runtime.loading.components import build_clip, load_component, load_tokenizer
from diffserve.runtime.precision import DeviceChoice
from diffserve.runtime.transfer import SideQueue, send

PREPARED: Final = "preprocessor_config.json"
CLIP_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Final = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class Preparation:
    """Conversion of an image to CLIP's input.

    Attributes:
        edge_px: Length of the resized shortest side.
        crop_px: (height, width) of the center crop.
        resample: Pillow's resampling filter.
        mean: Mean of each channel.
        std: Standard deviation of each channel.
    """

    edge_px: int
    crop_px: tuple[int, int]
    resample: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def read(cls, file: Path, side_px: int) -> Preparation:
        """Read ``file`` for a model with inputs of ``side_px`` squared. Raises ModelLoadError."""
        config = read_json(file)
        try:
            size, crop = config.get("size", side_px), config.get("crop_size", side_px)
            edge = size["shortest_edge"] if isinstance(size, dict) else size
            height, width = (crop["height"], crop["width"]) if isinstance(crop, dict) else (crop, crop)
            mean, std = (tuple(map(float, config.get(f"image_{name}", default))) for name, default in DEFAULTS)
            preparation = cls(int(edge), (int(height), int(width)), int(config.get("resample", 3)), mean, std)
        except (KeyError, TypeError, ValueError) as error:
            raise ModelLoadError(
                f"{file} is not a valid configuration of a CLIP image processor ({error!r})."
            ) from None
        if (
            preparation.crop_px != (side_px, side_px)
            or preparation.edge_px < side_px
            or len(mean) != 3
            or len(std) != 3
        ):
            raise ModelLoadError(
                f"{file} prepares images of {preparation.crop_px}, but the model reads {side_px}x{side_px}."
            )
        return preparation

    def __call__(self, pixels: NDArray[np.uint8]) -> Tensor:
        """Return (1, 3, height, width) float32 of an image (height, width, 3)."""
        image = Image.fromarray(pixels)
        short, long = sorted(image.size)
        further = int(self.edge_px * long / short)
        size = (self.edge_px, further) if image.width <= image.height else (further, self.edge_px)
        resized = np.asarray(image.resize(size, Image.Resampling(self.resample)), dtype=np.float32) / 255.0
        (height, width), (tall, wide) = self.crop_px, resized.shape[:2]
        top, left = (tall - height) // 2, (wide - width) // 2
        cropped = torch.from_numpy(resized[top : top + height, left : left + width])
        colors = (cropped - torch.tensor(self.mean)) / torch.tensor(self.std)
        return colors.permute(2, 0, 1)[None].contiguous()


DEFAULTS: Final = (("mean", CLIP_MEAN), ("std", CLIP_STD))


class ClipScorer:
    """transformers' ``CLIPModel``, its tokenizer and its preparation. For one thread at a time.

    name  of its directory
    """

    def __init__(self, name: str, network: Any, tokenizer: Any, prepare: Preparation, device: torch.device) -> None:
        self.name = name
        self.network = network
        self._tokenizer = tokenizer
        self._prepare = prepare
        self._device = device
        self._queue = SideQueue(device)
        self._window = int(network.config.text_config.max_position_embeddings)

    @classmethod
    def load(cls, path: str | Path, choice: DeviceChoice) -> ClipScorer:
        """Load a directory in transformers' layout. Raises ModelNotFound or ModelLoadError."""
        directory = model_path(path)
        if not directory.is_dir():
            raise ModelNotFound(f"there is no scorer at {directory}; model.scorer names the directory of a CLIP model.")
        file = directory / "config.json"
        config = read_json(file)
        if config.get("model_type") != "clip" or "vision_config" not in config:
            raise ModelLoadError(
                f"{file} is of a {config.get('model_type')!r} model; a scorer must be a complete CLIPModel."
            )
        network = build_clip(config, str(file))
        load_component(network, Checkpoint.open(find_weights(directory, "model", dtype=choice.dtype)), choice)
        prepare = Preparation.read(directory / PREPARED, int(network.config.vision_config.image_size))
        return cls(directory.name, network, load_tokenizer(directory), prepare, choice.device)

    @property
    def side_px(self) -> int:
        """Side of the square that the model reads."""
        return int(self.network.config.vision_config.image_size)

    @property
    def logit_scale(self) -> float:
        """Factor of the cosine in the logits that the model was trained with."""
        return float(self.network.logit_scale.float().exp())

    def begin(self) -> None:
        """Initialize torch in the calling thread, because that resets the number of threads of the process."""
        torch.get_num_threads()

    @torch.inference_mode()
    def score(self, prompt: str, pixels: NDArray[np.uint8]) -> float:
        """Return the cosine, -1 to 1, of the possibly truncated ``prompt`` and an image (height, width, 3)."""
        token_ids = self._tokenizer(prompt, truncation=True, max_length=self._window, verbose=False).input_ids
        prepared = self._prepare(pixels)
        with self._queue:
            ids = send(torch.tensor([token_ids]), self._device)
            picture = send(prepared, self._device).to(self.network.dtype)
            output = self.network(input_ids=ids, pixel_values=picture)
            return float((output.text_embeds.float() * output.image_embeds.float()).sum())
