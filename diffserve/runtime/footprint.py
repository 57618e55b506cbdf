"""Memory and work of a model, computed by dry runs before anything is loaded.

``Footprint`` is for a model on disk. ``Activations`` is for a loaded model: bytes per latent cell, measured once at the
native size on an empty copy of the networks and valid for all sizes to about a percent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from diffserve.api.tiles import TileLayout, tiles_of
from diffserve.api.types import DiffusionParams, ModelProfile
from diffserve.disk_cache import DiskCache
from diffserve.runtime.dry_run import Work, dry_run
from diffserve.runtime.loading.components import build
from diffserve.runtime.model import DiffusionModel, load_model
from diffserve.runtime.precision import INT8_DYNAMIC, INT8_STATIC
from diffserve.runtime.text.conditioning import Conditioner, make_conditioner
from diffserve.runtime.unet.pruning import shrink, widths_of
from diffserve.runtime.unet.random_rows import random_inputs
from diffserve.runtime.unet.unet import UNetRunner
from diffserve.runtime.vae.vae import TILE_SHARES, VAERunner, encode_moments, tile_side
from diffserve.settings.config import EngineConfig


@dataclass(frozen=True)
class Footprint:
    """Requirements of a model at its first good size.

    Attributes:
        model: The model on the meta device.
        page_pool_bytes: Size of the page pool.
        steps: Work of one UNet call by number of rows.
        decode: Work of decoding one image.
        shallow: Work of a shallow call of one row under DeepCache; ``None`` if the UNet cannot be split.
        feature_bytes: Features that a row under DeepCache keeps between calls.
    """

    model: DiffusionModel
    page_pool_bytes: int
    steps: dict[int, Work]
    decode: Work
    shallow: Work | None
    feature_bytes: int

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights of all components."""
        return self.model.info.weights_bytes

    @property
    def peak_bytes(self) -> int:
        """Peak memory: weights, pages, features under DeepCache, and the larger of a step and decoding.

        Workspaces of the libraries come on top, some hundred MB on a GPU.
        """
        features = self.feature_bytes * max(self.steps)
        calls = max(work.peak_bytes for work in (self.decode, *self.steps.values()))
        return self.weights_bytes + self.page_pool_bytes + features + calls


def footprint_of(
    path: str | Path, *, dtype: str, config: EngineConfig, profile: ModelProfile | None, rows: Sequence[int]
) -> Footprint:
    """Return the requirements of the model at ``path`` in ``dtype``, a name that is not "auto". Reads no weights.

    Raises what ``load_model`` raises.
    """
    model = load_model(path, device="meta", dtype=dtype, profile=profile)
    conditioner = make_conditioner(model, config, is_exact=False)
    size = model.info.good_sizes[0]
    features = kept_features(model, size, 1)
    return Footprint(
        model,
        page_pool_bytes=conditioner.pool.arena.data.nbytes if conditioner.pool else 0,
        steps={count: step_work(model, conditioner, size, count) for count in rows},
        decode=decode_work(model, size),
        shallow=None if features is None else step_work(model, conditioner, size, 1, features),
        feature_bytes=0 if features is None else features.nbytes,
    )


@dataclass(frozen=True)
class LargeImage:
    """Activations of a guided image of one size, by dry runs.

    Attributes:
        size: Width and height in pixels.
        tiles: Tiles on which the UNet runs; ``None``: it runs on the entire image.
        row: Work of a UNet row: of a tile, or of the entire image.
        decode: Work of decoding the image whole.
        decode_tile: Work of decoding the smallest tile in which the VAE decodes where memory is short.
        encode: Work of encoding a start image, or the image between the passes of hires fix, whole.
        encode_tile: Work of encoding the smallest tile in which the VAE encodes where memory is short.
    """

    size: tuple[int, int]
    tiles: TileLayout | None
    row: Work
    decode: Work
    decode_tile: Work
    encode: Work
    encode_tile: Work

    @property
    def from_text_bytes(self) -> int:
        """Least bytes of an image from text: a UNet call of one row, or a tile of the VAE."""
        return max(self.row.peak_bytes, self.decode_tile.peak_bytes)

    @property
    def from_image_bytes(self) -> int:
        """Least bytes of an image that starts from an image, which has to be encoded."""
        return max(self.from_text_bytes, self.encode_tile.peak_bytes)


def plan_large_image(
    model: DiffusionModel, config: EngineConfig, size: tuple[int, int], params: DiffusionParams
) -> LargeImage:
    """Return the activations of an image of ``size`` (width, height) with the tiles of ``params``; ``model`` is meta.

    Raises:
        InvalidRequest: The tiles do not fit.
    """
    tiles, (height, width) = tiles_of(params, model.info, *size), _cells(model, size)
    sides = [min(side, tile_side(side, TILE_SHARES[-1])) * model.vae.factor for side in (width, height)]
    conditioner = make_conditioner(model, config, is_exact=False)
    return LargeImage(
        size,
        tiles,
        row=step_work(model, conditioner, size if tiles is None else tiles.tile_px, 1),
        decode=decode_work(model, size),
        decode_tile=decode_work(model, (sides[0], sides[1])),
        encode=encode_work(model, size),
        encode_tile=encode_work(model, (sides[0], sides[1])),
    )


def step_work(
    model: DiffusionModel,
    conditioner: Conditioner,
    size: tuple[int, int],
    num_rows: int,
    features: Tensor | None = None,
) -> Work:
    """Return the work of one UNet call of a meta ``model`` at ``size`` (width, height).

    With ``features`` it is a shallow call.
    """
    width_px, height_px = size
    inputs = random_inputs(model, (height_px, width_px, model.text.window_tokens), num_rows)
    contexts = inputs.pop("contexts").to(model.dtype)
    with torch.inference_mode():
        row_contexts = conditioner.of_embeddings(contexts)
    return dry_run(lambda: model.unet.predict(contexts=row_contexts, features=features, **inputs))


def kept_features(model: DiffusionModel, size: tuple[int, int], num_rows: int) -> Tensor | None:
    """Return the features of full calls of a meta ``model``; ``None`` if its UNet has no shallow part."""
    shallow = model.unet.shallow
    if shallow is None:
        return None
    return torch.empty((num_rows, shallow.num_channels, *_cells(model, size)), dtype=model.dtype, device="meta")


def decode_work(model: DiffusionModel, size: tuple[int, int]) -> Work:
    """Return the work of decoding one image of ``size`` (width, height) by the VAE of a meta ``model``."""
    latents = torch.empty((1, model.vae.latent_channels, *_cells(model, size)), device="meta")
    return dry_run(lambda: model.vae.network.decode(latents.to(model.vae.dtype), return_dict=False))


def encode_work(model: DiffusionModel, size: tuple[int, int]) -> Work:
    """Return the work of encoding one image of ``size`` (width, height) by the VAE of a meta ``model``."""
    pixels = torch.empty((1, 3, size[1], size[0]), dtype=model.vae.dtype, device="meta")
    return dry_run(lambda: encode_moments(model.vae.network, pixels))


def _cells(model: DiffusionModel, size: tuple[int, int]) -> tuple[int, int]:
    """Return height and width of the latents."""
    width_px, height_px = size
    return height_px // model.vae.factor, width_px // model.vae.factor


CACHE_KIND: Final = "activations"
EDITION: Final = 2

WIDTHS: Final = 16.0
"""Upper bound of activations in multiples of the widest block.

UNets hold 4 to 7 tensors of that width at the resolution of the latents, a tiny one 13; decoders 5 to 7.5 of their last
block's width at that of the image.
"""

MARGIN_CPU: Final = 2.0
MARGIN_CPU_NARROW: Final = 3.5
MARGIN_DEVICE: Final = 1.25
MARGIN_DEVICE_NARROW: Final = 2.5
"""Memory taken per byte of a dry run, without and with int8 arithmetic.

Measured peaks: torch's own 1.04 to 1.23, and 2.1 to 2.3 with int8 products, whose sums have 32 bits; of a CPU process,
with copies by libraries and a fragmented heap, 1.5 to 2.3, and 2.8 to 3.9 (``benchmarks/LOG.md``).
"""


@dataclass(frozen=True)
class Activations:
    """Activation bytes of a dry run per cell of the latents.

    Attributes:
        row_cell_bytes: Of a row in a full call.
        shallow_row_cell_bytes: Of a row in a shallow call.
        picture_cell_bytes: Of an image that is decoded whole.
        encoded_cell_bytes: Of an image that is encoded whole.
        token_bytes: Keys and values of a row for each token of its text.
    """

    row_cell_bytes: float
    shallow_row_cell_bytes: float
    picture_cell_bytes: float
    encoded_cell_bytes: float
    token_bytes: float

    @classmethod
    def at_most(cls, model: DiffusionModel) -> Activations:
        """Return an upper bound for ``model`` without a dry run, which suffices if much memory is free."""
        unet, vae = model.unet.network.config, model.vae.network.config
        row = WIDTHS * max(unet.block_out_channels) * model.dtype.itemsize
        picture = WIDTHS * vae.block_out_channels[0] * model.vae.factor**2 * model.vae.dtype.itemsize
        return cls(row, row, picture, picture, _token_bytes(model))

    @classmethod
    def of(cls, model: DiffusionModel, config: EngineConfig, cache: DiskCache) -> Activations:
        """Return the activations of ``model`` under ``config``: measured in seconds, and cached."""
        dtypes = f"{model.choice.dtype} {model.vae.dtype}"
        key = f"{EDITION} {model.digest} {dtypes} {config.cross_attention} torch {torch.__version__}"
        return cache.read_or_compute(CACHE_KIND, key, cls, lambda: cls._measured(meta_copy(model), config))

    @classmethod
    def _measured(cls, twin: DiffusionModel, config: EngineConfig) -> Activations:
        conditioner = make_conditioner(twin, config, is_exact=False)
        size = twin.info.good_sizes[0]
        cells = size[0] * size[1] / twin.vae.factor**2
        features = kept_features(twin, size, 1)
        full = step_work(twin, conditioner, size, 1).peak_bytes
        shallow = full if features is None else features.nbytes
        if features is not None:
            shallow += step_work(twin, conditioner, size, 1, features).peak_bytes
        decoded, encoded = decode_work(twin, size).peak_bytes, encode_work(twin, size).peak_bytes
        return cls(full / cells, shallow / cells, decoded / cells, encoded / cells, _token_bytes(twin))

    def of_row(self, num_cells: int, num_tokens: int, *, is_shallow: bool = False) -> float:
        """Return the bytes of a row of a UNet call."""
        cell_bytes = self.shallow_row_cell_bytes if is_shallow else self.row_cell_bytes
        return num_cells * cell_bytes + num_tokens * self.token_bytes


def _token_bytes(model: DiffusionModel) -> float:
    """Return the bytes of keys and values of all cross-attention layers for a token; embeddings are smaller."""
    layers = (layer for name, layer in model.unet.network.named_modules() if name.endswith("attn2"))
    return 2.0 * model.dtype.itemsize * sum(int(layer.to_k.out_features) for layer in layers)


def margin(model: DiffusionModel) -> float:
    """Return the memory that ``model`` takes per byte of a dry run on its device."""
    is_narrow = model.choice.dtype in (INT8_DYNAMIC, INT8_STATIC)
    if model.device.type == "cpu":
        return MARGIN_CPU_NARROW if is_narrow else MARGIN_CPU
    return MARGIN_DEVICE_NARROW if is_narrow else MARGIN_DEVICE


def meta_copy(model: DiffusionModel) -> DiffusionModel:
    """Return ``model`` on the meta device, with empty copies of UNet and VAE in their dtypes and widths."""
    choice = replace(model.choice, device=torch.device("meta"), offload="none", spread=None)
    unet = _empty("UNet2DConditionModel", model.unet.network.config, model.dtype)
    shrink(unet, widths_of(model.unet.network))
    vae = _empty(type(model.vae.network).__name__, model.vae.network.config, model.vae.dtype)
    return replace(
        model,
        choice=choice,
        unet=UNetRunner(unet, device=choice.device, dtype=model.dtype),
        vae=VAERunner(vae, device=choice.device, dtype=model.vae.dtype),
    )


def _empty(name: str, config: Mapping[str, Any], dtype: torch.dtype) -> Any:
    network = build(name, config, name).eval().requires_grad_(False)
    return torch.nn.Module.to(network, "meta", dtype)  # diffusers' own method logs warnings
