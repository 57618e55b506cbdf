"""Spans of requests, in the SDK's in-memory exporter and in a collector of a live server."""

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
from diffserve.service.telemetry import Traces
from diffserve.settings.layers import load_settings
from tests.service.server import SOON_S, running_server, wait_for

PARENT = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"


def spans_of(*headers: dict[str, str], path: str = "/v1/models") -> list[Any]:
    """Return the spans of requests with ``headers``, in order."""
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
            for request_headers in headers:
                await client.get(path, headers=request_headers)
        assert not engine.metrics.traces._inside

    asyncio.run(ask())
    return list(exporter.get_finished_spans())


def test_a_request_is_a_span_of_its_route_with_a_valid_parent_continued() -> None:
    wrong = (
        "",
        "x",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{PARENT}-{'0' * 16}-01",
        f"ff-{PARENT}-{SPAN}-01",
        f"{PARENT}" * 9,
    )
    all_headers = [{"traceparent": f"00-{PARENT}-{SPAN}-01"}, {}, *({"traceparent": parent} for parent in wrong)]
    first, *later = spans_of(*all_headers)
    assert first.name == "GET /v1/models"
    assert format(first.context.trace_id, "032x") == PARENT
    assert format(first.parent.span_id, "016x") == SPAN
    attributes = {"http.request.method": "GET", "http.route": "/v1/models", "http.response.status_code": 503}
    assert attributes.items() <= first.attributes.items()
    assert first.attributes["error.type"] == "engine_unavailable"
    assert len(later) == len(all_headers) - 1
    assert all(span.parent is None for span in later)
    assert len({span.context.trace_id for span in later}) == len(later)
    assert spans_of({}, path="/livez") == []
    assert [span.name for span in spans_of({}, path="/SECRET")] == ["GET"]


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"},
        {"OTEL_TRACES_EXPORTER": "zipkin"},
        {"OTEL_SDK_DISABLED": "true", "OTEL_TRACES_EXPORTER": "otlp"},
    ],
)
def test_nothing_is_traced_unless_the_environment_enables_it(env: dict[str, str]) -> None:
    assert Traces.from_environment(env) is None


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Yield the address of a collector and the spans that it receives."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
            spans.extend(
                span for resource in sent.resource_spans for scope in resource.scope_spans for span in scope.spans
            )
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", spans
        server.shutdown()
        thread.join()


@pytest.mark.slow
def test_a_collector_gets_the_stages_of_an_image(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    with collector() as (url, spans):
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_BSP_SCHEDULE_DELAY": "200"}
        with running_server(tiny_model("sd15"), tmp_path, env=env) as server:
            server.wait_until_ready()
            parent = {"traceparent": f"00-{PARENT}-{SPAN}-01"}
            body = {"prompt": "a SECRET fox", "num_inference_steps": 25, "seed": 5, "n": 2}
            assert server.client.post("/v1/images/generations", json=body, headers=parent).status_code == 200
            wait_for(lambda: len(spans) >= 11, SOON_S, "the spans")
    assert b"SECRET" not in b"".join(span.SerializeToString() for span in spans)
    assert {span.trace_id.hex() for span in spans} == {PARENT}
    (request_span,) = [span for span in spans if span.name == "POST /v1/images/generations"]
    assert request_span.parent_span_id.hex() == SPAN
    attributes = {attribute.key: attribute.value for attribute in request_span.attributes}
    assert attributes["gen_ai.operation.name"].string_value == "generate_content"
    assert attributes["diffserve.steps"].int_value == 25
    for index in (0, 1):
        stages = [
            span
            for span in spans
            if any(a.key == "diffserve.image_index" and a.value.int_value == index for a in span.attributes)
        ]
        stages.sort(key=lambda span: span.start_time_unix_nano)
        assert [span.name for span in stages] == ["queue.wait", "text_encode", "denoise", "vae_decode", "image_encode"]
        encode = stages.pop()
        assert stages[-1].start_time_unix_nano <= encode.start_time_unix_nano <= encode.end_time_unix_nano
        assert all(span.parent_span_id == request_span.span_id for span in stages)
        for span, after in pairwise(stages):
            assert span.start_time_unix_nano <= span.end_time_unix_nano == after.start_time_unix_nano
        assert [event.attributes[0].value.int_value for event in stages[2].events] == [10, 20]
        slack_ns = 500_000_000  # two clocks are read, and on a busy machine not at once
        assert stages[0].start_time_unix_nano >= request_span.start_time_unix_nano - slack_ns
        assert stages[-1].end_time_unix_nano <= request_span.end_time_unix_nano + slack_ns
