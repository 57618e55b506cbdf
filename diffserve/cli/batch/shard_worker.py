"""Who paints shards: an engine in a worker's process, whichever machine that is on."""

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
from diffserve.processes.wait_policy import bound_spinning
from diffserve.service.safety import Safety
from diffserve.settings.config import Settings
from diffserve.settings.layers import Flag, load_settings

MOST_TRIES: Final = 4
"""Of a shard whose workers were lost: it may be what they were lost by."""

Work = tuple[Outcome, Sequence[PaintedFile]]


class ShardJob(msgspec.Struct, frozen=True, kw_only=True):
    """What all shards of a command have in common.

    prompts, folder  of the command's machine, absolute; seen from here by the same names
    token            what the folder's file ``ShardFolder.seen`` says
    concurrency      lines that are painted at a time
    environment      settings of the command's environment
    flags            its options: key -> (option, value)
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
        """The engine's, as the command has them. Raises ConfigError."""
        flags = {key: Flag(*flag) for key, flag in self.flags.items()}
        return load_settings(model=self.model, config=self.config, env=self.environment, flags=flags)


class ShardTold(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What became of a shard; or the ``error`` for which nobody can go on, and the field to blame."""

    shard: int
    num_painted: int = 0
    num_failed: int = 0
    error: str = ""
    param: str | None = None


class ShardWorker:
    """Paints one shard after the other, with an engine that is loaded for the first of them."""

    def __init__(self, job: bytes, open_painter: Callable[[Settings], LinePainter] | None = None) -> None:
        self._job = msgspec.msgpack.decode(job, type=ShardJob)
        self._place = ShardFolder(Path(self._job.folder), self._job.layout)
        self._open = open_painter or _local_painter
        self._painter: LinePainter | None = None

    def paint(self, shard: bytes) -> bytes:
        """A shard and what became of it, as msgpack."""
        read = msgspec.msgpack.decode(shard, type=Shard)
        try:
            told = self._paint(read)
        except DiffserveError as error:
            told = ShardTold(shard=read.number, error=error.message, param=error.param)
        except OSError as error:
            said = f"{error.strerror or error}{f': {str(error.filename)!r}' if error.filename else ''}."
            told = ShardTold(shard=read.number, error=said)
        return msgspec.msgpack.encode(told)

    def _paint(self, shard: Shard) -> ShardTold:
        self._check_folder()
        if len(list(self._place.parts(shard.number))) >= MOST_TRIES:
            first, last = shard.rows[0].number, shard.rows[-1].number
            said = f"{MOST_TRIES} workers were lost while they painted lines {first} to {last}"
            raise InvalidRequest(f"{said}; is there memory for --concurrency {self._job.concurrency}?", param="prompts")
        held = self._place.outcomes(shard)
        num_painted = num_failed = 0
        with ShardWriter(self._place, shard.number) as writer:
            for outcome, pictures in self._in_order(shard.rows, held):
                if outcome.line in held:
                    writer.keep(outcome)
                else:
                    writer.add(outcome, pictures)
                num_painted += outcome.error is None
                num_failed += outcome.error is not None
        return ShardTold(shard=shard.number, num_painted=num_painted, num_failed=num_failed)

    def _in_order(self, rows: Sequence[ShardRow], held: dict[int, Outcome]) -> Iterator[Work]:
        """What becomes of each row. Few are painted ahead of one that takes long: pictures wait in memory for it."""
        ahead: deque[Future[Work] | Work] = deque()
        prompts = Path(self._job.prompts)
        most = 2 * self._job.concurrency
        with ThreadPoolExecutor(self._job.concurrency) as threads:
            try:
                for row in rows:
                    known = held.get(row.number)
                    ahead.append((known, ()) if known else threads.submit(self._paint_row, row, prompts))
                    if len(ahead) > most:
                        yield _done(ahead.popleft())
                while ahead:
                    yield _done(ahead.popleft())
            except BaseException:
                for one in ahead:
                    if isinstance(one, Future):
                        one.cancel()
                raise

    def _paint_row(self, row: ShardRow, prompts: Path) -> Work:
        assert self._painter is not None
        return paint_line(row.line(prompts), self._painter, lambda share: None)

    def _check_folder(self) -> None:
        """InvalidRequest where the folder is not the command's; and the engine is there."""
        try:
            is_shared = self._place.seen.read_text(encoding="utf-8") == self._job.token
        except OSError:
            is_shared = False
        if not is_shared:
            said = f"{self._job.folder!r} on {gethostname()!r} is not the folder that the command writes to"
            raise InvalidRequest(f"{said}; give one that all machines of the cluster share.", param="output")
        if self._painter is None:
            self._painter = self._open(self._job.settings)


def _done(work: Future[Work] | Work) -> Work:
    return work.result() if isinstance(work, Future) else work


def _local_painter(settings: Settings) -> LinePainter:
    bound_spinning(os.environ)
    safety = Safety.of(settings)
    if safety is not None:
        atexit.register(safety.stop)
    return LocalPainter(open_engine(settings), settings.serve, safety)
