"""Work that was cut into pieces, done by a fixed pool of Ray Data's actors, one engine each.

A piece and what becomes of it are bytes, whatever they mean to who made them. A worker that is lost is begun anew, and
its piece is done by it or another; doing one twice must do no harm.
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
"""Of memory that a cluster of this machine's own keeps pieces in; more go to its disk."""


class Worker(Protocol):
    """Does pieces, one after the other."""

    def paint(self, shard: bytes) -> bytes:
        """A piece, and what became of it."""


class MakeWorker(Protocol):
    """A class that can be imported where workers are."""

    def __call__(self, job: bytes) -> Worker:
        """A worker for ``job``."""


class Pool(NamedTuple):
    """How many workers, and what each takes."""

    size: int
    num_cpus: float
    num_gpus: float


def paint_shards(
    shards: Iterable[bytes], make: tuple[MakeWorker, bytes], address: str | None, num_workers: int | None
) -> Iterator[bytes]:
    """What became of each of ``shards``, in the order in which they are done. ``make``: a worker's class, and its job.

    ``address``: of a Ray cluster that this machine is part of, "auto" for the one there is; None: one is begun here and
    ends with the last shard. ``num_workers``: None: one for each GPU, or else for each machine.

    Raises InvalidRequest where no cluster answers, DiffserveError where it gives up.
    """
    _join(address)
    try:
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.print_on_execution_start = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        tables: list[Any] = [ray.put(pa.table({"shard": pa.array([shard], pa.binary())})) for shard in shards]
        pool = pool_for(num_workers, min(len(tables), num_workers or len(tables)))
        told = ray.data.from_arrow_refs(tables).map_batches(
            _Actor,
            fn_constructor_args=make,
            batch_size=1,
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(size=pool.size, max_tasks_in_flight_per_actor=1),
            num_cpus=pool.num_cpus,
            num_gpus=pool.num_gpus or None,
        )
        for batch in told.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
            for one in batch["told"]:
                yield one.as_py()
    except RayError as error:
        last = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise DiffserveError(f"the cluster gave up a shard: {last} The same command goes on.") from error
    finally:
        ray.shutdown()


class _Actor:
    """A worker, as Ray Data calls it."""

    def __init__(self, make: MakeWorker, job: bytes) -> None:
        self._worker = make(job)

    def __call__(self, batch: pa.Table) -> pa.Table:
        told = [self._worker.paint(shard.as_py()) for shard in batch["shard"]]
        return pa.table({"told": pa.array(told, pa.binary())})


def pool_for(num_workers: int | None, most: int) -> Pool:
    """One worker for each GPU, or else for each machine, unless it is said; ``most`` at most. Each takes an equal part
    of a machine's cores. Raises InvalidRequest where more are wanted than there are GPUs or cores.
    """
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    num_gpus = int(sum(machine.get("GPU", 0) for machine in machines))
    size = max(1, min(num_workers or num_gpus or len(machines), most))
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
        said = " ".join(str(error).split())[:300]
        raise InvalidRequest(f"no Ray cluster at {address or 'this machine'}: {said}", param="--address") from error


def _reach(address: str) -> None:
    """InvalidRequest where nothing listens at ``address``: Ray itself would try for a minute."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        said = f"--address is {address!r}; give HOST:PORT of a cluster that this machine is part of, or auto."
        raise InvalidRequest(said, param="--address")
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
    except (OSError, OverflowError) as error:
        said = f"no Ray cluster answers at {address} ({error}); see `ray start`, and its port."
        raise InvalidRequest(said, param="--address") from None
