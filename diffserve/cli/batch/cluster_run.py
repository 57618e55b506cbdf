"""``diffserve batch --cluster``: the same batch in shards, painted by workers on all machines of a Ray cluster."""

from __future__ import annotations

import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console

from diffserve.api.errors import ConfigError, DiffserveError
from diffserve.cli.batch.manifest import Outcome, alone_in
from diffserve.cli.batch.run import GO_ON, MOST_TOLD, SIGN_OF_LIFE_S, bar_of_lines, check_concurrency, tell_end
from diffserve.cli.batch.shard_worker import ShardJob, ShardTold, ShardWorker
from diffserve.cli.batch.shards import ShardFolder
from diffserve.cli.generate import note
from diffserve.cli.outputs import write_output
from diffserve.cluster.ray_calls import METRIC_PORTS, NO_PORT
from diffserve.settings.layers import ENV_PREFIX, PROFILES, Flag

LOOK_S: Final = 2.0
"""How often the shards that are being painted are looked at."""

PATHS: Final = tuple(
    f"model.{name}"
    for name in ("vae", "text_encoder", "embeddings_dir", "lora_dir", "controlnet_dir", "refiner", "scorer")
)
"""Settings that may name a file of this machine."""

News = ShardTold | BaseException | None

PaintShards = Callable[[Iterable[bytes], tuple[type[ShardWorker], bytes], str | None, int | None], Iterator[bytes]]


class Ordered(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for, beside the prompts and the folder.

    address      of a Ray cluster that this machine is part of; None: one is begun for this batch, on this machine
    num_workers  None: one for each GPU, or else for each machine
    shard_lines  None: as the folder's batch was begun, or the usual number
    """

    address: str | None = None
    num_workers: int | None = None
    shard_lines: int | None = None
    webdataset: bool = False


class _Scan:
    """The shards that are not over, and what was found while looking for them."""

    def __init__(self, place: ShardFolder, prompts: Path) -> None:
        self._place = place
        self._prompts = prompts
        self.num_lines = self.num_shards = self.num_before = self.num_over = 0

    def missing(self) -> Iterator[bytes]:
        """As msgpack, one by one."""
        files = frozenset(entry.name for entry in os.scandir(self._place.folder))
        for shard in self._place.shards(self._prompts):
            held = self._place.outcomes(shard, files)
            self.num_shards += 1
            self.num_lines += len(shard.rows)
            self.num_before += sum(outcome.error is None for outcome in held.values())
            if len(held) == len(shard.rows):
                self.num_over += len(held)
            else:
                yield msgspec.msgpack.encode(shard)


def run(
    prompts: Path,
    output: Path,
    ordered: Ordered,
    *,
    concurrency: int,
    model: str | None,
    config: str | None,
    flags: Mapping[str, Flag],
) -> int:
    """Paint every line of ``prompts`` into the folder ``output``; 0 where all are painted, 1 where some failed.

    Raises DiffserveError for what ends all of it, and KeyboardInterrupt; the same command goes on after either.
    """
    check_concurrency(concurrency)
    paint_shards = _bulk(ordered.address)
    console = Console(stderr=True, highlight=False)
    with alone_in(output):
        place = ShardFolder.open(output.resolve(), lines=ordered.shard_lines, webdataset=ordered.webdataset)
        job = ShardJob(
            prompts=str(prompts.resolve()),
            folder=str(place.folder),
            token=secrets.token_hex(8),
            layout=place.layout,
            concurrency=concurrency,
            model=_from_anywhere(model),
            config=_from_anywhere(config),
            environment={name: value for name, value in os.environ.items() if name.startswith(ENV_PREFIX)},
            flags={
                key: (flag.name, _from_anywhere(flag.value) if key in PATHS else flag.value)
                for key, flag in flags.items()
                if flag.value is not None
            },
        )
        _ = job.settings  # what is wrong with them is said before anything is begun
        place.clear()
        scan = _Scan(place, prompts)
        missing = scan.missing()
        first = next(missing, None)
        if first is not None:
            write_output(place.seen, job.token.encode())
            make = (ShardWorker, msgspec.msgpack.encode(job))
            told = paint_shards(chain([first], missing), make, ordered.address, ordered.num_workers)
            try:
                _Watch(place, scan, console).follow(told)
            except KeyboardInterrupt:
                note(console, f"stopped; {GO_ON}.")
                raise
            finally:
                place.seen.unlink(missing_ok=True)
                place.clear()
        lost: list[Outcome] = []
        num_painted = num_failed = 0
        for outcome in place.write_results(scan.num_shards):
            num_painted += outcome.error is None
            num_failed += outcome.error is not None
            if outcome.error is not None and len(lost) < MOST_TOLD:
                lost.append(outcome)
    return tell_end(scan.num_lines, scan.num_before, num_painted, num_failed, lost, output, console)


class _Watch:
    """Follows shards as they are told of, and says how far the batch is."""

    def __init__(self, place: ShardFolder, scan: _Scan, console: Console) -> None:
        self._place = place
        self._scan = scan
        self._console = console
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()

    def follow(self, told: Iterable[bytes]) -> None:
        """To the end. Raises DiffserveError for what ends it before."""
        threading.Thread(target=self._listen, args=(told,), daemon=True).start()
        num_done, looked_s, said_s, painting = 0, 0.0, time.monotonic(), 0
        with bar_of_lines(self._console) as progress:
            bar = progress.add_task("painting", total=None, count="")
            while True:
                try:
                    news = self._news.get(timeout=0.5)
                except queue.Empty:
                    pass
                else:
                    if isinstance(news, BaseException):
                        raise news
                    if news is None:
                        return
                    num_done += self._count(news)
                now_s = time.monotonic()
                if now_s - looked_s > LOOK_S:
                    looked_s, painting = now_s, self._num_lines_of_parts()
                total, done = self._scan.num_lines, self._scan.num_over + num_done + painting
                progress.update(bar, total=total or None, completed=done, count=f"{done}/{total}")
                if not self._console.is_terminal and now_s - said_s > SIGN_OF_LIFE_S:
                    said_s = now_s
                    note(self._console, f"{done} of {total} lines are done.")

    def _listen(self, told: Iterable[bytes]) -> None:
        try:
            for one in told:
                self._news.put(msgspec.msgpack.decode(one, type=ShardTold))
            self._news.put(None)
        except BaseException as error:
            self._news.put(error)

    def _count(self, told: ShardTold) -> int:
        if told.error:
            room = " Make room there:" if told.error.startswith("cannot write") else ""
            message = " ".join(told.error.split())
            raise DiffserveError(f"{message}{room} {GO_ON}.", param=told.param)
        return told.num_painted + told.num_failed

    def _num_lines_of_parts(self) -> int:
        """Of each shard the most that anybody has; those who are gone leave theirs until the end."""
        lines: dict[str, int] = {}
        for part in self._place.parts():
            number = part.name[1:7]
            with suppress(OSError):
                if self._place.outcomes_path(int(number)).exists():
                    continue
                lines[number] = max(lines.get(number, 0), part.read_bytes().count(b"\n"))
        return sum(lines.values())


def _from_anywhere(path: str | None) -> str | None:
    """What is here by that name, as it is called wherever a worker is; what is not stays as it is."""
    if path is None or path in PROFILES or not Path(path).exists():
        return path
    return str(Path(path).resolve())


def _bulk(address: str | None) -> PaintShards:
    """What paints shards over Ray, which is loaded here and not before. Raises ConfigError where there is none."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    if address is None:  # Ray reads these as it is loaded
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # else it is on an address that others reach
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
        said = f"the package {error.name} is not installed: pip install 'diffserve[cluster]'."
        raise ConfigError(said) from None
    return paint_shards
