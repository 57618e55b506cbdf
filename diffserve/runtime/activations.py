"""What networks hold while they compute, in bytes, known before they do: to let in what fits instead of running out.

All that a UNet call or a decoded picture holds at its peak is tensors with so many numbers for each row and cell of the
latents, whatever the size: a dry run (``runtime.needs``) of one row at the native size tells for all of them, to a
percent. It is made of empty twins of the networks, so that no weight moves and a model whose weights rest elsewhere is
measured too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import torch

from diffserve.disk_cache import DiskCache
from diffserve.runtime.loading.components import build
from diffserve.runtime.model import DiffusionModel
from diffserve.runtime.needs import decode_work, encode_work, kept_features, step_work
from diffserve.runtime.precision import INT8_DYNAMIC, INT8_STATIC
from diffserve.runtime.text.conditioning import make_conditioner
from diffserve.runtime.unet.pruning import shrink, widths_of
from diffserve.runtime.unet.unet import UNetRunner
from diffserve.runtime.vae.vae import VAERunner
from diffserve.settings.config import EngineConfig

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
