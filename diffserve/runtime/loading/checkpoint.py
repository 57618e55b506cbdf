"""Tensors of safetensors files as one mapping, read one at a time, and the digests of such files.

``manifest-sha256.json`` in a directory of shipped weights maps files to their sha256, so that damage is found at load.
Directories without one are accepted. ``python -m diffserve.training.manifest`` writes it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from diffserve.api.errors import ModelLoadError
from diffserve.disk_cache import DiskCache
from diffserve.models.lora_layers import InvalidLoRAError, refuse_ip_adapter
from diffserve.models.model_files import read_json, refuse_pickle
from diffserve.models.safetensors_header import file_problem

DIGESTS = "digests"
DIGEST = re.compile("[0-9a-f]{64}")
KEEP_FROM_BYTES = 1 << 26
"""Digests of files from this size on are cached: they take half a second or more. Shipped files are smaller."""

SETTLED_NS = 2_000_000_000
MANIFEST_FILE: Final = "manifest-sha256.json"
NOT_COVERED: Final = frozenset({MANIFEST_FILE, "fewest_steps.json", "world.json"})
"""The manifest itself, and files about the weights that are written later: no network is made of them."""

OUR_OWN: Final = Path(__file__).resolve().parents[2]
"""The folder of the installed package."""


SCALES: Final = (".scale_weight", ".weight_scale")
"""Suffixes, after a layer's name, of the factor of its float8 weight. ComfyUI writes both kinds."""

SCALING: Final = re.compile(r"(?:.*\.)?(?:scaled_fp8|scale_input|input_scale|comfy_quant)")
"""Other tensors of such files, used by float8 arithmetic only."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file.

    Attributes:
        file: The file.
        shape: Shape in the file's header.
        key: Name in the file; empty if it is the name in the checkpoint.
        scale: Factor of the tensor: one number, or one for each row.
    """

    file: Path
    shape: tuple[int, ...]
    key: str = ""
    scale: TensorEntry | None = None


@dataclass
class Checkpoint:
    """The tensors of one or several safetensors files, by name; ``files`` in the order in which they were opened."""

    entries: dict[str, TensorEntry] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)
    _handles: dict[Path, Any] = field(default_factory=dict, repr=False)

    def __contains__(self, key: object) -> bool:
        return key in self.entries

    @classmethod
    def open(cls, files: Iterable[Path]) -> Checkpoint:
        """Read the headers of ``files``. Raises ModelLoadError for a pickle, a truncated or a foreign file."""
        checkpoint = cls()
        for file in files:
            checkpoint._add(file)
        checkpoint._take_scales()
        return checkpoint

    def _add(self, file: Path) -> None:
        refuse_pickle(file)
        try:
            handle = safe_open(str(file), framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            problem = file_problem(file) or f"cannot be read ({str(error).splitlines()[0]})"
            raise ModelLoadError(f"{file} {problem}.") from error
        self._handles[file] = handle
        self.files.append(file)
        self.metadata.update(handle.metadata() or {})
        for key in handle.keys():  # noqa: SIM118 - not a dict
            if key in self.entries:
                raise ModelLoadError(f"tensor {key!r} is in both {self.entries[key].file} and {file}; keep one.")
            self.entries[key] = TensorEntry(file, tuple(handle.get_slice(key).get_shape()))

    def _take_scales(self) -> None:
        """Attach the scales of float8 weights to them, and drop the other tensors that only float8 calls need."""
        scaled = {
            key: f"{key.removesuffix(suffix)}.weight"
            for key in self.entries
            for suffix in SCALES
            if key.endswith(suffix)
        }
        for key, weight in scaled.items():
            if weight in self.entries and self._dtype(weight).startswith("F8"):
                scale = replace(self.entries.pop(key), key=key)
                self.entries[weight] = replace(self.entries[weight], key=weight, scale=scale)
        if any(entry.scale for entry in self.entries.values()):
            for key in [key for key in self.entries if SCALING.fullmatch(key)]:
                del self.entries[key]

    @property
    def num_parameters(self) -> int:
        """Number of parameters."""
        return sum(math.prod(entry.shape) for entry in self.entries.values())

    def rename(self, names: Mapping[str, str]) -> None:
        """Rename the tensor ``key`` to ``names[key]``; other tensors keep their names."""
        self.entries = {
            names.get(key, key): replace(entry, key=entry.key or key) for key, entry in self.entries.items()
        }

    def refuse_ip_adapter(self) -> None:
        """Raise ModelLoadError if these tensors are, or include, an IP-Adapter."""
        try:
            refuse_ip_adapter(self.entries)
        except InvalidLoRAError as error:
            raise ModelLoadError(f"{self.where()} {error}.") from None

    def read(self, key: str) -> torch.Tensor:
        """Return the tensor ``key`` as stored, backed by the file, so copy it to keep it. A scaled one is float32."""
        entry = self.entries[key]
        stored = self._stored(entry, entry.key or key)
        if entry.scale is None:
            return stored
        scale = self._stored(entry.scale, entry.scale.key).float()
        if scale.numel() not in (1, stored.shape[0]):
            raise ModelLoadError(
                f"tensor {entry.scale.key!r} of {entry.scale.file} has shape {list(scale.shape)}; the scale of a "
                f"weight {list(stored.shape)} is one number or one for each row."
            )
        return stored.float() * scale.reshape(-1, *[1] * (stored.ndim - 1))

    def _stored(self, entry: TensorEntry, key: str) -> torch.Tensor:
        try:
            tensor: torch.Tensor = self._handles[entry.file].get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"tensor {key!r} of {entry.file} cannot be read ({error}).") from error
        return tensor

    def holds_floats(self, key: str) -> bool:
        """Return whether the tensor ``key`` is of a float dtype, from the header."""
        return self._dtype(key).startswith(("F", "BF"))

    def _dtype(self, key: str) -> str:
        entry = self.entries[key]
        code: str = self._handles[entry.file].get_slice(entry.key or key).get_dtype()
        return code

    def where(self, key: str | None = None) -> str:
        """Return the file of ``key`` (or all files), for an error message."""
        if key is not None and key in self.entries:
            return str(self.entries[key].file)
        return ", ".join(str(file) for file in self.files)


def digest_files(files: Iterable[Path], cache: DiskCache | None = None) -> str:
    """Return the sha256 of the digests of ``files``, sorted by name, as 64 hexadecimal digits.

    ``cache`` stores digests of large files. An entry is valid while path, size, times and inode stay the same; small
    files are read at every start.
    """
    total = hashlib.sha256()
    for file in sorted(files):
        total.update(bytes.fromhex(_digest_file(file, cache or DiskCache(None))))
    return total.hexdigest()


def _digest_file(file: Path, cache: DiskCache) -> str:
    key, identity = str(file.resolve()), _identity(file)
    is_cached = identity["size"] >= KEEP_FROM_BYTES
    entry = cache.read(DIGESTS, key) if is_cached else None
    if isinstance(entry, dict) and entry.get("file") == identity and DIGEST.fullmatch(str(entry.get("sha256"))):
        return str(entry["sha256"])
    digest = _sha256(file)
    is_settled = (
        time.time_ns() - identity["mtime_ns"] > SETTLED_NS
    )  # a newer file may change within one tick of its time stamp
    if is_cached and is_settled and _identity(file) == identity:
        cache.write(DIGESTS, key, {"file": identity, "sha256": digest})
    return digest


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _identity(file: Path) -> dict[str, int]:
    """Return size, times and inode, which change if the file is replaced."""
    stat = file.stat()
    return {
        "size": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
        "ctime_ns": stat.st_ctime_ns,
        "inode": stat.st_ino,
    }


def write_manifest(directory: Path) -> Path:
    """Write the manifest of all files below ``directory`` that belong to a network."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.name not in NOT_COVERED)
    listed = {path.relative_to(directory).as_posix(): _sha256(path) for path in files}
    manifest = directory / MANIFEST_FILE
    manifest.write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")
    return manifest


def check_manifest(directory: Path) -> None:
    """Verify the files in the manifest of ``directory``, if there is one.

    Raises ModelLoadError naming the first file that is missing or differs.
    """
    manifest = directory / MANIFEST_FILE
    if not manifest.is_file():
        return
    for name, expected in read_json(manifest).items():
        file = directory / name
        try:
            actual = _sha256(file)
        except OSError as error:
            raise ModelLoadError(f"{file} cannot be read ({error.strerror}); {_way_out(directory)}.") from error
        if actual != expected:
            raise ModelLoadError(
                f"{file} is damaged: its sha256 begins with {actual[:12]}, that of the file that was shipped with "
                f"{str(expected)[:12]}; {_way_out(directory)}."
            )


def _way_out(directory: Path) -> str:
    if not directory.resolve().is_relative_to(OUR_OWN):
        return f"copy it again, or, if it was changed on purpose, remove {directory / MANIFEST_FILE}"
    again = "install diffserve again (pip install --force-reinstall --no-deps diffserve)"
    return f"{again}, or, if it was changed on purpose, run python -m diffserve.training.manifest"
