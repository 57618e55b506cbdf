"""Parts that models have in common, once in memory: text encoders and VAEs that are the same to the last bit.

They are told by a digest of what was loaded, not of files: so a part is found again in a copy, in a checkpoint of
another layout, and beneath a LoRA that leaves it alone, and one that was quantized or taught words otherwise is not.
Pages of a text encoder go by its digest, too, so models that share it share what it has computed.
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

SAYS_NOTHING: Final = ("architectures", "torch_dtype", "dtype", "transformers_version")
"""Of a configuration: who wrote it, and what the tensors say themselves; so does what begins with an underscore."""

logger = logging.getLogger(__name__)


def with_digests(model: DiffusionModel) -> DiffusionModel:
    """``model``, its parts told apart; as it is where its weights do not rest on the device."""
    if model.choice.offload != "none" or model.choice.spread or model.device.type == "meta":
        return model
    return replace(model, part_digests={name: digest_of(network) for name, network in _parts(model).items()})


def sharing(model: DiffusionModel, others: Iterable[DiffusionModel]) -> DiffusionModel:
    """``model`` with the parts of ``others`` in place of its own where they are the same; all ``with_digests``."""
    known = {
        (name, digest): other for other in others for name, digest in other.part_digests.items() if _fits(other, model)
    }
    found = {name: known[name, digest] for name, digest in model.part_digests.items() if (name, digest) in known}
    if not found:
        return model
    own, theirs = model.text, {name: _parts(other)[name] for name, other in found.items()}
    encoders = [
        encoder._replace(network=theirs.get(name, encoder.network))
        for name, encoder in zip(model.encoder_names, own.encoders, strict=True)
    ]
    text = TextEncoderRunner(
        encoders,
        device=own.device,
        digest=own.digest,
        num_time_ids=own.num_time_ids,
        zero_empty_negative=own.zero_empty_negative,
    )
    vae = found["vae"].vae if "vae" in found else model.vae
    refiner = None if model.refiner is None else replace(model.refiner, vae=vae)
    shared = replace(model, text=text, vae=vae, refiner=refiner)
    names = ", ".join(f"{name} with {other.model_id}" for name, other in found.items())
    logger.info("%s shares its %s", model.model_id, names)
    return shared


def digest_of(network: Any) -> str:
    """sha256 over the class, configuration and tensors of ``network``."""
    config: Mapping[str, Any] = network.config if isinstance(network.config, Mapping) else network.config.to_dict()
    told = {key: config[key] for key in sorted(config) if not key.startswith("_") and key not in SAYS_NOTHING}
    total = hashlib.sha256(f"{type(network).__name__} {told!r}".encode())
    for name, tensor in [*network.named_parameters(), *network.named_buffers()]:
        flat = tensor.detach().cpu().contiguous().flatten()
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(flat.view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def _parts(model: DiffusionModel) -> dict[str, Any]:
    networks = [encoder.network for encoder in model.text.encoders]
    return {**dict(zip(model.encoder_names, networks, strict=True)), "vae": model.vae.network}


def _fits(other: DiffusionModel, model: DiffusionModel) -> bool:
    """Whether their parts are on one device, for one arithmetic."""
    one, two = other.choice, model.choice
    return (one.device, one.dtype, other.vae.dtype) == (two.device, two.dtype, model.vae.dtype)
