"""``diffserve batch --cluster``: splits a batch into shards for the workers of a Ray cluster.

``ShardWorker`` generates shards with an engine in its own process, on any machine of the cluster.
"""

from __future__ import annotations

import atexit
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from socket import gethostname
from typing import Any, Final

import msgspec
from rich.console import Console

from diffserve.api.errors import ConfigError, DiffserveError, InvalidRequest
from diffserve.cli.batch.lines import alone_in
from diffserve.cli.batch.painters import LinePainter, LocalPainter
from diffserve.cli.batch.runner import (
    CONTINUE_HINT,
    Work,
    WorkerThreads,
    check_concurrency,
    explain_stop,
    follow,
    paint_line,
    summarize,
)
from diffserve.cli.batch.shards import Layout, Shard, ShardFolder, ShardRow, ShardWriter
from diffserve.cli.generate import note, open_engine
from diffserve.cli.options import SettingsOptions
from diffserve.cli.outputs import write_output
from diffserve.cluster.ray_calls import METRIC_PORTS, NO_PORT
from diffserve.processes import bound_spinning
from diffserve.service.safety import Safety
from diffserve.settings.config import Settings
from diffserve.settings.layers import ENV_PREFIX, PROFILES, Flag, load_settings

PART_SCAN_S: Final = 2.0
"""Interval at which unfinished shards are counted for the progress bar."""

PATH_SETTINGS: Final = tuple(
    f"model.{name}"
    for name in (
        "vae",
        "text_encoder",
        "embeddings_dir",
        "lora_dir",
        "controlnet_dir",
        "reference_dir",
        "sampler_dir",
        "wildcard_dir",
        "quality_profile",
        "refiner",
        "scorer",
    )
)
"""Settings that can name a file on this machine."""

MOST_TRIES: Final = 4
"""How many workers a shard may lose before it fails, because the shard itself may crash them."""


class ShardJob(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters that all shards of a command share.

    Attributes:
        prompts: Absolute path of the batch file, the same on all machines.
        folder: Absolute path of the output folder, the same on all machines.
        token: Content of ``ShardFolder.token_path``, which proves that the folder is shared.
        layout: Shard size and output format.
        concurrency: Number of lines in progress at a time.
        model: Model name or path.
        config: Configuration name or file.
        environment: Settings from the environment of the command.
        flags: Options of the command: key -> (option, value).
    """

    prompts: str
    folder: str
    token: str
    layout: Layout
    concurrency: int
    model: str | None = None
    config: str | None = None
    environment: dict[str, str] = {}
    flags: dict[str, tuple[str, Any]] = {}

    @property
    def settings(self) -> Settings:
        """The settings of the command.

        Raises:
            ConfigError: A setting is invalid.
        """
        flags = {key: Flag(*flag) for key, flag in self.flags.items()}
        return load_settings(model=self.model, config=self.config, env=self.environment, flags=flags)


class ShardReport(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The result of a shard, or the ``error`` that stops the batch, with the invalid parameter."""

    shard: int
    num_painted: int = 0
    num_failed: int = 0
    error: str = ""
    param: str | None = None


class ShardWorker:
    """Generates shards one after the other. The engine is loaded for the first shard."""

    def __init__(self, job: bytes, open_painter: Callable[[Settings], LinePainter] | None = None) -> None:
        self._job = msgspec.msgpack.decode(job, type=ShardJob)
        self._place = ShardFolder(Path(self._job.folder), self._job.layout)
        self._open = open_painter or _local_painter
        self._painter: LinePainter | None = None

    def paint(self, shard: bytes) -> bytes:
        """Generate a shard and return its ``ShardReport``; both are encoded as msgpack."""
        decoded = msgspec.msgpack.decode(shard, type=Shard)
        try:
            result = self._paint(decoded)
        except DiffserveError as error:
            result = ShardReport(shard=decoded.number, error=error.message, param=error.param)
        except OSError as error:
            message = f"{error.strerror or error}{f': {str(error.filename)!r}' if error.filename else ''}."
            result = ShardReport(shard=decoded.number, error=message)
        return msgspec.msgpack.encode(result)

    def _paint(self, shard: Shard) -> ShardReport:
        self._check_folder()
        if self._painter is None:
            self._painter = self._open(self._job.settings)
        if len(list(self._place.parts(shard.number))) >= MOST_TRIES:
            first, last = shard.rows[0].number, shard.rows[-1].number
            message = f"{MOST_TRIES} workers were lost while they generated lines {first} to {last}"
            hint = f"if they ran out of memory, lower --concurrency {self._job.concurrency}."
            raise InvalidRequest(f"{message}; {hint}", param="prompts")
        earlier = self._place.outcomes(shard)
        num_painted = num_failed = 0
        missing = [row for row in shard.rows if row.number not in earlier]
        concurrency = self._job.concurrency
        with ShardWriter(self._place, shard.number) as writer:
            # Finished images wait in memory for a slow earlier row, so the number of rows after it is limited.
            work = partial(self._paint_row, self._painter)
            threads = WorkerThreads(work, missing, concurrency, max_ahead=2 * concurrency)
            try:
                painted = threads.in_order()
                for row in shard.rows:
                    if outcome := earlier.get(row.number):
                        writer.keep(outcome)
                    else:
                        outcome, pictures = next(painted)
                        writer.add(outcome, pictures)
                    num_painted += outcome.error is None
                    num_failed += outcome.error is not None
            finally:
                threads.stop()
        return ShardReport(shard=shard.number, num_painted=num_painted, num_failed=num_failed)

    def _paint_row(self, painter: LinePainter, row: ShardRow) -> Work:
        return paint_line(row.line(Path(self._job.prompts)), painter, lambda share: None)

    def _check_folder(self) -> None:
        """Check that the folder is shared with the command.

        Raises:
            InvalidRequest: The folder on this machine is not the folder of the command.
        """
        try:
            is_shared = self._place.token_path.read_text(encoding="utf-8") == self._job.token
        except OSError:
            is_shared = False
        if not is_shared:
            message = f"{self._job.folder!r} on {gethostname()!r} is not the folder that the command writes to"
            raise InvalidRequest(f"{message}; give one that all machines of the cluster share.", param="output")


def _local_painter(settings: Settings) -> LinePainter:
    bound_spinning(os.environ)
    safety = Safety.of(settings)
    if safety is not None:
        atexit.register(safety.stop)
    return LocalPainter(open_engine(settings), settings.serve, safety)


PaintShards = Callable[[Iterable[bytes], tuple[type[ShardWorker], bytes], str | None, int | None], Iterator[bytes]]


class ClusterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options that apply only to ``--cluster``.

    Attributes:
        address: Address of a Ray cluster that this machine is part of. None: start one for this batch.
        num_workers: Number of workers. None: one per GPU, or one per machine without GPUs.
        shard_lines: Lines per shard. None: as in the existing batch of the folder, or the default.
        webdataset: Whether to write a tar per shard instead of single files.
    """

    address: str | None = None
    num_workers: int | None = None
    shard_lines: int | None = None
    webdataset: bool = False


class _Scan:
    """Finds unfinished shards and counts lines and shards on the way."""

    def __init__(self, place: ShardFolder, prompts: Path) -> None:
        self._place = place
        self._prompts = prompts
        self.num_lines = self.num_shards = self.num_before = self.num_over = 0

    def missing(self) -> Iterator[bytes]:
        """Yield unfinished shards, encoded as msgpack."""
        files = frozenset(entry.name for entry in os.scandir(self._place.folder))
        for shard in self._place.shards(self._prompts):
            outcomes = self._place.outcomes(shard, files)
            self.num_shards += 1
            self.num_lines += len(shard.rows)
            self.num_before += sum(outcome.error is None for outcome in outcomes.values())
            if len(outcomes) == len(shard.rows):
                self.num_over += len(outcomes)
            else:
                yield msgspec.msgpack.encode(shard)


def run(
    prompts: Path,
    output: Path,
    options: ClusterOptions,
    sources: SettingsOptions,
    *,
    concurrency: int,
) -> int:
    """Generate images for every line of a batch file and return the exit code: 0, or 1 if some lines failed.

    Args:
        prompts: The batch file.
        output: Folder for the images and results, shared by all machines of the cluster.
        options: Cluster options.
        sources: Options for the settings.
        concurrency: Number of lines in progress at a time, per worker.

    Raises:
        DiffserveError: The whole batch cannot continue. The same command continues it later.
    """
    check_concurrency(concurrency)
    paint_shards = _import_paint_shards(options.address)
    console = Console(stderr=True, highlight=False)
    with alone_in(output):
        place = ShardFolder.open(output.resolve(), lines=options.shard_lines, webdataset=options.webdataset)
        job = ShardJob(
            prompts=str(prompts.resolve()),
            folder=str(place.folder),
            token=secrets.token_hex(8),
            layout=place.layout,
            concurrency=concurrency,
            model=_from_anywhere(sources.model),
            config=_from_anywhere(sources.config),
            environment={name: value for name, value in os.environ.items() if name.startswith(ENV_PREFIX)},
            flags={
                key: (flag.name, _from_anywhere(flag.value) if key in PATH_SETTINGS else flag.value)
                for key, flag in sources.flags.items()
                if flag.value is not None
            },
        )
        _ = job.settings  # report invalid settings before any work starts
        place.clear()
        scan = _Scan(place, prompts)
        missing = scan.missing()
        first = next(missing, None)
        if first is not None:
            write_output(place.token_path, job.token.encode())
            make = (ShardWorker, msgspec.msgpack.encode(job))
            results = paint_shards(chain([first], missing), make, options.address, options.num_workers)
            try:
                _follow(results, place, scan, console)
            except KeyboardInterrupt:
                note(console, f"stopped; {CONTINUE_HINT}.")
                raise
            finally:
                place.token_path.unlink(missing_ok=True)
                place.clear()
        outcomes = place.write_results(scan.num_shards)
        return summarize(outcomes, scan.num_lines, scan.num_before, output, console)


def _follow(results: Iterable[bytes], place: ShardFolder, scan: _Scan, console: Console) -> None:
    """Show the progress until all shards are done.

    Args:
        results: Encoded ``ShardReport`` objects.
        place: The output folder.
        scan: The counts of finished lines, to which ``results`` are added.
        console: Console for the progress.

    Raises:
        DiffserveError: The batch cannot continue.
    """
    num_partial, last_scan_s = 0, 0.0

    def add(report: ShardReport) -> None:
        if report.error:
            error = DiffserveError(report.error, param=report.param)
            explain_stop(error)
            raise error
        scan.num_over += report.num_painted + report.num_failed

    def count_lines() -> tuple[int, int, float]:
        nonlocal num_partial, last_scan_s
        if time.monotonic() - last_scan_s > PART_SCAN_S:
            last_scan_s, num_partial = time.monotonic(), _num_partial_lines(place)
        done = scan.num_over + num_partial
        return done, scan.num_lines, done

    follow(WorkerThreads(partial(msgspec.msgpack.decode, type=ShardReport), results, 1), add, count_lines, console)


def _num_partial_lines(place: ShardFolder) -> int:
    """Return the number of finished lines in unfinished shards.

    Lost workers leave their part files behind, so only the largest part of a shard counts.
    """
    lines: dict[str, int] = {}
    for part in place.parts():
        number = part.name[1:7]
        with suppress(OSError):
            if not place.outcomes_path(int(number)).exists():
                lines[number] = max(lines.get(number, 0), part.read_bytes().count(b"\n"))
    return sum(lines.values())


def _from_anywhere(path: str | None) -> str | None:
    """Return the absolute form of an existing path, and other values unchanged, for use by workers."""
    if path is None or path in PROFILES or not Path(path).exists():
        return path
    return str(Path(path).resolve())


def _import_paint_shards(address: str | None) -> PaintShards:
    """Import Ray and return the function that runs shards on it.

    Raises:
        ConfigError: Ray is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    if address is None:  # Ray reads these variables when it is imported
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # otherwise Ray listens on a public address
        os.environ.setdefault("RAY_enable_metrics_collection", "0")
        for name in METRIC_PORTS:
            os.environ.setdefault(name, NO_PORT)
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    try:
        from diffserve.cluster.bulk import paint_shards
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("ray", "pyarrow", "pandas"):
            raise
        message = f"the package {error.name} is not installed: pip install 'diffserve[cluster]'."
        raise ConfigError(message) from None
    return paint_shards
