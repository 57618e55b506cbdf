"""Commands import their libraries leanly, paint the same bytes, and leave everything as it was for others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from diffserve.runtime.loading import library_imports

UNUSED = ("torch._dynamo", "torch.distributed.tensor", "torchao", "scipy")
PAINT = """
import sys
sys.argv = ["diffserve", "generate", "a fox", "--model", "embedded-turbo", "--steps", "1", "--seed", "1", *sys.argv[1:]]
from diffserve.cli import main
try:
    main({arguments})
except SystemExit as stop:
    assert stop.code == 0, stop.code
"""
SAY_UNUSED = f"print([name for name in {UNUSED} if name in sys.modules])"
USE_THEM = """
import torch
assert torch._dynamo.__file__ and torch.distributed.is_available()
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)) == 2
import torchao
"""


def said_by(code: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_command_imports_nothing_unused_and_paints_the_same_bytes(tmp_path: Path) -> None:
    lean, whole = tmp_path / "lean.png", tmp_path / "whole.png"
    said = said_by(PAINT.format(arguments="") + SAY_UNUSED + USE_THEM, "-o", lean)
    assert said.splitlines()[-1] == "[]"
    assert "torch._dynamo" in said_by(PAINT.format(arguments="sys.argv[1:]") + SAY_UNUSED, "-o", whole)
    assert lean.read_bytes() == whole.read_bytes()


@pytest.mark.slow
def test_int8_still_finds_what_was_hidden(tmp_path: Path) -> None:
    assert "torchao" in said_by(PAINT.format(arguments="") + SAY_UNUSED, "--dtype", "int8", "-o", tmp_path / "a.png")


def test_process_with_the_libraries_in_it_is_left_alone() -> None:
    import diffusers

    before = dict(sys.modules)
    assert diffusers.__name__ in before
    assert not library_imports.import_lean()
    assert all(sys.modules.get(name) is before[name] for name in (*UNUSED, "diffusers") if name in before)


@pytest.mark.slow
def test_classes_of_transformers_are_all_found_where_they_are() -> None:
    code = """
from diffserve.runtime.loading import library_imports
assert library_imports.import_lean()
from transformers import models
from transformers.utils import import_utils
scanned = import_utils._LazyModule("again", models.__file__, import_utils.define_import_structure(models.__file__))
assert scanned._class_to_module == models._class_to_module
assert scanned._import_structure == models._import_structure
print(len(models._class_to_module) > 1000)
"""
    assert said_by(code) == "True\n"


@pytest.mark.slow
def test_libraries_that_do_not_bear_it_are_imported_whole(tmp_path: Path) -> None:
    code = """
import sys
from diffserve.runtime.loading import library_imports
library_imports.WANTED = (*library_imports.WANTED[:1], ("transformers", "NoSuchModel"))
assert not library_imports.import_lean()
assert not [name for name in sys.modules if name.partition(".")[0] in library_imports.LIBRARIES]
import torch
from transformers import CLIPTextModel
print(CLIPTextModel.__name__, torch._dynamo.__name__, torch.distributed.is_available())
"""
    assert said_by(code) == "CLIPTextModel torch._dynamo True\n"
