"""Tensors on disk: safetensors files seen as one mapping, every key checked before it is used.

Pickle files are refused by name: reading one can run code. A tensor is read when it is asked for and not before, so
that a loader which converts tensor by tensor never holds the checkpoint twice.

``manifest-sha256.json`` in a directory of shipped weights maps files, by their path below it, to the sha256 of their
bytes, so that a flipped bit is found at load and not in pictures. Directories without one, as people have them, are
taken as they are. ``python -m diffserve.embedded.manifest`` writes them anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from diffserve.disk_cache import DiskCache
from diffserve.errors import ModelLoadError
from diffserve.loras import IP_ADAPTER

logger = logging.getLogger(__name__)

PICKLE_SUFFIXES = (".bin", ".ckpt", ".pt", ".pth", ".pkl")
VARIANT_OF_DTYPE: Final = {"float16": "fp16", "bfloat16": "bf16"}
VARIANTS: Final = ("", "fp16", "bf16", "non_ema")
"""Variants of weights in the order in which they are taken; others come last."""

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


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: where it lies and the shape its header gives."""

    file: Path
    shape: tuple[int, ...]


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
        return checkpoint

    def _add(self, file: Path) -> None:
        refuse_pickle(file)
        try:
            handle = safe_open(str(file), framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(
                f"{file} is not a complete safetensors file ({error}); it may have been cut short, download it again."
            ) from error
        self._handles[file] = handle
        self.files.append(file)
        self.metadata.update(handle.metadata() or {})
        for key in handle.keys():  # noqa: SIM118 - not a dict
            if key in self.entries:
                raise ModelLoadError(f"tensor {key!r} is in both {self.entries[key].file} and {file}; keep one.")
            self.entries[key] = TensorEntry(file, tuple(handle.get_slice(key).get_shape()))

    def refuse_ip_adapter(self) -> None:
        """ModelLoadError where these tensors are an IP-Adapter, or have one among them."""
        key = next(filter(IP_ADAPTER.match, self.entries), None)
        if key is not None:
            raise ModelLoadError(
                f"{self.where(key)} holds an IP-Adapter (its tensor {key!r} says so), which diffserve does not serve; "
                "leave it out, and start from a picture or take a ControlNet."
            )

    def read(self, key: str) -> torch.Tensor:
        """The tensor ``key`` as stored, still backed by the file: copy what you keep."""
        entry = self.entries[key]
        try:
            tensor: torch.Tensor = self._handles[entry.file].get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"tensor {key!r} of {entry.file} cannot be read ({error}).") from error
        return tensor

    def holds_floats(self, key: str) -> bool:
        """Whether the tensor ``key`` does, as its header says; none of its numbers are read."""
        code: str = self._handles[self.entries[key].file].get_slice(key).get_dtype()
        return code.startswith(("F", "BF"))

    def where(self, key: str | None = None) -> str:
        """The file of ``key`` (or all files), for an error message."""
        if key is not None and key in self.entries:
            return str(self.entries[key].file)
        return ", ".join(str(file) for file in self.files)


def refuse_pickle(file: Path) -> None:
    """Raise ModelLoadError when ``file`` is of a kind whose reading can run code."""
    if file.suffix in PICKLE_SUFFIXES:
        raise ModelLoadError(
            f"{file} is a pickle file, which can run code when it is read; diffserve loads safetensors only. "
            "Get the model's .safetensors files, or convert this one on a machine you can lose."
        )


def find_weights(directory: Path, stem: str, *, dtype: str) -> list[Path]:
    """The safetensors files of a component: ``stem`` plain or as a variant (fp16, bf16, non_ema, ...), maybe sharded.

    The variant of ``dtype`` goes first, then what is plain, and what was chosen is logged where there was a choice.
    Raises ModelLoadError naming the pickle file found instead, or the file that is missing.
    """
    found = _variants(directory, stem)
    if not found:
        for suffix in PICKLE_SUFFIXES:
            for pickle in sorted(directory.glob(f"*{suffix}")):
                refuse_pickle(pickle)
        plain = directory / f"{stem}.safetensors"
        raise ModelLoadError(f"{plain} is missing; a diffusers directory holds {stem}.safetensors there.")
    order = dict.fromkeys([VARIANT_OF_DTYPE.get(dtype, ""), *VARIANTS])
    chosen = next((name for name in order if name in found), min(found))
    if set(found) != {""}:
        others = ", ".join(found[name].name for name in sorted(found) if name != chosen)
        logger.info("of %s %s is read%s", directory, found[chosen].name, f", and not {others}" if others else "")
    file = found[chosen]
    return _shards(file) if file.suffix == ".json" else [file]


def _variants(directory: Path, stem: str) -> dict[str, Path]:
    """Variant ("": plain) -> its file, or the index of its shards as any release of diffusers names it."""
    word = r"(?:\.(\w+))?"
    one = re.compile(rf"{re.escape(stem)}{word}\.safetensors")
    index = re.compile(rf"{re.escape(stem)}{word}\.safetensors{word}\.index{word}\.json")
    found: dict[str, Path] = {}
    for pattern in (index, one):  # a whole file goes before shards
        for file in sorted(directory.glob(f"{stem}*")):
            match = pattern.fullmatch(file.name)
            if match and file.is_file():
                found["".join(filter(None, match.groups()))] = file
    return found


def _shards(index: Path) -> list[Path]:
    content = read_json(index)
    names = content.get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ModelLoadError(f"{index} has no weight_map from tensor names to file names.")
    files = []
    for name in dict.fromkeys(names.values()):
        file = index.parent / name
        if Path(name).name != name:
            raise ModelLoadError(f"{index} points at {name!r}; shards lie beside their index.")
        refuse_pickle(file)
        if not file.is_file():
            raise ModelLoadError(f"{file} is missing; {index.name} names it.")
        files.append(file)
    return files


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in ``file``. Raises ModelLoadError when it is absent or something else."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelLoadError(f"{file} is missing or cannot be read ({error.strerror}).") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file} is not JSON ({error}).") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file} should hold a JSON object, not {type(content).__name__}.")
    return content


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
    return f"{again}, or, if it was changed on purpose, run python -m diffserve.embedded.manifest"
