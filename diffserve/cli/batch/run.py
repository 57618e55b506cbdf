"""Execution of a batch on this machine or a server: worker threads, output files, progress and summary."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from diffserve.api.bounds import check
from diffserve.api.errors import DiffserveError, InvalidRequest
from diffserve.cli.batch.lines import Line, read_lines
from diffserve.cli.batch.manifest import NAME, Manifest, Outcome
from diffserve.cli.batch.painters import LinePainter, LocalPainter, ServerPainter, Stopped
from diffserve.cli.batch.painting import failed, paint_line
from diffserve.cli.generate import EXIT_FAILED, note, open_engine
from diffserve.cli.outputs import write_output
from diffserve.cli.remote import refuse_placement
from diffserve.client import Client
from diffserve.service.safety import Safety
from diffserve.settings.layers import Flag, load_settings

MAX_CONCURRENCY: Final = 64
MAX_ERRORS_SHOWN: Final = 20
"""Number of failed lines that standard error lists; the manifest has all."""

CONTINUE_HINT: Final = "the same command paints what is missing"
STOP_TIMEOUT_S: Final = 10.0
PROGRESS_NOTE_S: Final = 30.0
"""Interval of progress notes when standard error is not a terminal."""


def run(
    prompts: Path,
    output: Path,
    *,
    server: str | None,
    concurrency: int,
    model: str | None,
    config: str | None,
    flags: Mapping[str, Flag],
    folder: Path | None = None,
) -> int:
    """Generate images for every line of a batch file and return the exit code: 0, or 1 if some lines failed.

    Args:
        prompts: The batch file.
        output: Folder for the images and ``results.jsonl``.
        server: Address of a server; None: load the model in this process.
        concurrency: Number of lines in progress at a time.
        model: Model name or path.
        config: Configuration name or file.
        flags: Settings of the command line.
        folder: Folder that image paths are relative to. None: the folder of ``prompts``.

    Raises:
        DiffserveError: The whole batch cannot continue. Finished lines are recorded first.
    """
    check_concurrency(concurrency)
    if server:
        refuse_placement({**flags, "": Flag("--config", config)})
    lines = read_lines(prompts, folder)
    console = Console(stderr=True, highlight=False)
    with Manifest.open(output, lines) as manifest:
        missing = [line for line in lines if line.number not in manifest.painted]
        if any(line.error is None for line in missing):
            if server:
                with Client(server) as client:
                    _Run(ServerPainter(client, model), output, manifest, console).paint(missing, concurrency)
            else:
                settings = load_settings(model=model, config=config, flags=flags)
                with Safety.running(settings) as safety:
                    with console.status(f"loading {settings.model.path}"):
                        painter = LocalPainter(open_engine(settings), settings.serve, safety)
                    _Run(painter, output, manifest, console).paint(missing, concurrency)
        else:
            for line in missing:
                manifest.add(failed(line, line.error, 0.0))
        return _summarize(lines, manifest, output, console)


def check_concurrency(concurrency: int) -> None:
    """Raise InvalidRequest if ``concurrency`` is out of bounds."""
    message = f"--concurrency must be between 1 and {MAX_CONCURRENCY}, got {concurrency}."
    check(1 <= concurrency <= MAX_CONCURRENCY, message, "--concurrency")


class _Run:
    """Generates lines in threads of this process."""

    def __init__(self, painter: LinePainter, folder: Path, manifest: Manifest, console: Console) -> None:
        self._painter = painter
        self._folder = folder
        self._manifest = manifest
        self._console = console
        self._todo: queue.SimpleQueue[Line] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Outcome | BaseException | None] = queue.SimpleQueue()
        self._shares: dict[int, float] = {}
        self._ends = threading.Event()

    def paint(self, lines: Sequence[Line], concurrency: int) -> None:
        """Generate ``lines`` with ``concurrency`` threads.

        Raises:
            DiffserveError: The whole batch cannot continue.
        """
        for line in lines:
            self._todo.put(line)
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(min(concurrency, len(lines)))]
        for thread in threads:
            thread.start()
        try:
            self._watch(len(lines), len(threads))
        except KeyboardInterrupt:
            self._stop(threads)
            note(self._console, f"stopped; {self._painted_count_text()} {CONTINUE_HINT}.")
            raise
        except DiffserveError as error:
            self._stop(threads)
            message = " ".join(error.message.split())
            hint = " Free some space there:" if error.param == "output" else ""
            error.message = f"{message}{hint} {self._painted_count_text()} {CONTINUE_HINT}."
            raise

    def _watch(self, num_lines: int, num_threads: int) -> None:
        num_done, last_note_s = 0, time.monotonic()
        with bar_of_lines(self._console) as progress:
            bar = progress.add_task("painting", total=num_lines, count=f"0/{num_lines}")
            while num_threads:
                try:
                    result = self._done.get(timeout=0.2)
                except queue.Empty:
                    pass
                else:
                    if isinstance(result, BaseException):
                        raise result
                    if result is None:
                        num_threads -= 1
                        continue
                    self._add(result)
                    num_done += 1
                progress.update(
                    bar, completed=num_done + sum(list(self._shares.values())), count=f"{num_done}/{num_lines}"
                )
                if not self._console.is_terminal and time.monotonic() - last_note_s > PROGRESS_NOTE_S:
                    last_note_s = time.monotonic()
                    note(self._console, f"{num_done} of {num_lines} lines are done.")

    def _add(self, outcome: Outcome) -> None:
        try:
            self._manifest.add(outcome)
        except OSError as error:
            raise InvalidRequest(f"cannot write {NAME}: {error.strerror}.", param="output") from error

    def _work(self) -> None:
        """Run in a thread: generate lines until none is left. Queue each result, a fatal error, and None at the end."""
        try:
            while not self._ends.is_set():
                try:
                    line = self._todo.get_nowait()
                except queue.Empty:
                    break
                self._done.put(self._outcome(line))
        except Stopped:
            pass
        except BaseException as error:
            self._done.put(error)
        finally:
            self._done.put(None)

    def _outcome(self, line: Line) -> Outcome:
        """Generate a line and write its files. Raises errors that would affect every line."""
        try:
            tell = partial(self._shares.__setitem__, line.number)
            outcome, pictures = paint_line(line, self._painter, tell)
        finally:
            self._shares.pop(line.number, None)
        if pictures and self._ends.is_set():
            raise Stopped
        for name, picture in zip(outcome.files, pictures, strict=True):
            write_output(self._folder / name, picture.data)
        return outcome

    def _stop(self, threads: Sequence[threading.Thread]) -> None:
        """Stop all threads and record the lines that they finished meanwhile."""
        self._ends.set()
        self._painter.stop()
        until_s = time.monotonic() + STOP_TIMEOUT_S
        for thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        while not self._done.empty():
            result = self._done.get_nowait()
            if isinstance(result, Outcome):
                try:
                    self._add(result)
                except InvalidRequest:
                    return

    def _painted_count_text(self) -> str:
        num_painted = sum(bool(outcome.files) for outcome in self._manifest.outcomes)
        return f"{num_painted} {'line is' if num_painted == 1 else 'lines are'} painted, and"


def bar_of_lines(console: Console) -> Progress:
    """Return a progress bar that counts lines and is hidden unless ``console`` is a terminal."""
    columns = (
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _summarize(lines: Sequence[Line], manifest: Manifest, folder: Path, console: Console) -> int:
    """Print the summary of a batch in this process and return the exit code."""
    outcomes = manifest.outcomes
    failures = [outcome for outcome in outcomes if outcome.error is not None]
    num_painted = len(outcomes) - len(failures)
    shown = failures[:MAX_ERRORS_SHOWN]
    return print_summary(len(lines), len(manifest.painted), num_painted, len(failures), shown, folder, console)


def print_summary(
    num_lines: int,
    num_before: int,
    num_painted: int,
    num_failed: int,
    failures: Sequence[Outcome],
    folder: Path,
    console: Console,
) -> int:
    """Print the summary of a batch and return the exit code.

    Args:
        num_lines: Number of lines in the batch file.
        num_before: Number of lines that earlier runs finished.
        num_painted: Number of lines that succeeded, including earlier runs.
        num_failed: Number of lines that failed.
        failures: The failed lines to list.
        folder: Output folder.
        console: Console for the list of failures.
    """
    for outcome in failures:
        note(console, f"line {outcome.line}: {(outcome.error or {}).get('message')}")
    if num_failed > len(failures):
        note(console, f"{num_failed - len(failures)} more lines failed; see {folder / NAME}.")
    before_text = f", {num_before} of them before" if num_before else ""
    next_step = (
        "; correct the refused lines, and then"
        if any((outcome.error or {}).get("param") for outcome in failures)
        else ", and"
    )
    failed_text = f"; {num_failed} failed{next_step} {CONTINUE_HINT}" if num_failed else ""
    print(f"{num_painted} of {num_lines} lines are painted into {folder}{before_text}{failed_text}", file=sys.stdout)
    return EXIT_FAILED if num_failed or num_painted < num_lines else 0
