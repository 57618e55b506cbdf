"""The server as an application of Ray Serve: its replicas, and one front behind Ray Serve's proxies.

    serve run diffserve.cluster.ray_service:build cluster=cluster.toml config=serve.toml

The front runs once, on the head node, since it holds the limits and the data folder. Ray needs a token and the
environment ``ray_calls.SERVED``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec.structs import replace
from ray import serve

from diffserve.cluster.actor import bind_grpc_to_loopback, is_on_loopback
from diffserve.cluster.config import ClusterConfig, read_arguments, settings_of
from diffserve.cluster.ray_calls import DRAIN_S, UNLIMITED, RayCalls, bind_replica, check_environment, shared_calls
from diffserve.cluster.run import StateReporter, open_pool
from diffserve.cluster.state import ClusterState, StateFile
from diffserve.logs import json_logs
from diffserve.service.front import Front
from diffserve.service.images.service import ImageChecks
from diffserve.service.run import open_store
from diffserve.settings.config import Settings

FRONT: Final = "front"
ON_HEAD: Final = {"node:__internal_head__": 0.001}
SHUTDOWN_MARGIN_S: Final = 10.0
"""Time for the shutdown itself, in addition to the time for running requests."""


def build(arguments: Mapping[str, str]) -> Any:
    """Build the application; the files are read where this runs, on the head node.

    Args:
        arguments: See ``config.read_arguments``.

    Raises:
        ConfigError: A file cannot be read or is invalid.
    """
    settings, cluster = read_arguments(arguments)
    drain_s = settings.serve.shutdown_timeout_s + SHUTDOWN_MARGIN_S
    handles = {
        deployment.name: bind_replica(
            serve, deployment.name, deployment.resources, settings_of(settings, deployment.stage), max(drain_s, DRAIN_S)
        )
        for deployment in cluster.deployments
    }
    front = serve.deployment(
        name=FRONT,
        num_replicas=1,
        max_ongoing_requests=UNLIMITED,  # the front has its own limits
        graceful_shutdown_timeout_s=drain_s,
        ray_actor_options={"num_cpus": 0, "resources": ON_HEAD},
    )(serve.ingress()(Ingress))
    return front.bind(msgspec.msgpack.encode(settings), msgspec.msgpack.encode(cluster), handles)


class Ingress:
    """The Ray Serve deployment class of the front."""

    def __init__(self, settings: bytes, cluster: bytes, handles: dict[str, Any]) -> None:
        """Create the front.

        Args:
            settings: Settings, as msgpack.
            cluster: Cluster configuration, as msgpack.
            handles: Handles of the replicas, by their names.

        Raises:
            ConfigError: Ray runs without a token or without the environment ``SERVED``.
        """
        self._front: Front | None = None
        self._resources = contextlib.ExitStack()
        check_environment(os.environ)  # Ray Serve calls __del__ where this raises, too
        bind_grpc_to_loopback()
        front_settings = msgspec.msgpack.decode(settings, type=Settings)
        if not is_on_loopback():  # then the proxies are reachable from other machines
            front_settings = replace(front_settings, serve=replace(front_settings.serve, host="0.0.0.0"))
        self._settings = front_settings
        self._cluster = msgspec.msgpack.decode(cluster, type=ClusterConfig)
        self._handles = handles

    async def __serve_build_asgi_app__(self) -> Any:
        """Return the ASGI application; Ray Serve calls this in the event loop of the requests.

        Raises:
            ConfigError: Another front uses the data folder, or other machines could connect without a key.
        """
        try:
            return await self._open()
        except BaseException:
            self._resources.close()
            raise

    async def _open(self) -> Any:
        config, enter = self._settings.serve, self._resources.enter_context
        state = StateFile(Path(config.data_dir).expanduser())
        patience_s = config.shutdown_timeout_s + SHUTDOWN_MARGIN_S + DRAIN_S
        await asyncio.to_thread(enter, state.locked(patience_s))
        database, ring = await asyncio.to_thread(open_store, self._settings)
        enter(json_logs(config.log_level))
        if database is not None:
            enter(database.in_use())
        checks = await asyncio.to_thread(ImageChecks.of, self._settings)
        self._resources.callback(checks.stop)
        engines = open_pool(self._settings, self._cluster, await self._calls())
        reporter = StateReporter(state, ClusterState(pid=os.getpid(), is_deployed=True))
        self._resources.callback(reporter.stop)
        reporter.start(engines)
        self._front = Front(self._settings, engines, ring=ring, database=database, checks=checks)
        self._front.begin()
        return self._front.app

    async def _calls(self) -> dict[str, RayCalls]:
        """Return the calls to the replicas, by name, after those of an earlier front have stopped."""
        application = serve.get_replica_context().app_name
        deployments = self._cluster.deployments
        calls = (
            asyncio.to_thread(
                shared_calls, serve, application, name, self._handles[name], settings_of(self._settings, stage)
            )
            for name, stage, _ in deployments
        )
        names = [deployment.name for deployment in deployments]
        return dict(zip(names, await asyncio.gather(*calls), strict=True))

    def check_health(self) -> None:
        """Raise the error at which all replicas failed; Ray Serve then restarts the front."""
        if self._front is not None and self._front.engine.failed.done():
            raise self._front.engine.failed.result()

    async def __del__(self) -> None:
        """Stop the front; Ray Serve awaits this after the last request or the shutdown timeout."""
        if self._front is not None:
            await self._front.stop(self._front.gate.wait(self._settings.serve.shutdown_timeout_s))
            await self._front.close()
        self._resources.close()
