"""Sharing of identical text encoders and VAEs between loaded models.

Parts are compared by a digest of the loaded tensors, not of files, so copies and other checkpoint layouts are found,
and parts that differ by quantization or learned words are not shared. Models that share a text encoder share its pages.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

import torch

from diffserve.runtime.model import DiffusionModel
from diffserve.runtime.text.encoding import TextEncoderRunner

IGNORED_KEYS: Final = ("architectures", "torch_dtype", "dtype", "transformers_version")
"""Configuration keys that do not affect a network, like those that begin with an underscore."""

logger = logging.getLogger(__name__)


def with_digests(model: DiffusionModel) -> DiffusionModel:
    """Return ``model`` with digests of its parts; unchanged if its weights are not all on the device."""
    if model.choice.offload != "none" or model.choice.spread or model.device.type == "meta":
        return model
    return replace(model, part_digests={name: digest_of(network) for name, network in _parts(model).items()})


def sharing(model: DiffusionModel, models: Iterable[DiffusionModel]) -> DiffusionModel:
    """Return ``model`` with parts of ``models`` in place of its own identical ones; all have ``with_digests``."""
    available = {
        (name, digest): other for other in models for name, digest in other.part_digests.items() if _fits(other, model)
    }
    shared_with = {
        name: available[name, digest] for name, digest in model.part_digests.items() if (name, digest) in available
    }
    if not shared_with:
        return model
    text_runner, networks = model.text, {name: _parts(other)[name] for name, other in shared_with.items()}
    encoders = [
        encoder._replace(network=networks.get(name, encoder.network))
        for name, encoder in zip(model.encoder_names, text_runner.encoders, strict=True)
    ]
    text = TextEncoderRunner(
        encoders,
        device=text_runner.device,
        digest=text_runner.digest,
        num_time_ids=text_runner.num_time_ids,
        zero_empty_negative=text_runner.zero_empty_negative,
    )
    vae = shared_with["vae"].vae if "vae" in shared_with else model.vae
    refiner = None if model.refiner is None else replace(model.refiner, vae=vae)
    shared = replace(model, text=text, vae=vae, refiner=refiner)
    names = ", ".join(f"{name} with {other.model_id}" for name, other in shared_with.items())
    logger.info("%s shares its %s", model.model_id, names)
    return shared


def digest_of(network: Any) -> str:
    """Return the sha256 of the class, configuration and tensors of ``network``."""
    config: Mapping[str, Any] = network.config if isinstance(network.config, Mapping) else network.config.to_dict()
    settings = {key: config[key] for key in sorted(config) if not key.startswith("_") and key not in IGNORED_KEYS}
    total = hashlib.sha256(f"{type(network).__name__} {settings!r}".encode())
    for name, tensor in [*network.named_parameters(), *network.named_buffers()]:
        flat = tensor.detach().cpu().contiguous().flatten()
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(flat.view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def _parts(model: DiffusionModel) -> dict[str, Any]:
    networks = [encoder.network for encoder in model.text.encoders]
    return {**dict(zip(model.encoder_names, networks, strict=True)), "vae": model.vae.network}


def _fits(other: DiffusionModel, model: DiffusionModel) -> bool:
    """Return whether both models have the same devices and dtypes."""
    first, second = other.choice, model.choice
    return (first.device, first.dtype, other.vae.dtype) == (second.device, second.dtype, model.vae.dtype)
