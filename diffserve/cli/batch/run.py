"""A batch as it runs: lines in threads, files as they come, and how to go on with what ends it."""

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
MOST_TOLD: Final = 20
"""Lines that failed, of which standard error tells; the manifest tells of all."""

GO_ON: Final = "the same command paints what is missing"
END_S: Final = 10.0
SIGN_OF_LIFE_S: Final = 30.0


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
    """Paint every line of ``prompts`` into the folder ``output``; 0 where all are painted, 1 where some failed.

    Raises DiffserveError for what ends all of it, and KeyboardInterrupt, each after what is painted was written down.
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
        return _end(lines, manifest, output, console)


def check_concurrency(concurrency: int) -> None:
    """InvalidRequest where it is out of bounds."""
    said = f"--concurrency is {concurrency}; it must lie between 1 and {MAX_CONCURRENCY}."
    check(1 <= concurrency <= MAX_CONCURRENCY, said, "--concurrency")


class _Run:
    """Lines that are painted in threads of this process."""

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
        """All ``lines``, as many at a time as ``concurrency`` says. Raises what ends the batch."""
        for line in lines:
            self._todo.put(line)
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(min(concurrency, len(lines)))]
        for thread in threads:
            thread.start()
        try:
            self._watch(len(lines), len(threads))
        except KeyboardInterrupt:
            self._stop(threads)
            note(self._console, f"stopped; {self._count()} {GO_ON}.")
            raise
        except DiffserveError as error:
            self._stop(threads)
            message = " ".join(error.message.split())
            room = " Make room there:" if error.param == "output" else ""
            error.message = f"{message}{room} {self._count()} {GO_ON}."
            raise

    def _watch(self, num_lines: int, num_threads: int) -> None:
        num_done, told_s = 0, time.monotonic()
        is_seen = self._console.is_terminal
        with bar_of_lines(self._console) as progress:
            bar = progress.add_task("painting", total=num_lines, count=f"0/{num_lines}")
            while num_threads:
                try:
                    news = self._done.get(timeout=0.2)
                except queue.Empty:
                    pass
                else:
                    if isinstance(news, BaseException):
                        raise news
                    if news is None:
                        num_threads -= 1
                        continue
                    self._add(news)
                    num_done += 1
                progress.update(bar, completed=num_done + self._share(), count=f"{num_done}/{num_lines}")
                if not is_seen and time.monotonic() - told_s > SIGN_OF_LIFE_S:
                    told_s = time.monotonic()
                    note(self._console, f"{num_done} of {num_lines} lines are done.")

    def _add(self, outcome: Outcome) -> None:
        try:
            self._manifest.add(outcome)
        except OSError as error:
            raise InvalidRequest(f"cannot write {NAME}: {error.strerror}.", param="output") from error

    def _work(self) -> None:
        """Paint line after line; in a thread. What ends the batch is handed over, and so is the end."""
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
        """What becomes of a line. Raises what would become of every other one, too."""
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
        """End all threads, and write down what they finished meanwhile."""
        self._ends.set()
        self._painter.stop()
        until_s = time.monotonic() + END_S
        for thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        while not self._done.empty():
            news = self._done.get_nowait()
            if isinstance(news, Outcome):
                try:
                    self._add(news)
                except InvalidRequest:
                    return

    def _count(self) -> str:
        num_painted = sum(bool(outcome.files) for outcome in self._manifest.outcomes)
        return f"{num_painted} {'line is' if num_painted == 1 else 'lines are'} painted, and"

    def _share(self) -> float:
        return sum(list(self._shares.values()))


def bar_of_lines(console: Console) -> Progress:
    """A bar of lines, with the time that is left, on a terminal."""
    columns = (
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _end(lines: Sequence[Line], manifest: Manifest, folder: Path, console: Console) -> int:
    """Say what became of all, and the exit code."""
    outcomes = manifest.outcomes
    lost = [outcome for outcome in outcomes if outcome.error is not None]
    num_painted = len(outcomes) - len(lost)
    return tell_end(len(lines), len(manifest.painted), num_painted, len(lost), lost[:MOST_TOLD], folder, console)


def tell_end(
    num_lines: int,
    num_before: int,
    num_painted: int,
    num_failed: int,
    lost: Sequence[Outcome],
    folder: Path,
    console: Console,
) -> int:
    """Say how many of a batch's lines are painted, why the first of those that failed did, and the exit code."""
    for outcome in lost:
        note(console, f"line {outcome.line}: {(outcome.error or {}).get('message')}")
    if num_failed > len(lost):
        note(console, f"and {num_failed - len(lost)} more; {folder / NAME} says why.")
    before = f", {num_before} of them before" if num_before else ""
    first = "; correct what was refused, and then" if any((one.error or {}).get("param") for one in lost) else ", and"
    told = f"; {num_failed} failed{first} {GO_ON}" if num_failed else ""
    print(f"{num_painted} of {num_lines} lines are painted into {folder}{before}{told}", file=sys.stdout)
    return EXIT_FAILED if num_failed or num_painted < num_lines else 0
