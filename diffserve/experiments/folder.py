"""The folder of a sweep: whether it may be written, whether it is of this very sweep, and files that are whole.

Everything is refused before anything is made. ``parts/setup.json`` says what a sweep was begun with, and ``parts/lock``
is held by the process that is at it; the lock goes with the process, however that ends.
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
"""What people call the parts of a setup that have no plain name."""


def refuse_folder(folder: Path, results: Iterable[str]) -> None:
    """Raise :class:`InvalidRequest` where a sweep cannot write to ``folder``, without making anything there.

    A folder that is there may be used when it is a sweep's, or holds none of ``results``; one that is not there will be
    made, so the nearest parent that exists must be writable.
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
    """Raise :class:`InvalidRequest` where ``folder`` holds a sweep that was begun with something else than ``setup``.

    Only what both name is compared, so that a part of a setup can be held against it before the rest is known.
    Samplers, steps and guidance are no part of it: more of them continue what is there.
    """
    parts = folder / PARTS
    try:
        known = msgspec.json.decode((parts / SETUP).read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        known = {}
    except (OSError, msgspec.DecodeError):
        raise _other(folder, "that cannot be read") from None
    if not known and any(parts.glob("*.jsonl")):
        raise _other(folder, "that another version began")
    now = msgspec.json.decode(msgspec.json.encode(dict(setup)))
    for name in [name for name in now if name in known and known[name] != now[name]]:
        raise _other(folder, f"with other {_describe(name, known[name], now[name])}")


def _other(folder: Path, which: str) -> InvalidRequest:
    return InvalidRequest(f"{str(folder)!r} holds a sweep {which}; choose another folder.", param="output")


def _describe(name: str, known: Any, now: Any) -> str:
    """The name of a difference, and both values where they are short; of a digest its first digits."""
    title, values = NAMES.get(name, name), [str(value) for value in (known, now)]
    if name == "weights":
        values = [value[:DIGEST_DIGITS] for value in values]
    is_short = all(isinstance(value, str | int | float) for value in (known, now))
    return f"{title} ({values[0]}, now {values[1]})" if is_short and max(map(len, values)) <= MAX_SHOWN_CHARS else title


def take_lock(folder: Path) -> IO[bytes]:
    """Hold ``folder`` for this process until the file is closed. Raises :class:`InvalidRequest` while another has it.

    Where the system knows no such locks, nothing is held.
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
    """Write ``data`` so that a reader sees the old file or the new one. Raises :class:`InvalidRequest`."""
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
    """What the system says against the block is raised as :class:`InvalidRequest` about ``path``."""
    try:
        yield
    except OSError as error:
        raise InvalidRequest(f"cannot write to {str(path)!r}: {error.strerror}.", param="output") from None
