"""Worker of a sharded batch: generates shards with an engine in its own process, on any machine."""

from __future__ import annotations

import atexit
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from socket import gethostname
from typing import Any, Final

import msgspec

from diffserve.api.errors import DiffserveError, InvalidRequest
from diffserve.cli.batch.manifest import Outcome
from diffserve.cli.batch.painters import LinePainter, LocalPainter, PaintedFile
from diffserve.cli.batch.painting import paint_line
from diffserve.cli.batch.shards import Layout, Shard, ShardFolder, ShardRow, ShardWriter
from diffserve.cli.generate import open_engine
from diffserve.processes import bound_spinning
from diffserve.service.safety import Safety
from diffserve.settings.config import Settings
from diffserve.settings.layers import Flag, load_settings

MOST_TRIES: Final = 4
"""How many workers a shard may lose before it fails, because the shard itself may crash them."""

Work = tuple[Outcome, Sequence[PaintedFile]]


class ShardJob(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters that all shards of a command share.

    Attributes:
        prompts: Absolute path of the batch file, the same on all machines.
        folder: Absolute path of the output folder, the same on all machines.
        token: Content of ``ShardFolder.seen``, which proves that the folder is shared.
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


class ShardTold(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
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
        """Generate a shard and return its ``ShardTold``; both are encoded as msgpack."""
        decoded = msgspec.msgpack.decode(shard, type=Shard)
        try:
            result = self._paint(decoded)
        except DiffserveError as error:
            result = ShardTold(shard=decoded.number, error=error.message, param=error.param)
        except OSError as error:
            message = f"{error.strerror or error}{f': {str(error.filename)!r}' if error.filename else ''}."
            result = ShardTold(shard=decoded.number, error=message)
        return msgspec.msgpack.encode(result)

    def _paint(self, shard: Shard) -> ShardTold:
        self._check_folder()
        if self._painter is None:
            self._painter = self._open(self._job.settings)
        if len(list(self._place.parts(shard.number))) >= MOST_TRIES:
            first, last = shard.rows[0].number, shard.rows[-1].number
            message = f"{MOST_TRIES} workers were lost while they painted lines {first} to {last}"
            hint = f"if they ran out of memory, lower --concurrency {self._job.concurrency}."
            raise InvalidRequest(f"{message}; {hint}", param="prompts")
        earlier = self._place.outcomes(shard)
        num_painted = num_failed = 0
        with ShardWriter(self._place, shard.number) as writer:
            for outcome, pictures in self._in_order(shard.rows, earlier):
                if outcome.line in earlier:
                    writer.keep(outcome)
                else:
                    writer.add(outcome, pictures)
                num_painted += outcome.error is None
                num_failed += outcome.error is not None
        return ShardTold(shard=shard.number, num_painted=num_painted, num_failed=num_failed)

    def _in_order(self, rows: Sequence[ShardRow], earlier: dict[int, Outcome]) -> Iterator[Work]:
        """Yield the result of each row in order.

        The number of rows in progress is limited, because finished images wait in memory for a slow earlier row.
        """
        ahead: deque[Future[Work] | Work] = deque()
        prompts = Path(self._job.prompts)
        max_ahead = 2 * self._job.concurrency
        with ThreadPoolExecutor(self._job.concurrency) as threads:
            try:
                for row in rows:
                    outcome = earlier.get(row.number)
                    ahead.append((outcome, ()) if outcome else threads.submit(self._paint_row, row, prompts))
                    if len(ahead) > max_ahead:
                        yield _done(ahead.popleft())
                while ahead:
                    yield _done(ahead.popleft())
            except BaseException:
                for work in ahead:
                    if isinstance(work, Future):
                        work.cancel()
                raise

    def _paint_row(self, row: ShardRow, prompts: Path) -> Work:
        assert self._painter is not None
        return paint_line(row.line(prompts), self._painter, lambda share: None)

    def _check_folder(self) -> None:
        """Check that the folder is shared with the command.

        Raises:
            InvalidRequest: The folder on this machine is not the folder of the command.
        """
        try:
            is_shared = self._place.seen.read_text(encoding="utf-8") == self._job.token
        except OSError:
            is_shared = False
        if not is_shared:
            message = f"{self._job.folder!r} on {gethostname()!r} is not the folder that the command writes to"
            raise InvalidRequest(f"{message}; give one that all machines of the cluster share.", param="output")


def _done(work: Future[Work] | Work) -> Work:
    return work.result() if isinstance(work, Future) else work


def _local_painter(settings: Settings) -> LinePainter:
    bound_spinning(os.environ)
    safety = Safety.of(settings)
    if safety is not None:
        atexit.register(safety.stop)
    return LocalPainter(open_engine(settings), settings.serve, safety)
