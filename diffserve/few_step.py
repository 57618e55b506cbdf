"""Models distilled to paint in a few steps, known by what lies on disk, and how each starts right. No torch.

    turbo      SD-Turbo and SDXL-Turbo (Sauer et al. 2023, arXiv 2311.17042)
    lightning  SDXL-Lightning (Lin et al. 2024, arXiv 2402.13929), a UNet or a LoRA for a number of steps
    hyper      Hyper-SD (Ren et al. 2024, arXiv 2404.13686), the same; files with "CFG" in the name take guidance
    lcm        latent consistency models (Luo et al. 2023, arXiv 2310.04378), which bring their own scheduler

All but lcm leave no mark in their tensors: their publishers' names say it. A diffusers directory has to say it with its
scheduler as well, which begins at the last timestep for these ("trailing"); a directory of the model hub's cache is
known by the name that is two levels up. An adapter that a request names is known by its own.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from diffserve.types import DiffusionParams

TURBO, LIGHTNING, HYPER, LCM = "turbo", "lightning", "hyper", "lcm"
NAMED: Final = re.compile(rf"(?<![a-z])({TURBO}|{LIGHTNING}|{HYPER}|{LCM})(?![a-z])", re.IGNORECASE)
STEPS: Final = re.compile(r"(?<!\d)(\d{1,2})[ _-]?steps?(?![a-z])", re.IGNORECASE)
WITH_GUIDANCE: Final = re.compile(r"(?<![a-z])cfg(?![a-z])", re.IGNORECASE)
LORA: Final = re.compile(r"(?<![a-z])lora(?![a-z])", re.IGNORECASE)
GUIDANCE_OF_CFG: Final = 5.0
GUIDANCE_OF_LCM: Final = 8.5
"""Where the UNet reads guidance as a number (``time_cond_proj_dim``)."""

MANY_STEPS: Final = 4
"""Of a model that takes any few: the first number at which nothing is left undone."""


class FewStep(NamedTuple):
    """``kind`` of a few-step model, and the ``entries`` of a profile that it starts right with."""

    kind: str
    entries: dict[str, Any]


def find_few_step(path: Path) -> FewStep | None:
    """What the model at ``path``, a diffusers directory, one with an adapter, or a single file, is distilled to;
    ``None`` for all others, and for what cannot be read, which the loader reports."""
    name = _published_name(path)
    scheduler = read_json_object(path / "scheduler" / "scheduler_config.json")
    unet = read_json_object(path / "unet" / "config.json")
    found = NAMED.search(name)
    kind = found[1].lower() if found else None
    begins_last = scheduler.get("timestep_spacing") == "trailing" if scheduler else True
    if scheduler.get("_class_name") == "LCMScheduler" or unet.get("time_cond_proj_dim"):
        kind = LCM
    elif kind is None or not (begins_last or kind == LCM):
        return None
    return _starts(kind, name, scheduler, unet)


def find_few_step_lora(name: str) -> FewStep | None:
    """What the adapter ``name`` distils a model to. Styles are called by such words, too: with a number of steps it is
    no style, and Turbo's and LCM's are called a LoRA."""
    found = NAMED.search(name)
    kind = found[1].lower() if found else ""
    is_one = bool(kind and STEPS.search(name)) or (kind in (TURBO, LCM) and bool(LORA.search(name)))
    return _starts(kind, name, {}, {}) if is_one else None


def begin_with_loras(params: DiffusionParams) -> tuple[DiffusionParams, tuple[str, ...]]:
    """``params``, what they leave open chosen as the first of their adapters that distils wants it; and a sentence
    that says so."""
    for lora in params.loras:
        few_step = find_few_step_lora(lora.name) if lora.scale > 0 else None
        if few_step is None:
            continue
        start = few_step.entries
        said = (
            f"LoRA {lora.name!r} is distilled to few steps ({few_step.kind}): unless asked otherwise "
            f"{start['num_steps']} of {start['sampler']}, spacing {start['spacing']}, guidance "
            f"{start['guidance_scale']:g}."
        )
        left_open = {name: value for name, value in start.items() if getattr(params, name) is None}
        return msgspec.structs.replace(params, **left_open), (said,)
    return params, ()


def _starts(kind: str, name: str, scheduler: dict[str, Any], unet: dict[str, Any]) -> FewStep:
    count = STEPS.search(name)
    entries: dict[str, Any] = {
        "num_steps": int(count[1]) if count and int(count[1]) else MANY_STEPS,
        "guidance_scale": 1.0,
    }
    if kind == LCM:
        is_told = unet.get("time_cond_proj_dim") is not None
        own = {"sampler": "lcm", "spacing": "leading", "guidance_scale": GUIDANCE_OF_LCM if is_told else 1.0}
        return FewStep(kind, entries | own)
    is_ancestral = "Ancestral" in str(scheduler.get("_class_name", "Ancestral" if kind == TURBO else ""))
    entries |= {"sampler": "euler_a" if is_ancestral else "euler", "spacing": "trailing"}
    return FewStep(kind, entries | ({"guidance_scale": GUIDANCE_OF_CFG} if WITH_GUIDANCE.search(name) else {}))


def _published_name(path: Path) -> str:
    """The name that the publisher gave: of the file or directory, or of the model in the hub's cache."""
    place = path.absolute()
    if place.parent.name == "snapshots":
        return place.parent.parent.name
    return place.stem if place.is_file() else place.name


def read_json_object(path: Path) -> dict[str, Any]:
    """What the JSON file at ``path`` holds; nothing where that cannot be read, or is no object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
