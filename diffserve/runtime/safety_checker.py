"""Stable Diffusion's safety checker: CLIP embeddings of an image compared with those of unwanted concepts.

(Rando et al., 2022, arXiv 2210.04610, on its limits.) It reads diffusers' ``safety_checker/``, a
``StableDiffusionSafetyChecker`` in safetensors, and ``feature_extractor/``, which defines the size of images.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from diffserve.api.errors import ModelLoadError
from diffserve.models.model_files import model_path, read_json

COMPONENT = "safety_checker"
EXTRACTOR = "feature_extractor"


class SafetyChecker:
    """Classifies images as unsafe or not. A ViT-L takes a second on a CPU."""

    def __init__(self, network: Any, extractor: Any) -> None:
        self._network = network
        self._extractor = extractor

    @classmethod
    def load(cls, model: str) -> SafetyChecker:
        """Load the checker of the diffusers directory ``model``. Raises ModelLoadError if it has none."""
        from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
        from transformers import CLIPImageProcessor

        folder = model_path(model)
        if not (folder / COMPONENT / "config.json").is_file():
            raise ModelLoadError(
                f"{model!r} has no {COMPONENT}; give a diffusers directory that has one, or safety_filter = "
                '"MODULE:FACTORY".'
            )
        if not list((folder / COMPONENT).glob("*.safetensors")):
            raise ModelLoadError(f"the {COMPONENT} of {model!r} has no safetensors; other weights are not read.")
        config = read_json(folder / EXTRACTOR / "preprocessor_config.json")
        settings = {key: value for key, value in config.items() if not key.endswith("_type")}
        try:
            network = StableDiffusionSafetyChecker.from_pretrained(
                str(folder / COMPONENT), use_safetensors=True, local_files_only=True
            )
        except (OSError, ValueError, RuntimeError, KeyError, json.JSONDecodeError) as error:
            raise ModelLoadError(f"the {COMPONENT} of {model!r} cannot be read: {error}") from None
        return cls(network.eval(), CLIPImageProcessor(**settings))

    @torch.inference_mode()
    def blocks_picture(self, pixels: NDArray[np.uint8]) -> bool:
        """Return whether the image ``pixels`` (height, width, 3) is unsafe."""
        clip_input = self._extractor(images=[pixels], return_tensors="pt").pixel_values
        _, flags = self._network(images=np.zeros((1, 1, 1, 3), dtype=np.float32), clip_input=clip_input)
        return bool(flags[0])
