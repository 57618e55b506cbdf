"""What painting with a model takes, before any of it is loaded: weights, a step of so many rows, decoding a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from diffserve.api.types import ModelProfile
from diffserve.runtime.dry_run import Work, dry_run
from diffserve.runtime.model import DiffusionModel, load_model
from diffserve.runtime.text.conditioning import Conditioner, make_conditioner
from diffserve.runtime.unet.random_rows import random_inputs
from diffserve.runtime.vae.vae import encode_moments
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
