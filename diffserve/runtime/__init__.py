"""Tensors and memory: loading a model, encoding prompts, running UNet rows, and pictures to latents and back."""

from __future__ import annotations

from diffserve.runtime.model import DiffusionModel, MemoryEntry, load_model
from diffserve.runtime.precision import DTYPE_NAMES, DeviceChoice, choose_device
from diffserve.runtime.text.encoding import Conditioning, TextEncoderRunner
from diffserve.runtime.unet.unet import UNetRunner
from diffserve.runtime.vae.vae import VAERunner

__all__ = [
    "DTYPE_NAMES",
    "Conditioning",
    "DeviceChoice",
    "DiffusionModel",
    "MemoryEntry",
    "TextEncoderRunner",
    "UNetRunner",
    "VAERunner",
    "choose_device",
    "load_model",
]
