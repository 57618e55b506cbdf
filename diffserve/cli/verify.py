"""``diffserve verify``: what pictures say of where they are from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from diffserve.api.errors import InvalidRequest
from diffserve.cli.start import refuse
from diffserve.media.provenance import Provenance, examine

EXIT_NOTHING = 1


def run(files: Sequence[Path], *, as_json: bool) -> int:
    """Print a line for each of ``files``; 0 where all of them say so, 2 where one cannot be read, which is said."""
    code = 0
    for file in files:
        try:
            found = examine(file.read_bytes(), name=repr(str(file)))
        except OSError as error:
            code = refuse(f"cannot read {str(file)!r}: {error.strerror}.")
        except InvalidRequest as error:
            code = refuse(error.message)
        else:
            code = max(code, 0 if found.is_generated else EXIT_NOTHING)
            told = {"file": str(file), **found.told()}
            print(msgspec.json.encode(told).decode() if as_json else f"{file}  {_line(found)}")
    return code


def _line(found: Provenance) -> str:
    said = []
    if found.xmp is not None and found.xmp.digital_source_type:
        said.append(f"XMP says {found.xmp.digital_source_type.rpartition('/')[2]}")
    if found.watermark is not None:
        said.append(f"its watermark says {found.watermark.kind} ({100 * found.watermark.confidence:.0f} %)")
    if found.c2pa is not None:
        said.append(f"its content credentials are {found.c2pa.state}, by {found.c2pa.signer or 'nobody known'}")
    head = "painted by a machine" if found.is_generated else "nothing says that a machine painted it"
    return f"{head}: {'; '.join(said)}" if said else head
