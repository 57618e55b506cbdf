"""Ray cluster, started on this machine or joined, and the Ray Serve deployments of the replicas.

All of Ray's options are set here: token authentication is on; usage statistics, the dashboard, HAProxy, direct ingress
and Serve's own HTTP are off. ray is imported after the environment is set, since it reads the environment only once.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import Context
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, Final

import msgspec

from diffserve.api.errors import ConfigError
from diffserve.cluster.config import ClusterConfig, ReplicaConfig, settings_of
from diffserve.settings.config import Settings

APPLICATION: Final = "diffserve"
OBJECT_STORE_BYTES: Final = 256 << 20
DRAIN_S: Final = 30.0
UNLIMITED: Final = 100_000
LOOK_BACK_S: Final = 11.0  # Ray Serve warns about values up to its deprecated interval
CLOSES_AFTER_S: Final = 2.0
"""Seconds after which Ray Serve stops a replica without an open call."""

FIXED: Final = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_ENABLE_HA_PROXY": "0",
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",  # the first replica starts after it; default 10 s
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
}
SERVED: Final = {
    **{name: value for name, value in FIXED.items() if name.startswith("RAY_SERVE_")},
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "diffserve.service.http.proxy:middlewares",
}
"""Environment, in addition to a token, that a Ray started elsewhere needs to serve the application."""
LOCAL: Final = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # without it Ray uses an address that other machines reach
    "RAY_enable_metrics_collection": "0",
    "RAY_worker_niceness": "0",  # the default of 15 leaves a replica little CPU time on a busy machine
}


METRIC_PORTS: Final = ("AUTOSCALER_METRIC_PORT", "DASHBOARD_METRIC_PORT")
"""Environment variables with the ports of Ray's own Prometheus metrics, which it serves without a token."""

NO_PORT: Final = "-1"


class RayCalls:
    """Calls to the replica of a deployment: see :class:`~diffserve.cluster.replica.Calls`."""

    def __init__(self, deploy: Callable[[Settings], Any], has_replica: Callable[[], bool], settings: Settings) -> None:
        """Deploy the replica with ``settings``.

        Args:
            deploy: Deploys it with settings and without a replica, and returns its DeploymentHandle.
            has_replica: Returns whether it has a replica, also one that is stopping.
            settings: Settings of the replica.
        """
        self._deploy_with = deploy
        self._has_replica = has_replica
        self._settings = settings
        self._was_started = False
        self._deploy()

    async def stream(self, method: str, *arguments: bytes) -> AsyncGenerator[bytes, None]:
        """Yield the parts of an answer as they arrive; closing the generator cancels the call."""
        if method == "live":
            await self._remove_stopping_replica()
        # In an empty context, so that Ray does not tie the call to the HTTP request that runs in this one.
        answer = Context().run(getattr(self._streams, method).remote, *arguments)
        try:
            async for part in answer:
                yield part
        finally:
            answer.cancel()

    async def ask(self, question: bytes) -> bytes:
        """Return an answer that is available at once."""
        return bytes(await self._handle.ask.remote(question))

    async def _remove_stopping_replica(self) -> None:
        """Deploy again if there was a replica before.

        Ray Serve may have decided to stop the earlier replica, but still sends it calls until it is killed.
        """
        if self._was_started and await asyncio.to_thread(self._has_replica):
            await asyncio.to_thread(self._deploy)
        self._was_started = True

    async def renew(self, settings: Settings) -> None:
        """Use ``settings`` for new replicas; the earlier one must have been stopped."""
        self._settings = settings
        await asyncio.to_thread(self._deploy)
        self._was_started = False

    def _deploy(self) -> None:
        self._handle = self._deploy_with(self._settings)
        self._streams = self._handle.options(stream=True)


def has_replica(serve: Any, application: str, name: str) -> bool:
    """Return whether the deployment ``name`` of ``application`` has a replica, also one that is stopping."""
    status = serve.status().applications.get(application)
    deployment = None if status is None else status.deployments.get(name)
    return deployment is not None and any(deployment.replica_states.values())


def application_calls(serve: Any, name: str, resources: ReplicaConfig, settings: Settings, lock: Lock) -> RayCalls:
    """Return the calls to a replica that is an application of its own; ``lock`` serializes all deployments."""
    application = f"{APPLICATION}-{name}"

    def deploy(settings: Settings) -> Any:
        bound = bind_replica(serve, name, resources, settings)
        with lock:
            if application in serve.status().applications:
                serve.delete(application)
            return serve.run(bound, name=application, route_prefix=None)

    return RayCalls(deploy, partial(has_replica, serve, application, name), settings)


def shared_calls(serve: Any, application: str, name: str, handle: Any, settings: Settings) -> RayCalls:
    """Return the calls to a replica in the front's ``application``, where it cannot be deployed alone."""

    def wait_until_stopped(_: Settings) -> Any:
        deadline_s = time.monotonic() + DRAIN_S
        while has_replica(serve, application, name) and time.monotonic() < deadline_s:
            time.sleep(0.2)
        return handle

    return RayCalls(wait_until_stopped, partial(has_replica, serve, application, name), settings)


def bind_replica(serve: Any, name: str, resources: ReplicaConfig, settings: Settings, drain_s: float = DRAIN_S) -> Any:
    """Return a Ray Serve application with one replica while it is called, and none otherwise."""
    from diffserve.cluster.actor import ReplicaActor

    deployment = serve.deployment(
        name=name,
        max_ongoing_requests=UNLIMITED,  # the front and the engine limit them
        graceful_shutdown_timeout_s=drain_s,
        ray_actor_options={"num_cpus": resources.cpus, "num_gpus": resources.gpus},
        autoscaling_config={
            "min_replicas": 0,
            "max_replicas": 1,
            "target_ongoing_requests": UNLIMITED,
            "upscale_delay_s": 0.0,
            "downscale_delay_s": CLOSES_AFTER_S,
            "downscale_to_zero_delay_s": CLOSES_AFTER_S,
            "look_back_period_s": LOOK_BACK_S,
        },
    )(ReplicaActor)
    return deployment.bind(msgspec.msgpack.encode(settings))


def check_environment(environment: Mapping[str, str]) -> None:
    """Raise ConfigError unless Ray's ``environment`` requires a token and has the values of ``SERVED``."""
    if environment.get("RAY_AUTH_MODE") != "token":
        raise ConfigError("this Ray does not require a token; start it with RAY_AUTH_MODE=token.")
    for name, value in SERVED.items():
        if environment.get(name) != value:
            raise ConfigError(f"this Ray was not started with {name}={value}; set it for every process of Ray.")


@contextmanager
def ray_cluster(
    settings: Settings, cluster: ClusterConfig, *, address: str = "", token_file: Path, folder: Path | None = None
) -> Iterator[dict[str, RayCalls]]:
    """Start or join Ray and deploy the replicas; stop everything that was started here afterwards.

    Args:
        settings: Settings of the replicas.
        cluster: The replicas.
        address: Address of a Ray cluster to join; "" starts one on this machine.
        token_file: Token of the cluster at ``address``; for a new Ray it is written, readable only by its owner.
        folder: Folder for the files of a new Ray.

    Yields:
        The calls to each replica, by its name.

    Raises:
        ConfigError: ray is not installed, or there is no cluster with this token.
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
            for deployment in cluster.deployments:
                serve.delete(f"{APPLICATION}-{deployment.name}")
        ray.shutdown()


def _connect(ray: Any, cluster: ClusterConfig, address: str, folder: Path | None) -> None:
    quiet = {"log_to_driver": False, "namespace": APPLICATION, "logging_level": "warning"}
    try:
        if address:
            ray.init(address=address, **quiet)
            return
        resources = [deployment.resources for deployment in cluster.deployments]
        ray.init(
            address="local",
            include_dashboard=False,
            num_cpus=max(1, math.ceil(sum(replica.cpus for replica in resources))),  # not the machine's cores
            num_gpus=math.ceil(sum(replica.gpus for replica in resources)),
            object_store_memory=OBJECT_STORE_BYTES,
            _node_ip_address="127.0.0.1",
            _temp_dir=None if folder is None else str(folder),
            **quiet,
        )
    except Exception as error:  # Ray raises many types
        reason = str(error).strip().partition("\n")[0]
        where = f"there is no cluster to join at {address!r}" if address else "Ray does not start"
        raise ConfigError(f"{where}: {reason}") from None


def _deploy(serve: Any, settings: Settings, cluster: ClusterConfig) -> dict[str, RayCalls]:
    lock = Lock()
    return {
        deployment.name: application_calls(
            serve, deployment.name, deployment.resources, settings_of(settings, deployment.stage), lock
        )
        for deployment in cluster.deployments
    }


def _write_token(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
