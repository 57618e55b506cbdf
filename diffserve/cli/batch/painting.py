"""One line of a batch: painted by whoever paints, or told why it was not."""

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
    """What becomes of a line, and its pictures, which nobody has written yet. Raises what would become of every other
    line, too."""
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
        raise DiffserveError(f"line {line.number} came back with {len(pictures)} pictures of {len(names)}.")
    outcome = Outcome(
        line=line.number,
        id=line.id,
        digest=line.digest,
        prompt=line.prompt,
        files=tuple(names),
        seeds=tuple(picture.seed for picture in pictures),
        variation_seeds=tuple(one.variation_seed for one in pictures if one.variation_seed is not None),
        seconds=round(time.monotonic() - started_s, 3),
        recipe=pictures[0].recipe,
        warnings=tuple(dict.fromkeys(said for picture in pictures for said in picture.warnings)),
    )
    return outcome, pictures


def failed(line: Line, error: DiffserveError | None, seconds: float) -> Outcome:
    """The outcome of a line that is not painted."""
    assert error is not None
    told = {"code": error.code, "message": error.message, "param": error.param}
    return Outcome(
        line=line.number, id=line.id, digest=line.digest, prompt=line.prompt, seconds=round(seconds, 3), error=told
    )
