"""What painting with a model takes, before any of it is loaded: weights, a step of so many rows, decoding a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from diffserve.config import EngineConfig
from diffserve.runtime.dry_run import Work, dry_run
from diffserve.runtime.model import DiffusionModel, load_model
from diffserve.runtime.text.conditioning import Conditioner, make_conditioner
from diffserve.runtime.unet.random_rows import random_inputs
from diffserve.types import ModelProfile


@dataclass(frozen=True)
class Needs:
    """model: its shapes, without numbers. steps: one UNet call by rows at the first good size. decode: one picture."""

    model: DiffusionModel
    page_pool_bytes: int
    steps: dict[int, Work]
    decode: Work

    @property
    def weights_bytes(self) -> int:
        """Of all components."""
        return self.model.info.weights_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that is held at once: weights, pages, and the hungrier of the largest step and decoding.

        Workspaces of the libraries come on top, some hundred MB on a GPU.
        """
        return self.weights_bytes + self.page_pool_bytes + max(self.decode.peak_bytes, *map(_peak, self.steps.values()))


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
    width_px, height_px = model.info.good_sizes[0]
    factor = model.info.vae_factor
    latents = torch.empty((1, model.info.latent_channels, height_px // factor, width_px // factor), device="meta")
    return Needs(
        model,
        page_pool_bytes=conditioner.pool.arena.data.nbytes if conditioner.pool else 0,
        steps={count: _step(model, conditioner, (height_px, width_px), count) for count in rows},
        decode=dry_run(lambda: model.vae.network.decode(latents.to(model.vae.dtype), return_dict=False)),
    )


def _step(model: DiffusionModel, conditioner: Conditioner, size: tuple[int, int], num_rows: int) -> Work:
    """One UNet call, told of its texts as in a tick."""
    inputs = random_inputs(model, (*size, model.text.window_tokens), num_rows)
    contexts = inputs.pop("contexts").to(model.dtype)
    with torch.inference_mode():
        told = conditioner.of_embeddings(contexts)
    return dry_run(lambda: model.unet.predict(contexts=told, **inputs))
