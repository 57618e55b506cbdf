"""Where a sweep may write: refused before anything is made, never into another sweep, files whole or not at all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from diffserve.api.errors import InvalidRequest
from diffserve.experiments.store import PARTS, SETUP, Store, refuse_folder, refuse_other_sweep, take_lock, write_whole

RESULTS = ("cells.csv", "report.html")
BEGUN: dict[str, Any] = {"weights": "abc", "prompts": ("a fox", "an owl"), "reference_steps": 200, "size": (128, 128)}


def store_at(folder: Path, **setup: Any) -> Store:
    return Store(folder, {**BEGUN, **setup}, results=RESULTS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": "abd"}, r"other weights \(abc, now abd\); choose another folder"),
        ({"prompts": ("a fox",)}, "other prompts; choose another folder"),
        ({"reference_steps": 50}, r"other reference steps \(200, now 50\)"),
    ],
)
def test_a_sweep_of_another_setup_is_refused_and_says_what_differs(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    store_at(tmp_path)
    before = (tmp_path / PARTS / SETUP).read_bytes()
    with pytest.raises(InvalidRequest, match=message):
        store_at(tmp_path, **change)
    with pytest.raises(InvalidRequest, match=message):
        refuse_other_sweep(tmp_path, change)
    refuse_other_sweep(tmp_path, {"weights": "abc", "samplers": "any"})
    store_at(tmp_path)
    assert (tmp_path / PARTS / SETUP).read_bytes() == before


def test_pieces_of_a_sweep_without_a_readable_setup_are_refused(tmp_path: Path) -> None:
    parts = tmp_path / PARTS
    parts.mkdir()
    refuse_other_sweep(tmp_path, BEGUN)
    (parts / "ddim-5.jsonl").touch()
    with pytest.raises(InvalidRequest, match="a sweep of another version"):
        store_at(tmp_path)
    (parts / SETUP).write_text("{", encoding="utf-8")
    with pytest.raises(InvalidRequest, match="a sweep that cannot be read"):
        store_at(tmp_path)


def test_two_sweeps_never_paint_into_one_folder_and_a_killed_one_frees_it(tmp_path: Path) -> None:
    (tmp_path / PARTS).mkdir()
    program = (
        "import sys, time, pathlib; from diffserve.experiments.store import take_lock\n"
        "held = take_lock(pathlib.Path(sys.argv[1])); print('held', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(InvalidRequest, match="another sweep is writing to"):
            take_lock(tmp_path)
        other.kill()
    take_lock(tmp_path).close()


def test_a_folder_under_a_file_is_refused_in_one_sentence_and_nothing_is_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    for folder in (tmp_path / "file", tmp_path / "file" / "deeper"):
        with pytest.raises(InvalidRequest, match=r"cannot write to .*: Not a directory"):
            refuse_folder(folder, RESULTS)
        with pytest.raises(InvalidRequest, match="cannot write to"):
            store_at(folder)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_asking_whether_a_folder_can_be_written_makes_nothing(tmp_path: Path) -> None:
    refuse_folder(tmp_path / "new" / "deeper", RESULTS)
    assert not list(tmp_path.iterdir())
    store_at(tmp_path / "new" / "deeper")
    assert (tmp_path / "new" / "deeper" / PARTS).is_dir()


def test_results_that_no_sweep_wrote_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "cells.csv").write_text("precious", encoding="utf-8")
    with pytest.raises(InvalidRequest, match=r"has a cells\.csv that was not written by a sweep"):
        store_at(tmp_path)
    (tmp_path / PARTS).mkdir()
    refuse_folder(tmp_path, RESULTS)


def test_a_file_that_cannot_be_written_leaves_no_piece_of_it(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    with pytest.raises(InvalidRequest, match=r"cannot write to .*report\.html"):
        write_whole(tmp_path / "report.html", b"page")
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
