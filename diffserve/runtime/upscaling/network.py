"""Loading of upscalers from safetensors, and their calls."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F

from diffserve.api.errors import NumericalError
from diffserve.models.upscalers import CompactShape, RrdbShape, SwinIRShape, UpscalerShape, read_upscaler
from diffserve.runtime.loading.checkpoint import Checkpoint
from diffserve.runtime.loading.weight_loading import TensorSource, build_on_meta, fill
from diffserve.runtime.precision import DeviceChoice
from diffserve.runtime.upscaling.compact import Compact
from diffserve.runtime.upscaling.rrdb import Rrdb
from diffserve.runtime.upscaling.swinir import SwinIR
from diffserve.runtime.upscaling.tiles import TiledImage, TilePlan

NETWORKS: Final[dict[type, Callable[[Any], nn.Module]]] = {
    CompactShape: Compact,
    RrdbShape: Rrdb,
    SwinIRShape: SwinIR,
}
OPERATIONS_PER_CALL: Final = {"cpu": 4e10}
"""Multiplications and additions of one tile on a device; about a tenth of a second on two CPU cores."""

OTHER_OPERATIONS_PER_CALL: Final = 4e12

logger = logging.getLogger(__name__)


def build_network(shape: UpscalerShape) -> nn.Module:
    """Build the network of a shape, with initial weights."""
    return NETWORKS[type(shape)](shape)


@dataclass
class Upscaler:
    """A loaded upscaler.

    Attributes:
        network: The network.
        shape: Its shape.
        device: Device of its weights.
        dtype: Dtype of its weights.
        num_bytes: Size of its weights.
    """

    network: Any
    shape: UpscalerShape
    device: torch.device
    dtype: torch.dtype
    num_bytes: int

    @classmethod
    def load(cls, path: Path, choice: DeviceChoice) -> Upscaler:
        """Read an upscaler from a safetensors file: in float32 on a CPU, else in the dtype of ``choice``.

        Raises:
            ModelLoadError: The file is damaged, or of an unknown architecture.
        """
        file = read_upscaler(path)
        dtype = torch.float32 if choice.device.type == "cpu" else choice.compute_dtype
        network = build_on_meta(lambda: build_network(file.shape))
        source = TensorSource.renamed(Checkpoint.open([path]), file.names)
        plain = replace(choice, dtype="float32", compute_dtype=dtype, offload="none", spread=None, rooms=())
        fill(network, source, plain, channels_last=True)
        return cls(network, file.shape, choice.device, dtype, file.num_parameters * dtype.itemsize)

    def tiled(self, pixels: NDArray[np.uint8], max_tile_pixels: int | None = None) -> TiledImage:
        """Cut an image (H, W, 3) into tiles that take about a tenth of a second each.

        Args:
            pixels: The image.
            max_tile_pixels: Input pixels of a tile with its margins, instead.
        """
        if max_tile_pixels is None:
            operations = OPERATIONS_PER_CALL.get(self.device.type, OTHER_OPERATIONS_PER_CALL)
            num_parameters = self.num_bytes // self.dtype.itemsize
            max_tile_pixels = int(operations / (2 * num_parameters))
        network = self.network
        plan = TilePlan.of(
            receptive_px=network.receptive_px,
            multiple_px=network.multiple_px,
            scale=network.scale,
            max_tile_pixels=max_tile_pixels,
        )
        return TiledImage(pixels, plan)

    @torch.inference_mode()
    def enlarge(self, tile: NDArray[np.float32]) -> NDArray[np.float32]:
        """Enlarge one tile.

        A network whose float16 results are not finite is used in float32 from then on.

        Args:
            tile: (h, w, 3) in 0..1.

        Returns:
            (scale h, scale w, 3), not clamped.

        Raises:
            NumericalError: The result is not finite.
        """
        height, width = tile.shape[:2]
        multiple, scale = self.network.multiple_px, self.network.scale
        down, right = -height % multiple, -width % multiple
        x = torch.from_numpy(tile).permute(2, 0, 1)[None].to(self.device)
        if down or right:
            x = F.pad(x, (0, right, 0, down), "reflect" if down < height and right < width else "replicate")
        large = self.network(x.to(self.dtype)).float()
        if not torch.isfinite(large).all():
            if self.dtype != torch.float16:
                raise NumericalError("the upscaled image is not finite; choose another upscaler.")
            logger.warning("the upscaler overflows in float16; float32 is used from now on")
            self.network, self.dtype = self.network.float(), torch.float32
            self.num_bytes *= 2
            return self.enlarge(tile)
        result: NDArray[np.float32] = large[0, :, : scale * height, : scale * width].permute(1, 2, 0).cpu().numpy()
        return result

    def upscale(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Enlarge an image (H, W, 3) completely. Raises NumericalError."""
        image = self.tiled(pixels)
        while not image.is_done:
            image.run_next(self.enlarge)
        return image.result()
