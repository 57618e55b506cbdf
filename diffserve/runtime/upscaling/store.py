"""Upscalers that requests name: found in their folders, loaded when needed, and run tile by tile."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Final

import numpy as np
import torch
from cachetools import LRUCache
from numpy.typing import NDArray

from diffserve.api.errors import InsufficientMemory, InvalidRequest, ModelLoadError
from diffserve.api.types import FILTERS, ModelInfo, Picture
from diffserve.api.upscale_types import check_input_size, check_network_size
from diffserve.media.upscaling import MAX_PASSES, TargetSize, canonical_upscaler, enlarge, needs_another_run
from diffserve.models.upscalers import UpscalerFile, UpscalerFolders, read_upscaler
from diffserve.runtime.memory import free_bytes, give_memory_back
from diffserve.runtime.precision import choose_device
from diffserve.runtime.upscaling.network import Upscaler
from diffserve.runtime.upscaling.tiles import MIN_CORE_PX, TiledImage

KEPT_UPSCALERS: Final = 2
"""Upscalers that stay in memory."""

HIRES_FIELD: Final = "hires_upscaler"

logger = logging.getLogger(__name__)


class UpscalerStore:
    """The upscalers of a model's folder and the shipped ones; the last ``KEPT_UPSCALERS`` stay in memory."""

    def __init__(self, info: ModelInfo) -> None:
        """Look up the upscalers of the model of ``info``, whose device they use."""
        self._info = info
        self._folders = UpscalerFolders(info.upscaler_dir)
        self._loaded: LRUCache[tuple[Path, int, int], Upscaler] = LRUCache(KEPT_UPSCALERS)

    def check_image(self, name: str, width_px: int, height_px: int, *, param: str) -> None:
        """Raise InvalidRequest if an image of this size cannot be enlarged by the network ``name``.

        Args:
            name: Name of the network.
            width_px: Width of the image.
            height_px: Height of the image.
            param: Field to name in an error about the size.
        """
        _, path = self._folders.find(name)
        scale = _read(name, path).shape.scale
        check_network_size(name, scale, width_px, height_px, param)

    def check_between_passes(self, name: str, width_px: int, height_px: int) -> tuple[str, bytes]:
        """Check the upscaler between the passes of hires fix.

        Args:
            name: A filter in any letter case, or a network.
            width_px: Width of the first pass.
            height_px: Height of the first pass.

        Returns:
            The full name, and a digest of the network's file for cache keys; empty for a filter.

        Raises:
            InvalidRequest: There is no such upscaler, it cannot be used, or its result would be too large.
        """
        name = canonical_upscaler(name)
        if name in FILTERS:
            return name, b""
        full_name, path = self._folders.find(name, HIRES_FIELD)
        scale = _read(full_name, path, HIRES_FIELD).shape.scale
        check_input_size(width_px, height_px)
        check_network_size(full_name, scale, width_px, height_px, HIRES_FIELD)
        return full_name, hashlib.sha256(repr(_stamp(path)).encode()).digest()

    def load(self, name: str) -> Upscaler:
        """Return the upscaler ``name``, from memory or its file.

        Raises:
            InvalidRequest: The file is missing or cannot be used.
            InsufficientMemory: The device has too little free memory.
        """
        _, path = self._folders.find(name)
        key = _stamp(path)
        if key not in self._loaded:
            choice = choose_device(self._info.device, self._info.dtype)
            need, free = 4 * _read(name, path).num_parameters, free_bytes(choice.device)
            if free is not None and need > free:
                raise InsufficientMemory(
                    f"upscaler {name!r} needs {need >> 20} MiB of memory, and {free >> 20} MiB are free; try again "
                    "later, or choose a smaller one."
                )
            try:
                self._loaded[key] = Upscaler.load(path, choice)
            except ModelLoadError as error:
                raise _refused(name, path, error) from None
        return self._loaded[key]


class NetworkRun:
    """An image that a network enlarges once, tile by tile; the tiles become smaller where memory is short."""

    def __init__(self, upscaler: Upscaler, pixels: NDArray[np.uint8]) -> None:
        """Prepare the tiles of ``pixels`` (H, W, 3)."""
        self.upscaler = upscaler
        self._pixels = pixels
        self._image: TiledImage = upscaler.tiled(pixels)

    @property
    def is_done(self) -> bool:
        """Whether all tiles are finished."""
        return self._image.is_done

    def run_next(self) -> None:
        """Enlarge the next tile. Raises torch.OutOfMemoryError if the smallest tile does not fit into memory."""
        plan = self._image.plan
        try:
            self._image.run_next(self.upscaler.enlarge)
            return
        except torch.OutOfMemoryError:
            if plan.core_px <= MIN_CORE_PX:
                raise
        logger.warning("upscaling continues in tiles of %d px: memory is short", plan.core_px // 2)
        give_memory_back(self.upscaler.device)
        self._image = self.upscaler.tiled(self._pixels, (plan.core_px // 2 + 2 * plan.margin_px) ** 2)

    def result(self) -> Picture:
        """Return the enlarged image."""
        return Picture.from_array(self._image.result())


class Enlargement:
    """An image that a network enlarges to a size, in one or several runs, tile by tile.

    The result equals that of ``POST /v1/images/upscale`` with this size.
    """

    def __init__(self, upscaler: Upscaler, picture: Picture, target: TargetSize) -> None:
        """Prepare the first run on ``picture``; ``target`` is the size to reach."""
        self._target = target
        self._run = NetworkRun(upscaler, picture.array)
        self._num_runs = 1

    def run_next(self) -> Picture | None:
        """Enlarge the next tile; return the image at the target size after the last tile, else ``None``."""
        self._run.run_next()
        if not self._run.is_done:
            return None
        picture, upscaler = self._run.result(), self._run.upscaler
        if self._num_runs < MAX_PASSES and needs_another_run(picture, self._target, upscaler.shape.scale):
            self._run, self._num_runs = NetworkRun(upscaler, picture.array), self._num_runs + 1
            return None
        return enlarge(picture, *self._target)


def _stamp(path: Path) -> tuple[Path, int, int]:
    """Return the path, size and time of a file, which change with its content."""
    status = path.stat()
    return path, status.st_size, status.st_mtime_ns


def _read(name: str, path: Path, param: str = "upscaler") -> UpscalerFile:
    try:
        return read_upscaler(path)
    except ModelLoadError as error:
        raise _refused(name, path, error, param) from None


def _refused(name: str, path: Path, error: ModelLoadError, param: str = "upscaler") -> InvalidRequest:
    """Return ``error`` as an error of the request, without the path of the folder."""
    problem = error.message.replace(str(path), path.name)
    return InvalidRequest(f"upscaler {name!r} cannot be used: {problem}", param=param)
