"""Tests of stored files, batches and usage."""

from __future__ import annotations

import asyncio
import io
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import psycopg
import pytest
from sqlalchemy import delete, insert

from diffserve.api.errors import InvalidRequest
from diffserve.service.stored.usage import WRITE_DELAY_S, UsageBook
from diffserve.store import Database
from diffserve.store.batch_input import MAX_LINES, SLICE_BYTES, SLICE_LINES, InputCheck, lines_of, path_of, read_line
from diffserve.store.batches import WINDOW_S, Batches, LineDone
from diffserve.store.database import PageSelection
from diffserve.store.errors import StoreError
from diffserve.store.files import Files
from diffserve.store.schema import usage as usage_table
from diffserve.store.usage import Usage, UsageCounts, day_of
from tests.store.conftest import OpenDatabase


class Clock:
    now_s = 1e9

    def __call__(self) -> float:
        return self.now_s


class Shelf:
    """Files and batches over one database."""

    def __init__(self, database: Database, max_bytes: int = 1000) -> None:
        self.clock = Clock()
        self.database = database
        self.files = Files(self.database, max_bytes, self.clock)
        self.batches = Batches(self.database, self.files, self.clock)

    def add(self, data: bytes = b"x", owner: str = "key-1", purpose: str = "batch") -> str:
        return self.files.add(owner, purpose, "a.jsonl", io.BytesIO(data), max_bytes=500).id

    @property
    def names(self) -> set[str]:
        return {path.name for path in self.files.folder.iterdir()}


@pytest.fixture
def shelf(database: Database) -> Shelf:
    return Shelf(database)


def test_a_file_is_stored_completely_or_not_at_all(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [shelf.add(b"x" * 300), shelf.add(b"y" * 300, purpose="vision"), shelf.add(owner="key-2")]
    for data, message in ((b"z" * 501, "longer than 500"), (b"z" * 401, "take 600 bytes of 1000")):
        with pytest.raises(InvalidRequest, match=message):
            shelf.add(data)
    with monkeypatch.context() as full_disk:
        full_disk.setattr("diffserve.store.files.SPARE_BYTES", 1 << 62)
        with pytest.raises(OSError, match="No space"):
            shelf.add()
    with monkeypatch.context() as broken_insert:
        broken_insert.setattr("diffserve.store.files.insert_row", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            shelf.add()
    assert shelf.names == set(names), "no partial file remains"
    file = shelf.files.get("key-1", names[0])
    assert file is not None
    with shelf.files.open(file) as opened:
        assert opened.read() == b"x" * 300
    assert shelf.files.get("key-2", names[0]) is None
    assert shelf.files.get("key-1", "../diffserve.sqlite") is None
    page = shelf.files.page("key-1", PageSelection(1))
    assert page is not None
    assert ([file.id for file in page[0]], page[1]) == ([names[1]], True)
    shelf.clock.now_s += 31 * 24 * 3600
    assert shelf.files.get("key-1", names[0]) is None
    shelf.files.sweep(in_use={names[1]})
    assert shelf.names == {names[1]}


def test_each_line_is_in_the_output_once_after_a_torn_write(open_database: OpenDatabase) -> None:
    shelf = Shelf(open_database())
    batch = shelf.batches.add("key-1", "/v1/images/generations", shelf.add(), 4, {"for": "me"})
    shelf.batches.move(batch.id, "in_progress", of=("validating",))
    shelf.batches.finish_lines(batch.id, [LineDone(1, b"one\n", False), LineDone(2, b"bad\n", True)])
    with shelf.files.path(batch.output_file).open("ab") as output_file:
        output_file.write(b"half of an unfinished line" * 9)
    reopened = Shelf(open_database())
    [unfinished] = reopened.batches.unfinished()
    assert (unfinished.status, unfinished.output_bytes) == ("in_progress", 4)
    assert (unfinished.num_completed, unfinished.num_failed) == (1, 1)
    assert reopened.batches.done_lines(unfinished) == {1, 2}
    reopened.batches.finish_lines(batch.id, [LineDone(3, b"three\n", False)])
    with pytest.raises(StoreError) as refused:
        reopened.batches.finish_lines(batch.id, [LineDone(3, b"three again\n", False)])
    assert refused.value.reason == "duplicate"
    assert batch.output_file in reopened.batches.files_in_use()
    reopened.files.sweep(reopened.batches.files_in_use())
    reopened.batches.finish(batch.id, "cancelled")
    reopened.batches.finish(batch.id, "completed")
    finished = reopened.batches.get(batch.id)
    assert finished is not None
    assert (finished.status, set(finished.times), reopened.batches.files_in_use()) == (
        "cancelled", {"in_progress", "cancelled"}, set(),
    )  # fmt: skip
    output = reopened.files.get("key-1", batch.output_file)
    assert output is not None
    with reopened.files.open(output) as opened:
        assert (opened.read(), output.num_bytes) == (b"one\nthree\n", 10)
    assert finished.expires_s == finished.created_s + WINDOW_S


def check_input(file: BinaryIO) -> int:
    check = InputCheck(file, "/v1/images/generations")
    while check.check_slice():
        pass
    return check.num_lines


def test_lines_may_end_in_any_newline() -> None:
    data = b'\n{"custom_id":"a","body":{},"url":"images/generations/"}\r\n\r\nno json\n{"custom_id":"b","body":{}}'
    assert [number for number, _ in lines_of(io.BytesIO(data))] == [2, 4, 5]
    assert check_input(io.BytesIO(data)) == 3
    assert path_of("/v1/chat/completions/") == path_of("/chat/completions") == "/v1/chat/completions"
    with pytest.raises(InvalidRequest, match="line 1 is longer than"):
        check_input(io.BytesIO(b" " * (9 << 20)))


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b" \n"])
def test_a_file_of_empty_lines_is_refused_early(end: bytes) -> None:
    file = io.BytesIO(end * 5_000_000)
    with pytest.raises(InvalidRequest, match="more than 100000 lines") as refused:
        check_input(file)
    assert refused.value.code == "too_many_lines"
    assert file.tell() <= (2 * MAX_LINES + 1) * len(end)


@pytest.mark.parametrize("depth", [10_000, 1_000_000])
def test_a_deeply_nested_line_is_a_problem_of_that_line(depth: int) -> None:
    body = b"[" * depth + b"]" * depth
    line = b'{"custom_id": "a", "method": "POST", "url": "/v1/images/generations", "body": %s}' % body
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        read_line(line)
    check = InputCheck(io.BytesIO(line + b"\n"), "/v1/images/generations")
    check.check_slice()
    [problem] = check.problems
    assert (problem.line, problem.code) == (1, "invalid_json_line")


def test_a_full_batch_may_have_an_empty_line_after_every_line() -> None:
    lines = b"".join(b'{"custom_id":"%d","body":{}}\n\n' % number for number in range(MAX_LINES))
    assert check_input(io.BytesIO(lines)) == MAX_LINES
    with pytest.raises(InvalidRequest, match="more than 50000 lines"):
        check_input(io.BytesIO(lines.replace(b"\n\n", b"\n") + b'{"custom_id":"x","body":{}}'))


@pytest.mark.parametrize(("num_lines", "line_bytes"), [(5_000, 40), (40, 200_000)])
def test_a_file_is_checked_in_slices_of_few_lines_and_bytes(num_lines: int, line_bytes: int) -> None:
    lines = [b'{"custom_id":"%d","body":{}}' % number for number in range(num_lines)]
    file = io.BytesIO(b"\n".join(line.ljust(line_bytes) for line in lines))
    check, ends = InputCheck(file, "/v1/images/generations"), [0]
    while check.check_slice():
        ends.append(file.tell())
        assert ends[-1] - ends[-2] <= min(SLICE_LINES * (line_bytes + 1), SLICE_BYTES + line_bytes)
    assert check.num_lines == num_lines
    assert len(ends) > 5


def test_usage_is_summed_by_key_and_day(database: Database) -> None:
    usage = Usage(database)
    usage.add({("key-1", "2026-01-02"): UsageCounts(1, 2, 3, 4, 5), ("", "2026-01-02"): UsageCounts(requests=1)})
    usage.add({("key-1", "2026-01-02"): UsageCounts(1, 1, 1, 1, 1), ("key-1", "2025-12-31"): UsageCounts(requests=9)})
    assert usage.days("2026-01-01", "key-1") == [("key-1", "2026-01-02", UsageCounts(2, 3, 4, 5, 6))]
    assert [owner for owner, _, _ in usage.days("2020-01-01")] == ["", "key-1", "key-1"]
    assert (day_of(0.0), day_of(86400.0 * 366, 366)) == ("1970-01-01", "1970-01-01")


def test_usage_is_written_in_groups_and_at_shutdown(tmp_path: Path) -> None:
    usage, written = Usage(Database(tmp_path)), list[int]()

    class RecordingUsage(Usage):
        def add(self, used: Mapping[tuple[str, str], UsageCounts]) -> None:
            written.append(len(used))
            usage.add(used)

    async def use() -> None:
        book = UsageBook(RecordingUsage(Database(tmp_path)), clock=lambda: 0.0)
        for _ in range(3):
            book.count("key-1", UsageCounts(requests=1))
        await asyncio.sleep(4 * WRITE_DELAY_S)
        assert written == [1]
        book.count("key-1", UsageCounts(pictures=1))  # and the server stops before the next write

    asyncio.run(use())
    assert written == [1, 1]
    assert usage.days("1970-01-01") == [("key-1", "1970-01-01", UsageCounts(requests=3, pictures=1))]


def test_a_failed_write_is_rolled_back_and_its_connection_closed(database: Database) -> None:
    usage = Usage(database)
    usage.add({("key-1", "2026-01-02"): UsageCounts(requests=1)})
    used: list[object] = []

    def delete_and_fail() -> None:
        with database.writing(at_once=False) as connection:
            used.append(connection.connection.dbapi_connection)
            connection.execute(delete(usage_table))
            connection.execute(insert(usage_table).values(owner="key-2", day="2026-01-02"))

    with database.writing(at_once=False) as connection:
        first = connection.connection.dbapi_connection
    with pytest.raises(StoreError):
        delete_and_fail()
    assert first is not None
    assert used == [first], "small writes reuse one connection"
    with pytest.raises((sqlite3.ProgrammingError, psycopg.OperationalError), match="closed"):
        first.cursor().execute("SELECT 1")
    with database.writing(at_once=False) as connection:
        assert connection.connection.dbapi_connection is not first
    assert usage.days("2026-01-01") == [("key-1", "2026-01-02", UsageCounts(requests=1))]
