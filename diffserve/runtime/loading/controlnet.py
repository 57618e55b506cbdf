"""ControlNets on disk: diffusers' directories, checked against the UNet before any weight is read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

from diffserve.models.controlnets import ALLOWED_CLASS, read_controlnet
from diffserve.models.model_files import DIFFUSERS_STEM, find_weights
from diffserve.runtime.loading.checkpoint import Checkpoint
from diffserve.runtime.loading.components import build, load_component
from diffserve.runtime.loading.weight_loading import TensorSource, check_keys
from diffserve.runtime.precision import DeviceChoice
from diffserve.runtime.unet.controlnet import check_fits
from diffserve.runtime.unet.gated_layers import use_halved_gates
from diffserve.runtime.unet.steady_layers import use_steady_layers


class ControlNetFiles(NamedTuple):
    """A ControlNet's configuration and its tensors, opened and not read."""

    directory: Path
    config: dict[str, Any]
    checkpoint: Checkpoint

    @classmethod
    def open(cls, directory: Path, dtype: str) -> ControlNetFiles:
        """Of ``directory``, the variant that suits ``dtype``. Raises ModelLoadError."""
        config = read_controlnet(directory)
        return cls(directory, config, Checkpoint.open(find_weights(directory, DIFFUSERS_STEM, dtype=dtype)))

    @property
    def num_parameters(self) -> int:
        """Numbers in all tensors."""
        return sum(math.prod(entry.shape) for entry in self.checkpoint.entries.values())

    def network(self, unet: Any, vae_factor: int) -> Any:
        """The network, empty, every tensor accounted for. Raises ModelLoadError where it does not fit ``unet``, or its
        files do not fit its configuration.
        """
        network = build(ALLOWED_CLASS, self.config, str(self.directory / "config.json"))
        check_fits(network, unet, vae_factor)
        check_keys(ALLOWED_CLASS, network.state_dict(), TensorSource.renamed(self.checkpoint, self._names))
        return network

    def load(self, unet: Any, vae_factor: int, choice: DeviceChoice) -> Any:
        """The network with its weights in ``choice.compute_dtype``, whatever the UNet's are quantised to."""
        network = self.network(unet, vae_factor)
        if choice.device.type == "cpu":
            use_steady_layers(network, choice.compute_dtype)
        elif choice.device.type == "cuda":
            use_halved_gates(network)
        return load_component(network, self.checkpoint, choice)

    @property
    def _names(self) -> dict[str, str]:
        return {key: key for key in self.checkpoint.entries}
