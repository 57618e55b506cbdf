"""Execution of batch lines: worker threads, progress and summary.

Batches on this machine and on a server (``run``) and on a cluster (``cluster_run``) share it.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from diffserve.api.bounds import check
from diffserve.api.errors import DiffserveError, EngineUnavailable
from diffserve.cli.batch.lines import NAME, Line, Outcome
from diffserve.cli.batch.painters import LinePainter, PaintedFile, ReportProgress, Stopped
from diffserve.cli.generate import EXIT_FAILED, note
from diffserve.client import ServerLost, ServerUnreachable

FATAL_CODES: Final = frozenset({"invalid_api_key", "insufficient_permissions", "insufficient_quota"})
INVALID_JSON: Final = "invalid_json"
MAX_CONCURRENCY: Final = 64
MAX_ERRORS_SHOWN: Final = 20
"""Number of failed lines that standard error lists; the manifest has all."""

CONTINUE_HINT: Final = "run the same command again to continue"
POLL_S: Final = 0.2
PROGRESS_NOTE_S: Final = 30.0
"""Interval of progress notes when standard error is not a terminal."""

Work = tuple[Outcome, Sequence[PaintedFile]]
"""Result of a line, and its images, which are not written yet."""

T = TypeVar("T")
R = TypeVar("R")


def check_concurrency(concurrency: int) -> None:
    """Raise InvalidRequest if ``concurrency`` is out of bounds."""
    message = f"--concurrency must be between 1 and {MAX_CONCURRENCY}, got {concurrency}."
    check(1 <= concurrency <= MAX_CONCURRENCY, message, "--concurrency")


def paint_line(line: Line, painter: LinePainter, report_progress: ReportProgress) -> Work:
    """Generate the images of a line.

    Args:
        line: The line.
        painter: Generates the images.
        report_progress: Called with the completed share of the line, 0 to 1.

    Raises:
        DiffserveError: The error would affect every line, such as an unreachable server or an invalid API key.
    """
    started_s = time.monotonic()
    try:
        if line.error is not None:
            raise line.error
        pictures = painter.paint(line, report_progress)
    except (ServerLost, ServerUnreachable, EngineUnavailable):
        raise
    except DiffserveError as error:
        if error.code in FATAL_CODES:
            raise
        return failed(line, error, time.monotonic() - started_s), ()
    names = line.names()
    if len(names) != len(pictures):
        raise DiffserveError(f"line {line.number} must have {len(names)} images, got {len(pictures)}.")
    outcome = Outcome(
        line=line.number,
        id=line.id,
        digest=line.digest,
        prompt=line.prompt,
        files=tuple(names),
        seeds=tuple(picture.seed for picture in pictures),
        variation_seeds=tuple(picture.variation_seed for picture in pictures if picture.variation_seed is not None),
        seconds=round(time.monotonic() - started_s, 3),
        recipe=pictures[0].recipe,
        warnings=tuple(dict.fromkeys(warning for picture in pictures for warning in picture.warnings)),
    )
    return outcome, pictures


def failed(line: Line, error: DiffserveError | None, seconds: float) -> Outcome:
    """Return the result of a line that failed with ``error`` after ``seconds``."""
    assert error is not None
    details = {"code": error.code, "message": error.message, "param": error.param}
    return Outcome(
        line=line.number, id=line.id, digest=line.digest, prompt=line.prompt, seconds=round(seconds, 3), error=details
    )


class WorkerThreads(Generic[T, R]):
    """Calls a function for each item in daemon threads.

    Attributes:
        results: Index of the item and result, in the order of completion; an error that ended a thread; None when all
            threads have ended.
    """

    def __init__(
        self, work: Callable[[T], R], items: Iterable[T], num_threads: int, max_ahead: int = sys.maxsize
    ) -> None:
        """Start the threads.

        Args:
            work: Called with an item; Stopped ends its thread without an error.
            items: The items, which a thread iterates when it needs the next one.
            num_threads: Number of calls at a time.
            max_ahead: Number of items that may be started and not yet read from ``in_order``.
        """
        self.results: queue.SimpleQueue[tuple[int, R] | BaseException | None] = queue.SimpleQueue()
        self._is_stopping = threading.Event()
        self._work = work
        self._items = enumerate(items)
        self._lock = threading.Lock()
        self._ahead = threading.Semaphore(max_ahead)
        self._num_running = num_threads
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def in_order(self) -> Iterator[R]:
        """Yield the results in the order of the items; raise an error at once."""
        early: dict[int, R] = {}
        for index in count():
            while index not in early:
                result = self.results.get()
                if result is None:
                    return
                if isinstance(result, BaseException):
                    raise result
                early[result[0]] = result[1]
            self._ahead.release()
            yield early.pop(index)

    def stop(self, timeout_s: float | None = None) -> None:
        """Start no further items, and wait for the threads, at most ``timeout_s``."""
        self._is_stopping.set()
        self._ahead.release(len(self._threads))
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(None if until_s is None else max(0.0, until_s - time.monotonic()))

    def _run(self) -> None:
        try:
            while True:
                self._ahead.acquire()
                with self._lock:
                    entry = None if self._is_stopping.is_set() else next(self._items, None)
                if entry is None:
                    break
                self.results.put((entry[0], self._work(entry[1])))
        except Stopped:
            pass
        except BaseException as error:
            self.results.put(error)
        finally:
            with self._lock:
                self._num_running -= 1
                if not self._num_running:
                    self.results.put(None)


def follow(
    threads: WorkerThreads[T, R],
    add: Callable[[R], None],
    count_lines: Callable[[], tuple[int, int, float]],
    console: Console,
) -> None:
    """Handle the results of ``threads`` as they come, and show the progress until all threads have ended.

    Args:
        threads: The threads.
        add: Called with each result.
        count_lines: Returns the number of finished lines, the number of all lines, and the number of finished lines
            with the parts of unfinished ones.
        console: Console for a progress bar or, if it is not a terminal, for notes.

    Raises:
        BaseException: The error of a thread, or of ``add``.
    """
    last_note_s = time.monotonic()
    columns = (
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("painting", total=None, count="")
        while True:
            try:
                result = threads.results.get(timeout=POLL_S)
            except queue.Empty:
                pass
            else:
                if isinstance(result, BaseException):
                    raise result
                if result is None:
                    return
                add(result[1])
            num_done, num_lines, completed = count_lines()
            progress.update(bar, total=num_lines or None, completed=completed, count=f"{num_done}/{num_lines}")
            if not console.is_terminal and time.monotonic() - last_note_s > PROGRESS_NOTE_S:
                last_note_s = time.monotonic()
                note(console, f"{num_done} of {num_lines} lines are done.")


def explain_stop(error: DiffserveError, progress: str = "") -> None:
    """Add to the message of an error that stops a batch what was done, ``progress``, and how to continue."""
    hint = " Free some space there:" if error.message.startswith("cannot write") else ""
    continuation = f"{progress} {CONTINUE_HINT}.".strip()
    end = "" if error.message.endswith((".", ";", ":")) else ";"
    error.message = f"{error.message}{end}{hint} {continuation[0].upper()}{continuation[1:]}"


def _is_user_error(error: Mapping[str, Any]) -> bool:
    """Return whether a failed line must be corrected, because it would fail again unchanged."""
    return bool(error.get("param")) or error.get("code") == INVALID_JSON


def summarize(outcomes: Iterable[Outcome], num_lines: int, num_before: int, folder: Path, console: Console) -> int:
    """Print the summary of a batch and return the exit code.

    Args:
        outcomes: Results of this and earlier runs.
        num_lines: Number of lines in the batch file.
        num_before: Number of lines that earlier runs finished.
        folder: Output folder.
        console: Console for the list of failures.
    """
    num_painted = num_failed = 0
    is_user_error = False
    for outcome in outcomes:
        if outcome.error is None:
            num_painted += 1
            continue
        num_failed += 1
        if num_failed <= MAX_ERRORS_SHOWN:
            is_user_error = is_user_error or _is_user_error(outcome.error)
            note(console, f"line {outcome.line}: {outcome.error.get('message')}")
    if num_failed > MAX_ERRORS_SHOWN:
        note(console, f"{num_failed - MAX_ERRORS_SHOWN} more lines failed; see {folder / NAME}.")
    before_text = f", {num_before} of them in earlier runs" if num_before else ""
    next_step = "correct the invalid lines, then run" if is_user_error else "run"
    failed_text = f"; {num_failed} failed; {next_step} the same command again to retry" if num_failed else ""
    print(f"{num_painted} of {num_lines} lines are done in {folder}{before_text}{failed_text}")
    return EXIT_FAILED if num_failed or num_painted < num_lines else 0
