"""The page of parity names tests that there are, with tolerances that they have."""

from __future__ import annotations

import ast
import re

import pytest

from tests.readme import ROOT
from tests.schedulers.diffusers_samplers import EXCLUDED, MENDED
from tests.schedulers.test_config_fields import DIFFERENCES as BY_FIELD

PAGE = (ROOT / "docs" / "parity.md").read_text(encoding="utf-8")
TESTED, DIFFERENCES = PAGE.split("## Differences that are meant")
KEYS = re.findall(r"^\| `([\w-]+)` \|", DIFFERENCES, re.MULTILINE)
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", PAGE)
ROWS = re.findall(r"^\| (.+?) \| .+? \| (\S+) \| `(tests/[\w/]+\.py)::\w+` \|$", TESTED, re.MULTILINE)


def test_every_row_of_the_table_is_read() -> None:
    assert len(ROWS) == sum(line.startswith("| ") for line in TESTED.splitlines()) - 1 > 20
    assert len(set(NAMED)) == len(NAMED) > len(ROWS)


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_a_named_test_is_there(file: str, name: str) -> None:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(("what", "tolerance", "file"), ROWS)
def test_a_tolerance_is_one_of_its_file(what: str, tolerance: str, file: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    assert tolerance == "bytes" or re.search(rf"\b{tolerance}\b", text), what


def test_differences_of_the_samplers_are_on_the_page() -> None:
    assert {*MENDED, *EXCLUDED, *BY_FIELD} <= set(KEYS)
    assert sum(line.startswith("| ") for line in DIFFERENCES.splitlines()) - 1 == len(KEYS) == len(set(KEYS))


def test_every_difference_from_diffusers_is_known_to_a_test() -> None:
    """A row that no test names could be wrong for years. A1111 itself cannot be run here."""
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    tests += (ROOT / "tests" / "schedulers" / "diffusers_samplers.py").read_text(encoding="utf-8")
    unknown = [key for key in KEYS if not key.startswith("a1111-") and f'"{key}"' not in tests]
    assert not unknown
