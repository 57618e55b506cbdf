"""Few-step models: recognized by their files and names, with the settings that each kind starts with. No torch.

Almost no such model has a mark in its tensors, so the scheduler's configuration and the published name decide; KINDS is
the table of both. A directory in the model hub's cache is known by the name two levels up.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from diffserve.api.types import DiffusionParams
from diffserve.models.model_files import model_path

TURBO, LIGHTNING, HYPER, LCM, TCD, DMD, PCM, FLASH = "turbo", "lightning", "hyper", "lcm", "tcd", "dmd2", "pcm", "flash"
EULER: Final = "euler"


class Kind(NamedTuple):
    """One way of distilling a model.

    word        regular expression of the word in published names
    sampler     what its publishers sample with; a sigma schedule may follow
    spacing     the spacing of that sampler
    is_acronym  the word is no ordinary one, so that it is evidence by itself
    """

    word: str
    sampler: str
    spacing: str
    is_acronym: bool


KINDS: Final[dict[str, Kind]] = {
    LCM: Kind("lcm(?:like)?", "lcm", "leading", is_acronym=True),
    TCD: Kind("tcd", "tcd", "leading", is_acronym=True),
    DMD: Kind("dmd2?", "lcm simple", "trailing", is_acronym=True),
    PCM: Kind("pcm", "tcd", "leading", is_acronym=True),
    FLASH: Kind(r"flash[ _-]?sd(?:xl|\d+)?|flash(?=.*step)", "lcm", "leading", is_acronym=False),
    HYPER: Kind("hyper", EULER, "trailing", is_acronym=False),
    LIGHTNING: Kind("lightning", EULER, "trailing", is_acronym=False),
    TURBO: Kind("turbo", EULER, "trailing", is_acronym=False),
}
"""Kinds by name; where a name has several words, the first kind of this table counts.

lcm        latent consistency (Luo et al. 2023, arXiv 2310.04378)
tcd        trajectory consistency (Zheng et al. 2024, arXiv 2402.19159)
dmd2       distribution matching (Yin et al. 2024, arXiv 2405.14867), at the timesteps 999, 749, 499 and 249
pcm        phased consistency (Wang et al. 2024, arXiv 2405.18407); "normalcfg" in the name takes guidance
flash      Flash Diffusion (Chadebec et al. 2024, arXiv 2406.02347)
hyper      Hyper-SD (Ren et al. 2024, arXiv 2404.13686); "CFG" in the name takes guidance
lightning  SDXL-Lightning (Lin et al. 2024, arXiv 2402.13929)
turbo      SD-Turbo and SDXL-Turbo (Sauer et al. 2023, arXiv 2311.17042)
"""

SCHEDULERS: Final = {"LCMScheduler": LCM, "TCDScheduler": TCD}
"""Classes that only models of a kind are published with."""

STOCHASTIC_SCHEDULERS: Final = ("DPMSolverSDEScheduler", "DPMSolverSinglestepScheduler")
"""Classes that community models of turbo and lightning are published with, and base models are not."""

MODEL_MARK: Final = re.compile(r"(?<![a-z])sd|xl(?![a-z])|v\d", re.IGNORECASE)
"""Marks the name of a model, as opposed to the name of a folder: a family or a version."""

STEPS: Final = re.compile(r"(?<!\d)(\d{1,2})[ _-]?steps?(?![a-z])", re.IGNORECASE)
GUIDANCE_BY_NAME: Final = {
    HYPER: (re.compile(r"(?<![a-z])cfg(?![a-z])", re.IGNORECASE), 5.0),
    PCM: (re.compile(r"normal_?cfg", re.IGNORECASE), 7.5),
}
LORA: Final = re.compile(r"(?<![a-z])lora(?![a-z])", re.IGNORECASE)
GUIDANCE_OF_LCM: Final = 8.5
"""Where the UNet reads guidance as a number (``time_cond_proj_dim``)."""

DEFAULT_STEPS: Final = 4
"""For a model that takes any few steps: the first number at which pictures are finished."""


class FewStep(NamedTuple):
    """The ``kind`` of a few-step model, the ``entries`` of a profile that it starts with, and why it was recognized."""

    kind: str
    entries: dict[str, Any]
    reason: str

    @property
    def defaults(self) -> str:
        """Steps, sampler, spacing and guidance that it starts with, for a message."""
        start = self.entries
        return (
            f"sampler {start['sampler']}, steps {start['num_steps']}, spacing {start['spacing']}, "
            f"guidance {start['guidance_scale']:g}"
        )


def find_few_step(path: Path) -> FewStep | None:
    """Recognize the few-step model at ``path``: a diffusers directory, one with an adapter, or a single file.

    Returns ``None`` for all other models, and for what cannot be read, which the loader reports.
    """
    name, path = _published_name(path), model_path(path)
    scheduler = read_json_object(path / "scheduler" / "scheduler_config.json")
    unet = read_json_object(path / "unet" / "config.json")
    class_name, kind_of_name = str(scheduler.get("_class_name", "")), _kind_of_name(name)
    if unet.get("time_cond_proj_dim"):
        return _start(LCM, name, scheduler, "time_cond_proj_dim in unet/config.json", guidance_scale=GUIDANCE_OF_LCM)
    if class_name in SCHEDULERS:
        kind = SCHEDULERS[class_name]
        if kind_of_name and KINDS[kind_of_name].sampler.startswith(KINDS[kind].sampler):
            kind = kind_of_name
        return _start(kind, name, scheduler, f"the scheduler {class_name}")
    if kind_of_name is None:
        return None
    evidence = []
    if class_name in STOCHASTIC_SCHEDULERS:
        evidence.append(f"the scheduler {class_name}")
    if scheduler.get("timestep_spacing") == "trailing":
        evidence.append("trailing timesteps")
    is_of_model = KINDS[kind_of_name].is_acronym or STEPS.search(name) or MODEL_MARK.search(name)
    if scheduler and not evidence and not is_of_model:
        return None
    return _start(kind_of_name, name, scheduler, " and ".join([f"the name {name!r}", *evidence]))


def find_few_step_lora(name: str) -> FewStep | None:
    """Recognize the few-step adapter ``name``.

    Styles have such words in their names as well. A number of steps in the name excludes a style; so does "LoRA" after
    turbo, and a family or "LoRA" beside an acronym.
    """
    kind = _kind_of_name(name)
    if kind is None:
        return None
    is_lora = LORA.search(name) is not None
    by_acronym = KINDS[kind].is_acronym and (is_lora or MODEL_MARK.search(name))
    if not (STEPS.search(name) or by_acronym or kind == FLASH or (kind == TURBO and is_lora)):
        return None
    few_step = _start(kind, name, {}, f"the name {name!r}")
    eta = {"eta": 0.0} if kind == PCM else {}  # its publishers sample without noise
    return few_step._replace(entries=few_step.entries | eta)


def begin_with_loras(params: DiffusionParams) -> tuple[DiffusionParams, tuple[str, ...]]:
    """Fill what ``params`` leave open with the settings of their first few-step adapter; also returns a warning."""
    for lora in params.loras:
        few_step = find_few_step_lora(lora.name.rpartition("/")[2]) if lora.scales[1] > 0 else None
        if few_step is None:
            continue
        message = (
            f"LoRA {lora.name!r} is a few-step adapter ({few_step.kind}, by its name). Where the request leaves them "
            f"open: {few_step.defaults}."
        )
        left_open = {name: value for name, value in few_step.entries.items() if getattr(params, name) is None}
        if params.sampler is not None:
            left_open.pop("eta", None)  # which belongs to the sampler
        return msgspec.structs.replace(params, **left_open), (message,)
    return params, ()


def _kind_of_name(name: str) -> str | None:
    for kind, row in KINDS.items():
        if re.search(rf"(?<![a-z])(?:{row.word})(?![a-z])", name, re.IGNORECASE):
            return kind
    return None


def _start(
    kind: str, name: str, scheduler: dict[str, Any], reason: str, *, guidance_scale: float | None = None
) -> FewStep:
    count, row = STEPS.search(name), KINDS[kind]
    pattern, with_guidance = GUIDANCE_BY_NAME.get(kind, (None, 1.0))
    if guidance_scale is None:
        guidance_scale = with_guidance if pattern and pattern.search(name) else 1.0
    is_ancestral = "Ancestral" in str(scheduler.get("_class_name", "Ancestral" if kind == TURBO else ""))
    entries = {
        "num_steps": int(count[1]) if count and int(count[1]) else DEFAULT_STEPS,
        "guidance_scale": guidance_scale,
        "sampler": "euler_a" if row.sampler == EULER and is_ancestral else row.sampler,
        "spacing": row.spacing,
    }
    return FewStep(kind, entries, reason)


def _published_name(path: Path) -> str:
    """Return the name that the publisher chose: of the file or directory, or of the model in the hub's cache."""
    place = path.absolute()
    if place.parent.name == "snapshots":
        return place.parent.parent.name
    return place.stem if place.is_file() else place.name


def read_json_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in the file at ``path``; empty where it cannot be read or is no object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
