"""Visitors' pictures on disk: bounded, not to be guessed, gone at the end."""

from __future__ import annotations

import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ui.files import MAX_NAME_CHARS, PREFIX, Files, remove_orphans, safe_name


@pytest.fixture
def files() -> Iterator[Files]:
    files = Files(max_bytes=100)
    yield files
    files.remove()


def test_what_is_written_is_read_back_from_a_place_of_its_own(files: Files) -> None:
    one, other = files.write(b"one", "a fox.png"), files.write(b"other", "a fox.png")
    assert (one.read_bytes(), other.read_bytes()) == (b"one", b"other")
    assert one.name == "a-fox.png"
    assert one.parent.parent == files.folder
    assert len(one.parent.name) == 32


def test_the_oldest_make_room_for_the_newest(files: Files) -> None:
    paths = [files.write(bytes(40), f"{number}.png") for number in range(4)]
    assert [path.exists() for path in paths] == [False, False, True, True]


def test_a_single_file_may_be_larger_than_the_bound(files: Files) -> None:
    assert files.write(bytes(500), "large.png").exists()


def test_nobody_else_on_the_machine_may_look(files: Files) -> None:
    assert stat.S_IMODE(files.folder.stat().st_mode) == 0o700


def test_nothing_is_left_behind(files: Files) -> None:
    files.write(b"x", "x.png")
    files.remove()
    assert not files.folder.exists()
    files.remove()


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_keeps_is_not(files: Files) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    orphan = Path(tempfile.gettempdir()) / f"{PREFIX}{process.pid}-left"
    orphan.mkdir()
    (orphan / "a.png").write_bytes(b"x")
    remove_orphans()
    assert not orphan.exists()
    assert files.folder.exists()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("../../etc/passwd", "etc-passwd"),
        ("a\x00b\n.png", "a-b.png"),
        ("", "picture"),
        ("日本.png", "picture.png"),
        ("a. fox-7.png", "a-fox-7.png"),
        ("x" * 500 + ".png", "x" * MAX_NAME_CHARS + ".png"),
    ],
)
def test_a_name_is_made_harmless(text: str, name: str) -> None:
    assert safe_name(text) == name
