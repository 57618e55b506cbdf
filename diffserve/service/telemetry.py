"""OpenTelemetry traces and GenAI metrics, sent over HTTP if the standard variables enable them.

A request has a span with spans of its stages, whose durations come from the results and end when the event arrived; a
valid ``traceparent`` is continued. The metrics' conventions are experimental: ``OTEL_SEMCONV_STABILITY_OPT_IN`` must
contain ``gen_ai_latest_experimental``. Nothing contains prompts. Needs the extra ``otel``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

from starlette.datastructures import Headers
from starlette.types import Scope

from diffserve.api.embedding_types import Embedded
from diffserve.api.rewrite_types import RewriteFinished
from diffserve.api.text_types import TextAccepted, TextFinished, TextTimings
from diffserve.api.types import Accepted, Cancelled, Failed, Finished, ImageFinished, ImageResult, Progress
from diffserve.version import __version__

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

EVENT_EVERY: Final = 10
"""Interval, in steps, of the events in a denoising span."""

MISSING: Final = "OTEL_ variables are set, but the packages are not installed: pip install 'diffserve[otel]'"
OTLP: Final = "http/protobuf"
HEADER_NAMES: Final = ("traceparent", "tracestate")

log = logging.getLogger("diffserve.http")


class Traces:
    """Spans of the requests in progress, by the part of the ID that they share with their engine requests."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("diffserve", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._inside: dict[str, _Request] = {}

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> Traces | None:
        """Create the exporter that the standard variables configure; None if they configure none."""
        if not is_asked(env, "TRACES"):
            return None
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ModuleNotFoundError:
            log.warning("no traces", extra={"reason": MISSING})
            return None
        provider = TracerProvider(resource=resource(env))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        return cls(provider)

    def begin(self, request_id: str, scope: Scope) -> str:
        """Start the span of a request and return its trace ID."""
        from opentelemetry.trace import SpanKind

        headers = Headers(scope=scope)
        carrier = {name: headers[name] for name in HEADER_NAMES if name in headers}
        span = self._tracer.start_span(
            scope["method"][:16], self._propagator.extract(carrier), kind=SpanKind.SERVER,
            attributes={"http.request.method": scope["method"][:16], "url.scheme": scope["scheme"]},
        )  # fmt: skip
        self._inside[key_of(request_id)] = _Request(span)
        return format(span.get_span_context().trace_id, "032x")

    def end(self, request_id: str, endpoint: str, status: int, code: str) -> None:
        """End the span of a request with its route, status and error code."""
        from opentelemetry.trace import StatusCode

        request = self._inside.pop(key_of(request_id), None)
        if request is None or endpoint == "page":  # requests of the page run no engine work themselves
            return
        span = request.span
        span.update_name(f"{request.method} {endpoint}" if endpoint != "none" else request.method)
        span.set_attribute("http.response.status_code", status)
        if endpoint != "none":
            span.set_attribute("http.route", endpoint)
        if code:
            span.set_attribute("error.type", code)
        if status >= 500 or (code and status < 400):
            span.set_status(StatusCode.ERROR)
        span.end()

    def observe(self, event: Any) -> None:
        """Record an event of an engine request."""
        request = self._inside.get(key_of(event.request_id))
        if request is None:
            return
        now_ns = time.time_ns()
        match event:
            case Progress():
                request.progressed(event, now_ns)
            case ImageFinished(result=result):
                self._finish_image(request, result, now_ns)
            case TextFinished() | RewriteFinished():
                is_chat = isinstance(event, TextFinished)
                self._finish_text(request, "chat" if is_chat else "rewrite", event.timings, now_ns)
                usage = {"gen_ai.usage.input_tokens": event.usage.prompt_tokens}
                usage["gen_ai.usage.output_tokens"] = event.usage.output_tokens
                request.span.set_attributes(
                    {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "diffserve", **usage}
                )

    def record_span(self, request_id: str, name: str, started_ns: int, **attributes: int) -> None:
        """Record a span of work in the service from ``started_ns`` until now."""
        request = self._inside.get(key_of(request_id))
        if request is not None:
            self._stage(request, name, started_ns, time.time_ns(), attributes)

    def close(self) -> None:
        """Send the remaining spans; the exporter's variables bound the time."""
        self._provider.shutdown()

    def _finish_image(self, request: _Request, result: ImageResult, now_ns: int) -> None:
        request.span.set_attributes(
            {
                "gen_ai.operation.name": "generate_content",
                "gen_ai.provider.name": "diffserve",
                "gen_ai.output.type": "image",
                "gen_ai.response.model": result.model,
                "gen_ai.response.id": result.request_id,
                "diffserve.steps": result.num_steps,
                "diffserve.scheduler": result.sampler,
                "diffserve.guidance_scale": result.guidance_scale,
                "diffserve.width": result.picture.width_px,
                "diffserve.height": result.picture.height_px,
            }
        )
        index, timings = result.image_index, result.timings
        image_attributes = {"diffserve.image_index": index, "gen_ai.request.seed": result.seed}
        image_attributes |= {} if result.variation_seed is None else {"diffserve.variation_seed": result.variation_seed}
        if result.cached is not None:
            request.span.add_event("cached", {**image_attributes, "diffserve.cached": result.cached}, now_ns)
            return
        attributes = request.steps.pop(index, [])
        ended_ns = attributes[-1][0] if attributes else now_ns - _ns(timings.decode_s)
        started_ns = ended_ns - _ns(timings.denoise_s)
        encoded_ns = started_ns - _ns(timings.encode_s)
        self._stage(request, "queue.wait", encoded_ns - _ns(timings.queue_s), encoded_ns, image_attributes)
        self._stage(request, "text_encode", encoded_ns, started_ns, image_attributes)
        denoise = self._stage(request, "denoise", started_ns, None, image_attributes)
        for at_ns, step in attributes:
            if step % EVENT_EVERY == 0:
                denoise.add_event("step", {"diffserve.step": step}, at_ns)
        denoise.end(ended_ns)
        self._stage(request, "vae_decode", ended_ns, ended_ns + _ns(timings.decode_s), image_attributes)

    def _finish_text(self, request: _Request, name: str, timings: TextTimings, now_ns: int) -> None:
        started_ns = now_ns - _ns(timings.total_s)
        self._stage(request, "queue.wait", started_ns, started_ns + _ns(timings.queue_s), {})
        span = self._stage(request, name, started_ns + _ns(timings.queue_s), None, {})
        span.add_event("first token", None, started_ns + _ns(timings.ttft_s))
        span.end(now_ns)

    def _stage(
        self, request: _Request, name: str, start_ns: int, end_ns: int | None, attributes: Mapping[str, int | str]
    ) -> Span:
        span = self._tracer.start_span(name, request.context, attributes=attributes, start_time=start_ns)
        if end_ns is not None:
            span.end(end_ns)
        return span


class _Request:
    """Span of a request and the times of its images' steps."""

    def __init__(self, span: Span) -> None:
        self.span = span
        self.steps: dict[int, list[tuple[int, int]]] = {}

    @property
    def method(self) -> str:
        name: str = getattr(self.span, "name", "HTTP")
        return name

    @property
    def context(self) -> Context:
        from opentelemetry.trace import set_span_in_context

        return set_span_in_context(self.span)

    def progressed(self, event: Progress, now_ns: int) -> None:
        """Keep every tenth step and the last."""
        attributes = self.steps.setdefault(event.image_index, [])
        if attributes and attributes[-1][1] % EVENT_EVERY:
            attributes.pop()
        attributes.append((now_ns, event.step_index))


def is_asked(env: Mapping[str, str], kind: Literal["TRACES", "METRICS"]) -> bool:
    """Return whether the standard variables enable this kind; unsupported settings are logged."""
    name, exporter = kind.lower(), env.get(f"OTEL_{kind}_EXPORTER", "").strip().lower()
    places = (f"OTEL_EXPORTER_OTLP_{kind}_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    if exporter not in ("", "otlp", "none"):
        reason = f"OTEL_{kind}_EXPORTER is {exporter[:40]!r}; only otlp is supported"
        log.warning(f"no {name}", extra={"reason": reason})
    is_wanted = exporter == "otlp" or (not exporter and any(env.get(place) for place in places))
    if not is_wanted or env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    spoken = env.get(f"OTEL_EXPORTER_OTLP_{kind}_PROTOCOL") or env.get("OTEL_EXPORTER_OTLP_PROTOCOL") or OTLP
    if spoken != OTLP:
        reason_ = f"OTEL_EXPORTER_OTLP_PROTOCOL is {spoken[:40]!r}; {name} are sent as {OTLP}"
        log.warning(f"{name} use another protocol", extra={"reason": reason_})
    return True


def resource(env: Mapping[str, str]) -> Resource:
    """Return the resource that describes this service; needs the packages."""
    from opentelemetry.sdk.resources import Resource

    attributes_ = {} if env.get("OTEL_SERVICE_NAME") else {"service.name": "diffserve"}
    return Resource.create({"service.version": __version__, **attributes_})


def key_of(request_id: str) -> str:
    """Return the part of a request ID that its engine requests share."""
    return request_id.split("-", 2)[1] if "-" in request_id else request_id


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


OPT_IN: Final = "gen_ai_latest_experimental"
OPERATIONS: Final = {"image": "generate_content", "embedding": "embeddings"}
"""Names of operations by the kind of the request; the default is "chat"."""

DURATIONS_S: Final = tuple(0.01 * 2**power for power in range(14))
FIRST_TOKEN_S: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
A_TOKEN_S: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
TOKENS: Final = tuple(4.0**power for power in range(14))
MOST_INSIDE: Final = 65_536


class GenAiMetrics:
    """Four histograms that are updated from the engine's events."""

    def __init__(self, provider: MeterProvider) -> None:
        self._provider = provider
        meter = provider.get_meter("diffserve")

        def histogram(name: str, unit: str, description: str, bounds: tuple[float, ...]) -> Any:
            return meter.create_histogram(
                f"gen_ai.{name}", unit, description, explicit_bucket_boundaries_advisory=list(bounds)
            )

        self._duration = histogram(
            "server.request.duration", "s", "Duration of a request, including its time in the queue.", DURATIONS_S
        )
        description = "Time from submission to the first token."
        self._first_token = histogram("server.time_to_first_token", "s", description, FIRST_TOKEN_S)
        description = "Mean time per output token after the first."
        self._a_token = histogram("server.time_per_output_token", "s", description, A_TOKEN_S)
        self._tokens = histogram("client.token.usage", "{token}", "Input and output tokens of a request.", TOKENS)
        self._begun: dict[str, tuple[float, dict[str, str]]] = {}

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> GenAiMetrics | None:
        """Create the metrics that the standard variables configure; None if they configure none."""
        options = (item.strip() for item in env.get("OTEL_SEMCONV_STABILITY_OPT_IN", "").split(","))
        if OPT_IN not in options or not is_asked(env, "METRICS"):
            return None
        try:
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
            from opentelemetry.sdk.metrics import MeterProvider
            from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        except ModuleNotFoundError:
            log.warning("no metrics are sent", extra={"reason": MISSING})
            return None
        return cls(MeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter())], resource(env)))

    def observe(self, kind: str, event: Any) -> None:
        """Record an event of a request of ``kind``: "image", "text", "rewrite" or "embedding"."""
        match event:
            case Accepted() | TextAccepted() if len(self._begun) < MOST_INSIDE:
                self._begun[event.request_id] = time.monotonic(), {}
            case ImageFinished(result=result) if event.request_id in self._begun:
                self._begun[event.request_id][1]["gen_ai.response.model"] = result.model
            case TextFinished(usage=usage, timings=timings) | RewriteFinished(usage=usage, timings=timings):
                attributes = self._attributes(kind)
                self._begun.pop(event.request_id, None)
                self._duration.record(timings.total_s, attributes)
                self._first_token.record(timings.ttft_s, attributes)
                if timings.tpot_s:
                    self._a_token.record(timings.tpot_s, attributes)
                for name, number in (("input", usage.prompt_tokens), ("output", usage.output_tokens)):
                    self._tokens.record(number, attributes | {"gen_ai.token.type": name})
            case Embedded(num_tokens=num_tokens):
                self._tokens.record(num_tokens, self._attributes(kind) | {"gen_ai.token.type": "input"})
            case Finished() | Failed() | Cancelled():
                self._end(kind, event)

    def _end(self, kind: str, event: Finished | Failed | Cancelled) -> None:
        begun_s, attributes = self._begun.pop(event.request_id, (None, {}))
        code = event.code if isinstance(event, Failed) else "cancelled" if isinstance(event, Cancelled) else ""
        if begun_s is not None:
            error = {"error.type": code} if code else {}
            self._duration.record(time.monotonic() - begun_s, self._attributes(kind) | attributes | error)

    @staticmethod
    def _attributes(kind: str) -> dict[str, str]:
        output = {"gen_ai.output.type": "image"} if kind == "image" else {}
        return {
            "gen_ai.operation.name": OPERATIONS.get(kind, "chat"),
            "gen_ai.provider.name": "diffserve",
            **output,
        }

    def close(self) -> None:
        """Send the remaining metrics; the exporter's variables bound the time."""
        self._provider.shutdown()
