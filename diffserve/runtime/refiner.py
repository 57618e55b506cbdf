"""The second expert of an ensemble: a model whose UNet takes over for the last steps (SDXL's refiner, Podell et al.
2023, arXiv 2307.01952, section 2.5; ensembles of experts, Balaji et al. 2022, arXiv 2211.01324).

Both work on one latent by one step table, so they must mean the same by a latent and by a step. Whatever else a
refiner is, the base's VAE is used, and those of the base's text encoders that are its own as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from diffserve.api.errors import ModelLoadError
from diffserve.runtime.text.encoding import TextEncoder
from diffserve.runtime.unet.unet import UNetRunner
from schedulers import NoiseSchedule

LEARNT = ".token_embedding.base."
"""Where the embeddings lie of an encoder that was taught words."""


def check_latents(path: Path, unet: UNetRunner, base: UNetRunner) -> None:
    """Raises ModelLoadError where the model at ``path`` cannot go on with latents of ``base``."""
    if base.extra_channels or unet.extra_channels:
        raise _refused(path, "one of the two is an inpainting model, and such are painted by alone")
    if unet.latent_channels != base.latent_channels:
        raise _refused(path, f"it paints {unet.latent_channels} latent channels, the model {base.latent_channels}")
    if bool(unet.guidance_dim) != bool(base.guidance_dim):
        raise _refused(path, "only one of the two is told guidance as a number")


def check_noise(path: Path, schedule: NoiseSchedule, base: NoiseSchedule) -> None:
    """Raises ModelLoadError where the model at ``path`` means another thing by a step than ``base``."""
    if base.is_continuous or schedule.preconditioning != base.preconditioning:
        own, other = (f"{one.prediction_type}{', continuous' * one.is_continuous}" for one in (schedule, base))
        raise _refused(
            path, f"its UNet is asked as {own}, the model's as {other}; give one of the same, not continuous"
        )
    if not np.array_equal(schedule.alphas_cumprod, base.alphas_cumprod):
        raise _refused(path, "it was trained with another noise schedule")


def _refused(path: Path, problem: str) -> ModelLoadError:
    return ModelLoadError(f"{path} cannot refine what this model paints: {problem} (model.refiner).")


def share_encoders(own: Sequence[TextEncoder], others: Sequence[TextEncoder]) -> list[TextEncoder]:
    """``own``, those in place of them that hold the same weights: twice in memory is once too often."""
    return [next((other for other in others if _is_same(one, other)), one) for one in own]


def _is_same(one: TextEncoder, other: TextEncoder) -> bool:
    if one.special != other.special or type(one.network) is not type(other.network):
        return False
    ours, theirs = _weights(one), _weights(other)
    return ours.keys() == theirs.keys() and all(_is_equal(ours[name], theirs[name]) for name in ours)


def _is_equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and (one.is_meta or torch.equal(one, other))


def _weights(encoder: TextEncoder) -> dict[str, Tensor]:
    state = encoder.network.state_dict()
    return {name.replace(LEARNT, ".token_embedding."): tensor for name, tensor in state.items()}
