"""What a model directory says of itself before any weight is read: family, native size, spacing. No torch.

The command line and the server use it to pick the built-in profile that a model given by path starts from.
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
"""For zero terminal SNR: no sigma schedule reaches the infinite first sigma, and only trailing spacing starts there."""
SDXL_TENSORS = (
    *("conditioner.embedders.1.", "conditioner.embedders.0.model."),
    *("model.diffusion_model.label_emb.", "label_emb.", "add_embedding."),
)
"""Its second text encoder, which its refiner has as the only one, and in files of a UNet alone what reads sizes."""
SDXL_TURBO_SIZE = (512, 512)
"""Which its single file does not say."""


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
        """The entries of a :class:`~diffserve.api.types.ModelProfile` that it gives."""
        entries = msgspec.structs.asdict(self)
        return {key: value for key, value in entries.items() if key != "base" and value is not None}


def describe_model(path: Path) -> tuple[str, dict[str, Any]]:
    """(name of the built-in profile, entries to lay over it) for the model at ``path``.

    ``path`` is a diffusers directory, a single safetensors file, or a directory with an adapter. What cannot be read is
    left out: the loader reports it with the whole story.
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
        profile, found = _from_adapter(path)
        return profile, found | entries
    found = _from_directory(path) | (few_step.entries if few_step else {})
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
        spec = msgspec.convert(read_json_object(path / ADAPTER_FILE), AdapterSpec)
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
    few_step = find_few_step(path)
    return profile, found | _from_directory(path) | (few_step.entries if few_step else {}) | spec.defaults


def _from_directory(path: Path) -> dict[str, Any]:
    """The size the UNet was trained at and the spacing its scheduler was written for."""
    found: dict[str, Any] = {}
    sample_size = read_json_object(path / "unet" / "config.json").get("sample_size")
    levels = read_json_object(path / "vae" / "config.json").get("block_out_channels")
    if isinstance(sample_size, int) and isinstance(levels, list):
        side_px = sample_size * 2 ** (len(levels) - 1)
        if side_px not in (512, 1024):
            found["good_sizes"] = [[side_px, side_px]]
            found["max_side_px"] = 2 * side_px
    scheduler = read_json_object(path / "scheduler" / "scheduler_config.json")
    if scheduler.get("timestep_spacing") in ("leading", "trailing", "linspace"):
        found["spacing"] = scheduler["timestep_spacing"]
    return found | ({"sampler": ZERO_SNR["sampler"]} if scheduler.get("rescale_betas_zero_snr") else {})
