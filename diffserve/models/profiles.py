"""Default settings of models, recognized by their files and names without torch: few-step methods, adapters and sizes.

Tensors rarely identify few-step (distilled) models, so the scheduler configuration and the published name decide (see
``KINDS``). The name of a directory in the cache of the model hub is that of the repository, two levels up.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from diffserve.api.errors import ModelLoadError
from diffserve.api.types import DiffusionParams
from diffserve.models.model_files import model_path
from diffserve.models.safetensors_header import read_header
from diffserve.models.vocabulary import EMBEDDED_DIRECTORY, knows_embedded_world

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
            f"LoRA {lora.name!r} is a few-step adapter ({few_step.kind}, by its name). Defaults for fields that the "
            f"request omits: {few_step.defaults}."
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
