"""Log lines are JSON in all cases and contain no text of clients."""

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


def logged_lines(action: Callable[[], Any], **options: Any) -> list[dict[str, Any]]:
    """Return the log lines that ``action`` causes."""
    stream, before = io.StringIO(), sys.stderr
    sys.stderr = stream
    try:
        with json_logs("info", **options):
            action()
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


def test_an_exception_is_logged_with_type_and_traceback_and_without_message() -> None:
    [line] = logged_lines(log_an_exception)
    assert (line["level"], line["event"], line["request_id"]) == ("error", "it failed", "img-1")
    assert line["error"] == "ValueError"
    assert "raise_from_another" in line["traceback"]
    assert "caused by" in line["traceback"]
    assert "KeyError" in line["traceback"]


@pytest.mark.parametrize("action", [print_an_exception, write_an_exception])
def test_a_printed_traceback_is_one_line_for_each_exception(action: Callable[[], None]) -> None:
    lines = logged_lines(action)
    assert [line["error"] for line in lines if line["event"] == "exception"] == ["KeyError", "ValueError"]
    assert len(lines) == 2
    assert "raise_from_another" in lines[1]["traceback"]
    assert {line["level"] for line in lines} == {"warning"}


def test_text_printed_to_standard_error_becomes_json() -> None:
    def action() -> None:
        print("loading", 3, "shards", file=sys.stderr)
        print(f"token '{SECRET}' is odd\n\nand so on", file=sys.stderr)
        sys.stderr.write("without its end")
        sys.stderr.write("\n")

    texts = [line["text"] for line in logged_lines(action)]
    assert texts == ["loading 3 shards", "token … is odd", "and so on", "without its end"]


def test_a_warning_is_logged_with_category_and_place_and_without_message() -> None:
    def action() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn(f"update the choices to include: {SECRET}", UserWarning, stacklevel=1)

    [line] = logged_lines(action)
    assert (line["level"], line["event"], line["logger"]) == ("warning", "a warning", "py.warnings")
    assert (line["category"], line["file"]) == ("UserWarning", __file__)
    assert int(line["line"]) > 0


def test_records_of_libraries_are_logged_without_quoted_text() -> None:
    def action() -> None:
        logging.getLogger("library").warning("the following was cut: ['%s']", SECRET)
        logging.getLogger("library").info("not worth a line")

    [line] = logged_lines(action)
    assert line["logger"] == "library"


def test_an_uncaught_exception_is_logged() -> None:
    def action() -> None:
        thread = threading.Thread(target=raise_from_another)
        thread.start()
        thread.join()

    [line] = logged_lines(action)
    assert (line["level"], line["error"]) == ("critical", "ValueError")


def test_only_messages_of_trusted_exceptions_are_logged() -> None:
    def action() -> None:
        log = logging.getLogger("diffserve.test")
        for error in (
            RuntimeError(f"CUDA error: out of memory in '{SECRET}'"),
            OSError(28, "No space left on device", f"/tmp/{SECRET}.png"),
            InvalidRequest(f"the weight of {SECRET} is 9"),
            ValueError(SECRET),
        ):
            log.error("failed", exc_info=error)

    reasons = [line.get("reason") for line in logged_lines(action, trusted=MACHINE)]
    assert reasons == ["CUDA error: out of memory in …", "No space left on device", "invalid_value", None]
    assert (
        "reason"
        not in logged_lines(lambda: logging.getLogger("diffserve").error("x", exc_info=RuntimeError(SECRET)))[0]
    )


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
def test_quoted_text_is_removed(text: str, shown: str) -> None:
    assert without_quotes(text) == shown


def test_reason_of_a_failure_keeps_only_device_messages() -> None:
    client_text = f"generating this image raised ValueError: {SECRET}\n{SECRET}"
    assert reason_of(client_text) == "generating this image raised ValueError"
    device_message = "generating this image raised RuntimeError: CUDA error: device-side assert triggered"
    assert reason_of(device_message) == device_message


def test_the_level_applies_to_this_package_and_is_restored() -> None:
    before = logging.getLogger("diffserve").level, logging.getLogger().level, sys.excepthook
    with json_logs("error"):
        assert not logging.getLogger("diffserve.http").isEnabledFor(logging.WARNING)
    assert (logging.getLogger("diffserve").level, logging.getLogger().level, sys.excepthook) == before


def test_a_fatal_exception_is_logged_as_json() -> None:
    code = f"from diffserve.logs import json_logs\nwith json_logs('info'):\n    raise SystemError('{SECRET}')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    [line] = [json.loads(line) for line in done.stderr.splitlines()]
    assert (line["level"], line["error"]) == ("critical", "SystemError")
    assert SECRET not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_lines_that_cannot_be_written_are_dropped_without_failing() -> None:
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
