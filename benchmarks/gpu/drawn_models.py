"""Models whose weights are drawn on the device: the real loader fills every layer, and no weight is written or read.

The directory of such a model holds configurations, tokenizers, and weight files that are headers with a hole behind
them. While ``drawn_weights`` is on, a tensor of a checkpoint is drawn on the device from a seed and its name, so every
process and every precision gets the same weights.
"""

from __future__ import annotations

import hashlib
import math
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import torch
from torch import Tensor

from benchmarks.random_models import NETWORKS, make_pipeline, model_parts, save_hollow_model
from diffserve.disk_cache import DiskCache
from diffserve.runtime import DiffusionModel, load_model
from diffserve.runtime.loading.checkpoint import Checkpoint
from diffserve.runtime.loading.library_imports import hushed
from diffserve.runtime.loading.weight_loading import build_on_meta
from diffserve.settings.layers import load_settings

EMBEDDING_STD = 0.02


def draw_tensor(name: str, shape: tuple[int, ...], device: torch.device, seed: int = 0) -> Tensor:
    """Return a float32 tensor for the parameter ``name`` of ``shape``, spread as by torch's own initialization."""
    if len(shape) < 2:
        return torch.full(shape, 0.0 if name.endswith("bias") else 1.0, device=device)
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()) + seed)
    tensor = torch.empty(shape, device=device)
    if "embeddings." in name:  # a text encoder's
        return tensor.normal_(0.0, EMBEDDING_STD, generator=generator)
    bound = 1.0 / math.sqrt(math.prod(shape[1:]))
    return tensor.uniform_(-bound, bound, generator=generator)


@contextmanager
def drawn_weights(device: torch.device, seed: int = 0) -> Iterator[None]:
    """Within the block, models are loaded with drawn weights, whatever their files hold."""

    def read(checkpoint: Checkpoint, key: str) -> Tensor:
        return draw_tensor(key, checkpoint.entries[key].shape, device, seed)

    def digest(files: Iterable[Path], cache: DiskCache | None = None) -> str:
        names = " ".join(sorted(f"{file.parent.parent.name}/{file.parent.name}" for file in files))
        return hashlib.sha256(f"drawn {seed} {names}".encode()).hexdigest()

    with patch.object(Checkpoint, "read", read), patch("diffserve.runtime.model.digest_files", digest):
        yield


def model_directory(name: str, folder: Path) -> Path:
    """Return the directory of the model ``name`` (of ``random_models.NAMES``) below ``folder``; create it if missing.

    Several processes may ask at the same time: it appears as a whole.
    """
    target = folder / name
    if not target.is_dir():
        scratch = Path(tempfile.mkdtemp(dir=folder, prefix=f".{name}-"))
        save_hollow_model(name, scratch, dtype=torch.bfloat16)
        try:
            scratch.rename(target)
        except OSError:  # another process was faster
            shutil.rmtree(scratch, ignore_errors=True)
    return target / "model"


def load_drawn(name: str, folder: Path, device: torch.device, dtype: str) -> DiffusionModel:
    """Return the model ``name`` on ``device`` in ``dtype``, painted at its native size only."""
    path = model_directory(name, folder)
    settings = load_settings(model=str(path), env={}).model
    profile = msgspec.structs.replace(settings, probe=False, good_sizes=(), model_id=name)
    with drawn_weights(device):
        return load_model(path, device=str(device), dtype=dtype, profile=profile)


def pipeline_on(model: DiffusionModel, name: str) -> Any:
    """Diffusers' own pipeline for the model ``name``, with networks of its own that share the weights of ``model``."""
    with hushed("transformers", "diffusers"), tempfile.TemporaryDirectory() as scratch:
        parts = build_on_meta(lambda: model_parts(name, Path(scratch)))
        parts["scheduler"] = parts["scheduler"].from_config(
            parts["scheduler"].config
        )  # its tables, off the meta device
    networks = dict(zip(model.encoder_names, (encoder.network for encoder in model.text.encoders), strict=True))
    networks |= {"unet": model.unet.network, "vae": model.vae.network}
    for key in NETWORKS:
        if key in parts:
            parts[key].requires_grad_(
                False
            ).eval()  # before the assignment: weights made under inference mode take no gradients
            parts[key].load_state_dict(networks[key].state_dict(), assign=True)
            for module in parts[key].modules():  # what is computed and not stored, such as the numbers of positions
                for buffer_name, buffer in module.named_buffers(recurse=False):
                    setattr(module, buffer_name, buffer.to(model.device))
    return make_pipeline(parts)
