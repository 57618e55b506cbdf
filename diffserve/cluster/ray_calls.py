"""Ray: started in this machine or joined, with a token and on the loopback, and the deployments of the replicas in it.

What is switched on and off is said here and nowhere else: token authentication on, with a token of the cluster's own;
usage statistics, the dashboard, HAProxy, direct ingress and Serve's own HTTP off. ray is imported only after the
environment says so, since it reads it once.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager
from contextvars import Context
from pathlib import Path
from threading import Lock
from typing import Any, Final, Protocol

import msgspec

from diffserve.api.errors import ConfigError
from diffserve.cluster.config import ClusterConfig, ReplicaConfig, settings_of
from diffserve.settings.config import Settings

APPLICATION: Final = "diffserve"
OBJECT_STORE_BYTES: Final = 256 << 20
DRAIN_S: Final = 30.0
MANY: Final = 100_000
LOOK_BACK_S: Final = 11.0  # more than a deprecated interval of Ray Serve, or it warns
CLOSES_AFTER_S: Final = 2.0
"""So long Ray Serve waits before it ends a replica that nobody holds."""

FIXED: Final = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_ENABLE_HA_PROXY": "0",
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",  # the first replica waits for that; 10 s else
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
}
SERVED: Final = {
    **{name: value for name, value in FIXED.items() if name.startswith("RAY_SERVE_")},
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "diffserve.service.http.proxy:middlewares",
}
"""What a Ray that somebody else starts must have in its environment, beside a token, to serve our application."""
LOCAL: Final = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # else Ray takes an address that others reach
    "RAY_enable_metrics_collection": "0",
    "RAY_worker_niceness": "0",  # 15 else: a replica would get a thirtieth of a core beside whoever else is at work
}


METRIC_PORTS: Final = ("AUTOSCALER_METRIC_PORT", "DASHBOARD_METRIC_PORT")
"""Environment variables with the ports of Ray's own Prometheus metrics, which it serves without a token."""

NO_PORT: Final = "-1"


class Place(Protocol):
    """A deployment of one replica, or none."""

    def is_there(self) -> bool:
        """Whether it has a replica, also one that is closing."""

    def begin(self, settings: Settings) -> Any:
        """Without a replica, with ``settings``. A DeploymentHandle."""


class RayCalls:
    """Calls of the one replica of a deployment: see :class:`~diffserve.cluster.replica.Calls`."""

    def __init__(self, deployed: Place, settings: Settings) -> None:
        self._deployed = deployed
        self._settings = settings
        self._was_held = False
        self._begin()

    async def stream(self, method: str, *arguments: bytes) -> AsyncGenerator[bytes, None]:
        """The parts of an answer as they come; closing it leaves the call, which is cancelled there."""
        if method == "live":
            await self._have_none_that_closes()
        answer = Context().run(getattr(self._streams, method).remote, *arguments)  # else a request's end is its end
        try:
            async for part in answer:
                yield part
        finally:
            answer.cancel()

    async def ask(self, question: bytes) -> bytes:
        """An answer that comes at once."""
        return bytes(await self._handle.ask.remote(question))

    async def _have_none_that_closes(self) -> None:
        """Begin without a replica where one was held before: Ray Serve, which saw it let go, or lost, for a moment, may
        have decided to end it, gives it calls yet, and kills it with them half a minute later.
        """
        if self._was_held and await asyncio.to_thread(self._deployed.is_there):
            await asyncio.to_thread(self._begin)
        self._was_held = True

    async def renew(self, settings: Settings) -> None:
        """Have the deployment make replicas with ``settings``. One that is there must have been let go; it is ended."""
        self._settings = settings
        await asyncio.to_thread(self._begin)
        self._was_held = False

    def _begin(self) -> None:
        self._handle = self._deployed.begin(self._settings)
        self._streams = self._handle.options(stream=True)


class Deployed:
    """The application of one replica in Ray Serve, by its name."""

    def __init__(self, serve: Any, name: str, each: ReplicaConfig, lock: Lock) -> None:
        """``lock``: one at a time begins."""
        self._serve = serve
        self._name = name
        self._each = each
        self._lock = lock

    @property
    def _application(self) -> str:
        return f"{APPLICATION}-{self._name}"

    def is_there(self) -> bool:
        """Whether it has a replica, also one that is closing."""
        return has_replica(self._serve, self._application, self._name)

    def begin(self, settings: Settings) -> Any:
        """Without a replica, with ``settings``; one that was there is ended. A DeploymentHandle."""
        bound = bind_replica(self._serve, self._name, self._each, settings)
        with self._lock:
            if self._application in self._serve.status().applications:
                self._serve.delete(self._application)
            return self._serve.run(bound, name=self._application, route_prefix=None)


class Bound:
    """The deployment of one replica in an application that has the front, too: it cannot begin alone."""

    def __init__(self, serve: Any, application: str, name: str, handle: Any) -> None:
        self._serve = serve
        self._application = application
        self._name = name
        self._handle = handle

    def is_there(self) -> bool:
        """Whether it has a replica, also one that is closing."""
        return has_replica(self._serve, self._application, self._name)

    def begin(self, settings: Settings) -> Any:
        """Its DeploymentHandle, once it has no replica, which nobody holds and Ray Serve ends; ``settings`` are the
        application's.
        """
        until_s = time.monotonic() + DRAIN_S
        while self.is_there() and time.monotonic() < until_s:
            time.sleep(0.2)
        return self._handle


def has_replica(serve: Any, application: str, name: str) -> bool:
    """Whether the deployment ``name`` has a replica, also one that is closing."""
    told = serve.status().applications.get(application)
    deployed = None if told is None else told.deployments.get(name)
    return deployed is not None and any(deployed.replica_states.values())


def bind_replica(serve: Any, name: str, each: ReplicaConfig, settings: Settings, drain_s: float = DRAIN_S) -> Any:
    """An application of Ray Serve that is one replica with ``settings``, or none while nobody holds it."""
    from diffserve.cluster.actor import ReplicaActor

    deployment = serve.deployment(
        name=name,
        max_ongoing_requests=MANY,  # the front and the engine count; nothing waits in between
        graceful_shutdown_timeout_s=drain_s,
        ray_actor_options={"num_cpus": each.cpus, "num_gpus": each.gpus},
        autoscaling_config={
            "min_replicas": 0,
            "max_replicas": 1,
            "target_ongoing_requests": MANY,
            "upscale_delay_s": 0.0,
            "downscale_delay_s": CLOSES_AFTER_S,
            "downscale_to_zero_delay_s": CLOSES_AFTER_S,
            "look_back_period_s": LOOK_BACK_S,
        },
    )(ReplicaActor)
    return deployment.bind(msgspec.msgpack.encode(settings))


def check_environment(environment: Mapping[str, str]) -> None:
    """ConfigError unless the Ray that was started with it asks for a token and serves as ``SERVED`` says."""
    if environment.get("RAY_AUTH_MODE") != "token":
        raise ConfigError("this Ray asks nobody for a token; start it with RAY_AUTH_MODE=token.")
    for name, value in SERVED.items():
        if environment.get(name) != value:
            raise ConfigError(f"this Ray was not started with {name}={value}; every process of it must have that.")


@contextmanager
def ray_cluster(
    settings: Settings, cluster: ClusterConfig, *, address: str = "", token_file: Path, folder: Path | None = None
) -> Iterator[dict[str, RayCalls]]:
    """The replicas' deployments, by their names, in a Ray of this process or in the one at ``address``.

    ``token_file``: of a Ray of this process it is made anew, readable to its owner alone; at ``address`` it must be
    that of the cluster. ``folder``: where a Ray of this process keeps its things. Afterwards nothing that was started
    here is left running; a cluster that was joined goes on.
    Raises ConfigError where ray is not installed, or there is no cluster, or not one with that token.
    """
    local = LOCAL | {name: os.environ.get(name, NO_PORT) for name in METRIC_PORTS}
    os.environ.update(FIXED | {"RAY_AUTH_TOKEN_PATH": str(token_file)} | ({} if address else local))
    os.environ.pop("RAY_AUTH_TOKEN", None)
    if not address:
        _write_token(token_file)
    elif not token_file.is_file():
        raise ConfigError(f"there is no token of the cluster at {address} in {str(token_file)!r}; give --token-file.")
    try:
        import ray
        from ray import serve
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise ConfigError("the package ray is not installed: pip install 'diffserve[cluster]'.") from None
    try:
        _connect(ray, cluster, address, folder)
        serve.start(proxy_location="Disabled")
        yield _deploy(serve, settings, cluster)
    finally:
        if address and ray.is_initialized():
            for one in cluster.deployments:
                serve.delete(f"{APPLICATION}-{one.name}")
        ray.shutdown()


def _connect(ray: Any, cluster: ClusterConfig, address: str, folder: Path | None) -> None:
    quiet = {"log_to_driver": False, "namespace": APPLICATION, "logging_level": "warning"}
    try:
        if address:
            ray.init(address=address, **quiet)
            return
        taken = [one.resources for one in cluster.deployments]
        ray.init(
            address="local",
            include_dashboard=False,
            num_cpus=max(1, math.ceil(sum(each.cpus for each in taken))),  # as the file says, whatever the machine has
            num_gpus=math.ceil(sum(each.gpus for each in taken)),
            object_store_memory=OBJECT_STORE_BYTES,
            _node_ip_address="127.0.0.1",
            _temp_dir=None if folder is None else str(folder),
            **quiet,
        )
    except Exception as error:  # Ray raises of every kind
        said = str(error).strip().partition("\n")[0]
        where = f"there is no cluster to join at {address!r}" if address else "Ray does not start"
        raise ConfigError(f"{where}: {said}") from None


def _deploy(serve: Any, settings: Settings, cluster: ClusterConfig) -> dict[str, RayCalls]:
    lock = Lock()
    return {
        one.name: RayCalls(Deployed(serve, one.name, one.resources, lock), settings_of(settings, one.stage))
        for one in cluster.deployments
    }


def _write_token(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
