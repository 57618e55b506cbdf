"""The shipped dashboard and alerts use only metrics that a live server exports."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client.parser import text_string_to_metric_families

from tests.service.server import RunningServer

pytestmark = pytest.mark.slow

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
METRIC = re.compile(r"(diffserve_\w+)(?:\{([^}]*)\})?")
GROUPED = re.compile(r"\bby \(([^)]*)\)")
MATCHED = re.compile(r"(\w+)(?:=~|!~|!=|=)")
SHOWN = re.compile(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}")


def expressions() -> Iterator[tuple[str, str]]:
    """Return every expression with the texts that are shown with it."""
    for panel in json.loads((CONFIGS / "grafana.json").read_text())["panels"]:
        for target in panel["targets"]:
            yield target["expr"], target["legendFormat"]
    for group in yaml.safe_load((CONFIGS / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["expr"], rule["annotations"]["summary"]


def exported_labels(server: RunningServer) -> dict[str, set[str]]:
    """Return the labels of every metric of ``server`` after it has generated, chatted and refused."""
    assert server.paint(stream=True, partial_images=1, num_steps=3).status_code == 200
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
    assert server.client.post("/v1/chat/completions", json=body).status_code == 200
    assert server.client.get("/nowhere").status_code == 404
    labels: dict[str, set[str]] = {}
    text = server.client.get("/metrics").text
    assert re.search(r"^diffserve_image_encode_seconds_count [1-9]", text, re.MULTILINE)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


def test_every_metric_and_label_of_dashboard_and_alerts_exists(text_server: RunningServer) -> None:
    exported = exported_labels(text_server)
    unknown = []
    for expression, words in expressions():
        used = METRIC.findall(expression)
        assert used, expression
        labels = set.union(*(exported.get(name, set()) for name, _ in used))
        unknown += [name for name, _ in used if name not in exported]
        for name, matchers in used:
            unknown += [f"{name}{{{label}}}" for label in set(MATCHED.findall(matchers)) - exported.get(name, set())]
        grouped = {label.strip() for group in GROUPED.findall(expression) for label in group.split(",")}
        unknown += [f"{label} in {expression}" for label in grouped | set(SHOWN.findall(words)) if label not in labels]
        grouped.discard("le")
        is_aggregated = "sum" in expression
        assert not is_aggregated or set(SHOWN.findall(words)) <= grouped, f"{words} of {expression}"
    assert not unknown
    assert len(list(expressions())) > 40
