"""OpenTelemetry's metrics of generative AI, read from memory, and when none are sent."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from diffserve.api.text_types import TextFinished, TextTimings, TextUsage
from diffserve.api.types import Accepted, Cancelled, Failed, Finished
from diffserve.service.telemetry import GenAiMetrics

OPT_IN = {"OTEL_SEMCONV_STABILITY_OPT_IN": "http, gen_ai_latest_experimental"}
PLACE = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}


def points_of(*events: tuple[str, Any]) -> dict[str, list[tuple[dict[str, Any], int, float]]]:
    """Return (attributes, count, sum) of each point by metric name, after ``events`` of these kinds."""
    reader = InMemoryMetricReader()
    metrics = GenAiMetrics(MeterProvider([reader]))
    for kind, event in events:
        metrics.observe(kind, event)
    assert not metrics._begun
    data: Any = reader.get_metrics_data()
    [scope] = data.resource_metrics[0].scope_metrics
    return {
        metric.name: [(dict(point.attributes), point.count, point.sum) for point in metric.data.data_points]
        for metric in scope.metrics
    }


def test_a_text_records_duration_time_to_first_token_and_token_counts() -> None:
    timings = TextTimings(queue_s=0.1, ttft_s=0.5, tpot_s=0.02, total_s=2.0)
    usage = TextUsage(prompt_tokens=7, output_tokens=5, cached_tokens=0)
    points = points_of(("text", TextFinished(request_id="a", results=(), usage=usage, timings=timings)))
    chat = {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "diffserve"}
    assert points["gen_ai.server.request.duration"] == [(chat, 1, 2.0)]
    assert points["gen_ai.server.time_to_first_token"] == [(chat, 1, 0.5)]
    assert points["gen_ai.server.time_per_output_token"] == [(chat, 1, 0.02)]
    tokens = {point[0]["gen_ai.token.type"]: point[2] for point in points["gen_ai.client.token.usage"]}
    assert tokens == {"input": 7, "output": 5}


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (Finished(request_id="a", num_painted=1, num_failed=0), None),
        (Failed(request_id="a", code="out_of_memory", message="x"), "out_of_memory"),
        (Cancelled(request_id="a"), "cancelled"),
    ],
)
def test_images_record_a_duration_and_the_outcome(end: Any, error: str | None) -> None:
    accepted = Accepted(request_id="a", seed=1, num_images=1, queue_position=0)
    [(attributes, count, _)] = points_of(("image", accepted), ("image", end))["gen_ai.server.request.duration"]
    assert (attributes["gen_ai.operation.name"], attributes["gen_ai.output.type"], count) == (
        "generate_content",
        "image",
        1,
    )
    assert attributes.get("error.type") == error


@pytest.mark.parametrize(
    "env",
    [{}, OPT_IN, PLACE, {**OPT_IN, **PLACE, "OTEL_METRICS_EXPORTER": "none"}, {**PLACE, "OTEL_SDK_DISABLED": "true"}],
)
def test_nothing_is_sent_unless_the_environment_enables_it(env: dict[str, str]) -> None:
    assert GenAiMetrics.from_environment(env) is None
