"""Checks that the parts of a model fit together, and that a refiner fits its base.

A refiner's UNet takes over for the last steps (SDXL's refiner, arXiv 2307.01952, section 2.5). Base and refiner share
one latent and one step table, so their latents and noise schedules must agree. The base's VAE is used, and those of the
base's text encoders that are identical.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from diffserve.api.errors import ModelLoadError
from diffserve.api.micro_conditioning import NUM_REFINER_IDS, NUM_SDXL_IDS
from diffserve.runtime.text.encoding import TextEncoder, TextEncoderRunner
from diffserve.runtime.unet.unet import UNetRunner
from diffserve.runtime.vae.preview import PreviewRunner
from diffserve.runtime.vae.vae import VAERunner
from schedulers import NoiseSchedule

LEARNT = ".token_embedding.base."
"""Path of the embeddings in an encoder with learned words."""


def check_latents(path: Path, unet: UNetRunner, base: UNetRunner) -> None:
    """Raise ModelLoadError if the model at ``path`` cannot continue with latents of ``base``."""
    if base.extra_channels or unet.extra_channels:
        raise _refused(path, "one of the two is an inpainting model, which cannot be combined with a refiner")
    if unet.latent_channels != base.latent_channels:
        raise _refused(path, f"it has {unet.latent_channels} latent channels, the model {base.latent_channels}")
    if bool(unet.guidance_dim) != bool(base.guidance_dim):
        raise _refused(path, "only one of the two takes the guidance scale as an input")


def check_noise(path: Path, schedule: NoiseSchedule, base: NoiseSchedule) -> None:
    """Raise ModelLoadError if the model at ``path`` has another noise schedule or prediction than ``base``."""
    if base.is_continuous or schedule.preconditioning != base.preconditioning:
        names = (f"{each.prediction_type}{', continuous' * each.is_continuous}" for each in (schedule, base))
        refiner_type, base_type = names
        raise _refused(
            path,
            f"its UNet uses {refiner_type}, that of the model {base_type}; both must be the same and not continuous",
        )
    if not np.array_equal(schedule.alphas_cumprod, base.alphas_cumprod):
        raise _refused(path, "it was trained with another noise schedule")


def _refused(path: Path, problem: str) -> ModelLoadError:
    return ModelLoadError(f"{path} cannot refine images of this model: {problem} (model.refiner).")


def share_encoders(encoders: Sequence[TextEncoder], base_encoders: Sequence[TextEncoder]) -> list[TextEncoder]:
    """Return ``encoders``, with those of ``base_encoders`` in place of identical ones."""
    return [next((base for base in base_encoders if _is_same(encoder, base)), encoder) for encoder in encoders]


def _is_same(encoder: TextEncoder, other: TextEncoder) -> bool:
    if encoder.special != other.special or type(encoder.network) is not type(other.network):
        return False
    weights, other_weights = _weights(encoder), _weights(other)
    return weights.keys() == other_weights.keys() and all(
        _is_equal(weights[name], other_weights[name]) for name in weights
    )


def _is_equal(tensor: Tensor, other: Tensor) -> bool:
    return (
        tensor.shape == other.shape and tensor.dtype == other.dtype and (tensor.is_meta or torch.equal(tensor, other))
    )


def _weights(encoder: TextEncoder) -> dict[str, Tensor]:
    state = encoder.network.state_dict()
    return {name.replace(LEARNT, ".token_embedding."): tensor for name, tensor in state.items()}


def check_parts(
    text: TextEncoderRunner, unet: UNetRunner, vae: VAERunner, previewer: PreviewRunner | None, location: Path
) -> None:
    """Raise ModelLoadError for components that do not fit each other."""
    config = unet.network.config
    width = sum(int(encoder.network.config.hidden_size) for encoder in text.encoders)
    cells = vae.latent_channels
    if width != config.cross_attention_dim:
        dim = config.cross_attention_dim
        problem = f"the text encoder gives {width} features, the UNet reads {dim} (cross_attention_dim)"
    elif unet.latent_channels != cells:
        problem = f"the VAE has {cells} latent_channels, the UNet writes {unet.latent_channels} (out_channels)"
    elif unet.extra_channels not in (0, 1 + cells):
        served = f"{cells} (text to image) and {2 * cells + 1} (inpainting)"
        problem = f"in_channels of the UNet is {config.in_channels}; diffserve serves {served}"
    elif len(text.encoders) == 2 and not unet.has_size_conditioning:
        problem = "size conditioning and a second text encoder must both be present (SDXL) or both absent"
    elif unet.has_size_conditioning and not hasattr(text.encoders[-1].network, "text_projection"):
        problem = "size conditioning and a text encoder with a projection must both be present (SDXL) or both absent"
    elif text.num_time_ids not in (0, NUM_REFINER_IDS, NUM_SDXL_IDS):
        problem = f"its UNet takes {text.num_time_ids} size values; diffserve supports 6 (SDXL) and 5 (its refiner)"
    elif previewer is not None and previewer.latent_channels != cells:
        problem = f"its preview decoder reads {previewer.latent_channels} latent channels, the VAE has {cells}"
    else:
        return
    raise ModelLoadError(f"{location}: {problem}.")
