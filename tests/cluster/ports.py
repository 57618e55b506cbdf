"""Check of the ports of Ray's processes with a client of Ray's own protocols, with and without a token."""

from __future__ import annotations

import http.client
import ipaddress
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

import psutil
import pytest

METHODS: Final = (
    "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",  # the GCS
    "/ray.rpc.NodeManagerService/GetNodeStats",  # a raylet
    "/ray.rpc.ObjectManagerService/Pull",
    "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",  # a worker, and the front, which is a Ray driver
    "/ray.rpc.ReporterService/GetTraceback",  # the agent of a node
    "/ray.serve.ASGIService/HandleRequest",  # a replica of Ray Serve
)
"""One that each kind of gRPC server here knows."""
WRONG: Final = "0" * 64
PATIENCE_S: Final = 20.0


class Port:
    """A port on which a process listens."""

    def __init__(self, process: psutil.Process, name: str, host: str, number: int) -> None:
        self.process = process
        self.name = name
        self.host = ipaddress.ip_address(host.removeprefix("::ffff:"))
        self.number = number

    def __repr__(self) -> str:
        return f"{self.name} at {self.host}:{self.number}"

    def calls(self, token: str | None) -> set[str]:
        """Return the status codes of gRPC calls with ``token``; empty if no method is known here."""
        grpc: Any = pytest.importorskip("grpc")
        metadata = None if token is None else [("authorization", f"Bearer {token}")]
        names = set()
        with grpc.insecure_channel(f"127.0.0.1:{self.number}") as channel:
            for method in METHODS:
                call = channel.unary_unary(method, request_serializer=bytes, response_deserializer=bytes)
                try:
                    call(b"", timeout=PATIENCE_S, metadata=metadata)
                    names.add("OK")
                except grpc.RpcError as error:
                    names.add(error.code().name)
                    if error.code().name == "UNAVAILABLE":
                        break  # it does not speak gRPC
        return names - {"UNIMPLEMENTED", "UNAVAILABLE"}

    def page(self, token: str | None) -> tuple[int, bytes]:
        """Return the HTTP answer to a request with ``token``."""
        connection = http.client.HTTPConnection("127.0.0.1", self.number, timeout=PATIENCE_S)
        try:
            connection.request("GET", "/", headers={} if token is None else {"Authorization": f"Bearer {token}"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


def listening(processes: Iterable[psutil.Process]) -> list[Port]:
    """Return all ports on which ``processes`` listen."""
    ports = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # zombie processes are included
            ports += [
                Port(process, process.name(), each.laddr.ip, each.laddr.port)
                for each in process.net_connections("tcp")
                if each.status == psutil.CONN_LISTEN
            ]
    return ports


def check_refusals(ports: Iterable[Port], token: str) -> dict[str, int]:
    """Return how many of ``ports`` speak gRPC ("grpc") and HTTP ("http").

    Raises:
        AssertionError: If a port answers without the token, or speaks neither protocol.
    """
    kinds = {"grpc": 0, "http": 0}
    for port in ports:
        if calls := port.calls(token):
            assert "UNAUTHENTICATED" not in calls, port
            assert port.calls(None) == port.calls(WRONG) == {"UNAUTHENTICATED"}, port
            kinds["grpc"] += 1
            continue
        without, wrong, right = (port.page(each)[0] for each in (None, WRONG, token))
        assert (without, wrong) == (401, 403), port
        assert right == 404, port
        kinds["http"] += 1
    return kinds
