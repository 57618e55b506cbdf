"""Image files of visitors: limited in size, with unguessable names, removed at the end."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ui.files import LEFT_S, MAX_NAME_CHARS, UPLOAD_S, PageFiles, safe_name


@pytest.fixture
def files() -> Iterator[PageFiles]:
    files = PageFiles(max_bytes=100)
    yield files
    files.remove()


def test_every_file_is_stored_at_a_separate_path(files: PageFiles) -> None:
    first, other = files.write(b"one", "a fox.png"), files.write(b"other", "a fox.png")
    assert (first.read_bytes(), other.read_bytes()) == (b"one", b"other")
    assert first.name == "a-fox.png"
    assert first.parent.parent == files.folder
    assert len(first.parent.name) == 32


def test_the_oldest_files_are_evicted(files: PageFiles) -> None:
    paths = [files.write(bytes(40), f"{number}.png") for number in range(4)]
    assert [path.exists() for path in paths] == [False, False, True, True]


def test_a_single_file_may_be_larger_than_the_bound(files: PageFiles) -> None:
    assert files.write(bytes(500), "large.png").exists()


def uploaded(files: PageFiles, num_bytes: int, *, age_s: float = 0.0) -> Path:
    """Return a file stored as by Gradio, in a separate folder named after its content."""
    place = files.folder / secrets.token_hex(32)
    place.mkdir()
    (place / "a.png").write_bytes(bytes(num_bytes))
    os.utime(place, (time.time() - age_s,) * 2)
    return place / "a.png"


def test_an_unread_upload_is_removed_after_some_minutes(files: PageFiles) -> None:
    old, new = uploaded(files, 1, age_s=UPLOAD_S + 1), uploaded(files, 1)
    (files.folder / "tmpold").write_bytes(b"x")
    os.utime(files.folder / "tmpold", (time.time() - UPLOAD_S - 1,) * 2)
    picture = files.write(b"x", "x.png")
    os.utime(picture.parent, (0, 0))
    assert set(files.sweep()) == {old, files.folder / "tmpold"}
    assert [path.exists() for path in (old.parent, new, files.folder / "tmpold", picture)] == [False, True, False, True]


def test_uploads_count_and_are_evicted_first(files: PageFiles) -> None:
    pictures = [files.write(bytes(45), "x.png") for _ in range(2)]
    old, new = uploaded(files, 12, age_s=20), uploaded(files, 12, age_s=10)
    files.sweep()
    assert [path.exists() for path in (old, new, *pictures)] == [False, True, False, True]
    new.unlink()
    files.sweep()
    assert files.write(bytes(45), "x.png").exists()
    assert pictures[1].exists()


def test_files_are_private_to_the_user(files: PageFiles) -> None:
    assert stat.S_IMODE(files.folder.stat().st_mode) == 0o700


def test_nothing_remains_after_closing(files: PageFiles) -> None:
    files.write(b"x", "x.png")
    (files.folder / "tmp-of-gradio").write_bytes(b"x")
    files.remove()
    assert not files.folder.exists()
    files.remove()


def test_a_deleted_folder_is_created_again(files: PageFiles) -> None:
    shutil.rmtree(files.folder)
    assert files.write(b"x", "x.png").read_bytes() == b"x"
    with closing(PageFiles()):
        assert files.folder.exists()


def test_files_of_killed_processes_are_removed_and_those_of_running_ones_stay(files: PageFiles) -> None:
    orphan = left_behind("a" * 32)
    with closing(PageFiles()) as other_files:
        assert not orphan.exists()
        assert other_files.left == []
        assert files.folder.exists()


def left_behind(name: str) -> Path:
    """Return the folder of a killed process, with an image in the folder ``name``."""
    program = "import os, ui.files; print(ui.files.PageFiles().folder, flush=True); os.kill(os.getpid(), 9)"
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    orphan = Path(completed.stdout.strip())
    (orphan / name).mkdir(parents=True)
    (orphan / name / "a.png").write_bytes(b"x")
    return orphan


@contextmanager
def closing(files: PageFiles) -> Iterator[PageFiles]:
    try:
        yield files
    finally:
        files.remove()


def test_a_visitors_files_of_a_killed_process_are_taken_over_for_an_hour() -> None:
    orphan = left_behind("new")
    for name, age_s in (("new", 0.0), ("old", LEFT_S + 60)):
        (orphan / name).mkdir(exist_ok=True)
        (orphan / name / "somebody.note.json").write_text("{}")
        os.utime(orphan / name, (time.time() - age_s,) * 2)
    with closing(PageFiles()) as files:
        assert [folder.name for folder in files.left] == ["new"]
        assert (files.folder / "new" / "a.png").read_bytes() == b"x"
        assert not orphan.exists()
        with closing(PageFiles()) as other_files:
            assert other_files.left == []


def test_only_files_of_present_visitors_outlive_the_process() -> None:
    files = PageFiles()
    mine, other_path, nobodys = (files.write(b"x", "x.png") for _ in range(3))
    files.note(mine, "me", b"{}")
    files.note(other_path, "them", b"{}")
    files.stays = lambda: {"me"}
    files.remove()
    assert [path.exists() for path in (mine, other_path, nobodys)] == [True, False, False]
    files.stays = frozenset
    shutil.rmtree(files.folder)


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
def test_file_names_are_sanitized(text: str, name: str) -> None:
    assert safe_name(text) == name
