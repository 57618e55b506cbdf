"""What a model directory says of itself before any weight is read: family, native size, spacing. No torch.

The command line and the server use it to pick the built-in profile that a model given by path starts from.
"""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import msgspec

from diffserve.errors import ModelLoadError
from diffserve.vocabulary import EMBEDDED_DIRECTORY, knows_embedded_world

ADAPTER_FILE = "adapter.json"
MAX_HEADER_BYTES = 100_000_000
ZERO_SNR = {"sampler": "dpmpp_2m", "spacing": "trailing"}
"""For zero terminal SNR: no sigma schedule reaches the infinite first sigma, and only trailing spacing starts there."""


class AdapterSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ``adapter.json`` says: which model a LoRA changes, and the defaults of the changed one.

    base  "embedded", or a diffusers directory, relative to the adapter's own
    """

    base: str
    sampler: str | None = None
    num_steps: int | None = None
    guidance_scale: float | None = None

    @property
    def defaults(self) -> dict[str, Any]:
        """The entries of a :class:`~diffserve.types.ModelProfile` that it gives."""
        entries = msgspec.structs.asdict(self)
        return {key: value for key, value in entries.items() if key != "base" and value is not None}


def describe_model(path: Path) -> tuple[str, dict[str, Any]]:
    """(name of the built-in profile, entries to lay over it) for the model at ``path``.

    ``path`` is a diffusers directory, a single safetensors file, or a directory with an adapter. What cannot be read is
    left out: the loader reports it with the whole story.
    """
    is_file = path.suffix == ".safetensors"
    name = path.resolve().stem if is_file else path.resolve().name
    entries: dict[str, Any] = {"model_id": re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-.")[:64] or "model"}
    if is_file:
        tensors = _header(path)
        is_sdxl = any(key.startswith("conditioner.embedders.1.") for key in tensors)
        return ("sdxl" if is_sdxl else "sd15"), entries | (ZERO_SNR if "ztsnr" in tensors else {})
    if (path / ADAPTER_FILE).is_file():
        profile, found = _from_adapter(path)
        return profile, found | entries
    found = _from_directory(path)
    if _is_embedded(path):
        own = _from_directory(EMBEDDED_DIRECTORY)  # of which its profile knows more
        return "embedded", entries | {key: value for key, value in found.items() if value != own.get(key)}
    return ("sdxl" if (path / "text_encoder_2").is_dir() else "sd15"), entries | found


def _is_embedded(path: Path) -> bool:
    try:
        return knows_embedded_world(path)
    except ModelLoadError:
        return False


def _from_adapter(path: Path) -> tuple[str, dict[str, Any]]:
    """What its base says, then its own scheduler, then its own defaults."""
    try:
        spec = msgspec.convert(_read_json(path / ADAPTER_FILE), AdapterSpec)
    except msgspec.ValidationError:
        return "sd15", {}
    base = path / Path(spec.base).expanduser()
    if spec.base == "embedded":
        described: tuple[str, dict[str, Any]] = "embedded", {}
    elif (base / ADAPTER_FILE).is_file():  # the loader refuses it
        described = "sd15", {}
    else:
        described = describe_model(base)
    profile, found = described
    return profile, found | _from_directory(path) | spec.defaults


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
