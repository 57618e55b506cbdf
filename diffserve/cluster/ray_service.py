"""The same server as an application of Ray Serve: its replicas, and one front that Ray Serve's proxies lead to.

::

    serve run diffserve.cluster.ray_service:build cluster=cluster.toml config=serve.toml

or the same ``import_path`` and ``args`` in a file of ``serve deploy``, or in ``serveConfigV2`` of a RayService. There
is one front, whatever the number of proxies: its books say who may come in. It stands on the head, keeps its things in
its folder there, and asks for a Ray with a token and with ``ray_calls.SERVED`` in its environment.
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

from diffserve.cluster.config import ClusterConfig, read_arguments, settings_of
from diffserve.cluster.ray_calls import DRAIN_S, MANY, Bound, RayCalls, bind_replica, check_environment
from diffserve.cluster.replica import is_on_loopback, listen_no_further_than_ray
from diffserve.cluster.run import StateReporter, replicas_over
from diffserve.cluster.state import ClusterState, StateFile
from diffserve.logs import json_logs
from diffserve.service.front import Front
from diffserve.service.images.service import ImageChecks
from diffserve.service.run import open_store
from diffserve.settings.config import Settings

FRONT: Final = "front"
ON_HEAD: Final = {"node:__internal_head__": 0.001}
LEAVES_S: Final = 10.0
"""Beside what work in progress is given."""


def build(arguments: Mapping[str, str]) -> Any:
    """The application; for ``arguments`` see ``config.read_arguments``. Files are read where this runs: on the head.

    Raises ConfigError for what cannot be read, or is wrong.
    """
    settings, cluster = read_arguments(arguments)
    drain_s = settings.serve.shutdown_timeout_s + LEAVES_S
    handles = {
        one.name: bind_replica(serve, one.name, one.takes, settings_of(settings, one.stage), max(drain_s, DRAIN_S))
        for one in cluster.deployments
    }
    front = serve.deployment(
        name=FRONT,
        num_replicas=1,
        max_ongoing_requests=MANY,  # its own books say who may come in
        graceful_shutdown_timeout_s=drain_s,
        ray_actor_options={"num_cpus": 0, "resources": ON_HEAD},
    )(serve.ingress()(Ingress))
    return front.bind(msgspec.msgpack.encode(settings), msgspec.msgpack.encode(cluster), handles)


class Ingress:
    """What Ray Serve makes one of: the front, in a process of Ray's."""

    def __init__(self, settings: bytes, cluster: bytes, handles: dict[str, Any]) -> None:
        """``settings`` and ``cluster``: as msgpack. ``handles``: of the replicas, by their names. Raises ConfigError
        where the Ray is not one with a token, or without what ``SERVED`` says.
        """
        self._front: Front | None = None
        self._held = contextlib.ExitStack()
        check_environment(os.environ)  # Ray Serve calls __del__ where this raises, too
        listen_no_further_than_ray()
        own = msgspec.msgpack.decode(settings, type=Settings)
        if not is_on_loopback():  # then proxies are for others, too
            own = replace(own, serve=replace(own.serve, host="0.0.0.0"))
        self._settings = own
        self._cluster = msgspec.msgpack.decode(cluster, type=ClusterConfig)
        self._handles = handles

    async def __serve_build_asgi_app__(self) -> Any:
        """What answers. Ray Serve calls this on the loop that requests are answered on. Raises ConfigError where
        another front has the folder, or others may come in without a key.
        """
        try:
            return await self._open()
        except BaseException:
            self._held.close()
            raise

    async def _open(self) -> Any:
        config, enter = self._settings.serve, self._held.enter_context
        state = StateFile(Path(config.data_dir).expanduser())
        patience_s = config.shutdown_timeout_s + LEAVES_S + DRAIN_S  # one that goes when this one comes has its folder
        await asyncio.to_thread(enter, state.held(patience_s))
        database, ring = await asyncio.to_thread(open_store, config)
        enter(json_logs(config.log_level))
        if database is not None:
            enter(database.held())
        checks = await asyncio.to_thread(ImageChecks.of, self._settings)
        self._held.callback(checks.stop)
        engines = replicas_over(self._settings, self._cluster, await self._calls())
        told = StateReporter(state, ClusterState(pid=os.getpid(), is_deployed=True))
        self._held.callback(told.end)
        told.begin(engines)
        self._front = Front(self._settings, engines, ring=ring, database=database, checks=checks)
        self._front.begin()
        return self._front.app

    async def _calls(self) -> dict[str, RayCalls]:
        """Of the replicas, by their names, once there are none that another front held."""
        application = serve.get_replica_context().app_name
        stages = {one.name: settings_of(self._settings, one.stage) for one in self._cluster.deployments}
        places = {name: Bound(serve, application, name, self._handles[name]) for name in stages}
        begun = (asyncio.to_thread(RayCalls, places[name], each) for name, each in stages.items())
        return dict(zip(stages, await asyncio.gather(*begun), strict=True))

    def check_health(self) -> None:
        """Raises what all replicas were given up for: Ray Serve then starts this anew."""
        if self._front is not None and self._front.engine.failed.done():
            raise self._front.engine.failed.result()

    async def __del__(self) -> None:
        """Ray Serve calls and awaits this when the last request is answered, or its time is over."""
        if self._front is not None:
            await self._front.stop(self._front.gate.wait(self._settings.serve.shutdown_timeout_s))
            await self._front.close()
        self._held.close()
