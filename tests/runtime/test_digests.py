"""Digests of large files are kept between starts, and believed only while the file is the same."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from diffserve.disk_cache import DiskCache
from diffserve.runtime.loading import checkpoint
from diffserve.runtime.loading.checkpoint import DIGESTS, digest_files

LONG_AGO_NS = 1_600_000_000_000_000_000


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were hashed; everything counts as large."""
    names: list[str] = []
    real = hashlib.file_digest

    def count_digest(stream: object, name: str) -> object:
        names.append(Path(stream.name).name)  # type: ignore[attr-defined]
        return real(stream, name)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoint, "KEEP_FROM_BYTES", 0)
    monkeypatch.setattr(hashlib, "file_digest", count_digest)
    return names


def weights(path: Path, content: bytes, mtime_ns: int = LONG_AGO_NS) -> Path:
    path.write_bytes(content)
    os.utime(path, ns=(mtime_ns, mtime_ns))
    return path


def test_a_second_start_reads_no_large_file(tmp_path: Path, reads: list[str]) -> None:
    files = [weights(tmp_path / "a", b"one"), weights(tmp_path / "b", b"two")]
    first = digest_files(files, DiskCache(tmp_path / "cache"))
    assert reads == ["a", "b"]
    assert digest_files(files, DiskCache(tmp_path / "cache")) == first == digest_files(files)
    assert reads == ["a", "b", "a", "b"]  # the last one without a cache


@pytest.mark.parametrize("change", ["content", "time", "replaced"])
def test_another_file_at_the_same_place_is_read(tmp_path: Path, reads: list[str], change: str) -> None:
    file, cache = weights(tmp_path / "a", b"one"), DiskCache(tmp_path / "cache")
    digest_files([file], cache)
    if change == "content":
        weights(file, b"two2")
    elif change == "time":
        weights(file, b"two", LONG_AGO_NS + 1)
    else:
        weights(tmp_path / "b", b"two").replace(file)
    assert digest_files([file], cache) == digest_files([file])
    assert reads == ["a", "a", "a"]


def test_a_file_that_was_written_a_moment_ago_is_not_kept(tmp_path: Path, reads: list[str]) -> None:
    file, cache = tmp_path / "a", DiskCache(tmp_path / "cache")
    file.write_bytes(b"one")
    digest_files([file], cache)
    digest_files([file], cache)
    assert reads == ["a", "a"]


def test_what_is_kept_is_checked_and_a_small_file_is_always_read(
    tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, cache = weights(tmp_path / "a", b"one"), DiskCache(tmp_path / "cache")
    right = digest_files([file], cache)
    entry = cache.read(DIGESTS, str(file))
    for wrong in ({**entry, "sha256": "zz"}, {**entry, "sha256": 7}, [entry], {"sha256": entry["sha256"]}):
        cache.write(DIGESTS, str(file), wrong)
        assert digest_files([file], cache) == right
    reads.clear()
    monkeypatch.setattr(checkpoint, "KEEP_FROM_BYTES", 4)
    assert digest_files([file], cache) == right
    assert reads == ["a"]
