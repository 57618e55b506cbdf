"""Recognition of few-step (distilled) models by their files and names, and their default settings, without torch.

Tensors rarely identify such models, so the scheduler configuration and the published name decide (see ``KINDS``). The
name of a directory in the cache of the model hub is that of the repository, two levels up.
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
    """Distillation method.

    Attributes:
        word: Regular expression for the word in published names.
        sampler: Sampler that the publishers use, optionally with a sigma schedule.
        spacing: Timestep spacing of that sampler.
        is_acronym: Whether the word is not an ordinary word, so that it is sufficient evidence.
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
"""Kinds by name; if a model name matches several kinds, the first one of this table applies.

lcm        latent consistency (Luo et al. 2023, arXiv 2310.04378)
tcd        trajectory consistency (Zheng et al. 2024, arXiv 2402.19159)
dmd2       distribution matching (Yin et al. 2024, arXiv 2405.14867), at the timesteps 999, 749, 499 and 249
pcm        phased consistency (Wang et al. 2024, arXiv 2405.18407); "normalcfg" in the name: uses guidance
flash      Flash Diffusion (Chadebec et al. 2024, arXiv 2406.02347)
hyper      Hyper-SD (Ren et al. 2024, arXiv 2404.13686); "CFG" in the name: uses guidance
lightning  SDXL-Lightning (Lin et al. 2024, arXiv 2402.13929)
turbo      SD-Turbo and SDXL-Turbo (Sauer et al. 2023, arXiv 2311.17042)
"""

SCHEDULERS: Final = {"LCMScheduler": LCM, "TCDScheduler": TCD}
"""Scheduler classes that only models of one kind are published with."""

STOCHASTIC_SCHEDULERS: Final = ("DPMSolverSDEScheduler", "DPMSolverSinglestepScheduler")
"""Scheduler classes of community turbo and lightning models that base models are not published with."""

MODEL_MARK: Final = re.compile(r"(?<![a-z])sd|xl(?![a-z])|v\d", re.IGNORECASE)
"""Family or version in a name, which indicates a model name as opposed to another folder name."""

STEPS: Final = re.compile(r"(?<!\d)(\d{1,2})[ _-]?steps?(?![a-z])", re.IGNORECASE)
GUIDANCE_BY_NAME: Final = {
    HYPER: (re.compile(r"(?<![a-z])cfg(?![a-z])", re.IGNORECASE), 5.0),
    PCM: (re.compile(r"normal_?cfg", re.IGNORECASE), 7.5),
}
LORA: Final = re.compile(r"(?<![a-z])lora(?![a-z])", re.IGNORECASE)
GUIDANCE_OF_LCM: Final = 8.5
"""Guidance scale of UNets with guidance embedding (``time_cond_proj_dim``)."""

DEFAULT_STEPS: Final = 4
"""Steps for a model without a number in its name: the lowest number that gives finished images."""


class FewStep(NamedTuple):
    """Recognized few-step model: its kind, its default profile entries, and the reason for the recognition."""

    kind: str
    entries: dict[str, Any]
    reason: str

    @property
    def defaults(self) -> str:
        """Default sampler, steps, spacing and guidance, as text for a message."""
        entries = self.entries
        return (
            f"sampler {entries['sampler']}, steps {entries['num_steps']}, spacing {entries['spacing']}, "
            f"guidance {entries['guidance_scale']:g}"
        )


def find_few_step(path: Path) -> FewStep | None:
    """Recognize the few-step model at ``path``: a diffusers directory, an adapter directory, or a single file.

    Returns:
        The few-step model; ``None`` for other models and for files that cannot be read, which the loader reports.
    """
    name, path = _published_name(path), model_path(path)
    scheduler = read_json_object(path / "scheduler" / "scheduler_config.json")
    unet = read_json_object(path / "unet" / "config.json")
    class_name, kind_of_name = str(scheduler.get("_class_name", "")), _kind_of_name(name)
    if unet.get("time_cond_proj_dim"):
        return _make_few_step(
            LCM, name, scheduler, "time_cond_proj_dim in unet/config.json", guidance_scale=GUIDANCE_OF_LCM
        )
    if class_name in SCHEDULERS:
        kind = SCHEDULERS[class_name]
        if kind_of_name and KINDS[kind_of_name].sampler.startswith(KINDS[kind].sampler):
            kind = kind_of_name
        return _make_few_step(kind, name, scheduler, f"the scheduler {class_name}")
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
    return _make_few_step(kind_of_name, name, scheduler, " and ".join([f"the name {name!r}", *evidence]))


def find_few_step_lora(name: str) -> FewStep | None:
    """Recognize the few-step LoRA ``name``.

    Style LoRAs use the same words in their names. A name is that of a few-step LoRA if it has a number of steps, if it
    has "turbo" and "LoRA", or if it has an acronym together with a model family or "LoRA".
    """
    kind = _kind_of_name(name)
    if kind is None:
        return None
    is_lora = LORA.search(name) is not None
    by_acronym = KINDS[kind].is_acronym and (is_lora or MODEL_MARK.search(name))
    if not (STEPS.search(name) or by_acronym or kind == FLASH or (kind == TURBO and is_lora)):
        return None
    few_step = _make_few_step(kind, name, {}, f"the name {name!r}")
    eta = {"eta": 0.0} if kind == PCM else {}  # the publishers sample without noise
    return few_step._replace(entries=few_step.entries | eta)


def begin_with_loras(params: DiffusionParams) -> tuple[DiffusionParams, tuple[str, ...]]:
    """Fill unset fields of ``params`` with the defaults of their first few-step LoRA.

    Returns:
        The new parameters, and a warning if there is a few-step LoRA.
    """
    for lora in params.loras:
        few_step = find_few_step_lora(lora.name.rpartition("/")[2]) if lora.scales[1] > 0 else None
        if few_step is None:
            continue
        message = (
            f"LoRA {lora.name!r} is a few-step adapter ({few_step.kind}, by its name). Where the request leaves them "
            f"open: {few_step.defaults}."
        )
        defaults = {name: value for name, value in few_step.entries.items() if getattr(params, name) is None}
        if params.sampler is not None:
            defaults.pop("eta", None)  # applies to the default sampler only
        return msgspec.structs.replace(params, **defaults), (message,)
    return params, ()


def _kind_of_name(name: str) -> str | None:
    for kind, method in KINDS.items():
        if re.search(rf"(?<![a-z])(?:{method.word})(?![a-z])", name, re.IGNORECASE):
            return kind
    return None


def _make_few_step(
    kind: str, name: str, scheduler: dict[str, Any], reason: str, *, guidance_scale: float | None = None
) -> FewStep:
    count, method = STEPS.search(name), KINDS[kind]
    pattern, with_guidance = GUIDANCE_BY_NAME.get(kind, (None, 1.0))
    if guidance_scale is None:
        guidance_scale = with_guidance if pattern and pattern.search(name) else 1.0
    is_ancestral = "Ancestral" in str(scheduler.get("_class_name", "Ancestral" if kind == TURBO else ""))
    entries = {
        "num_steps": int(count[1]) if count and int(count[1]) else DEFAULT_STEPS,
        "guidance_scale": guidance_scale,
        "sampler": "euler_a" if method.sampler == EULER and is_ancestral else method.sampler,
        "spacing": method.spacing,
    }
    return FewStep(kind, entries, reason)


def _published_name(path: Path) -> str:
    """Return the published name: that of the file, of the directory, or of the repository in the cache of the hub."""
    path = path.absolute()
    if path.parent.name == "snapshots":
        return path.parent.parent.name
    return path.stem if path.is_file() else path.name


def read_json_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in the file at ``path``; empty if it cannot be read or is not an object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
