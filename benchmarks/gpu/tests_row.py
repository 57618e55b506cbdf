"""The project's tests on the device: those marked gpu, and the engine's own with ``--device``; counted as they end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from typing import Any, Final

from benchmarks.gpu.run import ROOT
from benchmarks.gpu.worker import Bench

FOLDERS: Final = ("tests/runtime", "tests/engine")
QUICK_FILE: Final = "tests/schedulers/test_names.py"
OPTIONS: Final = (
    *("-v", "--tb=short", "--color=no"),
    *("-p", "no:cacheprovider", "-p", "benchmarks.gpu.print_failures"),
)
RESERVE_S: Final = 8.0
"""Kept for pytest to report what failed so far, when it is interrupted at the end of the row."""

MOST_NAMED: Final = 30
OUTCOMES: Final = (
    re.compile(r"^\[gw\d+\] \[ *\d+%\] (?P<outcome>[A-Z]+) (?P<test>tests/\S+)"),
    re.compile(r"^(?P<test>tests/\S+::.+?) (?P<outcome>PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b"),
)


def commands(bench: Bench) -> dict[str, list[str]]:
    """Return the pytest commands of the row, by the name of their point."""
    python = [sys.executable, "-m", "pytest", *OPTIONS]
    if bench.quick:
        return {"engine tests": [*python, "-n", "0", QUICK_FILE]}
    workers = str(min(8, max(1, (os.cpu_count() or 2) // 2)))
    return {
        "gpu tests": [*python, "-n", "2", "-m", "gpu", "tests"],
        "engine tests": [*python, "-n", workers, "--device", bench.device.type, *FOLDERS],
    }


def run(bench: Bench) -> None:
    """Run all commands at once until they end or the row does; what they print goes to ``tests.txt``."""
    started_s = time.monotonic()
    processes = {}
    for name, command in commands(bench).items():
        log = bench.work / f"{name.replace(' ', '-')}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        processes[name] = process, command, log
    waits = {name: process for name, (process, _, _) in processes.items()}
    while any(process.poll() is None for process in waits.values()) and bench.left_s > RESERVE_S:
        time.sleep(0.1)
    is_cut = {name: process.poll() is None for name, process in waits.items()}
    for name, process in waits.items():
        if is_cut[name]:
            process.send_signal(signal.SIGINT)
    for name, process in waits.items():
        if is_cut[name]:
            _wait_or_kill(process, bench.left_s - 2.0)
    texts = {name: log.read_text(encoding="utf-8", errors="replace") for name, (_, _, log) in processes.items()}
    bench.write("tests.txt", "\n".join(f"== {name}\n{text}" for name, text in texts.items()))
    for name, (process, command, _) in processes.items():
        seconds = round(time.monotonic() - started_s, 1)
        counts = count_outcomes(texts[name], process.returncode, is_cut=is_cut[name])
        figures = {"command": _shown(command), "s": seconds, **counts}
        bench.point(name, partial(dict, figures))


def _wait_or_kill(process: subprocess.Popen[Any], seconds: float) -> None:
    try:
        process.wait(max(0.5, seconds))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _shown(command: list[str]) -> str:
    return " ".join(["python", *command[1:]])


def count_outcomes(text: str, exit_code: int | None, *, is_cut: bool) -> dict[str, Any]:
    """Count the outcomes of tests by what ``pytest -v`` printed; failed tests are problems.

    ``is_cut``: the run was interrupted at the end of the row. Otherwise an exit code that no outcome explains is a
    problem too.
    """
    outcomes: dict[str, str] = {}
    for line in text.splitlines():
        for pattern in OUTCOMES:
            if match := pattern.match(line):
                outcomes[match["test"]] = match["outcome"]
                break
    counts = Counter(outcomes.values())
    problems = [test for test, outcome in outcomes.items() if outcome in ("FAILED", "ERROR")]
    if not is_cut and exit_code and not problems:
        problems = [f"pytest ended with {exit_code}: {text.strip()[-300:]}"]
    return {
        **{outcome.lower(): count for outcome, count in sorted(counts.items())},
        "is_cut": is_cut,
        "num_problems": len(problems),
        "problems": problems[:MOST_NAMED],
    }
