"""Detection of family, native size and timestep spacing of a model before any weight is read, without torch.

The command line and the server use it to choose the built-in profile for a model that is given by path.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from diffserve.api.errors import ModelLoadError
from diffserve.models.few_step import TURBO, find_few_step, read_json_object
from diffserve.models.model_files import model_path
from diffserve.models.safetensors_header import read_header
from diffserve.models.vocabulary import EMBEDDED_DIRECTORY, knows_embedded_world

ADAPTER_FILE = "adapter.json"
ZERO_SNR = {"sampler": "dpmpp_2m", "spacing": "trailing"}
"""Defaults for zero terminal SNR: the first sigma is infinite, which only trailing spacing without schedule reaches."""
SDXL_TENSORS = (
    *("conditioner.embedders.1.", "conditioner.embedders.0.model."),
    *("model.diffusion_model.label_emb.", "label_emb.", "add_embedding."),
)
"""Tensor prefixes that only SDXL has: its second text encoder (the only one of the refiner) and the size embedding."""
SDXL_TURBO_SIZE = (512, 512)
"""Native size of SDXL-Turbo, which its single file does not state."""


class AdapterSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of ``adapter.json``: the base model of a LoRA, and the defaults of the combination.

    Attributes:
        base: "embedded", or a diffusers directory relative to the directory of the adapter.
        sampler: Default sampler.
        num_steps: Default number of steps.
        guidance_scale: Default guidance scale.
    """

    base: str
    sampler: str | None = None
    num_steps: int | None = None
    guidance_scale: float | None = None

    @property
    def defaults(self) -> dict[str, Any]:
        """Entries of a :class:`~diffserve.api.types.ModelProfile` that the file sets."""
        entries = msgspec.structs.asdict(self)
        return {key: value for key, value in entries.items() if key != "base" and value is not None}


def describe_model(path: Path) -> tuple[str, dict[str, Any]]:
    """Detect the profile of the model at ``path``. Unreadable files are ignored here; the loader reports them.

    Args:
        path: A diffusers directory, a single safetensors file, or a directory with an adapter.

    Returns:
        The name of the built-in profile, and the entries that override it.
    """
    is_file = path.suffix == ".safetensors"
    name = path.resolve().stem if is_file else path.resolve().name.removeprefix("models--").replace("--", "-")
    entries: dict[str, Any] = {"model_id": re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-.")[:64] or "model"}
    few_step, path = find_few_step(path), model_path(path)
    if is_file:
        tensors = read_header(path)
        is_sdxl = any(key.startswith(SDXL_TENSORS) for key in tensors)
        entries |= (ZERO_SNR if "ztsnr" in tensors else {}) | (few_step.entries if few_step else {})
        if few_step and few_step.kind == TURBO and is_sdxl:
            entries |= {"good_sizes": [list(SDXL_TURBO_SIZE)], "max_side_px": 2 * max(SDXL_TURBO_SIZE)}
        return ("sdxl" if is_sdxl else "sd15"), entries
    if (path / ADAPTER_FILE).is_file():
        profile, adapter_entries = _from_adapter(path)
        return profile, adapter_entries | entries
    detected = _from_directory(path) | (few_step.entries if few_step else {})
    if _is_embedded(path):
        embedded = _from_directory(EMBEDDED_DIRECTORY)  # the built-in profile has better values for these
        return "embedded", entries | {key: value for key, value in detected.items() if value != embedded.get(key)}
    return ("sdxl" if (path / "text_encoder_2").is_dir() else "sd15"), entries | detected


def _is_embedded(path: Path) -> bool:
    try:
        return knows_embedded_world(path)
    except ModelLoadError:
        return False


def _from_adapter(path: Path) -> tuple[str, dict[str, Any]]:
    """Return profile and entries of an adapter: those of its base, overridden by its scheduler and its defaults."""
    try:
        spec = msgspec.convert(read_json_object(path / ADAPTER_FILE), AdapterSpec)
    except msgspec.ValidationError:
        return "sd15", {}
    base = path / Path(spec.base).expanduser()
    if spec.base == "embedded":
        base_profile: tuple[str, dict[str, Any]] = "embedded", {}
    elif (base / ADAPTER_FILE).is_file():  # refused by the loader
        base_profile = "sd15", {}
    else:
        base_profile = describe_model(base)
    profile, entries = base_profile
    few_step = find_few_step(path)
    return profile, entries | _from_directory(path) | (few_step.entries if few_step else {}) | spec.defaults


def _from_directory(path: Path) -> dict[str, Any]:
    """Return the training size of the UNet and the timestep spacing of the scheduler."""
    entries: dict[str, Any] = {}
    sample_size = read_json_object(path / "unet" / "config.json").get("sample_size")
    levels = read_json_object(path / "vae" / "config.json").get("block_out_channels")
    if isinstance(sample_size, int) and isinstance(levels, list):
        side_px = sample_size * 2 ** (len(levels) - 1)
        if side_px not in (512, 1024):
            entries["good_sizes"] = [[side_px, side_px]]
            entries["max_side_px"] = 2 * side_px
    scheduler = read_json_object(path / "scheduler" / "scheduler_config.json")
    if scheduler.get("timestep_spacing") in ("leading", "trailing", "linspace"):
        entries["spacing"] = scheduler["timestep_spacing"]
    return entries | ({"sampler": ZERO_SNR["sampler"]} if scheduler.get("rescale_betas_zero_snr") else {})
