"""Disk cache: complete or missing entries, bounded size, and no errors."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from diffserve import disk_cache
from diffserve.disk_cache import DiskCache


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_entries_persist(tmp_path: Path) -> None:
    DiskCache(tmp_path).write("costs", "embedded on a cpu", {"1": 0.02, "buckets": [1, 2, 4]})
    assert DiskCache(tmp_path).read("costs", "embedded on a cpu") == {"1": 0.02, "buckets": [1, 2, 4]}


def test_kinds_and_keys_are_separate(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path)
    cache.write("costs", "a", 1)
    assert cache.read("digests", "a") is None
    assert cache.read("costs", "b") is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"key": "other", "value": 1}', b"\xff\xfe", b"[" * 100_000])
def test_invalid_file_counts_as_missing(tmp_path: Path, content: bytes) -> None:
    cache = DiskCache(tmp_path)
    cache.write("costs", "a", 1)
    [path] = files_of(tmp_path)
    path.write_bytes(content)
    assert cache.read("costs", "a") is None
    cache.write("costs", "a", 2)
    assert cache.read("costs", "a") == 2


def test_least_recently_used_entries_are_deleted_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "MOST_ENTRIES", 2)
    cache = DiskCache(tmp_path)
    for key in ("oldest, but read again", "old"):
        cache.write("costs", key, key)
    for path in files_of(tmp_path):
        os.utime(path, (1, 1))
    cache.read("costs", "oldest, but read again")
    cache.write("costs", "new", 1)
    assert cache.read("costs", "old") is None
    assert cache.read("costs", "oldest, but read again") is not None
    assert cache.read("costs", "new") == 1


def test_folder_that_cannot_be_written_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = DiskCache(tmp_path / "file")
    with caplog.at_level(logging.WARNING):
        cache.write("costs", "a", 1)
        cache.write("costs", "b", 1)
    assert cache.read("costs", "a") is None
    assert len(caplog.records) == 1


def test_failed_write_leaves_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = DiskCache(tmp_path)
    cache.write("costs", "a", 1)

    def refuse(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    cache.write("costs", "a", 2)
    assert cache.read("costs", "a") == 1
    assert len(files_of(tmp_path)) == 1


def test_entry_size_is_limited(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="1048576"):
        DiskCache(tmp_path).write("costs", "a", "x" * (1 << 20))


def test_setting_selects_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert DiskCache.at("auto").folder == tmp_path / "diffserve"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert DiskCache.at("auto").folder == Path("~/.cache/diffserve").expanduser()
    assert DiskCache.at(str(tmp_path / "other")).folder == tmp_path / "other"
    disabled = DiskCache.at("")
    disabled.write("costs", "a", 1)
    assert disabled.folder is None
    assert disabled.read("costs", "a") is None
