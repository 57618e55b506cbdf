"""What a model directory says of itself before any weight is read: family, native size, spacing. No torch.

The command line and the server use it to pick the built-in profile that a model given by path starts from.
"""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

MAX_HEADER_BYTES = 100_000_000
ZERO_SNR = {"sampler": "dpmpp_2m", "spacing": "trailing"}
"""For zero terminal SNR: no sigma schedule reaches the infinite first sigma, and only trailing spacing starts there."""


def describe_model(path: Path) -> tuple[str, dict[str, Any]]:
    """(name of the built-in profile, entries to lay over it) for the model at ``path``.

    ``path`` is a diffusers directory or a single safetensors file. What cannot be read is left out: the loader reports
    it with the whole story.
    """
    is_file = path.suffix == ".safetensors"
    name = path.resolve().stem if is_file else path.resolve().name
    entries: dict[str, Any] = {"model_id": re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-.")[:64] or "model"}
    if is_file:
        tensors = _header(path)
        is_sdxl = any(key.startswith("conditioner.embedders.1.") for key in tensors)
        return ("sdxl" if is_sdxl else "sd15"), entries | (ZERO_SNR if "ztsnr" in tensors else {})
    return ("sdxl" if (path / "text_encoder_2").is_dir() else "sd15"), entries | _from_directory(path)


def _from_directory(path: Path) -> dict[str, Any]:
    """The size the UNet was trained at and the spacing its scheduler was written for."""
    found: dict[str, Any] = {}
    sample_size = _read_json(path / "unet" / "config.json").get("sample_size")
    levels = _read_json(path / "vae" / "config.json").get("block_out_channels")
    if isinstance(sample_size, int) and isinstance(levels, list):
        side_px = sample_size * 2 ** (len(levels) - 1)
        if side_px not in (512, 1024):
            found["good_sizes"] = [[side_px, side_px]]
            found["max_side_px"] = 2 * side_px
    scheduler = _read_json(path / "scheduler" / "scheduler_config.json")
    if scheduler.get("timestep_spacing") in ("leading", "trailing", "linspace"):
        found["spacing"] = scheduler["timestep_spacing"]
    return found | ({"sampler": ZERO_SNR["sampler"]} if scheduler.get("rescale_betas_zero_snr") else {})


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file: its tensors by name; empty where it cannot be read."""
    try:
        with path.open("rb") as file:
            (num_bytes,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(num_bytes, MAX_HEADER_BYTES)))
    except (OSError, ValueError, RecursionError, struct.error):
        return {}
    return header if isinstance(header, dict) else {}
