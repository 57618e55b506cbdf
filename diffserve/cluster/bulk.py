"""Batch work in shards on a fixed pool of Ray Data actors with one engine each.

Shards and results are bytes that only the caller interprets. A lost worker is restarted and its shard repeated, so that
shards must be idempotent.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple, Protocol

import pyarrow as pa  # type: ignore[import-untyped]
import ray
import ray.data
from ray.exceptions import RayError

from diffserve.api.errors import DiffserveError, InvalidRequest

REACH_S: Final = 5.0
STORE_BYTES: Final = 256 << 20
"""Size of the object store of a local cluster; further shards are spilled to disk."""


class Worker(Protocol):
    """A worker that processes shards one after the other."""

    def paint(self, shard: bytes) -> bytes:
        """Process a shard and return its result."""


class MakeWorker(Protocol):
    """A worker class that can be imported on every machine of the cluster."""

    def __call__(self, job: bytes) -> Worker:
        """Create a worker for ``job``."""


class Pool(NamedTuple):
    """Number of workers, and the resources of each."""

    size: int
    num_cpus: float
    num_gpus: float


def paint_shards(
    shards: Iterable[bytes], make: tuple[MakeWorker, bytes], address: str | None, num_workers: int | None
) -> Iterator[bytes]:
    """Process ``shards`` and yield the results in the order of completion.

    Args:
        shards: The work.
        make: The worker class and its job.
        address: Address of a Ray cluster that this machine is part of, or "auto"; ``None`` starts a local one.
        num_workers: Number of workers; ``None``: one per GPU, or per machine without GPUs.

    Raises:
        InvalidRequest: No cluster answers.
        DiffserveError: The cluster gave up a shard.
    """
    _join(address)
    try:
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.print_on_execution_start = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        tables: list[Any] = [ray.put(pa.table({"shard": pa.array([shard], pa.binary())})) for shard in shards]
        pool = pool_for(num_workers, min(len(tables), num_workers or len(tables)))
        results = ray.data.from_arrow_refs(tables).map_batches(
            _Actor,
            fn_constructor_args=make,
            batch_size=1,
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(size=pool.size, max_tasks_in_flight_per_actor=1),
            num_cpus=pool.num_cpus,
            num_gpus=pool.num_gpus or None,
        )
        for batch in results.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
            for result in batch["result"]:
                yield result.as_py()
    except RayError as error:
        last = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise DiffserveError(
            f"the cluster gave up on a shard: {last} Run the same command again to continue."
        ) from error
    finally:
        ray.shutdown()


class _Actor:
    """Adapter from Ray Data's batches to a worker."""

    def __init__(self, make: MakeWorker, job: bytes) -> None:
        self._worker = make(job)

    def __call__(self, batch: pa.Table) -> pa.Table:
        results = [self._worker.paint(shard.as_py()) for shard in batch["shard"]]
        return pa.table({"result": pa.array(results, pa.binary())})


def pool_for(num_workers: int | None, max_workers: int) -> Pool:
    """Return the workers for the current Ray cluster, which share the cores of the machines equally.

    Args:
        num_workers: Number of workers; ``None``: one per GPU, or per machine without GPUs.
        max_workers: Upper limit.

    Raises:
        InvalidRequest: There are more workers than GPUs or cores.
    """
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    num_gpus = int(sum(machine.get("GPU", 0) for machine in machines))
    size = max(1, min(num_workers or num_gpus or len(machines), max_workers))
    if num_gpus and size > num_gpus:
        raise InvalidRequest(f"--workers is {size}, and the cluster has {num_gpus} GPUs.", param="--workers")
    cores = [int(machine.get("CPU", 0)) for machine in machines]
    if size > sum(cores):
        raise InvalidRequest(f"--workers is {size}, and the cluster has {sum(cores)} cores.", param="--workers")
    each = max(1, max(cores))
    while sum(core // each for core in cores) < size:
        each -= 1
    return Pool(size, each, 1.0 if num_gpus else 0.0)


def _join(address: str | None) -> None:
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        options |= {"address": "local", "include_dashboard": False, "object_store_memory": STORE_BYTES}
        options["_node_ip_address"] = "127.0.0.1"
    else:
        _reach(address)
        options["address"] = address
    try:
        ray.init(**options)
    except (ConnectionError, RayError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise InvalidRequest(f"no Ray cluster at {address or 'this machine'}: {reason}", param="--address") from error


def _reach(address: str) -> None:
    """Raise InvalidRequest if nothing listens at ``address``; Ray itself would try for a minute."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        message = f"--address is {address!r}; give HOST:PORT of a cluster that this machine is part of, or auto."
        raise InvalidRequest(message, param="--address")
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
    except (OSError, OverflowError) as error:
        message = f"no Ray cluster answers at {address} ({error}); see `ray start`, and its port."
        raise InvalidRequest(message, param="--address") from None
