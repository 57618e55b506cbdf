"""Spans of requests, as the SDK's exporter in memory has them, and as a collector gets them from a live server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from diffserve.service.app import create_app
from diffserve.service.engine.client import EngineClient
from diffserve.service.lifecycle import Gate
from diffserve.service.tracing import Traces
from diffserve.settings.layers import load_settings
from tests.service.server import SOON_S, running_server, wait_for

PARENT = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"


def spans_of(*headers: dict[str, str], path: str = "/v1/models") -> list[Any]:
    """The spans of requests with ``headers``, in order."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    async def ask() -> None:
        config = load_settings(env={})
        engine = EngineClient(config)
        engine.metrics.traces = Traces(provider)
        transport = httpx.ASGITransport(create_app(engine, config.serve, Gate()))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            for told in headers:
                await client.get(path, headers=told)
        assert not engine.metrics.traces._inside

    asyncio.run(ask())
    return list(exporter.get_finished_spans())


def test_a_request_is_a_span_of_its_route_and_a_good_parent_is_gone_on_with() -> None:
    wrong = (
        "",
        "x",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{PARENT}-{'0' * 16}-01",
        f"ff-{PARENT}-{SPAN}-01",
        f"{PARENT}" * 9,
    )
    told = [{"traceparent": f"00-{PARENT}-{SPAN}-01"}, {}, *({"traceparent": one} for one in wrong)]
    first, *others = spans_of(*told)
    assert first.name == "GET /v1/models"
    assert format(first.context.trace_id, "032x") == PARENT
    assert format(first.parent.span_id, "016x") == SPAN
    attributes = {"http.request.method": "GET", "http.route": "/v1/models", "http.response.status_code": 503}
    assert attributes.items() <= first.attributes.items()
    assert first.attributes["error.type"] == "engine_unavailable"
    assert len(others) == len(told) - 1
    assert all(one.parent is None for one in others)
    assert len({one.context.trace_id for one in others}) == len(others)
    assert spans_of({}, path="/livez") == []
    assert [one.name for one in spans_of({}, path="/SECRET")] == ["GET"]


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"},
        {"OTEL_TRACES_EXPORTER": "zipkin"},
        {"OTEL_SDK_DISABLED": "true", "OTEL_TRACES_EXPORTER": "otlp"},
    ],
)
def test_nothing_is_traced_unless_the_environment_asks_for_it(env: dict[str, str]) -> None:
    assert Traces.from_environment(env) is None


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """The address of a collector, and the spans that it gets."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    found: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
            found.extend(span for one in sent.resource_spans for scope in one.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", found
        server.shutdown()
        thread.join()


@pytest.mark.slow
def test_a_collector_gets_the_stages_of_a_picture(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    with collector() as (url, found):
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_BSP_SCHEDULE_DELAY": "200"}
        with running_server(tiny_model("sd15"), tmp_path, env=env) as server:
            server.wait_until_ready()
            parent = {"traceparent": f"00-{PARENT}-{SPAN}-01"}
            body = {"prompt": "a SECRET fox", "num_inference_steps": 25, "seed": 5, "n": 2}
            assert server.client.post("/v1/images/generations", json=body, headers=parent).status_code == 200
            wait_for(lambda: len(found) >= 11, SOON_S, "the spans")
    assert b"SECRET" not in b"".join(one.SerializeToString() for one in found)
    assert {one.trace_id.hex() for one in found} == {PARENT}
    (whole,) = [one for one in found if one.name == "POST /v1/images/generations"]
    assert whole.parent_span_id.hex() == SPAN
    told = {one.key: one.value for one in whole.attributes}
    assert told["gen_ai.operation.name"].string_value == "generate_content"
    assert told["diffserve.steps"].int_value == 25
    for index in (0, 1):
        own = [
            one
            for one in found
            if any(a.key == "diffserve.image_index" and a.value.int_value == index for a in one.attributes)
        ]
        own.sort(key=lambda one: one.start_time_unix_nano)
        assert [one.name for one in own] == ["queue.wait", "text_encode", "denoise", "vae_decode", "image_encode"]
        encode = own.pop()
        assert own[-1].start_time_unix_nano <= encode.start_time_unix_nano <= encode.end_time_unix_nano
        assert all(one.parent_span_id == whole.span_id for one in own)
        for one, after in pairwise(own):
            assert one.start_time_unix_nano <= one.end_time_unix_nano == after.start_time_unix_nano
        assert [event.attributes[0].value.int_value for event in own[2].events] == [10, 20]
        slack_ns = 500_000_000  # two clocks are read, and on a busy machine not at once
        assert own[0].start_time_unix_nano >= whole.start_time_unix_nano - slack_ns
        assert own[-1].end_time_unix_nano <= whole.end_time_unix_nano + slack_ns
