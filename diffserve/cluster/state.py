"""What a front tells of its cluster to ``diffserve cluster status``, ``redeploy`` and ``down``: a file in the server's
folder.

The front holds a lock on it for as long as it lives, so that a number in it is of no other process.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO, Final

import msgspec

from diffserve.api.errors import ConfigError

FILE: Final = "cluster.json"
LOCK: Final = "cluster.lock"
TOKEN: Final = "cluster-token"
RAY: Final = "cluster-ray"
"""Says where the Ray of a front keeps its things."""
RAY_FOLDERS: Final = "diffserve-ray-"
AGAIN_AFTER_S: Final = 5.0


class ReplicaState(msgspec.Struct, frozen=True, kw_only=True):
    """A replica: what it is called, "ready", "starting", "leaving" or "off", the requests in its engine as of a second
    ago, what it was given and is not over (UNet rows of the native size), and the seconds that it took to start.
    """

    name: str
    state: str
    num_requests: int
    cost: float
    start_s: float


class ClusterState(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster: the front's process, the address of the Ray that was joined ("": its own), the replicas, and how often
    it was told to take other settings and is done with it, and the ``problem`` for which it did not the last time.
    """

    pid: int
    address: str = ""
    replicas: tuple[ReplicaState, ...] = ()
    num_redeploys: int = 0
    problem: str = ""
    is_deployed: bool = False


def open_private(path: Path) -> BinaryIO:
    """Open the file at ``path`` anew for writing; only its owner can read it, whatever its mode was before."""
    file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")
    os.fchmod(file.fileno(), 0o600)
    return file


class StateFile:
    """The file of a front that lives, in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._lock = folder / LOCK
        self._ray = folder / RAY
        self._told: ClusterState | None = None

    @contextmanager
    def locked(self, patience_s: float = 0.0) -> Iterator[None]:
        """ConfigError where another front has it, and still has after ``patience_s``."""
        self._lock.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        until_s = time.monotonic() + patience_s
        with open_private(self._lock) as lock:
            while not _lock_file(lock):
                if time.monotonic() >= until_s:
                    raise ConfigError(
                        f"a cluster is up in {str(self._lock.parent)!r}; end it (diffserve cluster down), or give "
                        "another --data-dir."
                    )
                time.sleep(0.2)
            self._path.unlink(missing_ok=True)  # what a front told that was killed: its number may be another's by now
            self._sweep()
            try:
                yield
            finally:
                self._path.unlink(missing_ok=True)

    @contextmanager
    def ray_folder(self) -> Iterator[Path]:
        """An empty folder for a Ray of this process, gone afterwards; where this process is killed before, the next
        front here removes it, or ``end``. Only for who holds this.
        """
        folder = Path(tempfile.mkdtemp(prefix=RAY_FOLDERS))
        with open_private(self._ray) as file:
            file.write(str(folder).encode())
        try:
            yield folder
        finally:
            self._sweep()

    def _sweep(self) -> None:
        """Remove what is left of the last Ray here, and nothing else."""
        try:
            folder = Path(self._ray.read_text(encoding="utf-8"))
        except OSError:
            return
        if folder.name.startswith(RAY_FOLDERS) and folder.parent == Path(tempfile.gettempdir()):
            shutil.rmtree(folder, ignore_errors=True)  # which follows no link
        self._ray.unlink(missing_ok=True)

    def write(self, state: ClusterState) -> None:
        """Write it, where it is news."""
        if state != self._told:
            self._told = state
            new = self._path.with_suffix(".new")
            with open_private(new) as file:
                file.write(msgspec.json.encode(state))
            new.replace(self._path)

    def read(self) -> ClusterState | None:
        """What the front that lives has told; ``None`` where there is none."""
        if not self.is_locked():
            return None
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=ClusterState)
        except (OSError, msgspec.MsgspecError):
            return None

    def is_locked(self) -> bool:
        """Whether a front lives."""
        try:
            with self._lock.open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def redeploy(self) -> bool:
        """Have the front read its settings anew, and wait until its replicas have them; whether there was one.
        ConfigError where they have not: it cannot be, or the front ended.
        """
        state = self.read()
        if state is None:
            return False
        _refuse_deployed(state, "give its args another revision, and serve deploy it again")
        if not state.replicas:
            raise ConfigError(f"the front, process {state.pid}, is only coming up; try again in a moment.")
        os.kill(state.pid, signal.SIGUSR1)
        while (told := self.read()) is None or told.num_redeploys == state.num_redeploys:
            if not self.is_locked():
                raise ConfigError(f"the front, process {state.pid}, ended before its replicas had other settings.")
            time.sleep(0.2)
        if told.problem:
            raise ConfigError(told.problem)
        return True

    def end(self, patience_s: float) -> bool:
        """Have the front end, and all that it started with it; whether there was one. ConfigError where it does not
        within ``patience_s``.
        """
        state = self.read()
        if state is None:
            if self._ray.exists():  # of a front that was killed
                with suppress(ConfigError), self.locked():
                    pass
            return False
        _refuse_deployed(state, "serve shutdown ends it, or whoever made the RayService")
        told_s, until_s = 0.0, time.monotonic() + patience_s
        while self.is_locked():
            if time.monotonic() > until_s:
                raise ConfigError(f"the front, process {state.pid}, has not ended within {patience_s:g} s.")
            is_coming_up = not (self.read() or state).replicas  # then Ray may not have listened
            if not told_s or (is_coming_up and time.monotonic() - told_s > AGAIN_AFTER_S):
                told_s = time.monotonic()
                with suppress(ProcessLookupError):
                    os.kill(state.pid, signal.SIGTERM)
            time.sleep(0.2)
        return True


def _lock_file(file: IO[Any]) -> bool:
    """Whether ``file`` is this process's own from now on."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _refuse_deployed(state: ClusterState, way: str) -> None:
    if state.is_deployed:
        raise ConfigError(f"the front here is a deployment of Ray Serve: {way}.")
