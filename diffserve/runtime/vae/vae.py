"""Conversion of images to latents and back, with recovery from overflow in 16 bits, and in tiles to save memory."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from diffserve.api.errors import NOT_FINITE, NumericalError
from diffserve.runtime.accelerators import synchronize
from diffserve.runtime.memory import give_memory_back, without_frames
from diffserve.runtime.transfer import Fetched, fetch, send

BFLOAT16_CAPABILITY: Final = (8, 0)
"""NVIDIA GPUs have bfloat16 matrix units from this compute capability (Ampere) on."""

TILE_SHARES: Final = (5 / 8, 3 / 8, 1 / 4)
"""Sides of a tile in shares of the whole: less than half of the memory at first, then a seventh, then a sixteenth."""

MIN_TILE_CELLS: Final = 8
"""Latent cells along a side of the smallest tile."""


class DecodePlan(NamedTuple):
    """How latents of one size are decoded.

    images_per_call  how many images share a call
    tile_share       side of a tile in shares of the image's side; 1.0: the image is decoded whole
    """

    images_per_call: int
    tile_share: float


def vae_dtype(dtype: torch.dtype, capability: tuple[int, int] | None, *, overflows: bool) -> torch.dtype:
    """Return the dtype of the VAE of a model that computes in ``dtype``.

    No VAE overflows in bfloat16, which has the range of float32.

    Args:
        dtype: What the model computes in.
        capability: Compute capability of its NVIDIA GPU; ``None`` on other devices.
        overflows: Whether activations of this VAE are too large for float16, as those of SDXL's are.
    """
    if not overflows or dtype != torch.float16:
        return dtype
    return torch.bfloat16 if capability is not None and capability >= BFLOAT16_CAPABILITY else torch.float32


def plan_decode(num_images: int, height: int, width: int, *, most_cells: int, tile_share: float = 1.0) -> DecodePlan:
    """Plan the decoding of ``num_images`` latents of (``height``, ``width``) cells.

    Args:
        num_images: How many images may share a call.
        height: Cells along the side.
        width: Cells along the top.
        most_cells: How many cells the free memory lets one call decode.
        tile_share: Largest side of a tile that the configuration allows; smaller ones are chosen where memory is short.
    """
    share = fitting_share(height, width, most_cells, tile_share)
    fitting = most_cells // tile_cells(height, width, share)
    return DecodePlan(max(1, min(num_images, fitting)), share)


def fitting_share(height: int, width: int, most_cells: int, tile_share: float = 1.0) -> float:
    """Return the side of the largest tiles that fit, in shares of the image's side; the smallest if none fits.

    Args:
        height: Cells along the side.
        width: Cells along the top.
        most_cells: How many cells fit into one call.
        tile_share: Largest side of a tile.
    """
    shares = (tile_share, *(share for share in TILE_SHARES if share < tile_share))
    return next((share for share in shares if tile_cells(height, width, share) <= most_cells), shares[-1])


def tile_cells(height: int, width: int, share: float) -> int:
    """Return the number of cells in a tile of latents of (``height``, ``width``) cells."""
    return math.prod(min(side, tile_side(side, share)) for side in (height, width))


def tile_side(num_cells: int, share: float) -> int:
    """Return the cells along the side of a tile, for a side of ``num_cells``."""
    return max(MIN_TILE_CELLS, -int(-num_cells * share // 1))


logger = logging.getLogger(__name__)

PREVIEW_CELLS = 32


@dataclass(frozen=True, eq=False)
class Decoded:
    """Decoded images on their way from the device, (B, H, W, 3) uint8.

    Attributes:
        pixels: The images.
        is_whole: Whether each is finite, bool (B,).
        again: Decodes one again with recovery from overflow, or raises.
    """

    pixels: Fetched
    is_whole: Fetched
    again: Callable[[int], NDArray[np.uint8]]

    @property
    def is_here(self) -> bool:
        """Whether ``picture`` returns without waiting."""
        return self.pixels.is_here and self.is_whole.is_here

    def picture(self, place: int) -> NDArray[np.uint8]:
        """Return a copy (H, W, 3) of one image. Raises NumericalError if it is not finite."""
        if not bool(self.is_whole.read()[place]):
            return self.again(place)
        array: NDArray[np.uint8] = self.pixels.read()[place].numpy().copy()
        return array

    @classmethod
    def of(cls, pixels: torch.Tensor) -> Decoded:
        """Wrap finite images (B, H, W, 3) uint8 on any device."""
        is_whole = Fetched(torch.ones(len(pixels), dtype=torch.bool))
        return cls(fetch(pixels), is_whole, lambda place: pixels[place].cpu().numpy())


class VAERunner:
    """Runs diffusers' ``AutoencoderKL`` or ``AutoencoderTiny`` with the normalization of its configuration.

    Latents are normalized as ``(z - shift) * scaling_factor`` where shift is ``shift_factor``, or per channel as
    ``(z - latents_mean) / latents_std * scaling_factor``. ``factor`` is the number of pixels per latent cell.
    ``compiled`` decodes shapes that it has a package for, and returns ``None`` for others.
    """

    def __init__(self, network: Any, *, device: torch.device, dtype: torch.dtype) -> None:
        config = network.config
        self.network = network
        self.device = device
        self.dtype = dtype
        self.compiled: Callable[[Tensor], Tensor | None] | None = None
        self.factor: int = 2 ** (len(config.block_out_channels) - 1)
        self.latent_channels: int = config.latent_channels
        mean = getattr(config, "latents_mean", None) or [getattr(config, "shift_factor", None) or 0.0]
        std = getattr(config, "latents_std", None) or [1.0]
        self._mean = torch.tensor(mean, device=device).view(1, -1, 1, 1)
        self._scale = float(config.scaling_factor) / torch.tensor(std, device=device).view(1, -1, 1, 1)

    @torch.inference_mode()
    def encode(
        self,
        pixels: NDArray[np.uint8] | torch.Tensor,
        generators: Sequence[torch.Generator] | None = None,
        tile_share: float = 1.0,
    ) -> torch.Tensor:
        """Return latents (B, C, H / factor, W / factor) float32 of images (B, H, W, 3), uint8 or float32 in [-1, 1].

        With ``generators``, one per image, the posterior is sampled in order, as in diffusers; without, its mode is
        used. ``AutoencoderTiny`` has no posterior and draws nothing. ``tile_share`` is the side of a tile in shares of
        the image's side; 1.0 encodes whole images.
        """
        images = _to_images(pixels)
        if generators is not None and len(generators) != images.shape[0]:
            raise ValueError(f"{images.shape[0]} images need as many generators, not {len(generators)}")
        latents = []
        for index, image in enumerate(images.split(1)):
            if tile_share >= 1.0:
                moments = self._moments(image)
            else:
                moments = in_tiles(self._moments, image.to(self.device), self.factor, tile_share, is_encoding=True)
            posterior = posterior_of(self.network, moments)
            if posterior is None:
                z = moments
            else:
                z = posterior.mode() if generators is None else _sample(posterior, generators[index])
            latents.append((z.float() - self._mean) * self._scale)
        return torch.cat(latents)

    @torch.inference_mode()
    def decode(self, latents: torch.Tensor) -> NDArray[np.uint8]:
        """Decode float32 ``latents`` (B, C, h, w) to images (B, H, W, 3). Raises NumericalError for one not finite."""
        return to_pixels(self._decoded(latents.to(self.device, torch.float32) / self._scale + self._mean))

    @torch.inference_mode()
    def decode_later(self, latents: torch.Tensor, tile_share: float = 1.0) -> Decoded:
        """Start decoding ``latents`` (B, C, h, w) float32 without waiting for the device.

        Args:
            latents: The finished latents.
            tile_share: Side of a tile in shares of the image's side; 1.0: decode whole images.

        Returns:
            The images; reading one raises what ``decode`` raises.
        """
        z = latents.to(self.device, torch.float32) / self._scale + self._mean

        def images_of(run: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
            return run(z) if tile_share >= 1.0 else in_tiles(run, z, self.factor, tile_share)

        images = images_of(lambda part: self._run(part.to(self.dtype)), z)
        is_whole = torch.isfinite(images).flatten(1).all(1)
        return Decoded(
            fetch(to_bytes(images)),
            fetch(is_whole),
            lambda place: to_pixels(images_of(self._decoded, z[place, None]))[0],
        )

    def _run(self, z: Tensor) -> Tensor:
        """Decode ``z`` (B, C, h, w) in the network's dtype, by a compiled package if there is one for its shape."""
        images = None if self.compiled is None else self.compiled(z)
        if images is None:
            images = self.network.decode(z, return_dict=False)[0]
        return images

    @torch.inference_mode()
    def decode_in_tiles(self, latents: torch.Tensor) -> NDArray[np.uint8]:
        """Decode ``latents`` in tiles, and in smaller ones while memory runs out; nearly the same as a whole decode.

        Raises ``torch.OutOfMemoryError`` when there is no memory for the smallest tile.
        """
        z = latents.to(self.device, torch.float32) / self._scale + self._mean
        for share in TILE_SHARES:
            try:
                return to_pixels(in_tiles(self._decoded, z, self.factor, share))
            except torch.OutOfMemoryError as error:
                if share == TILE_SHARES[-1]:
                    raise
                without_frames(error)
            give_memory_back(self.device)
        raise AssertionError("TILE_SHARES is empty")

    def preview_later(self, latents: torch.Tensor) -> Decoded:
        """Start decoding small images of ``latents``, for models without a preview decoder."""
        return self.decode_later(shrunk(latents))

    def _decoded(self, z: torch.Tensor) -> torch.Tensor:
        return self._guarded(lambda part: self.network.decode(part, return_dict=False)[0], z)

    def _moments(self, images: torch.Tensor) -> torch.Tensor:
        return self._guarded(lambda part: encode_moments(self.network, part), images)

    def _guarded(self, run: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
        """Run ``run`` on ``value``; an image that overflows in float16 is computed again, alone, in float32."""
        if not bool(torch.isfinite(value).all()):
            raise NumericalError(f"{NOT_FINITE['denoise']}; try another seed, fewer steps or a wider dtype.")
        output = run(value.to(self.device, self.dtype))
        is_whole = torch.isfinite(output).flatten(1).all(1).tolist()
        if all(is_whole):
            return output
        if self.dtype != torch.float16:
            raise NumericalError(f"{NOT_FINITE['vae_decode']} in {self.dtype}; try another dtype.")
        logger.warning("the VAE overflowed in float16; this image is made in float32")
        with self._in_float32():
            if len(value) == 1:
                return self._guarded(run, value)
            output = output.float()
            for index in (index for index, is_finite in enumerate(is_whole) if not is_finite):
                output[index] = self._guarded(run, value[index : index + 1])[0]
            return output

    @contextlib.contextmanager
    def _in_float32(self) -> Iterator[None]:
        """Convert the network to float32 for the block; the conversion from float16 and back is lossless."""
        synchronize(self.device)  # another stream may be decoding with these weights
        try:
            self.network.float()
            self.dtype = torch.float32
            yield
        finally:
            self.network.half()
            self.dtype = torch.float16


def encode_moments(network: Any, images: Tensor) -> Tensor:
    """Encode ``images`` (B, 3, H, W) in [-1, 1].

    Returns:
        Mean and logarithm of the variance of the latents (B, 2 C, h, w), or of ``AutoencoderTiny`` the latents
        (B, C, h, w).
    """
    output = network.encode(images)
    moments: Tensor = output.latent_dist.parameters if hasattr(output, "latent_dist") else output.latents
    return moments


def posterior_of(network: Any, moments: Tensor) -> Any:
    """Return diffusers' distribution of the latents that have ``moments``; ``None`` where they are the latents."""
    if moments.shape[1] == network.config.latent_channels:
        return None
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

    return DiagonalGaussianDistribution(moments)


def _sample(posterior: Any, generator: torch.Generator) -> Tensor:
    """Draw a sample as diffusers does, on the device of ``generator``, which may be another GPU."""
    mean: Tensor = posterior.mean
    if generator.device.type == "cpu" or generator.device == mean.device:
        sample: Tensor = posterior.sample(generator)
    else:
        noise = torch.randn(mean.shape, generator=generator, device=generator.device, dtype=mean.dtype)
        sample = mean + posterior.std * noise.to(mean.device)
    return sample


def shrunk(latents: torch.Tensor) -> torch.Tensor:
    """Average ``latents`` (B, C, h, w) over squares of cells, so that no side has more than ``PREVIEW_CELLS``."""
    side = -(-max(latents.shape[-2:]) // PREVIEW_CELLS)
    return F.avg_pool2d(latents, side, ceil_mode=True) if side > 1 else latents


def to_pixels(images: torch.Tensor) -> NDArray[np.uint8]:
    """Convert images (B, 3, H, W) in [-1, 1] on any device to (B, H, W, 3) uint8."""
    array: NDArray[np.uint8] = to_bytes(images).cpu().numpy()
    return array


def to_bytes(images: torch.Tensor) -> torch.Tensor:
    """Convert images (B, 3, H, W) in [-1, 1] to (B, H, W, 3) uint8 on their device."""
    pixels = (images.float() / 2 + 0.5).clamp(0, 1).mul(255).round().to(torch.uint8)
    return pixels.permute(0, 2, 3, 1).contiguous()


def _to_images(pixels: NDArray[np.uint8] | torch.Tensor) -> torch.Tensor:
    """Convert pixels to (B, 3, H, W) float32 in [-1, 1]."""
    tensor = pixels if isinstance(pixels, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(pixels))
    if tensor.dtype == torch.uint8:
        tensor = 2.0 * (tensor.float() / 255.0) - 1.0
    return tensor.permute(0, 3, 1, 2)


def in_tiles(
    run: Callable[[Tensor], Tensor], value: Tensor, factor: int, share: float, *, is_encoding: bool = False
) -> Tensor:
    """Return the float32 output of ``run`` on tiles of ``value``; waits for no device.

    A decoder maps latents (B, C, h, w) to images (B, 3, h * factor, w * factor), an encoder the reverse.

    Neighbors overlap by 2/5 of a tile and are blended. Group norms see a tile instead of the image: with tiles of 5/8
    the result has 37 dB or more against a whole decode of the embedded model's images.
    """
    read, write = (factor, 1) if is_encoding else (1, factor)  # input and output values along a side of a cell
    height, width = (side // read for side in value.shape[-2:])
    output: Tensor | None = None
    weights = torch.zeros((1, 1, height * write, width * write), device=value.device)
    for top, bottom in spans(height, share):
        for left, right in spans(width, share):
            tile = run(value[..., top * read : bottom * read, left * read : right * read]).float()
            if output is None:
                output = torch.zeros((*tile.shape[:2], height * write, width * write), device=value.device)
            fade = _fade(top, bottom, height, share, write)[:, None] * _fade(left, right, width, share, write)
            fade = send(fade, value.device)
            place = (..., slice(top * write, bottom * write), slice(left * write, right * write))
            output[place] += fade * tile
            weights[place] += fade
    assert output is not None
    return output / weights


def spans(num_cells: int, share: float) -> list[tuple[int, int]]:
    """Return the starts and ends of tiles of equal length along a side."""
    length, overlap = _length(num_cells, share)
    if length >= num_cells:
        return [(0, num_cells)]
    starts = list(range(0, num_cells - length, length - overlap))
    return [(start, start + length) for start in (*starts, num_cells - length)]


def _length(num_cells: int, share: float) -> tuple[int, int]:
    """Return the cells along a tile's side, and how many of them the next tile overlaps."""
    length = tile_side(num_cells, share)
    return length, 2 * length // 5


def _fade(start: int, stop: int, num_cells: int, share: float, factor: int) -> Tensor:
    """Return weights ((stop - start) * factor,): 1, falling to 0 near edges where a tile ends inside the image."""
    weights = torch.ones((stop - start) * factor)
    overlap = _length(num_cells, share)[1] * factor
    rising = torch.linspace(-0.5, 1.5, overlap).clamp(0.0, 1.0)
    if start > 0:
        weights[:overlap] *= rising
    if stop < num_cells:
        weights[-overlap:] *= rising.flip(0)
    return weights
