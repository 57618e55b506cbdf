"""LPIPS-like distance of two images in the stages of a backbone (Zhang et al. 2018, arXiv 1801.03924, equation 1).

The user names the backbone: the published LPIPS networks are pickles of torchvision's models, and torchmetrics' LPIPS
needs torchvision. Values are comparable only within one backbone.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from diffserve.api.errors import ModelLoadError
from diffserve.models.model_files import find_weights, model_path, read_json
from diffserve.runtime.loading.checkpoint import Checkpoint
from diffserve.runtime.loading.components import OFFLINE
from diffserve.runtime.loading.library_imports import hushed_loading, import_quietly
from diffserve.runtime.precision import DeviceChoice

WEIGHTS: Final = "lpips.safetensors"
WEIGHT = re.compile(r"lin(\d+)\.model\.1\.weight")
"""Names of the linear weights in the published files of LPIPS."""

PREPARED: Final = "preprocessor_config.json"
IMAGENET_MEAN: Final = (0.485, 0.456, 0.406)
IMAGENET_STD: Final = (0.229, 0.224, 0.225)
NORMS: Final = "hidden_states_norms."
"""Norms after the stages of some backbones, which published checkpoints lack and which start as the identity."""


class FeatureDistance:
    """Sum over the stages of a backbone of weighted squared distances between unit-normalized features.

    Args:
        network: A backbone of transformers that returns the feature maps of all stages.
        weights: Weight of each channel, (C,), by stage.
        mean: Mean of each color channel.
        std: Standard deviation of each color channel.
        device: Device of the network.
    """

    def __init__(
        self,
        network: Any,
        weights: list[Tensor],
        mean: tuple[float, ...],
        std: tuple[float, ...],
        device: torch.device,
    ) -> None:
        self._network = network
        self._weights = [weight.to(device) for weight in weights]
        self._mean = torch.tensor(mean, device=device).reshape(1, 3, 1, 1)
        self._std = torch.tensor(std, device=device).reshape(1, 3, 1, 1)
        self._device = device

    @classmethod
    def load(cls, path: str | Path, choice: DeviceChoice) -> FeatureDistance:
        """Load a backbone in transformers' layout from a directory.

        ``lpips.safetensors`` may hold linear weights, named as in the published LPIPS files (``lin0.model.1.weight``)
        and one for each stage. Without it all channels have the weight 1 / number of stages.

        Raises:
            ModelLoadError: The directory has no backbone in safetensors, or the linear weights do not fit it.
        """
        directory = model_path(path)
        kind = read_json(directory / "config.json").get("model_type")
        find_weights(directory, "model", dtype="float32")  # names a pickle, which is refused, and how to convert it
        network, channels = _load_backbone(directory, str(kind))
        prepared = read_json(directory / PREPARED) if (directory / PREPARED).is_file() else {}
        mean, std = (
            tuple(map(float, prepared.get(name, default)))
            for name, default in (("image_mean", IMAGENET_MEAN), ("image_std", IMAGENET_STD))
        )
        return cls(network.to(choice.device), _read_weights(directory, channels), mean, std, choice.device)

    @torch.inference_mode()
    def distance(self, pixels: NDArray[np.uint8], other: NDArray[np.uint8]) -> float:
        """Return the distance of two images (height, width, 3) of the same shape; equal images have 0."""
        pair = torch.from_numpy(np.stack([pixels, other])).to(self._device).permute(0, 3, 1, 2).float() / 255
        maps = self._network((pair - self._mean) / self._std).feature_maps
        total = torch.zeros((), device=self._device)
        for features, weight in zip(maps, self._weights, strict=True):
            first, second = F.normalize(features, dim=1)
            total += ((first - second).square() * weight[:, None, None]).sum(dim=0).mean()
        return float(total)


def _load_backbone(directory: Path, kind: str) -> tuple[Any, list[int]]:
    """Load a backbone with the feature maps of all stages, and return it with the channels of each stage."""
    auto, auto_config = (import_quietly("transformers", name) for name in ("AutoBackbone", "AutoConfig"))
    try:
        with hushed_loading():
            config = auto_config.from_pretrained(str(directory), **OFFLINE)
            config.out_indices = list(range(len(config.stage_names)))
            backbone = type(auto.from_config(config))  # AutoBackbone.from_pretrained asks the hub about the folder
            network, loading = backbone.from_pretrained(
                str(directory), config=config, use_safetensors=True, output_loading_info=True, **OFFLINE
            )
    except (OSError, ValueError, RuntimeError, AttributeError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelLoadError(
            f"{directory} holds a {kind!r} model that is no backbone of transformers: {reason}"
        ) from None
    missing = sorted(name for name in loading["missing_keys"] if not name.startswith(NORMS))
    if missing:
        raise ModelLoadError(f"the weights in {directory} lack {missing[0]!r} and {len(missing) - 1} more tensors.")
    return network, list(network.channels)


def _read_weights(directory: Path, channels: list[int]) -> list[Tensor]:
    """Read the linear weights, or return uniform ones."""
    file = directory / WEIGHTS
    if not file.is_file():
        return [torch.full((num_channels,), 1 / len(channels)) for num_channels in channels]
    checkpoint = Checkpoint.open([file])
    keys = {int(match[1]): key for key in checkpoint.entries if (match := WEIGHT.fullmatch(key))}
    weights = [checkpoint.read(keys[stage]).float().flatten() for stage in sorted(keys)]
    if [len(weight) for weight in weights] != channels:
        channels_in_file = [len(weight) for weight in weights]
        raise ModelLoadError(
            f"{file} has linear weights for {channels_in_file} channels; the stages of its backbone have {channels}."
        )
    return weights
