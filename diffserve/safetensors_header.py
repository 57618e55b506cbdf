"""What a safetensors file says before its numbers: the tensors that it holds. Read without any library. No torch."""

from __future__ import annotations

import json
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

MAX_HEADER_BYTES: Final = 100_000_000
FILES_KNOWN: Final = 4096


def read_header(path: Path) -> dict[str, Any]:
    """The tensors of the file by name; empty where it cannot be read."""
    try:
        with path.open("rb") as file:
            (num_bytes,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(num_bytes, MAX_HEADER_BYTES)))
    except (OSError, ValueError, RecursionError, struct.error):
        return {}
    return header if isinstance(header, dict) else {}


def is_whole(path: Path) -> bool:
    """Whether it is a safetensors file from its first byte to its last; a file is read once for as long as it stays."""
    try:
        status = path.stat()
        return _is_whole(path, status.st_size, status.st_mtime_ns)
    except OSError:
        return False


@lru_cache(FILES_KNOWN)
def _is_whole(path: Path, num_bytes: int, _changed_ns: int) -> bool:
    header = read_header(path)
    try:
        ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
        with path.open("rb") as file:
            return bool(ends) and 8 + struct.unpack("<Q", file.read(8))[0] + max(ends) == num_bytes
    except (OSError, LookupError, TypeError, struct.error):
        return False
