"""Tensors on disk: safetensors files seen as one mapping, every key checked before it is used.

A tensor is read when it is asked for and not before, so
that a loader which converts tensor by tensor never holds the checkpoint twice.

``manifest-sha256.json`` in a directory of shipped weights maps files, by their path below it, to the sha256 of their
bytes, so that a flipped bit is found at load and not in pictures. Directories without one, as people have them, are
taken as they are. ``python -m diffserve.training.manifest`` writes them anew.
"""

from __future__ import annotations

import hashlib
import json
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
"""Half a second to read and hash; what ships is smaller."""

SETTLED_NS = 2_000_000_000
MANIFEST_FILE: Final = "manifest-sha256.json"
NOT_COVERED: Final = frozenset({MANIFEST_FILE, "fewest_steps.json", "world.json"})
"""The manifest itself, and what is told of the weights later: no network is made of it."""

OUR_OWN: Final = Path(__file__).resolve().parents[2]
"""The installed package."""


SCALES: Final = (".scale_weight", ".weight_scale")
"""Names, behind that of a layer, of the factor that its float8 weight is multiplied by. ComfyUI writes both kinds."""

SCALING: Final = re.compile(r"(?:.*\.)?(?:scaled_fp8|scale_input|input_scale|comfy_quant)")
"""Other tensors of such files, which calls in float8 need and the weights do not."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file.

    file   where it lies
    shape  as the file's header gives it
    key    its name in the file; empty where it is the name in the checkpoint
    scale  the tensor that it is multiplied by, a number or one for each row
    """

    file: Path
    shape: tuple[int, ...]
    key: str = ""
    scale: TensorEntry | None = None


@dataclass
class Checkpoint:
    """The tensors of one or several safetensors files, by name. ``files`` in the order they were opened."""

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

    def rename(self, names: Mapping[str, str]) -> None:
        """Call the tensor ``key`` by the name ``names[key]`` from now on; the others keep theirs."""
        self.entries = {
            names.get(key, key): replace(entry, key=entry.key or key) for key, entry in self.entries.items()
        }

    def refuse_ip_adapter(self) -> None:
        """ModelLoadError where these tensors are an IP-Adapter, or have one among them."""
        try:
            refuse_ip_adapter(self.entries)
        except InvalidLoRAError as error:
            raise ModelLoadError(f"{self.where()} {error}.") from None

    def read(self, key: str) -> torch.Tensor:
        """The tensor ``key`` as stored, still backed by the file: copy what you keep. A scaled one is float32."""
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
        """Whether the tensor ``key`` does, as its header says; none of its numbers are read."""
        return self._dtype(key).startswith(("F", "BF"))

    def _dtype(self, key: str) -> str:
        entry = self.entries[key]
        code: str = self._handles[entry.file].get_slice(entry.key or key).get_dtype()
        return code

    def where(self, key: str | None = None) -> str:
        """The file of ``key`` (or all files), for an error message."""
        if key is not None and key in self.entries:
            return str(self.entries[key].file)
        return ", ".join(str(file) for file in self.files)


def digest_files(files: Iterable[Path], cache: DiskCache | None = None) -> str:
    """sha256 over the digests of ``files`` in the order of their names, 64 hexadecimal digits.

    ``cache``: where the digest of a large file is kept, so that a start does not read gigabytes twice. It is believed
    while path, size, time of change and inode are the same; smaller files are read at every start.
    """
    total = hashlib.sha256()
    for file in sorted(files):
        total.update(bytes.fromhex(_digest_file(file, cache or DiskCache(None))))
    return total.hexdigest()


def _digest_file(file: Path, cache: DiskCache) -> str:
    key, known = str(file.resolve()), _identity(file)
    is_kept = known["size"] >= KEEP_FROM_BYTES
    kept = cache.read(DIGESTS, key) if is_kept else None
    if isinstance(kept, dict) and kept.get("file") == known and DIGEST.fullmatch(str(kept.get("sha256"))):
        return str(kept["sha256"])
    digest = _sha256(file)
    is_settled = time.time_ns() - known["mtime_ns"] > SETTLED_NS  # else it may change without a later time of change
    if is_kept and is_settled and _identity(file) == known:
        cache.write(DIGESTS, key, {"file": known, "sha256": digest})
    return digest


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _identity(file: Path) -> dict[str, int]:
    """What is another number when the file is another, as a rule."""
    found = file.stat()
    return {
        "size": found.st_size,
        "mtime_ns": found.st_mtime_ns,
        "ctime_ns": found.st_ctime_ns,
        "inode": found.st_ino,
    }


def write_manifest(directory: Path) -> Path:
    """Write the manifest over all files below ``directory`` that a network is made of."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.name not in NOT_COVERED)
    listed = {path.relative_to(directory).as_posix(): _sha256(path) for path in files}
    manifest = directory / MANIFEST_FILE
    manifest.write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")
    return manifest


def check_manifest(directory: Path) -> None:
    """Hash what the manifest of ``directory`` lists; nothing is done where there is none.

    Raises ModelLoadError naming the first file that is missing or is not the one that was shipped.
    """
    manifest = directory / MANIFEST_FILE
    if not manifest.is_file():
        return
    for name, expected in read_json(manifest).items():
        file = directory / name
        try:
            found = _sha256(file)
        except OSError as error:
            raise ModelLoadError(f"{file} cannot be read ({error.strerror}); {_way_out(directory)}.") from error
        if found != expected:
            raise ModelLoadError(
                f"{file} is damaged: its sha256 begins with {found[:12]}, that of the file that was shipped with "
                f"{str(expected)[:12]}; {_way_out(directory)}."
            )


def _way_out(directory: Path) -> str:
    if not directory.resolve().is_relative_to(OUR_OWN):
        return f"copy it anew, or, if it was changed on purpose, remove {directory / MANIFEST_FILE}"
    again = "install diffserve again (pip install --force-reinstall --no-deps diffserve)"
    return f"{again}, or, if it was changed on purpose, run python -m diffserve.training.manifest"
