"""The safety checker in diffusers' format, tiny and with random weights of the real classes: as diffusers judges."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from diffserve.api.errors import ModelLoadError
from diffserve.runtime.safety_checker import SafetyChecker
from tests.tiny_models import save_safety_checker

PIXELS = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)


@pytest.mark.slow
def test_a_picture_is_judged_as_diffusers_judges_it(tmp_path: Path) -> None:
    from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
    from transformers import CLIPImageProcessor

    for threshold in (-2.0, 2.0):
        folder = save_safety_checker(tmp_path / str(threshold), threshold)
        reference_checker = StableDiffusionSafetyChecker.from_pretrained(str(folder / "safety_checker"))
        inputs = CLIPImageProcessor.from_pretrained(str(folder / "feature_extractor"))(
            images=[PIXELS], return_tensors="pt"
        )
        with torch.inference_mode():
            _, flags = reference_checker(images=np.zeros((1, 8, 8, 3)), clip_input=inputs.pixel_values)
        is_blocked = SafetyChecker.load(str(folder)).blocks_picture(PIXELS)
        assert is_blocked is (threshold < 0)
        assert flags == [is_blocked]


def test_weights_in_pickle_and_models_without_a_checker_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="has no safety_checker"):
        SafetyChecker.load(str(tmp_path))
    folder = save_safety_checker(tmp_path / "model", 2.0)
    (folder / "safety_checker" / "model.safetensors").rename(folder / "safety_checker" / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="has no safetensors"):
        SafetyChecker.load(str(folder))
