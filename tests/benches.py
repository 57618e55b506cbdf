"""Scripts of ``benchmarks/``, run as a shell would, but in this process: libraries are imported once for all."""

from __future__ import annotations

import io
import json
import runpy
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


def run_bench(name: str, *options: object, out: Path) -> dict[str, Any]:
    """Run ``benchmarks/<name>.py`` with ``options``; return the document that it wrote to ``out`` and printed last."""
    argv, path, threads, printed = sys.argv, sys.path[:], torch.get_num_threads(), io.StringIO()
    script = ROOT / "benchmarks" / f"{name}.py"
    sys.argv = [str(script), *map(str, options), "--out", str(out)]
    try:
        with redirect_stdout(printed), pytest.raises(SystemExit) as ended:
            _run(script)
    finally:
        sys.argv, sys.path[:] = argv, path
        torch.set_num_threads(threads)
    assert ended.value.code == 0
    written: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    assert written == json.loads(printed.getvalue().splitlines()[-1])
    return written


def _run(script: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of diffusers, which some arms are made of
        runpy.run_path(str(script), run_name="__main__")
