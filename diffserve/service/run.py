"""``serve``: bind, start the engine process, answer until a signal ends it, and shut down in order.

SIGTERM, SIGINT or SIGHUP: readiness and new work turn to 503 at once, work in progress may go on for
``shutdown_timeout_s``, then the engine is stopped and the process returns 0. A second signal skips the waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from diffserve.api.errors import ConfigError, EngineUnavailable
from diffserve.faults import install_kills
from diffserve.logs import json_logs
from diffserve.processes import STOP_SIGNALS, limit_own_arenas
from diffserve.service.engine.engines import Engines
from diffserve.service.engine.local import describe_engines, open_engines
from diffserve.service.front import Front
from diffserve.service.http.addresses import is_loopback
from diffserve.service.http.keys import ENV_KEY, KeyRing
from diffserve.service.http.protocol import MAX_HEADER_BYTES, Http1
from diffserve.service.images.service import ImageChecks
from diffserve.service.lifecycle import Gate
from diffserve.service.page import MountPage, Page
from diffserve.settings.config import ServeConfig, Settings
from diffserve.store.database import FILE, Database

SHORTEST_KEY = 16
GOODBYE_S = 10  # for answers that are already being written
SPARE_FILES = 128  # file descriptors that are reserved for other uses than connections
FULL_LOG_INTERVAL_S = 10.0

log = logging.getLogger("diffserve.http")


def serve(
    settings: Settings, *, mount_page: MountPage | None = None, engines: Callable[[Settings], Engines] = open_engines
) -> int:
    """Serve until a signal and return the exit status.

    Args:
        settings: The settings.
        mount_page: Builds the page at ``/``; None for no page.
        engines: Creates the engines within the running loop.

    Raises:
        ConfigError: The address cannot be bound.
        DiffserveError: The model cannot be loaded.
    """
    install_kills()
    limit_own_arenas()
    database, ring = open_store(settings)
    page = None if mount_page is None else Page(mount_page)
    lock = contextlib.nullcontext() if database is None else database.in_use()
    with json_logs(settings.serve.log_level), bind(settings.serve) as listener, lock:
        checks = ImageChecks.of(settings)
        try:
            return asyncio.run(_Server(settings, listener, page, ring, database, checks, engines).run())
        finally:
            checks.stop()


def open_store(settings: Settings) -> tuple[Database | None, KeyRing | None]:
    """Open the database and the keys. Raises ConfigError if they cannot be read or open access is not allowed."""
    database = open_database(settings)
    ring = open_ring(database, settings.serve)
    check_open(settings.serve, ring)
    return database, ring


def open_database(settings: Settings) -> Database | None:
    """Open the server's database; None if the default data folder cannot be written, so that nothing is stored.

    Raises:
        ConfigError: The database cannot be read, or the data folder was chosen by the user and cannot be written:
            without the keys in it, the server would be open. A database at ``[store] url`` must be usable, too.
    """
    folder = Path(settings.serve.data_dir).expanduser()
    try:
        return Database(folder, settings.store.url)
    except ConfigError as error:
        is_chosen = bool(settings.store.url) or not settings.has_default_data_dir
        needs_keys = bool(os.environ.get(ENV_KEY) or settings.serve.trusted_user_header)
        if is_chosen or needs_keys or _may_be_there(folder / FILE):
            raise
        print(f"diffserve: keys, files and history cannot be stored: {error.message}", flush=True)
        return None


def _may_be_there(file: Path) -> bool:
    """Return whether the file exists or cannot be examined: unreadable keys must not count as none."""
    try:
        return file.exists()
    except OSError:
        return True


def open_ring(database: Database | None, config: ServeConfig) -> KeyRing | None:
    """Load the keys from the database and the environment.

    Args:
        database: The database, None if nothing is stored.
        config: Says whether a proxy authenticates users, and their default limits.

    Raises:
        ConfigError: They cannot be read.
    """
    env_key = os.environ.get(ENV_KEY, "")
    if env_key and len(env_key) < SHORTEST_KEY:
        message = (
            f"{ENV_KEY} has {len(env_key)} characters; a key has at least {SHORTEST_KEY}: diffserve keys add makes one."
        )
        raise ConfigError(message, param="api_key")
    if database is None:
        return None
    limits = {
        "images_per_day": config.user_images_per_day,
        "device_seconds_per_day": config.user_device_seconds_per_day,
    }
    return KeyRing(database, env_key, has_users=bool(config.trusted_user_header), user_limits=limits)


def check_open(config: ServeConfig, ring: KeyRing | None) -> None:
    """Raise ConfigError if other machines could connect without a key and ``allow_open`` is not set."""
    is_closed = ring is not None and ring.is_closed
    if not is_closed and not is_loopback(config.host) and not config.allow_open:
        raise ConfigError(
            f"host is {config.host[:80]!r}, and without API keys every client that reaches it can generate images; "
            "create a key (diffserve keys add NAME), allow that by --allow-open (allow_open = true under [serve]), or "
            "serve this machine only (--host 127.0.0.1).",
            param="host",
        )


def bind(config: ServeConfig) -> socket.socket:
    """Return a listening socket at the configured address. Raises ConfigError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family, backlog=1024)
        # Connections inherit this. Without it a body waits for the delayed acknowledgment of its head, 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except UnicodeError:
        raise ConfigError(
            f"host is {config.host[:80]!r}, which is not a valid host name or address.", param="host"
        ) from None
    except OSError as error:
        is_lookup = isinstance(error, socket.gaierror) or error.errno is None
        reason = error.strerror if is_lookup else os.strerror(error.errno or 0)
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {reason}; try another --host or --port.",
            param="port",
        ) from None


@dataclass(eq=False)
class _Server:
    settings: Settings
    listener: socket.socket
    page: Page | None
    ring: KeyRing | None
    database: Database | None
    checks: ImageChecks
    open_engines: Callable[[Settings], Engines]
    num_signals: int = 0
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    hurry: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> int:
        """Run from the first engine to the last response."""
        asyncio.get_running_loop().set_exception_handler(_LoopTrouble())
        engine = self.open_engines(self.settings)
        front = Front(
            self.settings,
            engine,
            ring=self.ring,
            database=self.database,
            checks=self.checks,
            page=None if self.page is None else self.page.route,
        )
        http = HttpServer(uvicorn_config(front.app, _num_connections(self.settings.serve.max_connections)))
        for number in STOP_SIGNALS:
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # under nohup the server outlives its terminal
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        front.begin()
        answering = asyncio.create_task(http.serve(sockets=[self.listener]))
        self._print_line(f"listening on {self._url()}, loading {self.settings.model.model_id}")
        if engines := describe_engines(self.settings):
            self._print_line(engines)
        is_closed = self.ring is not None and self.ring.is_closed
        if not is_closed and not is_loopback(self.settings.serve.host):
            self._print_line("no API keys: every client that reaches this address can generate images")
        opening = asyncio.create_task(self._open_page())
        announcing = asyncio.create_task(self._announce(engine))
        try:
            stop = asyncio.create_task(self.stop.wait())
            ends: set[asyncio.Future[Any]] = {stop, engine.failed, answering}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
        finally:
            announcing.cancel()
            await front.stop(self._drain(front.gate))
            await self._close_page(opening)
            http.should_exit = True
            await asyncio.gather(answering, announcing, return_exceptions=True)
            await front.close()
        if not engine.failed.done():
            return 0
        if isinstance(engine.failed.result(), EngineUnavailable):
            self._print_line(engine.failed.result().message)
            return 1
        raise engine.failed.result()

    def _on_signal(self) -> None:
        self.num_signals += 1
        log.info("stop requested", extra={"num_signals": self.num_signals})
        (self.stop if self.num_signals == 1 else self.hurry).set()

    async def _drain(self, gate: Gate) -> None:
        """Wait for the work in progress, within the configured time."""
        waits = {asyncio.create_task(gate.empty.wait()), asyncio.create_task(self.hurry.wait())}
        timeout_s = self.settings.serve.shutdown_timeout_s
        _, pending = await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()

    async def _announce(self, engine: Engines) -> None:
        while not engine.is_ready:
            await asyncio.sleep(0.05)
        if engine.info is not None:
            info = engine.info
            self._print_line(f"ready: {info.model_id} on {info.device} in {info.dtype} ({info.choice_reason})")
            for path in engine.models[0].unet_paths[:1]:
                self._print_line(f"UNet calls of {path.width_px}x{path.height_px} are {path.path}: {path.reason}")
            for other in engine.models[1:]:
                at = (
                    f"loaded on the first request, {other.info.weights_bytes / 1e6:,.0f} MB"
                    if other.info
                    else other.problem
                )
                self._print_line(f"{other.name}: {at}")

    async def _open_page(self) -> None:
        """Open the page without garbage collection; loaded objects are frozen, as scanning them takes 0.2 s."""
        gc.disable()
        try:
            if self.page is not None:
                await self.page.open(self._own_url())
        finally:
            gc.freeze()
            gc.enable()

    async def _close_page(self, opening: asyncio.Task[None]) -> None:
        """Close the page without waiting for an unfinished import."""
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        if self.page is not None:
            await self.page.close()

    def _url(self) -> str:
        host, port = self.listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def _own_url(self) -> str:
        """Return the address by which this process reaches itself."""
        return self._url().replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")

    @staticmethod
    def _print_line(text: str) -> None:
        with contextlib.suppress(OSError):  # a closed pipe or a full disk must not end the server
            print(f"diffserve: {text}", flush=True)


class HttpServer(uvicorn.Server):
    """Uvicorn server without signal handlers, which would end the process before the engine."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield


def _num_connections(configured: int) -> int:
    """Return ``configured``, or what the file limit allows; the soft limit is raised if needed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = configured + SPARE_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return configured
    soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    possible = max(1, min(configured, files - SPARE_FILES))
    if possible < configured:
        log.warning("fewer connections than configured", extra={"at_most": possible, "reason": f"ulimit -n is {files}"})
    return possible


class _LoopTrouble:
    """Exception handler of the event loop that limits how often missing file descriptors are logged."""

    def __init__(self) -> None:
        self._logged_s = -FULL_LOG_INTERVAL_S

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not (isinstance(error, OSError) and "accept" in context["message"]):
            loop.default_exception_handler(context)
        elif loop.time() - self._logged_s >= FULL_LOG_INTERVAL_S:
            self._logged_s = loop.time()
            log.warning("connections are kept waiting", extra={"reason": error.strerror})


def uvicorn_config(app: FastAPI, max_connections: int) -> uvicorn.Config:
    """Return the configuration for serving ``app`` to at most ``max_connections`` at a time."""
    return uvicorn.Config(
        app,
        http=Http1.limited(max_connections),
        loop="asyncio",
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=GOODBYE_S,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
    )
