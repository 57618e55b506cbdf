"""Run the rows of the GPU suite, each before its deadline, in a worker process that is replaced when a row hangs.

This process never loads torch. A worker keeps its models from row to row. A spare worker stands by with its libraries
imported, so that a row which hangs, crashes or breaks the CUDA context costs later rows a few seconds only.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.report import MOST_ERROR_CHARS, Report, shorten_output
from benchmarks.gpu.schedule import MOST_JOBS, QUICK_PATIENCE, START, Job, Row, next_row, seconds_of

ROOT: Final = Path(__file__).resolve().parents[2]
POLL_S: Final = 0.25
FIRST_ROW_FAILED: Final = 2
NO_GPU: Final = 3
COMPILE_THREADS: Final = "6"
"""Of each compile job: the machine has 16 cores, and tests run meanwhile."""

MOST_OF_BUDGET: Final = 1.5
"""Of its budget a row may take so much, if earlier rows left time over."""

COMPILE_LOG: Final = "compile.txt"
WORKER_LOG: Final = "workers.txt"


def say(text: str) -> None:
    """Print progress to standard error."""
    print(text, file=sys.stderr, flush=True)


def environment(options: dict[str, Any]) -> dict[str, str]:
    """Return the environment of a worker or compile job, with this tree importable and caches in the run's folder."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    additions = {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "HF_HUB_OFFLINE": "1",
        "XDG_CACHE_HOME": str(Path(options["work"]) / "xdg"),
        "TORCHINDUCTOR_CACHE_DIR": str(Path(options["work"]) / "inductor"),
    }
    return {**os.environ, **additions, **({"OMP_NUM_THREADS": "1"} if options["quick"] else {})}


def end_group(process: subprocess.Popen[Any]) -> None:
    """Kill ``process`` and every process of its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Worker:
    """A process that runs rows, and the messages that come from it; its standard error goes to a file of results."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._log = Path(options["out"]) / WORKER_LOG
        self._log_start = 0
        with self._log.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu.worker", json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                env=environment(options),
                start_new_session=True,
            )
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def begin(self, row: Row, seconds: float) -> None:
        """Tell the worker to run ``row`` within ``seconds``."""
        assert self.process.stdin is not None
        self._log_start = self._log.stat().st_size
        with contextlib.suppress(OSError):  # the reader notices that the process is gone
            print(json.dumps({"place": row.place, "seconds": seconds}), file=self.process.stdin, flush=True)

    def message(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next message; ``None`` when the process has ended. Raises ``queue.Empty`` after ``timeout_s``."""
        return self._messages.get(timeout=max(0.0, timeout_s))

    def last_words(self) -> str:
        """Return standard error of the ended process since its row began, shortened, and its exit code."""
        with self._log.open("rb") as file:
            file.seek(self._log_start)
            text = file.read().decode("utf-8", errors="replace")
        reason = f"the worker ended with {self.process.wait()}"
        return f"{shorten_output(text, MOST_ERROR_CHARS - len(reason) - 1)}\n{reason}".strip()

    def close(self) -> None:
        """Kill the process and all that it started."""
        end_group(self.process)
        self._reader.join()
        with self.process:  # which closes its pipes
            pass

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._messages.put(json.loads(line))
        self._messages.put(None)


class CompileJobs:
    """Compile jobs, at most ``MOST_JOBS`` at a time; what they print is collected in one file."""

    def __init__(self, jobs: Sequence[Job], options: dict[str, Any], report: Report) -> None:
        self._waiting = list(jobs)
        self._options = options
        self._report = report
        self._running: dict[str, tuple[subprocess.Popen[bytes], float, Path]] = {}

    @property
    def unfinished(self) -> set[str]:
        """Names of jobs that have not ended."""
        return {job.name for job in self._waiting} | set(self._running)

    def poll(self) -> None:
        """Start what may start, and note what has ended."""
        for name, (process, started_s, log) in list(self._running.items()):
            if process.poll() is not None:
                del self._running[name]
                end_group(process)
                self._note(name, started_s, process.returncode, log)
        for job in self._waiting[: MOST_JOBS - len(self._running)]:
            self._waiting.remove(job)
            self._start(job)

    def _start(self, job: Job) -> None:
        log = Path(self._options["work"]) / f"{job.name}.log"
        command = [sys.executable, "-m", "benchmarks.gpu.compile_job", json.dumps(self._options | job._asdict())]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**environment(self._options), "TORCHINDUCTOR_COMPILE_THREADS": COMPILE_THREADS},
                start_new_session=True,
            )
        self._running[job.name] = process, self._report.now_s, log
        self._report.document["jobs"][job.name] = {"started_s": round(self._report.now_s, 1)}

    def _note(self, name: str, started_s: float, code: int | None, log: Path) -> None:
        text = log.read_text(encoding="utf-8", errors="replace")
        entry = self._report.document["jobs"][name]
        says = f"ended by signal {-code}" if code and code < 0 else "".join(text.strip().splitlines()[-1:])
        entry |= {"wall_s": round(self._report.now_s - started_s, 1), "exit_code": code, "says": says}
        if code:
            entry["error"] = shorten_output(text)
        with (self._report.folder / COMPILE_LOG).open("a", encoding="utf-8") as file:
            file.write(f"== {name}: exit code {code} after {entry['wall_s']} s\n{text}\n")
        self._report.write()
        say(f"{self._report.now_s:7.1f} s  compile job {name} ended with {code} after {entry['wall_s']} s")

    def wait_for_one(self, seconds: float) -> bool:
        """Wait until a job has ended, for at most ``seconds``. Returns whether one has."""
        until_s, unfinished = self._report.now_s + seconds, self.unfinished
        while self.unfinished == unfinished and self._report.now_s < until_s:
            self.poll()
            time.sleep(POLL_S)
        return self.unfinished != unfinished

    def close(self) -> None:
        """End what still runs."""
        for name, (process, started_s, log) in list(self._running.items()):
            end_group(process)
            self._note(name, started_s, None, log)
        self._running.clear()
        self._waiting.clear()


def run_rows(rows: Sequence[Row], jobs: Sequence[Job], options: dict[str, Any], report: Report) -> int:
    """Run ``rows`` in order, and ``jobs`` meanwhile. Returns 0, or the exit code that ended the run early."""
    pending = list(rows)
    workers: list[Worker] = []
    compiling = CompileJobs(jobs, options, report)
    try:
        while pending:
            patience = QUICK_PATIENCE if options["quick"] else 1.0
            length_s = patience * options["length_s"]
            row = next_row(pending, compiling.unfinished)
            if row is None:
                if compiling.wait_for_one(length_s - patience * seconds_of(pending) - report.now_s):
                    continue
                row = next_row(pending, compiling.unfinished, is_patient=False) or pending[0]
            pending.remove(row)
            left_s = length_s - patience * seconds_of(pending) - report.now_s
            seconds = max(min(left_s, MOST_OF_BUDGET * patience * row.seconds), row.most_s)
            workers = workers or [Worker(options)]
            entry = report.begin_row(row.name)
            if row.quiet and compiling.unfinished:
                entry["beside"] = sorted(compiling.unfinished)
            say(f"{report.now_s:7.1f} s  {row.name}: {row.what} ({seconds:.0f} s)")
            workers[0].begin(row, seconds)
            code = _follow(workers[0], entry, seconds, report, compiling)
            say(f"{report.now_s:7.1f} s  {row.name}: {entry['state']}")
            if entry["state"] == "abandoned":
                workers.pop(0).close()
            if code or (row.name == START and report.num_errors):
                return code or FIRST_ROW_FAILED
            if len(workers) < 2 and pending and not options["quick"]:
                workers.append(Worker(options))
        return 0
    finally:
        compiling.close()
        for worker in workers:
            worker.close()


def _follow(worker: Worker, entry: dict[str, Any], seconds: float, report: Report, compiling: CompileJobs) -> int:
    """Take the messages of a row until it ends or has had its ``seconds``. Returns an exit code that ends the run."""
    until_s = time.monotonic() + seconds
    while True:
        compiling.poll()
        try:
            message = worker.message(min(POLL_S, until_s - time.monotonic()))
        except queue.Empty:
            if time.monotonic() < until_s:
                continue
            report.end_row(entry, "abandoned", f"it took longer than {seconds:.0f} s")
            return 0
        if message is None:
            report.end_row(entry, "abandoned", worker.last_words())
            return 0
        if "point" in message:
            entry["points"][message.pop("point")] = message
            report.write()
        elif "about" in message:
            report.document |= message["about"]
        elif "no_gpu" in message:
            report.end_row(entry, "failed", message["no_gpu"])
            return NO_GPU
        else:
            report.end_row(entry, "failed" if message["error"] else "done", message["error"])
            return 0
