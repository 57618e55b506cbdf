"""The output folder of a sweep: permission checks, setup comparison, locking and atomic writes.

All checks run before anything is written. ``parts/setup.json`` stores the setup of a sweep. The running process locks
``parts/lock``, and the operating system releases the lock when the process ends.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import msgspec

from diffserve.api.errors import InvalidRequest

PARTS = "parts"
SETUP, LOCK = "setup.json", "lock"

DIGEST_DIGITS = 12
MAX_SHOWN_CHARS = 24
NAMES = {
    "is_deterministic": "deterministic mode",
    "is_checked": "checking of prompts",
    "num_seeds": "seeds of each prompt",
    "first_seed": "first seed",
    "reference_steps": "reference steps",
}
"""Display names of setup fields for error messages."""


def refuse_folder(folder: Path, results: Iterable[str]) -> None:
    """Check that a sweep can write to ``folder``, without creating anything.

    An existing folder must belong to a sweep or contain none of ``results``. For a folder that does not exist yet, the
    nearest existing parent must be writable.

    Raises:
        InvalidRequest: The folder cannot be used.
    """
    if folder.is_dir() and not (folder / PARTS).is_dir():
        for name in results:
            if (folder / name).exists():
                message = f"{str(folder)!r} holds a {name} that no sweep wrote; choose another folder."
                raise InvalidRequest(message, param="output")
    existing = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    with guard(folder), tempfile.TemporaryFile(dir=existing):
        pass


def refuse_other_sweep(folder: Path, setup: Mapping[str, Any]) -> None:
    """Check that ``folder`` does not hold a sweep with a different setup.

    Only fields that both setups have are compared, so that a partial setup can be checked early. Samplers, steps and
    guidance are not part of a setup: adding more of them continues the existing sweep.

    Raises:
        InvalidRequest: The folder holds another sweep.
    """
    parts = folder / PARTS
    try:
        stored = msgspec.json.decode((parts / SETUP).read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        stored = {}
    except (OSError, msgspec.DecodeError):
        raise _other(folder, "that cannot be read") from None
    if not stored and any(parts.glob("*.jsonl")):
        raise _other(folder, "that another version began")
    current = msgspec.json.decode(msgspec.json.encode(dict(setup)))
    for name in [name for name in current if name in stored and stored[name] != current[name]]:
        raise _other(folder, f"with other {_describe(name, stored[name], current[name])}")


def _other(folder: Path, which: str) -> InvalidRequest:
    return InvalidRequest(f"{str(folder)!r} holds a sweep {which}; choose another folder.", param="output")


def _describe(name: str, stored: Any, current: Any) -> str:
    """Describe a different setup field by name, with both values if they are short; digests are abbreviated."""
    title, values = NAMES.get(name, name), [str(value) for value in (stored, current)]
    if name == "weights":
        values = [value[:DIGEST_DIGITS] for value in values]
    is_short = all(isinstance(value, str | int | float) for value in (stored, current))
    return f"{title} ({values[0]}, now {values[1]})" if is_short and max(map(len, values)) <= MAX_SHOWN_CHARS else title


def take_lock(folder: Path) -> IO[bytes]:
    """Lock ``folder`` for this process until the returned file is closed; without ``fcntl`` nothing is locked.

    Raises:
        InvalidRequest: Another process holds the lock.
    """
    file = (folder / PARTS / LOCK).open("ab")
    with contextlib.suppress(ImportError):
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            message = f"another sweep is painting into {str(folder)!r} now; wait for it or choose another folder."
            raise InvalidRequest(message, param="output") from None
    return file


def write_whole(file: Path, data: bytes) -> None:
    """Write ``data`` atomically: readers see either the old file or the new one.

    Raises:
        InvalidRequest: The file cannot be written.
    """
    temporary = file.with_name(f".{file.name}.part")
    with guard(file):
        try:
            temporary.write_bytes(data)
            temporary.replace(file)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def guard(path: Path) -> Iterator[None]:
    """Convert an ``OSError`` of the block into an :class:`InvalidRequest` about ``path``."""
    try:
        yield
    except OSError as error:
        raise InvalidRequest(f"cannot write to {str(path)!r}: {error.strerror}.", param="output") from None
