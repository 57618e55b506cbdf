"""State file of a cluster, through which ``diffserve cluster status``, ``redeploy`` and ``down`` reach the front.

The front process holds a lock while it runs, so that the process id in the file is never that of another process.
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
"""File with the path of the folder of the front's own Ray."""
RAY_FOLDERS: Final = "diffserve-ray-"
REPEAT_SIGNAL_AFTER_S: Final = 5.0


class ReplicaState(msgspec.Struct, frozen=True, kw_only=True):
    """State of a replica.

    Attributes:
        state: "ready", "starting", "leaving" or "off".
        num_requests: Requests in its engine, at most a second ago.
        cost: Unfinished work in UNet rows of the native size.
        start_s: Seconds that it took to start.
    """

    name: str
    state: str
    num_requests: int
    cost: float
    start_s: float


class ClusterState(msgspec.Struct, frozen=True, kw_only=True):
    """State of a cluster.

    Attributes:
        pid: Process id of the front.
        address: Address of the Ray cluster that was joined; "" if the front started its own.
        num_redeploys: Number of redeployments that have ended.
        problem: Why the last redeployment failed; "" if it did not.
        is_deployed: Whether the front is a deployment of Ray Serve.
    """

    pid: int
    address: str = ""
    replicas: tuple[ReplicaState, ...] = ()
    num_redeploys: int = 0
    problem: str = ""
    is_deployed: bool = False


def open_private(path: Path) -> BinaryIO:
    """Open an empty file for writing that only its owner can read, whatever its mode was before."""
    file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")
    os.fchmod(file.fileno(), 0o600)
    return file


class StateFile:
    """The state file of the front that uses ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._lock = folder / LOCK
        self._ray = folder / RAY
        self._state: ClusterState | None = None

    @contextmanager
    def locked(self, patience_s: float = 0.0) -> Iterator[None]:
        """Hold the lock; raise ConfigError if another front still holds it after ``patience_s``."""
        self._lock.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        deadline_s = time.monotonic() + patience_s
        with open_private(self._lock) as lock:
            while not _lock_file(lock):
                if time.monotonic() >= deadline_s:
                    raise ConfigError(
                        f"a cluster is running in {str(self._lock.parent)!r}; end it (diffserve cluster down), or give "
                        "another --data-dir."
                    )
                time.sleep(0.2)
            self._path.unlink(missing_ok=True)  # of a killed front: its process id may be reused
            self._remove_ray_folder()
            try:
                yield
            finally:
                self._path.unlink(missing_ok=True)

    @contextmanager
    def ray_folder(self) -> Iterator[Path]:
        """Create an empty folder for the Ray of this process and remove it afterwards; requires the lock.

        If this process is killed, the next front or ``end`` removes the folder.
        """
        folder = Path(tempfile.mkdtemp(prefix=RAY_FOLDERS))
        with open_private(self._ray) as file:
            file.write(str(folder).encode())
        try:
            yield folder
        finally:
            self._remove_ray_folder()

    def _remove_ray_folder(self) -> None:
        """Remove the folder of the last Ray that a front here started, and nothing else."""
        try:
            folder = Path(self._ray.read_text(encoding="utf-8"))
        except OSError:
            return
        if folder.name.startswith(RAY_FOLDERS) and folder.parent == Path(tempfile.gettempdir()):
            shutil.rmtree(folder, ignore_errors=True)  # does not follow links
        self._ray.unlink(missing_ok=True)

    def write(self, state: ClusterState) -> None:
        """Write ``state`` if it has changed."""
        if state != self._state:
            self._state = state
            new = self._path.with_suffix(".new")
            with open_private(new) as file:
                file.write(msgspec.json.encode(state))
            new.replace(self._path)

    def read(self) -> ClusterState | None:
        """Return the state of the running front; ``None`` if there is none."""
        if not self.is_locked():
            return None
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=ClusterState)
        except (OSError, msgspec.MsgspecError):
            return None

    def is_locked(self) -> bool:
        """Return whether a front is running."""
        try:
            with self._lock.open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def redeploy(self) -> bool:
        """Make the front read its configuration again and wait until its replicas use it.

        Returns:
            Whether a front is running.

        Raises:
            ConfigError: The redeployment failed, or the front ended.
        """
        state = self.read()
        if state is None:
            return False
        _refuse_deployed(state, "give its args another revision, and serve deploy it again")
        if not state.replicas:
            raise ConfigError(f"the front, process {state.pid}, is still starting; try again in a moment.")
        os.kill(state.pid, signal.SIGUSR1)
        while (new := self.read()) is None or new.num_redeploys == state.num_redeploys:
            if not self.is_locked():
                raise ConfigError(f"the front, process {state.pid}, ended before its replicas had the new settings.")
            time.sleep(0.2)
        if new.problem:
            raise ConfigError(new.problem)
        return True

    def end(self, patience_s: float) -> bool:
        """Stop the front and everything that it started.

        Returns:
            Whether a front was running.

        Raises:
            ConfigError: The front did not end within ``patience_s``.
        """
        state = self.read()
        if state is None:
            if self._ray.exists():  # of a front that was killed
                with suppress(ConfigError), self.locked():
                    pass
            return False
        _refuse_deployed(state, "serve shutdown ends it, or the deletion of its RayService")
        signaled_s, deadline_s = 0.0, time.monotonic() + patience_s
        while self.is_locked():
            if time.monotonic() > deadline_s:
                raise ConfigError(f"the front, process {state.pid}, has not ended within {patience_s:g} s.")
            is_starting = not (self.read() or state).replicas  # Ray may ignore the signal while it starts
            if not signaled_s or (is_starting and time.monotonic() - signaled_s > REPEAT_SIGNAL_AFTER_S):
                signaled_s = time.monotonic()
                with suppress(ProcessLookupError):
                    os.kill(state.pid, signal.SIGTERM)
            time.sleep(0.2)
        return True


def _lock_file(file: IO[Any]) -> bool:
    """Lock ``file`` for this process; return whether that succeeded."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _refuse_deployed(state: ClusterState, remedy: str) -> None:
    if state.is_deployed:
        raise ConfigError(f"the front here is a deployment of Ray Serve: {remedy}.")
