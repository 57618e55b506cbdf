"""The document of the GPU suite, rewritten as a whole after every result: a run that is cut short leaves one."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, Final

FILE: Final = "suite.json"
TABLE: Final = "table.txt"
MOST_ERROR_CHARS: Final = 3000
CRASH: Final = "Current thread 0x"
"""With this Python's faulthandler begins the traceback of the thread that crashed; a long list of modules is behind."""


def shorten_output(text: str, most_chars: int = MOST_ERROR_CHARS) -> str:
    """Return the part of a process's output that explains its end: the traceback of a crash, or the last lines."""
    crash = text.rfind(CRASH)
    return text[crash : crash + most_chars] if crash >= 0 else text[-most_chars:]


class Report:
    """The document, in ``folder``. Times count from the making of this object."""

    def __init__(self, folder: Path, head: dict[str, Any]) -> None:
        self.folder = folder
        self._started_s = time.monotonic()
        self.document: dict[str, Any] = {"benchmark": "gpu_suite", **head, "rows": {}, "jobs": {}}
        folder.mkdir(parents=True, exist_ok=True)
        self.write()

    @property
    def now_s(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._started_s

    def begin_row(self, name: str) -> dict[str, Any]:
        """Return the entry of the row ``name``, which starts now."""
        row: dict[str, Any] = {"started_s": round(self.now_s, 1), "state": "running", "points": {}}
        self.document["rows"][name] = row
        self.write()
        return row

    def end_row(self, row: dict[str, Any], state: str, error: str | None = None) -> None:
        """Note how ``row`` ended: "done", "failed" with its ``error``, or "abandoned"."""
        row["state"] = state
        row["wall_s"] = round(self.now_s - row["started_s"], 1)
        if error:
            row["error"] = error[-MOST_ERROR_CHARS:]
        self.write()

    def write(self) -> None:
        """Write the document to its file."""
        part = self.folder / f".{FILE}.part"
        part.write_text(json.dumps(self.document, indent=1) + "\n", encoding="utf-8")
        os.replace(part, self.folder / FILE)

    @property
    def num_errors(self) -> int:
        """Points with an error or a problem, and rows that did not come to their end."""
        rows: list[dict[str, Any]] = list(self.document["rows"].values())
        points = [point for row in rows for point in row["points"].values()]
        return sum(map(_is_wrong, points)) + sum(bool(row["state"] != "done") for row in rows)


def _is_wrong(point: dict[str, Any]) -> bool:
    result = point.get("result")
    return "error" in point or bool(isinstance(result, dict) and result.get("problems"))
