"""Recorded requests of apps: a cluster answers as a local server does, except for times and random values."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

import httpx
import pytest

from diffserve.media.images import decode_image
from tests.cluster.running import Cluster, bare
from tests.service.server import RunningServer
from tests.service.test_recorded_clients import CLIENTS, Sent, answers_of

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

CHANCE = re.compile(r"\b(Seed: |seed\D{1,4})\d+")
DRAWN = ("seed", "all_seeds", "subseed", "all_subseeds", "job_timestamp")


def comparable(sent: Sent, answer: httpx.Response) -> Any:
    """Return the comparable parts of ``answer``.

    Without a seed in the request, seeds are removed and images are replaced by their properties.
    """
    seed = sent.body.get("seed", -1) if isinstance(sent.body, dict) else -1
    body = bare(answer.json()) if answer.content else None
    headers = {name for name in answer.headers if not name.startswith("x-ratelimit")}
    return answer.status_code, headers, body if int(seed) >= 0 else without_chance(body)


def without_chance(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_chance(item) for key, item in value.items() if key not in DRAWN}
    if isinstance(value, list):
        return [without_chance(item) for item in value]
    if not isinstance(value, str):
        return value
    if value.startswith("{"):
        return without_chance(bare(json.loads(value)))
    if len(value) > 200 and re.fullmatch("[A-Za-z0-9+/]+=*", value):
        picture = decode_image(base64.b64decode(value, validate=True))
        return picture.width_px, picture.height_px
    return CHANCE.sub(r"\1", value)


@pytest.mark.parametrize("client", CLIENTS)
def test_an_app_gets_equal_answers(cluster: Cluster, local: RunningServer, client: str) -> None:
    actual, expected = list(answers_of(cluster.server, client)), list(answers_of(local, client))
    assert len(actual) == len(expected) == len(CLIENTS[client])
    for (sent, answer), (_, other) in zip(actual, expected, strict=True):
        assert answer.is_success, (sent.path, answer.text[:500])
        assert sent.needs(answer), (sent.path, answer.text[:500])
        assert comparable(sent, answer) == comparable(sent, other), sent.path


def test_only_random_values_are_removed() -> None:
    sent, seeded = CLIENTS["n8n"][1], CLIENTS["LobeChat"][0]

    def reply_to(sent: Sent, **fields: Any) -> Any:
        return comparable(
            sent, httpx.Response(200, json={"n": 1, "info": json.dumps({"seed": 5, "width": 64}), **fields})
        )

    assert reply_to(sent, seed=1) == reply_to(sent, seed=2)
    assert reply_to(seeded, seed=1) != reply_to(seeded, seed=2)
    assert reply_to(sent, info=json.dumps({"seed": 6, "width": 64})) == reply_to(sent)
    assert reply_to(sent, info=json.dumps({"seed": 5, "width": 65})) != reply_to(sent)
    assert reply_to(sent, text="Steps: 3, Seed: 1, Size: 8") == reply_to(sent, text="Steps: 3, Seed: 2, Size: 8")
    assert reply_to(sent, text="Steps: 3, Seed: 1") != reply_to(sent, text="Steps: 4, Seed: 1")
