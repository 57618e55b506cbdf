"""``diffserve verify``: reports the AI-generation marks in image files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from diffserve.api.errors import InvalidRequest
from diffserve.cli.start import refuse
from diffserve.media.provenance import ProvenanceReport, examine

EXIT_UNMARKED = 1


def run(files: Sequence[Path], *, as_json: bool) -> int:
    """Print a line per file and return the exit code: 0 if all are marked, 1 if one is not, 2 if one is unreadable."""
    code = 0
    for file in files:
        try:
            provenance = examine(file.read_bytes(), name=repr(str(file)))
        except OSError as error:
            code = refuse(f"cannot read {str(file)!r}: {error.strerror}.")
        except InvalidRequest as error:
            code = refuse(error.message)
        else:
            code = max(code, 0 if provenance.is_generated else EXIT_UNMARKED)
            details = {"file": str(file), **provenance.to_dict()}
            print(msgspec.json.encode(details).decode() if as_json else f"{file}  {_describe(provenance)}")
    return code


def _describe(provenance: ProvenanceReport) -> str:
    marks = []
    if provenance.xmp is not None and provenance.xmp.digital_source_type:
        marks.append(f"XMP: {provenance.xmp.digital_source_type.rpartition('/')[2]}")
    if provenance.watermark is not None:
        marks.append(f"watermark: {provenance.watermark.kind} ({100 * provenance.watermark.confidence:.0f} %)")
    if provenance.c2pa is not None:
        marks.append(
            f"content credentials: {provenance.c2pa.state}, by {provenance.c2pa.signer or 'an unknown signer'}"
        )
    head = "AI-generated" if provenance.is_generated else "no AI-generation mark"
    return f"{head}: {'; '.join(marks)}" if marks else head
