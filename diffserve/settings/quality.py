"""Quality words of the page, the API and the command line, and the settings that each stands for.

With a quality profile of the model (see :mod:`diffserve.settings.quality_profile`), a word stands for a measured point:
sampler, steps and savings. Without one it stands for a share of the model's default steps. OpenAI's words (low, medium,
high, xhigh, hd) map to the nearest word here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from diffserve.api.errors import ConfigError, InvalidRequest
from diffserve.api.types import DiffusionParams, GenerationRequest, ModelInfo
from diffserve.models.learned_samplers import LearnedSamplers
from diffserve.models.profiles import begin_with_loras
from diffserve.settings.layers import AUTO_PROFILE, profile_path
from diffserve.settings.quality_profile import QualityPoint, QualityPoints, QualityProfile, read_profile
from schedulers.learned import is_learned

SHARES: Final = {"draft": 0.4, "standard": 1.0, "fine": 2.0}
"""Number of steps by quality without a profile, as a multiple of the model's default."""

AUTO: Final = "auto"
QUALITIES: Final = QualityPoints.__struct_fields__
SYNONYMS: Final = {"low": "draft", "medium": "standard", "high": "fine", "hd": "fine", "xhigh": "fine"}

SOLVER: Final = ("sampler", "num_steps", "sigma_schedule", "spacing", "eta", "sigma_min", "sigma_max")
"""Fields of a request that choose sampler and steps; if one is set, the point of a profile does not apply."""

SAVINGS: Final = ("cache_interval", "guidance_interval")
"""Fields of a point that a request overrides with any value but the default."""


def is_quality(word: str) -> bool:
    """Return whether ``word`` is a known quality."""
    return word in QUALITIES or word in SYNONYMS


def find_profile(info: ModelInfo) -> tuple[QualityProfile | None, str]:
    """Return the quality profile of a model, or None and the reason why the configured one is not used.

    The reason is empty if no profile is configured and none is shipped for these weights.
    """
    path = profile_path(info.quality_profile, info.model_id)
    if path is None:
        return None, ""
    try:
        profile = read_profile(path)
    except ConfigError as error:
        return None, f"{error.message} Shares of the default steps are used."
    if profile.digest.startswith(info.digest):
        return profile, ""
    if info.quality_profile == AUTO_PROFILE:  # the shipped file of another model with the same name
        return None, ""
    return None, (
        f"the quality profile {Path(info.quality_profile).name} was measured with {profile.model} "
        f"[{profile.digest[:10]}], not with {info.model_id} [{info.digest[:10]}], so shares of the default steps are "
        "used; make one with diffserve calibrate."
    )


def quality_points(info: ModelInfo) -> dict[str, QualityPoint]:
    """Return the point of each quality word; empty without a profile."""
    profile, _ = find_profile(info)
    return {} if profile is None else {name: getattr(profile.points, name) for name in QUALITIES}


def quality_steps(info: ModelInfo) -> dict[str, int]:
    """Return the number of steps of each quality by cost; without a profile, ``SHARES`` of the default."""
    points = quality_points(info)
    if points:
        return {name: points[name].num_steps for name in sorted(points, key=lambda name: points[name].seconds)}
    steps = {name: round(share * info.default_num_steps) for name, share in SHARES.items()}
    return {name: min(max(1, count), info.train_timesteps) for name, count in steps.items()}


def share_of_steps(word: str, info: ModelInfo) -> int:
    """Return the number of steps of the quality ``word`` without a profile; max is as fine.

    Raises:
        KeyError: :func:`is_quality` does not know ``word``.
    """
    if word == AUTO:
        return info.default_num_steps
    shares = {name: round(share * info.default_num_steps) for name, share in SHARES.items()}
    count = shares["fine" if word == "max" else SYNONYMS.get(word, word)]
    return min(max(1, count), info.train_timesteps)


def with_quality(
    request: GenerationRequest, word: str | None, info: ModelInfo
) -> tuple[GenerationRequest, tuple[str, ...]]:
    """Return ``request`` with the settings of a quality word, and warnings.

    The point of the model's profile applies if the request chooses neither sampler nor steps. Otherwise, and without a
    profile, the word sets only the number of steps, if the request does not.

    Args:
        request: The request; fields that it sets are kept.
        word: The quality; None: the request is returned unchanged.
        info: The model.
    """
    if word is None:
        return request, ()
    params = request.diffusion
    chooses_solver = any(getattr(params, name) is not None for name in SOLVER)
    is_few_step = bool(begin_with_loras(params)[1])
    profile, reason = (None, "") if chooses_solver or is_few_step else find_profile(info)
    if profile is not None:
        changed = _at_point(_point(profile, SYNONYMS.get(word, word), request, info), params, info)
    elif word == AUTO or params.num_steps is not None or is_learned(params.sampler):
        changed = params
    else:
        changed = msgspec.structs.replace(params, num_steps=share_of_steps(word, info))
    warnings = (f"quality is {word!r}; {reason}",) if reason else ()
    return msgspec.structs.replace(request, diffusion=changed), warnings


def _point(profile: QualityProfile, name: str, request: GenerationRequest, info: ModelInfo) -> QualityPoint:
    """Return the point of ``name`` that the request can use; a learned sampler runs whole images as it was learned."""
    point: QualityPoint = getattr(profile.points, name)
    if profile.built_in is None or not is_learned(point.sampler):
        return point
    params = request.diffusion
    scale = info.default_guidance_scale if params.guidance_scale is None else params.guidance_scale
    skips = request.init_image is not None and params.strength < 1.0
    skips |= params.switch_at is not None or params.similarity_threshold is not None
    if skips or scale != profile.guidance_scale:
        return getattr(profile.built_in, name)  # type: ignore[no-any-return]
    try:
        LearnedSamplers.of(info).find(point.sampler)
    except InvalidRequest:  # its file was removed
        return getattr(profile.built_in, name)  # type: ignore[no-any-return]
    return point


def _at_point(point: QualityPoint, params: DiffusionParams, info: ModelInfo) -> DiffusionParams:
    fields, defaults = point.params, DiffusionParams()
    for name in SAVINGS:
        if getattr(params, name) != getattr(defaults, name):
            del fields[name]
    if info.shallow_share is None:  # this model cannot run its shallow part alone
        fields.pop("cache_interval", None)
    return msgspec.structs.replace(params, **fields)
