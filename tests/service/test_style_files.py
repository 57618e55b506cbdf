"""``styles.csv`` files as A1111 has written them over the years, and as spreadsheets save them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from diffserve.service.a1111.styles import FILE, MAX_BYTES, PromptStyle, read_styles

STYLES = [
    PromptStyle("Öl", "oil painting of {prompt}, “brushed”, €", "photo"),
    PromptStyle("late", 'at "dusk"', ""),
]
ROWS = (
    'name{0}prompt{0}negative_prompt\r\nÖl{0}"oil painting of {{prompt}}, “brushed”, €"{0}photo\r\n'
    'late{0}"at ""dusk"""{0}\r\n'
)
OLD = 'name,text\nÖl,"oil painting of {prompt}, “brushed”, €"\nlate,"at ""dusk"""\n'


def write(folder: Path, data: bytes) -> list[PromptStyle]:
    (folder / FILE).write_bytes(data)
    return read_styles(folder)


@pytest.mark.parametrize("delimiter", [",", ";", "\t"], ids=["comma", "semicolon", "tab"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "cp1252"])
def test_encodings_and_delimiters_give_the_same_styles(tmp_path: Path, encoding: str, delimiter: str) -> None:
    mark = b"\xfe\xff" if encoding == "utf-16-be" else b""
    assert write(tmp_path, mark + ROWS.format(delimiter).encode(encoding)) == STYLES


def test_files_with_a_column_text_have_prompts(tmp_path: Path) -> None:
    assert write(tmp_path, OLD.encode()) == [style._replace(negative_prompt="") for style in STYLES]


@pytest.mark.parametrize(
    "text",
    [
        "sep=;\r\nname;prompt\r\nlate;at dusk\r\n",
        "\ufeffName , Prompt\nlate,at dusk\n,nameless\n\n",
        "negative_prompt,prompt,name\n,at dusk,late\n",
        '"name","prompt","negative_prompt","more"\n"late","at dusk"\n',
        'name,prompt\nlate,"at dusk"',
    ],
)
def test_other_ways_of_writing_a_table_are_read(tmp_path: Path, text: str) -> None:
    assert write(tmp_path, text.encode()) == [PromptStyle("late", "at dusk", "")]


def test_a_prompt_may_have_several_lines(tmp_path: Path) -> None:
    assert write(tmp_path, "name,prompt\nlate,at\u2028dusk\n".encode()) == [PromptStyle("late", "at\u2028dusk", "")]
    assert write(tmp_path, b'name,prompt\nlate,"at\ndusk"\n') == [PromptStyle("late", "at\ndusk", "")]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"late,at dusk\n", "its first line is 'late,at dusk\\n'; name the columns name,prompt,negative_prompt"),
        (b"", "its first line is ''"),
        (b"name,prompt\n" + b"x" * MAX_BYTES, f"at most {MAX_BYTES} are allowed"),
        (b'name,prompt\n"' + b"x" * 200_000 + b'",y\n', "field larger than field limit"),
        (b"\xff\xfen", "truncated data"),
    ],
)
def test_a_file_that_cannot_be_used_is_logged_once_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, data: bytes, reason: str
) -> None:
    with caplog.at_level(logging.WARNING, "diffserve.styles"):
        assert write(tmp_path, data) == []
        assert read_styles(tmp_path) == []
    (record,) = caplog.records
    assert record.getMessage() == f"{tmp_path / FILE} is not used"
    assert reason in record.__dict__["reason"]


def test_a_file_that_is_not_utf8_is_logged_and_a_changed_file_is_read_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "diffserve.styles"):
        assert write(tmp_path, "name,prompt\nÖl,x\n".encode("cp1252")) == [PromptStyle("Öl", "x", "")]
    assert "is not UTF-8 and was read as cp1252" in caplog.text
    caplog.clear()
    assert write(tmp_path, "name,prompt\nÖl,another\n".encode()) == [PromptStyle("Öl", "another", "")]
    assert caplog.text == ""
    assert read_styles(tmp_path / "none") == []
