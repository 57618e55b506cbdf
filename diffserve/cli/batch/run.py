"""``diffserve batch`` on this machine or a server: output files, results and stopping."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from rich.console import Console

from diffserve.api.errors import DiffserveError, InvalidRequest
from diffserve.cli.batch.job_painter import JobPainter
from diffserve.cli.batch.lines import NAME, Line, Manifest, Outcome, read_lines
from diffserve.cli.batch.painters import LinePainter, LocalPainter, Stopped
from diffserve.cli.batch.runner import (
    CONTINUE_HINT,
    WorkerThreads,
    check_concurrency,
    explain_stop,
    failed,
    follow,
    paint_line,
    summarize,
)
from diffserve.cli.generate import note, open_engine
from diffserve.cli.options import SettingsOptions
from diffserve.cli.outputs import write_output
from diffserve.cli.remote import refuse_placement
from diffserve.client import Client
from diffserve.service.safety import Safety

STOP_TIMEOUT_S: Final = 10.0


def run(
    prompts: Path,
    output: Path,
    sources: SettingsOptions,
    *,
    server: str | None,
    concurrency: int,
    folder: Path | None = None,
) -> int:
    """Generate images for every line of a batch file and return the exit code: 0, or 1 if some lines failed.

    Args:
        prompts: The batch file.
        output: Folder for the images and ``results.jsonl``.
        sources: Options for the settings.
        server: Address of a server; None: load the model in this process.
        concurrency: Number of lines in progress at a time.
        folder: Folder that image paths are relative to. None: the folder of ``prompts``.

    Raises:
        DiffserveError: The whole batch cannot continue. Finished lines are recorded first.
    """
    check_concurrency(concurrency)
    if server:
        refuse_placement(sources.loading_flags)
    lines = read_lines(prompts, folder)
    console = Console(stderr=True, highlight=False)
    with Manifest.open(output, lines) as manifest:
        missing = [line for line in lines if line.number not in manifest.painted]
        if all(line.error is not None for line in missing):
            for line in missing:
                manifest.add(failed(line, line.error, 0.0))
        elif server:
            with Client(server) as client:
                painter = JobPainter(client, sources.model, output)
                _Run(painter, output, manifest, console, painter.forget).paint(missing, concurrency)
        else:
            settings = sources.load()
            with Safety.running(settings) as safety:
                with console.status(f"loading {settings.model.path}"):
                    local = LocalPainter(open_engine(settings), settings.serve, safety)
                _Run(local, output, manifest, console).paint(missing, concurrency)
        return summarize(manifest.outcomes, len(lines), len(manifest.painted), output, console)


class _Run:
    """Generates lines in threads of this process; ``on_recorded`` is called with each result that is recorded."""

    def __init__(
        self,
        painter: LinePainter,
        folder: Path,
        manifest: Manifest,
        console: Console,
        on_recorded: Callable[[Outcome], None] = lambda _: None,
    ) -> None:
        self._on_recorded = on_recorded
        self._painter = painter
        self._folder = folder
        self._manifest = manifest
        self._console = console
        self._shares: dict[int, float] = {}
        self._num_done = 0
        self._is_stopping = threading.Event()

    def paint(self, lines: Sequence[Line], concurrency: int) -> None:
        """Generate ``lines`` with ``concurrency`` threads.

        Raises:
            DiffserveError: The whole batch cannot continue.
        """
        threads = WorkerThreads(self._paint_line, lines, min(concurrency, len(lines)))

        def count_lines() -> tuple[int, int, float]:
            return self._num_done, len(lines), self._num_done + sum(list(self._shares.values()))

        try:
            follow(threads, self._add, count_lines, self._console)
        except KeyboardInterrupt:
            self._stop(threads)
            note(self._console, f"stopped; {self._progress_text()} {CONTINUE_HINT}.")
            raise
        except DiffserveError as error:
            self._stop(threads)
            explain_stop(error, self._progress_text())
            raise

    def _add(self, outcome: Outcome) -> None:
        try:
            self._manifest.add(outcome)
        except OSError as error:
            raise InvalidRequest(f"cannot write {NAME}: {error.strerror}.", param="output") from error
        self._num_done += 1
        self._on_recorded(outcome)

    def _paint_line(self, line: Line) -> Outcome:
        """Generate a line and write its files. Raises errors that would affect every line."""
        try:
            report_progress = partial(self._shares.__setitem__, line.number)
            outcome, pictures = paint_line(line, self._painter, report_progress)
        finally:
            self._shares.pop(line.number, None)
        if pictures and self._is_stopping.is_set():
            raise Stopped
        for name, picture in zip(outcome.files, pictures, strict=True):
            write_output(self._folder / name, picture.data)
        return outcome

    def _stop(self, threads: WorkerThreads[Line, Outcome]) -> None:
        """Stop all threads and record the lines that they finished meanwhile."""
        self._is_stopping.set()
        self._painter.stop()
        threads.stop(STOP_TIMEOUT_S)
        while not threads.results.empty():
            result = threads.results.get_nowait()
            if isinstance(result, tuple):
                try:
                    self._add(result[1])
                except InvalidRequest:
                    return

    def _progress_text(self) -> str:
        num_painted = sum(bool(outcome.files) for outcome in self._manifest.outcomes)
        return f"{num_painted} {'line is' if num_painted == 1 else 'lines are'} done;"
