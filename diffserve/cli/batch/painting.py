"""Generation of one batch line: its result and images, or why it failed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from diffserve.api.errors import DiffserveError, EngineUnavailable
from diffserve.cli.batch.lines import Line
from diffserve.cli.batch.manifest import Outcome
from diffserve.cli.batch.painters import LinePainter, PaintedFile, Tell
from diffserve.client import ServerLost, ServerUnreachable

FATAL_CODES: Final = frozenset({"invalid_api_key", "insufficient_permissions"})


def paint_line(line: Line, painter: LinePainter, tell: Tell) -> tuple[Outcome, Sequence[PaintedFile]]:
    """Generate the images of a line and return its result with the images, which are not written yet.

    Args:
        line: The line.
        painter: Generates the images.
        tell: Called with the completed share of the line, 0 to 1.

    Raises:
        DiffserveError: The error would affect every line, such as an unreachable server or an invalid API key.
    """
    started_s = time.monotonic()
    try:
        if line.error is not None:
            raise line.error
        pictures = painter.paint(line.fields, tell)
    except (ServerLost, ServerUnreachable, EngineUnavailable):
        raise
    except DiffserveError as error:
        if error.code in FATAL_CODES:
            raise
        return failed(line, error, time.monotonic() - started_s), ()
    names = line.names()
    if len(names) != len(pictures):
        raise DiffserveError(f"line {line.number} must have {len(names)} images, got {len(pictures)}.")
    outcome = Outcome(
        line=line.number,
        id=line.id,
        digest=line.digest,
        prompt=line.prompt,
        files=tuple(names),
        seeds=tuple(picture.seed for picture in pictures),
        variation_seeds=tuple(picture.variation_seed for picture in pictures if picture.variation_seed is not None),
        seconds=round(time.monotonic() - started_s, 3),
        recipe=pictures[0].recipe,
        warnings=tuple(dict.fromkeys(warning for picture in pictures for warning in picture.warnings)),
    )
    return outcome, pictures


def failed(line: Line, error: DiffserveError | None, seconds: float) -> Outcome:
    """Return the result of a line that failed with ``error`` after ``seconds``."""
    assert error is not None
    details = {"code": error.code, "message": error.message, "param": error.param}
    return Outcome(
        line=line.number, id=line.id, digest=line.digest, prompt=line.prompt, seconds=round(seconds, 3), error=details
    )
