"""What painting with a model takes, before any of it is loaded: weights, a step of so many rows, decoding a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from diffserve.api.types import ModelProfile
from diffserve.disk_cache import DiskCache
from diffserve.runtime.dry_run import Work, dry_run
from diffserve.runtime.loading.components import build
from diffserve.runtime.model import DiffusionModel, load_model
from diffserve.runtime.precision import INT8_DYNAMIC, INT8_STATIC
from diffserve.runtime.text.conditioning import Conditioner, make_conditioner
from diffserve.runtime.unet.pruning import shrink, widths_of
from diffserve.runtime.unet.random_rows import random_inputs
from diffserve.runtime.unet.unet import UNetRunner
from diffserve.runtime.vae.vae import VAERunner, encode_moments
from diffserve.settings.config import EngineConfig


@dataclass(frozen=True)
class Needs:
    """model: its shapes, without numbers. steps: one UNet call by rows at the first good size. decode: one picture.

    shallow        a call of one row between two full ones under DeepCache; ``None``: the UNet cannot be split
    feature_bytes  what a row of an image under DeepCache keeps from one call to the next
    """

    model: DiffusionModel
    page_pool_bytes: int
    steps: dict[int, Work]
    decode: Work
    shallow: Work | None
    feature_bytes: int

    @property
    def weights_bytes(self) -> int:
        """Of all components."""
        return self.model.info.weights_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that is held at once: weights, pages, what the rows of the largest step keep under DeepCache, and
        the hungrier of that step and decoding.

        Workspaces of the libraries come on top, some hundred MB on a GPU.
        """
        kept = self.feature_bytes * max(self.steps)
        most = max(self.decode.peak_bytes, *map(_peak, self.steps.values()))
        return self.weights_bytes + self.page_pool_bytes + kept + most


def _peak(work: Work) -> int:
    return work.peak_bytes


def needs_of(
    path: str | Path, *, dtype: str, config: EngineConfig, profile: ModelProfile | None, rows: Sequence[int]
) -> Needs:
    """Dry runs of the model at ``path`` in ``dtype``, a name that is not "auto". Reads no weights.

    Raises what ``load_model`` does.
    """
    model = load_model(path, device="meta", dtype=dtype, profile=profile)
    conditioner = make_conditioner(model, config, is_exact=False)
    size = model.info.good_sizes[0]
    features = kept_features(model, size, 1)
    return Needs(
        model,
        page_pool_bytes=conditioner.pool.arena.data.nbytes if conditioner.pool else 0,
        steps={count: step_work(model, conditioner, size, count) for count in rows},
        decode=decode_work(model, size),
        shallow=None if features is None else step_work(model, conditioner, size, 1, features),
        feature_bytes=0 if features is None else features.nbytes,
    )


def step_work(
    model: DiffusionModel,
    conditioner: Conditioner,
    size: tuple[int, int],
    num_rows: int,
    features: Tensor | None = None,
) -> Work:
    """One UNet call of ``model``, which is on "meta", at ``size`` (width, height), told of its texts as in a tick; a
    shallow one where it is given ``features``.
    """
    width_px, height_px = size
    inputs = random_inputs(model, (height_px, width_px, model.text.window_tokens), num_rows)
    contexts = inputs.pop("contexts").to(model.dtype)
    with torch.inference_mode():
        told = conditioner.of_embeddings(contexts)
    return dry_run(lambda: model.unet.predict(contexts=told, features=features, **inputs))


def kept_features(model: DiffusionModel, size: tuple[int, int], num_rows: int) -> Tensor | None:
    """What full calls of ``model``, which is on "meta", leave for shallow ones."""
    shallow = model.unet.shallow
    if shallow is None:
        return None
    return torch.empty((num_rows, shallow.num_channels, *_cells(model, size)), dtype=model.dtype, device="meta")


def decode_work(model: DiffusionModel, size: tuple[int, int]) -> Work:
    """A picture of ``size`` (width, height) in one piece, by the VAE of ``model``, which is on "meta"."""
    latents = torch.empty((1, model.vae.latent_channels, *_cells(model, size)), device="meta")
    return dry_run(lambda: model.vae.network.decode(latents.to(model.vae.dtype), return_dict=False))


def encode_work(model: DiffusionModel, size: tuple[int, int]) -> Work:
    """A picture of ``size`` (width, height) to latents, by the VAE of ``model``, which is on "meta"."""
    pixels = torch.empty((1, 3, size[1], size[0]), dtype=model.vae.dtype, device="meta")
    return dry_run(lambda: encode_moments(model.vae.network, pixels))


def _cells(model: DiffusionModel, size: tuple[int, int]) -> tuple[int, int]:
    """Height and width of the latents."""
    width_px, height_px = size
    return height_px // model.vae.factor, width_px // model.vae.factor


KEPT_AS: Final = "activations"
EDITION: Final = 2

WIDTHS: Final = 16.0
"""No network of Stable Diffusion's families holds as many tensors as wide as its widest block, at the resolution of the
latents (a UNet: 4 to 7, a tiny one 13), or as wide as its last block, at that of the picture (a decoder: 5 to 7.5)."""

MARGIN_CPU: Final = 2.0
MARGIN_CPU_NARROW: Final = 3.5
MARGIN_DEVICE: Final = 1.25
MARGIN_DEVICE_NARROW: Final = 2.5
"""What is taken for each byte of a dry run. Measured: torch's own peak is 1.04 to 1.23 of it, and 2.1 to 2.3 with
products in 8 bits, whose sums have 32; of a CPU process, whose libraries make copies of their own and whose heap has
holes, 1.5 to 2.3, and 2.8 to 3.9; a little more where a call takes some MB only (``benchmarks/LOG.md``)."""


@dataclass(frozen=True)
class Activations:
    """Bytes of a dry run for each cell of the latents: of a row in a full call and in a shallow one, and of a picture
    that is decoded or encoded in one piece. token_bytes: what a row is told, for each token of its text.
    """

    row_cell_bytes: float
    shallow_row_cell_bytes: float
    picture_cell_bytes: float
    encoded_cell_bytes: float
    token_bytes: float

    @classmethod
    def at_most(cls, model: DiffusionModel) -> Activations:
        """More than any of ``model`` is, without a dry run: to see at once where there is plenty of room."""
        unet, vae = model.unet.network.config, model.vae.network.config
        row = WIDTHS * max(unet.block_out_channels) * model.dtype.itemsize
        picture = WIDTHS * vae.block_out_channels[0] * model.vae.factor**2 * model.vae.dtype.itemsize
        return cls(row, row, picture, picture, _token_bytes(model))

    @classmethod
    def of(cls, model: DiffusionModel, config: EngineConfig, cache: DiskCache) -> Activations:
        """Of ``model`` under ``config``; seconds, and kept in ``cache``."""
        dtypes = f"{model.choice.dtype} {model.vae.dtype}"
        key = f"{EDITION} {model.digest} {dtypes} {config.cross_attention} torch {torch.__version__}"
        kept = cache.read(KEPT_AS, key)
        if isinstance(kept, dict) and kept:
            return cls(**kept)
        found = cls._measured(hollow_twin(model), config)
        cache.write(KEPT_AS, key, asdict(found))
        return found

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
        """A row of a UNet call."""
        cell_bytes = self.shallow_row_cell_bytes if is_shallow else self.row_cell_bytes
        return num_cells * cell_bytes + num_tokens * self.token_bytes


def _token_bytes(model: DiffusionModel) -> float:
    """Keys and values of every cross-attention layer; embeddings are less."""
    layers = (layer for name, layer in model.unet.network.named_modules() if name.endswith("attn2"))
    return 2.0 * model.dtype.itemsize * sum(int(layer.to_k.out_features) for layer in layers)


def margin(model: DiffusionModel) -> float:
    """Bytes that ``model`` takes where it runs for each of a dry run's."""
    is_narrow = model.choice.dtype in (INT8_DYNAMIC, INT8_STATIC)
    if model.device.type == "cpu":
        return MARGIN_CPU_NARROW if is_narrow else MARGIN_CPU
    return MARGIN_DEVICE_NARROW if is_narrow else MARGIN_DEVICE


def hollow_twin(model: DiffusionModel) -> DiffusionModel:
    """``model`` on the meta device: its UNet and its VAE anew from their configurations, as narrow as they are, without
    numbers, in the dtype that they compute in.
    """
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
    return torch.nn.Module.to(network, "meta", dtype)  # diffusers' own warns of what it does not do
