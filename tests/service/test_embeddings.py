"""Embeddings over a real socket with the ``openai`` client, and the errors."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
from openai import OpenAI

from diffserve.api.errors import InvalidRequest
from diffserve.client import Client
from tests.service.server import GENERATIONS, RunningServer, error_of, files_of

pytestmark = pytest.mark.slow

EMBEDDINGS = "/v1/embeddings"
HOW: dict[str, Any] = {"size": "64x64", "num_inference_steps": 12, "seed": 7}


def test_both_formats_hold_the_same_numbers(client: OpenAI, server: RunningServer) -> None:
    as_floats = client.embeddings.create(model="text-embedding-3-small", input="a red fox", encoding_format="float")
    [embedding] = as_floats.data
    assert (embedding.object, embedding.index, as_floats.object) == ("embedding", 0, "list")
    assert as_floats.model == "sd15", "whose text encoder read it"
    assert (as_floats.usage.prompt_tokens, as_floats.usage.total_tokens) == (3, 3)
    assert np.linalg.norm(embedding.embedding) == pytest.approx(1.0, abs=1e-5)
    as_bytes = client.embeddings.create(model="sd15", input=["a dog", "a red fox"])  # base64, unpacked by the client
    assert [entry.index for entry in as_bytes.data] == [0, 1]
    assert as_bytes.data[1].embedding == embedding.embedding
    raw = server.client.post(EMBEDDINGS, json={"input": "a red fox", "encoding_format": "base64"}).json()
    assert np.frombuffer(base64.b64decode(raw["data"][0]["embedding"]), "<f4").tolist() == embedding.embedding
    shorter = client.embeddings.create(model="sd15", input="a red fox", dimensions=8).data[0].embedding
    np.testing.assert_allclose(shorter, embedding.embedding[:8] / np.linalg.norm(embedding.embedding[:8]), rtol=1e-5)


def test_a_vector_does_not_depend_on_concurrent_requests(client: OpenAI, server: RunningServer) -> None:
    words = [f"a red fox {number}" for number in range(40)]
    alone = [client.embeddings.create(model="sd15", input=text).data[0].embedding for text in words[::8]]
    [picture] = files_of(server.client.post(GENERATIONS, json={"prompt": words[0], **HOW}))
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="other", max_retries=0) as other:
        stream = other.images.generate(prompt=words[0], stream=True, size="64x64", extra_body=HOW)
        events: Iterator[Any] = iter(stream)
        next(events)
        together = client.embeddings.create(model="sd15", input=words)
        last = [event for event in events if event.type == "image_generation.completed"]
    assert [entry.embedding for entry in together.data][::8] == alone
    assert base64.b64decode(last[0].b64_json) == picture


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": ...}, "input", "missing_required_parameter"),
        ({"input": ""}, "input", "empty_input"),
        ({"input": []}, "input", "empty_input"),
        ({"input": ["a", ""]}, "input[1]", "empty_input"),
        ({"input": [[]]}, "input", "empty_input"),
        ({"input": None}, "input", "invalid_value"),
        ({"input": {"a": 1}}, "input", "invalid_value"),
        ({"input": [1, "a"]}, "input[0]", "invalid_value"),
        ({"input": [-1]}, "input[0]", "invalid_value"),
        ({"input": [1.5]}, "input[0]", "invalid_value"),
        ({"input": [10**9]}, "input", "invalid_value"),
        ({"input": [[1], [10**9]]}, "input", "invalid_value"),
        ({"input": "a" * 32_001}, "input", "string_above_max_length"),
        ({"input": "a dog, " * 1000}, "input", "string_above_max_length"),
        ({"input": ["a"] * 2049}, "input", "array_above_max_length"),
        ({"input": [1] * 8193}, "input", "array_above_max_length"),
        ({"dimensions": 0}, "dimensions", "invalid_value"),
        ({"dimensions": 65}, "dimensions", "invalid_value"),
        ({"dimensions": 2**64}, "dimensions", "invalid_value"),
        ({"encoding_format": "hex"}, "encoding_format", "invalid_value"),
        ({"model": "nope"}, "model", "model_not_found"),
        ({"model": "talker"}, "model", "model_not_found"),
        ({"model": ""}, "model", "model_not_found"),
    ],
)
def test_invalid_input_is_reported(text_server: RunningServer, fields: dict[str, Any], param: str, code: str) -> None:
    body = {name: value for name, value in ({"input": "a"} | fields).items() if value is not ...}
    headers = {"Content-Type": "application/json"}
    response = text_server.client.post(EMBEDDINGS, content=json.dumps(body), headers=headers)
    error = error_of(response)
    assert response.status_code == (404 if code == "model_not_found" else 400), error
    assert (error["param"], error["code"]) == (param, code), error


def test_the_diffserve_client_embeds(text_server: RunningServer) -> None:
    with Client(text_server.url) as client:
        vectors = client.embed(["a red fox", "a dog"])
        assert (vectors.model, vectors.usage.prompt_tokens, len(vectors.vectors)) == ("sd15", 5, 2)
        assert client.embed("a dog", dimensions=4).vectors[0] != vectors.vectors[1]
        assert client.embed("a dog").vectors[0] == vectors.vectors[1]
        with pytest.raises(InvalidRequest, match="empty"):
            client.embed("")
