"""Log lines: JSON whatever is said, and without anybody's words."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diffserve.api.errors import InvalidRequest
from diffserve.logs import MACHINE, json_logs, reason_of, without_quotes

SECRET = "zebrasecret"


def said(say: Callable[[], Any], **options: Any) -> list[dict[str, Any]]:
    """The lines that ``say`` leads to."""
    stream, before = io.StringIO(), sys.stderr
    sys.stderr = stream
    try:
        with json_logs("info", **options):
            say()
        assert sys.stderr is stream
    finally:
        sys.stderr = before
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert all({"ts", "level", "event"} <= set(line) for line in lines)
    assert SECRET not in stream.getvalue()
    return lines


def raise_from_another() -> None:
    try:
        raise KeyError(SECRET)
    except KeyError as error:
        raise ValueError(f"two lines,\nthe second with {SECRET}") from error


def log_an_exception() -> None:
    try:
        raise_from_another()
    except ValueError:
        logging.getLogger("diffserve.test").exception("it failed", extra={"request_id": "img-1"})


def print_an_exception() -> None:
    try:
        raise_from_another()
    except ValueError:
        traceback.print_exc()


def write_an_exception() -> None:
    try:
        raise_from_another()
    except ValueError:
        sys.stderr.write(traceback.format_exc())


def test_of_an_exception_kind_and_way_are_kept_and_no_words() -> None:
    [line] = said(log_an_exception)
    assert (line["level"], line["event"], line["request_id"]) == ("error", "it failed", "img-1")
    assert line["error"] == "ValueError"
    assert "raise_from_another" in line["traceback"]
    assert "caused by" in line["traceback"]
    assert "KeyError" in line["traceback"]


@pytest.mark.parametrize("say", [print_an_exception, write_an_exception])
def test_a_printed_traceback_is_one_line_for_each_exception(say: Callable[[], None]) -> None:
    lines = said(say)
    assert [line["error"] for line in lines if line["event"] == "exception"] == ["KeyError", "ValueError"]
    assert len(lines) == 2
    assert "raise_from_another" in lines[1]["traceback"]
    assert {line["level"] for line in lines} == {"warning"}


def test_what_anybody_prints_on_standard_error_is_json() -> None:
    def say() -> None:
        print("loading", 3, "shards", file=sys.stderr)
        print(f"token '{SECRET}' is odd\n\nand so on", file=sys.stderr)
        sys.stderr.write("without its end")
        sys.stderr.write("\n")

    texts = [line["text"] for line in said(say)]
    assert texts == ["loading 3 shards", "token … is odd", "and so on", "without its end"]


def test_a_warning_is_told_by_its_kind_and_place_and_without_words() -> None:
    def say() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn(f"update the choices to include: {SECRET}", UserWarning, stacklevel=1)

    [line] = said(say)
    assert (line["level"], line["event"], line["logger"]) == ("warning", "a warning", "py.warnings")
    assert (line["category"], line["file"]) == ("UserWarning", __file__)
    assert int(line["line"]) > 0


def test_other_libraries_are_told_without_quoted_words() -> None:
    def say() -> None:
        logging.getLogger("library").warning("the following was cut: ['%s']", SECRET)
        logging.getLogger("library").info("not worth a line")

    [line] = said(say)
    assert line["logger"] == "library"


def test_what_nobody_caught_is_a_line() -> None:
    def say() -> None:
        thread = threading.Thread(target=raise_from_another)
        thread.start()
        thread.join()

    [line] = said(say)
    assert (line["level"], line["error"]) == ("critical", "ValueError")


def test_the_machine_is_quoted_and_nobody_else() -> None:
    def say() -> None:
        log = logging.getLogger("diffserve.test")
        for error in (
            RuntimeError(f"CUDA error: out of memory in '{SECRET}'"),
            OSError(28, "No space left on device", f"/tmp/{SECRET}.png"),
            InvalidRequest(f"the weight of {SECRET} is 9"),
            ValueError(SECRET),
        ):
            log.error("failed", exc_info=error)

    reasons = [line.get("reason") for line in said(say, trusted=MACHINE)]
    assert reasons == ["CUDA error: out of memory in …", "No space left on device", "invalid_value", None]
    assert "reason" not in said(lambda: logging.getLogger("diffserve").error("x", exc_info=RuntimeError(SECRET)))[0]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("nothing to hide, it's plain", "nothing to hide, it's plain"),
        (f"the weight of '{SECRET}' is 9", "the weight of … is 9"),
        (f"'it's {SECRET}' is odd", "… is odd"),
        (f'cut: "{SECRET}...', "cut: …"),
        (f"first 'a' {SECRET} then 'b' end", "first … end"),
    ],
)
def test_what_stands_in_quotes_is_left_out(text: str, shown: str) -> None:
    assert without_quotes(text) == shown


def test_of_a_failure_that_is_ours_the_reason_is_kept_where_it_is_the_machines() -> None:
    ours = f"painting this image raised ValueError: {SECRET}\n{SECRET}"
    assert reason_of(ours) == "painting this image raised ValueError"
    machine = "painting this image raised RuntimeError: CUDA error: device-side assert triggered"
    assert reason_of(machine) == machine


def test_our_own_level_holds_for_our_own_records_and_all_is_as_before_afterwards() -> None:
    before = logging.getLogger("diffserve").level, logging.getLogger().level, sys.excepthook
    with json_logs("error"):
        assert not logging.getLogger("diffserve.http").isEnabledFor(logging.WARNING)
    assert (logging.getLogger("diffserve").level, logging.getLogger().level, sys.excepthook) == before


def test_a_process_that_dies_of_an_exception_says_so_in_json() -> None:
    code = f"from diffserve.logs import json_logs\nwith json_logs('info'):\n    raise SystemError('{SECRET}')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    [line] = [json.loads(line) for line in done.stderr.splitlines()]
    assert (line["level"], line["error"]) == ("critical", "SystemError")
    assert SECRET not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_lines_that_nobody_can_take_are_lost_and_nothing_else() -> None:
    program = """
import logging, sys, warnings
from diffserve.logs import json_logs
with json_logs("info"):
    logging.getLogger("diffserve.x").error("a mistake")
    print("a word", file=sys.stderr)
    warnings.warn("a warning")
    sys.stderr.flush()
    print("still here")
"""
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=full, timeout=60)
    assert done.stdout == b"still here\n"
