"""The real ``openai`` client over a real socket."""

from __future__ import annotations

import base64

import openai
import pytest
from openai import OpenAI

from diffserve.media.images import read_infotext

pytestmark = pytest.mark.slow


def test_it_generates_an_image(client: OpenAI) -> None:
    answer = client.images.generate(
        model="dall-e-2",
        prompt="a red fox",
        size="256x256",
        response_format="b64_json",
        extra_body={"num_inference_steps": 2, "seed": 5, "guidance_scale": 2.5, "sampler": "euler"},
    )
    assert answer.data is not None
    assert answer.data[0].b64_json is not None
    text = read_infotext(base64.b64decode(answer.data[0].b64_json))
    assert text is not None
    assert "Seed: 5, Size: 256x256" in text
    assert answer.created > 1_600_000_000
    assert answer.usage is not None
    assert answer.usage.total_tokens > 0


def test_it_generates_with_the_fields_of_newer_models(client: OpenAI) -> None:
    answer = client.images.generate(
        model="gpt-image-1",
        prompt="a red fox",
        n=2,
        size="auto",
        quality="auto",
        background="opaque",
        moderation="low",
        output_format="webp",
        output_compression=80,
        extra_body={"num_inference_steps": 2},
    )
    assert answer.data is not None
    assert len(answer.data) == 2
    assert answer.output_format == "webp"


def test_it_lists_models(client: OpenAI) -> None:
    names = [model.id for model in client.models.list()]
    assert names[0] == "sd15"
    assert {"dall-e-3", "gpt-image-1"} <= set(names)
    assert client.models.retrieve("sd15").owned_by == "diffserve"


def test_it_parses_the_errors(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="steps") as caught:
        client.images.generate(prompt="a red fox", extra_body={"num_inference_steps": 0})
    assert (caught.value.code, caught.value.param) == ("invalid_value", "num_inference_steps")
    assert caught.value.request_id is not None
    with pytest.raises(openai.NotFoundError) as missing:
        client.images.generate(model="no-such-model", prompt="a red fox")
    assert missing.value.code == "model_not_found"
