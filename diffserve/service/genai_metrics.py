"""OpenTelemetry metrics of the GenAI conventions, sent over HTTP if the standard variables enable them.

The conventions are experimental, so ``OTEL_SEMCONV_STABILITY_OPT_IN`` must contain ``gen_ai_latest_experimental``.
Durations are from submission to the end; ``error.type`` is the error code.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from diffserve.api.embedding_types import Embedded
from diffserve.api.rewrite_types import RewriteFinished
from diffserve.api.text_types import TextAccepted, TextFinished
from diffserve.api.types import Accepted, Cancelled, Failed, Finished, Painted
from diffserve.service.tracing import MISSING, is_asked, resource

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider

OPT_IN: Final = "gen_ai_latest_experimental"
OPERATIONS: Final = {"image": "generate_content", "embedding": "embeddings"}
"""Names of operations by the kind of the request; the default is "chat"."""

DURATIONS_S: Final = tuple(0.01 * 2**power for power in range(14))
FIRST_TOKEN_S: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
A_TOKEN_S: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
TOKENS: Final = tuple(4.0**power for power in range(14))
MOST_INSIDE: Final = 65_536

log = logging.getLogger("diffserve.http")


class GenAiMetrics:
    """Four histograms that are updated from the engine's events."""

    def __init__(self, provider: MeterProvider) -> None:
        self._provider = provider
        meter = provider.get_meter("diffserve")

        def histogram(name: str, unit: str, description: str, bounds: tuple[float, ...]) -> Any:
            return meter.create_histogram(
                f"gen_ai.{name}", unit, description, explicit_bucket_boundaries_advisory=list(bounds)
            )

        self._duration = histogram("server.request.duration", "s", "Of a request, from queue to end.", DURATIONS_S)
        description = "From submit to the first token."
        self._first_token = histogram("server.time_to_first_token", "s", description, FIRST_TOKEN_S)
        description = "Mean time of each later token."
        self._a_token = histogram("server.time_per_output_token", "s", description, A_TOKEN_S)
        self._tokens = histogram("client.token.usage", "{token}", "Read, and said, in a request.", TOKENS)
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
            case Painted(result=result) if event.request_id in self._begun:
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
