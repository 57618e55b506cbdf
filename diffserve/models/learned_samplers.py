"""Learned samplers in folders, without torch: which ones there are, and which of them fit a model."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

from diffserve.api.errors import InvalidRequest
from diffserve.api.types import DiffusionParams, ModelInfo
from diffserve.models.model_files import MAX_NAMES_IN_ERROR, find_below, is_valid_name
from diffserve.models.safetensors_header import FILES_KNOWN
from schedulers.errors import InvalidTable
from schedulers.learned import LEARNED, MAX_FILE_BYTES, LearnedSampler, is_learned

SUFFIX: Final = ".json"

OWN_SAMPLERS: Final = "samplers"
"""Folder in a model's directory with its own learned samplers."""


class LearnedFile(NamedTuple):
    """A learned sampler and the SHA-256 of its file."""

    sampler: LearnedSampler
    digest: str


class LearnedSamplers:
    """Folders of learned samplers, read again at each call; the first of several files with the same name is used.

    Args:
        paths: The folders.
        model_digest: Beginning of the digest of the model's weights; "" if it is not known, then every sampler fits.
        model_id: Name of the model, for messages.
    """

    def __init__(self, paths: Iterable[str], model_digest: str = "", model_id: str = "the model") -> None:
        self.paths = tuple(Path(path).expanduser() for path in paths)
        self._model_digest = model_digest
        self._model_id = model_id

    @classmethod
    def of(cls, info: ModelInfo) -> LearnedSamplers:
        """Return the learned samplers of a model."""
        return cls(info.sampler_dirs, info.digest, info.model_id)

    def usable(self) -> dict[str, LearnedSampler]:
        """Return the samplers that fit the model, by their names in requests."""
        samplers = {}
        for name, path in self._files().items():
            try:
                samplers[LEARNED + name] = self._read(name, path).sampler
            except InvalidRequest:
                continue
        return samplers

    def steps_of(self, samplers: Iterable[str]) -> dict[str, int]:
        """Return the steps of the learned samplers among ``samplers``, which are names in requests.

        Raises:
            InvalidRequest: A learned sampler cannot be used.
        """
        return {sampler: self.find(sampler).sampler.num_rows for sampler in samplers if is_learned(sampler)}

    def find(self, sampler: str) -> LearnedFile:
        """Return the learned sampler with the name ``sampler`` in requests.

        Raises:
            InvalidRequest: There is none, its file is malformed, or it was learned for another model.
        """
        name = sampler.removeprefix(LEARNED)
        files = self._files()
        if name in files:
            return self._read(name, files[name])
        usable = list(self.usable())
        listed = ", ".join(usable[:MAX_NAMES_IN_ERROR]) + ", ..." * (len(usable) > MAX_NAMES_IN_ERROR)
        hint = f"known are {listed}." if usable else "this model has none: start the server with --sampler-dir DIR."
        message = f"sampler is {sampler[:80]!r}; there is no such learned sampler: {hint}"
        raise InvalidRequest(message, param="sampler", code="unknown_sampler")

    def _read(self, name: str, path: Path) -> LearnedFile:
        def refused(reason: str) -> InvalidRequest:
            return InvalidRequest(f"sampler is {LEARNED + name!r}; {reason}", param="sampler")

        try:
            status = path.stat()
            file = _read_file(name, path, status.st_size, status.st_mtime_ns)
        except OSError as error:
            raise refused(f"its file cannot be read ({error.strerror}).") from None
        except (InvalidTable, UnicodeDecodeError) as error:
            raise refused(f"its file {path.name} cannot be used: {error}") from None
        if not file.sampler.model_digest.startswith(self._model_digest):
            raise refused(
                f"it was learned for {file.sampler.model} [{file.sampler.model_digest[:10]}], not for {self._model_id} "
                f"[{self._model_digest[:10]}]: search one for this model with diffserve sweep --search."
            )
        return file

    def _files(self) -> dict[str, Path]:
        """Return the files with valid names, by name, sorted."""
        below: dict[str, Path] = {}
        for folder in reversed(self.paths):
            below |= find_below(folder, _is_file)
        names = {file.removesuffix(SUFFIX): path for file, path in sorted(below.items())}
        return {name: path for name, path in names.items() if is_valid_name(name)}


@lru_cache(FILES_KNOWN)
def _read_file(name: str, path: Path, num_bytes: int, _changed_ns: int) -> LearnedFile:
    if num_bytes > MAX_FILE_BYTES:
        raise InvalidTable(f"it has {num_bytes} bytes; at most {MAX_FILE_BYTES} are allowed.")
    content = path.read_bytes()
    sampler = replace(LearnedSampler.from_json(content.decode("utf-8-sig")), name=name)
    return LearnedFile(sampler, hashlib.sha256(content).hexdigest())


def _is_file(path: Path) -> bool:
    return path.name.endswith(SUFFIX) and not os.path.isdir(path)


def num_steps_of(params: DiffusionParams, info: ModelInfo) -> int:
    """Return the steps of a request: those it gives, or else those of its learned sampler or of the model.

    Raises:
        InvalidRequest: The learned sampler cannot be used, or has another number of steps.
    """
    if not is_learned(params.sampler):
        return info.default_num_steps if params.num_steps is None else params.num_steps
    num_rows = LearnedSamplers.of(info).find(params.sampler).sampler.num_rows
    if params.num_steps not in (None, num_rows):
        message = (
            f"num_steps is {params.num_steps}; sampler {params.sampler!r} has {num_rows} steps: give {num_rows}, or "
            "leave the steps out."
        )
        raise InvalidRequest(message, param="num_inference_steps")
    return num_rows


NOT_TAKEN: Final = ("spacing", "sigma_schedule", "eta", "sigma_min", "sigma_max")
"""Fields that have no effect on a learned sampler."""


def check_learned(
    params: DiffusionParams, sampler: LearnedSampler, strength: float, guidance_scale: float
) -> tuple[str, ...]:
    """Check a request with a learned sampler, and return warnings.

    Raises:
        InvalidRequest: The request skips steps, or hands some of them to a refiner.
    """
    skipping = {
        "strength": strength if strength < 1.0 else None,
        "switch_at": params.switch_at,
        "similarity_threshold": params.similarity_threshold,
    }
    for name, value in skipping.items():
        if value is not None:
            message = (
                f"{name} is {value:g}; sampler {sampler.sampler!r} was learned for all its steps from noise and one "
                "network: leave it out, or choose another sampler."
            )
            raise InvalidRequest(message, param=name)
    warnings = tuple(
        f"{name} has no effect with sampler {sampler.sampler!r}."
        for name in NOT_TAKEN
        if getattr(params, name) not in (None, 0.0)
    )
    if guidance_scale != sampler.guidance_scale:
        warnings += (
            f"sampler {sampler.sampler!r} was learned at guidance scale {sampler.guidance_scale:g}; at "
            f"{guidance_scale:g} its images may be less accurate.",
        )
    return warnings
