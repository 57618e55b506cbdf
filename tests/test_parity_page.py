"""The page of parity names tests that there are, with tolerances that they have."""

from __future__ import annotations

import ast
import re

import pytest

from tests.readme import ROOT

PAGE = (ROOT / "docs" / "parity.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", PAGE)
ROWS = re.findall(r"^\| (.+?) \| .+? \| (\S+) \| `(tests/[\w/]+\.py)::\w+` \|$", PAGE, re.MULTILINE)


def test_every_row_of_the_table_is_read() -> None:
    assert len(ROWS) == sum(line.startswith("| ") for line in PAGE.splitlines()) - 1 > 20
    assert len(set(NAMED)) == len(NAMED) > len(ROWS)


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_a_named_test_is_there(file: str, name: str) -> None:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert name in {one.name for one in tree.body if isinstance(one, ast.FunctionDef)}


@pytest.mark.parametrize(("what", "tolerance", "file"), ROWS)
def test_a_tolerance_is_one_of_its_file(what: str, tolerance: str, file: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    assert tolerance == "bytes" or re.search(rf"\b{tolerance}\b", text), what
