"""Reading and validation of safetensors headers, without torch and without the ``safetensors`` library."""

from __future__ import annotations

import json
import math
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

MAX_HEADER_BYTES: Final = 100_000_000
FILES_KNOWN: Final = 4096
METADATA: Final = "__metadata__"
GIT_LFS: Final = b"version https://git-lfs.github.com/spec/"

_BITS_PER_NUMBER: Final = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
}


class _InvalidFileError(Exception):
    """Error of an invalid file; the message completes a sentence whose subject is the file."""


def read_header(path: Path) -> dict[str, Any]:
    """Return the header of a safetensors file: tensor entries by name; empty if the file cannot be read."""
    try:
        with path.open("rb") as file:
            (num_bytes,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(num_bytes, MAX_HEADER_BYTES)))
    except (OSError, ValueError, RecursionError, struct.error):
        return {}
    return header if isinstance(header, dict) else {}


def file_problem(path: Path, max_header_bytes: int = MAX_HEADER_BYTES) -> str:
    """Return why ``path`` is not a complete safetensors file, as the end of a sentence about it; "" if it is valid.

    The result is cached until the size or modification time of the file changes. Larger headers than
    ``max_header_bytes`` are a problem, too, as parsing them would block the server for seconds.
    """
    try:
        status = path.stat()
        return _file_problem(path, status.st_size, status.st_mtime_ns, max_header_bytes)
    except OSError as error:
        return f"cannot be read ({error.strerror})"


@lru_cache(FILES_KNOWN)
def _file_problem(path: Path, num_bytes: int, _changed_ns: int, max_header_bytes: int) -> str:
    try:
        with path.open("rb") as file:
            start = file.read(len(GIT_LFS))
            if start == GIT_LFS:
                raise _InvalidFileError("is a Git LFS pointer, not the file itself; fetch it with: git lfs pull")
            header_bytes = int.from_bytes(start[:8], "little")
            if num_bytes >= 8 and header_bytes > MAX_HEADER_BYTES:
                raise _InvalidFileError("is not a safetensors file; download it again")
            _check_size(num_bytes, 8 + header_bytes)
            if header_bytes > max_header_bytes:
                limit = f"at most {max_header_bytes:,} are allowed"
                raise _InvalidFileError(f"has a header of {header_bytes:,} bytes; {limit}")
            file.seek(8)
            header = json.loads(file.read(header_bytes))
        _check_header(header, num_bytes - 8 - header_bytes)
    except _InvalidFileError as error:
        return str(error)
    except (ValueError, RecursionError):
        return "is not a safetensors file, its header is not JSON; download it again"
    return ""


def _check_size(num_bytes: int, expected: int) -> None:
    if num_bytes < max(8, expected):
        message = f"is not a complete safetensors file: it has {num_bytes} of at least {max(8, expected)} bytes"
        raise _InvalidFileError(f"{message}; download it again, or wait until it is written")


def _check_header(header: object, data_bytes: int) -> None:
    """Check a header as the ``safetensors`` library does: data types, and tensors that fill the data without gaps."""
    if not isinstance(header, dict):
        raise _InvalidFileError("is not a safetensors file, its header is not a JSON object; download it again")
    metadata = header.pop(METADATA, None)
    if metadata is not None and not isinstance(metadata, dict):
        raise _InvalidFileError(f"has {METADATA} that is not a JSON object; save it again with metadata of text only")
    for name, value in (metadata or {}).items():
        if not isinstance(value, str):
            message = f"has a {METADATA} value that is not text ({name[:40]!r}: {json.dumps(value)[:40]})"
            raise _InvalidFileError(f"{message}; safetensors takes text only, save it again with text or without it")
    if not header:
        raise _InvalidFileError("holds no tensors")
    try:
        unknown = {entry["dtype"] for entry in header.values()} - _BITS_PER_NUMBER.keys()
        ranges = sorted((*entry["data_offsets"], entry["dtype"], entry["shape"]) for entry in header.values())
        ends = [0, *(end for _, end, _, _ in ranges)]
        is_valid = bool(unknown) or all(
            begin == last and 8 * (end - begin) == math.prod(shape) * _BITS_PER_NUMBER[dtype] >= 0
            for (begin, end, dtype, shape), last in zip(ranges, ends, strict=False)
        )
    except (LookupError, TypeError, ValueError):
        is_valid = False
    if not is_valid:
        raise _InvalidFileError("is damaged: its header does not fit its tensors; download it again")
    if unknown:
        raise _InvalidFileError(f"has tensors of type {min(unknown)!r}, which is not a type of safetensors")
    if ends[-1] > data_bytes:
        message = f"is not a complete safetensors file: it has {data_bytes} of {ends[-1]} bytes of tensors"
        raise _InvalidFileError(f"{message}; download it again, or wait until it is written")
    if ends[-1] < data_bytes:
        raise _InvalidFileError(f"has {data_bytes - ends[-1]} bytes after its tensors; download it again")
