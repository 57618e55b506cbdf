"""A PostgreSQL server of Debian's package for tests, in a temporary folder and on a Unix socket only."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import pytest

BINARIES: Final = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
USER: Final = "diffserve"
PASSWORD: Final = "correct-horse"
UNPRIVILEGED: Final = ("postgres", "nobody")
"""Users that run the server if the tests run as root, which PostgreSQL refuses."""


class PostgreSQL:
    """Running server.

    Args:
        folder: Its folder with the data and the socket.
        options: Options of ``subprocess.run`` that set the user.
    """

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self._folder = folder
        self._options = options
        self._num_databases = 0

    def url(self, name: str) -> str:
        """Return the address of the database ``name``, with a password that the server does not check."""
        return f"postgresql://{USER}:{PASSWORD}@/{name}?host={quote(str(self._folder), safe='')}"

    def create_database(self) -> str:
        """Create an empty database and return its address."""
        self._num_databases += 1
        name = f"test_{os.getpid()}_{self._num_databases}"
        self._run("psql", "-h", str(self._folder), "-U", USER, "-d", "postgres", "-qc", f"CREATE DATABASE {name}")
        return self.url(name)

    def start(self) -> None:
        """Create the files if there are none, and start the server."""
        data = self._folder / "data"
        if not data.exists():
            self._run("initdb", "-D", str(data), "-U", USER, "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
        settings = f"-F -c listen_addresses='' -c unix_socket_directories='{self._folder}'"
        self._run("pg_ctl", "-D", str(data), "-o", settings, "-l", str(self._folder / "log"), "-w", "start")

    def stop(self) -> None:
        """Stop the server and end its connections."""
        self._run("pg_ctl", "-D", str(self._folder / "data"), "-m", "immediate", "-w", "stop")

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Halt all processes of the server for the block; their connections stay open."""
        leader = int((self._folder / "data" / "postmaster.pid").read_text().split()[0])
        children = Path(f"/proc/{leader}/task/{leader}/children").read_text().split()
        pids = [leader, *map(int, children)]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(BINARIES[-1] / program), *arguments]
        with (self._folder / "output").open("wb") as output:  # a pipe would stay open in the server
            done = subprocess.run(
                command, stdout=output, stderr=output, cwd=self._folder, timeout=60, check=False, **self._options
            )
        assert done.returncode == 0, (self._folder / "output").read_text()


@contextmanager
def running_postgresql() -> Iterator[PostgreSQL]:
    """Run a server for the block; skip the test if PostgreSQL is not installed."""
    if not BINARIES:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    folder = Path(tempfile.mkdtemp(prefix="diffserve-pg-"))  # short: a socket's path has 107 bytes at most
    options: dict[str, Any] = {}
    if os.geteuid() == 0:
        users = {user.pw_name: user for user in pwd.getpwall()}
        user = next(users[name] for name in UNPRIVILEGED if name in users)
        options = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        os.chown(folder, user.pw_uid, user.pw_gid)
    server = PostgreSQL(folder, options)
    try:
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
