"""Tensors and memory: model loading, prompt encoding, UNet calls, and conversion of images to latents and back."""

from __future__ import annotations

from diffserve.runtime.auto_precision import choose_for
from diffserve.runtime.model import DiffusionModel, load_model
from diffserve.runtime.precision import DeviceChoice, choose_device
from diffserve.runtime.text.encoding import Conditioning, TextEncoderRunner
from diffserve.runtime.unet.unet import UNetRunner

__all__ = [
    "Conditioning",
    "DeviceChoice",
    "DiffusionModel",
    "TextEncoderRunner",
    "UNetRunner",
    "choose_device",
    "choose_for",
    "load_model",
]
