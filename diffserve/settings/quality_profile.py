"""Quality profiles: TOML files in which ``diffserve calibrate`` records what the quality words mean for one model."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import msgspec

from diffserve.api.errors import ConfigError, InvalidRequest
from diffserve.api.fields import FULL_INTERVAL
from diffserve.api.types import DiffusionParams
from schedulers import resolve_sampler
from schedulers.learned import is_learned

MAX_FILE_BYTES: Final = 100_000
MAX_SHOWN_CHARS: Final = 60

_PLACE = re.compile(r"(?P<reason>.*) - at `\$\.?(?P<key>[^`]*)`", re.DOTALL)
"""Message of msgspec with the place in the document."""


class QualityPoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that a quality word stands for, and what was measured with them.

    Attributes:
        sampler: Sampler name with an optional sigma schedule, or "learned:NAME".
        num_steps: Denoising steps.
        cache_interval: DeepCache interval; 1: off.
        guidance_interval: Part of the steps with guidance, as fractions.
        seconds: Seconds of an image generated alone.
        psnr_db: Mean PSNR to the converged image of the same noise.
        exact: Share of images that show exactly what their prompts say; None: not measured.

    Raises:
        ValueError: A value is out of range, or the sampler is unknown.
    """

    sampler: str
    num_steps: int
    cache_interval: int = 1
    guidance_interval: tuple[float, float] = FULL_INTERVAL
    seconds: float
    psnr_db: float
    exact: float | None = None

    def __post_init__(self) -> None:
        if not is_learned(self.sampler):
            resolve_sampler(self.sampler)
        try:
            DiffusionParams(**self.params)
        except InvalidRequest as error:
            raise ValueError(error.message) from None

    @property
    def params(self) -> dict[str, Any]:
        """The fields of :class:`DiffusionParams` that the point sets."""
        names = ("sampler", "num_steps", "cache_interval", "guidance_interval")
        return {name: getattr(self, name) for name in names}


class QualityPoints(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The point of each quality word."""

    draft: QualityPoint
    standard: QualityPoint
    fine: QualityPoint
    max: QualityPoint
    auto: QualityPoint


class QualityProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of each quality name for one model.

    Attributes:
        model: Name of the model.
        digest: Beginning of the digest of its weights; the profile applies to these weights only.
        guidance_scale: Guidance scale of the measurements.
        measure: How ``auto`` was chosen.
        measured_on: Machine, precision, version and date.
        points: The points of requests that start from noise.
        built_in: Points with built-in samplers only, for requests that learned samplers refuse; None: as ``points``.

    Raises:
        ValueError: ``built_in`` has a learned sampler.
    """

    model: str
    digest: str
    guidance_scale: float
    measure: str
    measured_on: str
    points: QualityPoints
    built_in: QualityPoints | None = None

    def __post_init__(self) -> None:
        for name in QualityPoints.__struct_fields__ if self.built_in is not None else ():
            sampler = getattr(self.built_in, name).sampler
            if is_learned(sampler):
                raise ValueError(f"built_in.{name}.sampler is {sampler!r}; give a sampler that is built in")

    def to_toml(self) -> str:
        """Return the content of the file."""
        return "\n".join(_lines(self)) + "\n"


def read_profile(path: Path) -> QualityProfile:
    """Read a quality profile; the result is kept until the file changes.

    Raises:
        ConfigError: The file cannot be read, or a key or value of it is wrong.
    """
    try:
        status = path.stat()
        if status.st_size > MAX_FILE_BYTES:
            raise ConfigError(
                f"{path} has {status.st_size} bytes; a quality profile has at most {MAX_FILE_BYTES}: name a file that "
                "diffserve calibrate wrote.",
                param="quality_profile",
            )
        return _read(path, status.st_size, status.st_mtime_ns)
    except OSError as error:
        message = f"cannot read the quality profile {str(path)!r}: {error.strerror}; make it with diffserve calibrate."
        raise ConfigError(message, param="quality_profile") from None


@lru_cache(16)
def _read(path: Path, _num_bytes: int, _changed_ns: int) -> QualityProfile:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(f"{path} is not valid TOML: {reason}.", param="quality_profile") from None
    try:
        return msgspec.convert(tables, QualityProfile)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {_explain(str(error), tables)}.", param="quality_profile") from None


def _explain(message: str, tables: Any) -> str:
    """Return the message of msgspec with the key and, for a single value, the value that is wrong."""
    place = _PLACE.fullmatch(message)
    reason, key = (place["reason"], place["key"]) if place else (message, "")
    reason = reason[0].lower() + reason[1:].rstrip(".")
    value = tables
    for part in re.findall(r"\w+", key):
        value = value[int(part)] if isinstance(value, list) else value.get(part)
    if isinstance(value, dict):
        return f"{key}: {reason}" if key else reason
    shown = repr(value)
    return f"{key} is {shown[:MAX_SHOWN_CHARS]}; {reason}"


def _lines(profile: QualityProfile) -> Iterator[str]:
    yield f"# What the quality words mean for {profile.model}. Written by diffserve calibrate; do not edit."
    yield "# seconds: one image alone. psnr_db: to the converged image. exact: share of images as their prompts say."
    for name in ("model", "digest", "guidance_scale", "measure", "measured_on"):
        yield f"{name} = {_value(getattr(profile, name))}"
    for table in ("points", "built_in"):
        points = getattr(profile, table)
        for name in QualityPoints.__struct_fields__ if points is not None else ():
            yield f"\n[{table}.{name}]"
            for key, value in msgspec.structs.asdict(getattr(points, name)).items():
                if value is not None:
                    yield f"{key} = {_value(value)}"


def _value(value: str | int | float | tuple[float, ...]) -> str:
    """Return ``value`` in TOML; JSON's strings, numbers and lists are valid in it."""
    return json.dumps(value, ensure_ascii=False)
