"""Chat completions over a real socket with the ``openai`` client.

``tests.service.talker.SCRIPT`` holds the language model's answers, so texts and probabilities are known exactly.
"""

from __future__ import annotations

import json
import math
import uuid
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionChunk

from tests.service.server import SOON_S, RunningServer, wait_for
from tests.service.talker import FOX, SCRIPT

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
LIKELIEST = math.exp(0.5) / (math.exp(0.5) + 2)


def says(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def joined(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    """Return the text of choice ``index`` in ``chunks``."""
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def test_a_chat_is_answered(text_client: OpenAI) -> None:
    answer = text_client.chat.completions.create(model="talker", messages=says("a fox"), temperature=0)
    [choice] = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert (choice.message.role, choice.message.content) == ("assistant", FOX)
    assert (answer.object, answer.model) == ("chat.completion", "talker")
    assert answer.id.startswith("chatcmpl-")
    assert answer.created > 1_600_000_000
    assert answer.system_fingerprint is not None
    assert answer.system_fingerprint.startswith("fp_")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4  # three pieces and the end
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 4
    assert answer.usage.prompt_tokens_details is not None


def test_a_shared_prefix_is_computed_once(text_client: OpenAI) -> None:
    story: list[Any] = [{"role": "system", "content": f"{uuid.uuid4().hex} {'be brief. ' * 20}"}, *says("a fox")]
    cached = []
    for _ in range(2):
        usage = text_client.chat.completions.create(model="talker", messages=story, temperature=0).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        cached.append((usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens))
    (before, _), (after, num_tokens) = cached
    assert before is not None
    assert before <= 16  # other chats may have cached the start of the template
    assert after == num_tokens // 16 * 16  # whole pages


def test_a_stream_has_the_same_text_in_pieces(text_client: OpenAI) -> None:
    stream = text_client.chat.completions.create(
        model="talker", messages=says("a fox"), temperature=0, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = stream
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant", *[None] * (len(chunks) - 1)]
    assert joined(chunks) == FOX
    assert [chunk.choices[0].delta.content for chunk in chunks[1:-1]] == list(SCRIPT["fox"])
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [*[None] * (len(chunks) - 1), "stop"]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in [*chunks, last]}) == 1
    assert [chunk.usage for chunk in chunks] == [None] * len(chunks)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 4


def test_a_stream_ends_with_done(text_server: RunningServer) -> None:
    body = {"messages": says("a fox"), "stream": True, "temperature": 0, "foo": 1}
    response = text_server.client.post(CHAT, json=body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-store"
    assert "foo" in response.headers["x-diffserve-warnings"]
    *events, done, tail = response.text.split("\n\n")
    assert (done, tail) == ("data: [DONE]", "")
    assert all(event.startswith("data: {") and "\n" not in event for event in events)
    assert all("usage" not in json.loads(event.removeprefix("data: ")) for event in events)


def test_a_character_of_several_tokens_is_never_split(text_client: OpenAI) -> None:
    stream = text_client.chat.completions.create(model="talker", messages=says("umlaut"), temperature=0, stream=True)
    chunks = list(stream)
    assert joined(chunks) == "ein Bär \N{FOX FACE}"
    assert not [chunk for chunk in chunks if "\N{REPLACEMENT CHARACTER}" in (chunk.choices[0].delta.content or "")]


@pytest.mark.parametrize("is_stream", [False, True])
def test_logprobs_are_those_of_the_model(text_client: OpenAI, is_stream: bool) -> None:
    answer = text_client.chat.completions.create(
        model="talker", messages=says("either"), temperature=0, logprobs=True, top_logprobs=3, stream=is_stream
    )
    choices = [chunk.choices[0] for chunk in answer] if isinstance(answer, openai.Stream) else [answer.choices[0]]
    content = [token for choice in choices if choice.logprobs for token in choice.logprobs.content or ()]
    [token] = content  # the end token is not part of the text
    assert (token.token, token.bytes) == ("a boat", list(b"a boat"))
    assert token.logprob == pytest.approx(math.log(LIKELIEST), abs=1e-3)  # the last norm is not quite exact
    assert token.top_logprobs[0].token == "a boat"
    assert {top.token for top in token.top_logprobs} == {"a boat", "a ship", "a raft"}
    assert sum(math.exp(top.logprob) for top in token.top_logprobs) == pytest.approx(1.0, abs=1e-4)


def test_several_texts_are_numbered_and_reproducible(text_client: OpenAI) -> None:
    def ask(seed: int, n: int) -> list[str | None]:
        answer = text_client.chat.completions.create(model="talker", messages=says("unsure"), seed=seed, n=n)
        assert [choice.index for choice in answer.choices] == list(range(n))
        return [choice.message.content for choice in answer.choices]

    eight = ask(7, 8)
    assert ask(7, 8) == eight
    assert [ask(seed, 1)[0] for seed in (7, 8, 9)] == eight[:3]
    assert set(eight) <= set(SCRIPT["unsure"])
    assert len(set(eight)) > 1


def test_several_texts_are_streamed_concurrently(text_client: OpenAI) -> None:
    fields: dict[str, Any] = {"model": "talker", "messages": says("unsure"), "seed": 7, "n": 4}
    answer = text_client.chat.completions.create(**fields)
    chunks = list(text_client.chat.completions.create(**fields, stream=True))
    assert [joined(chunks, index) for index in range(4)] == [choice.message.content for choice in answer.choices]
    ends = [choice.index for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert sorted(ends) == [0, 1, 2, 3]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(("stop", "expected"), [(", moon", "a red fox, deep snow"), (["zzz", "deep"], "a red fox, ")])
def test_a_stop_text_ends_the_answer_and_is_excluded(
    text_client: OpenAI, stop: str | list[str], expected: str, is_stream: bool
) -> None:
    answer = text_client.chat.completions.create(
        model="talker", messages=says("a fox"), temperature=0, stop=stop, stream=is_stream
    )
    if isinstance(answer, openai.Stream):
        chunks = list(answer)
        assert (joined(chunks), chunks[-1].choices[0].finish_reason) == (expected, "stop")
    else:
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (expected, "stop")


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_an_answer_ends_at_the_token_limit(text_client: OpenAI, name: str) -> None:
    limit: dict[str, Any] = {name: 2}
    answer = text_client.chat.completions.create(model="talker", messages=says("a fox"), temperature=0, **limit)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("a red fox, deep snow", "length")


def test_content_in_parts_and_newer_roles_are_read(text_client: OpenAI) -> None:
    messages: list[Any] = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "hello", "name": "me"},
        {"role": "assistant", "content": "hello to you"},
        {"role": "user", "content": [{"type": "text", "text": "a f"}, {"type": "text", "text": "ox"}]},
    ]
    answer = text_client.chat.completions.create(model="talker", messages=messages, temperature=0)
    assert answer.choices[0].message.content == FOX


def test_every_model_is_listed(text_client: OpenAI) -> None:
    names = [model.id for model in text_client.models.list()]
    assert names[:2] == ["sd15", "talker"]
    assert text_client.models.retrieve("talker").owned_by == "diffserve"


def test_beam_search_and_other_settings_reach_the_model(text_server: RunningServer) -> None:
    body = {"messages": says("either"), "temperature": 0, "num_beams": 3, "n": 3, "length_penalty": 0}
    choices = text_server.client.post(CHAT, json=body).json()["choices"]
    texts = [choice["message"]["content"] for choice in choices]
    assert texts[0] == "a boat"
    assert set(texts) == set(SCRIPT["either"])


def test_harmless_fields_are_accepted_and_unknown_ones_reported(text_server: RunningServer) -> None:
    harmless = {
        "user": "me", "store": False, "metadata": {"a": "b"}, "tools": [], "logit_bias": {}, "service_tier": "auto",
        "response_format": {"type": "text"}, "modalities": ["text"], "parallel_tool_calls": True, "n": None,
    }  # fmt: skip
    body = {"messages": says("a fox"), "temperature": 0, **harmless}
    answer = text_server.client.post(CHAT, json=body)
    assert (answer.status_code, answer.json()["warnings"]) == (200, [])
    odd = text_server.client.post(CHAT, json={**body, "chat_tempalte": "x"})
    assert odd.json()["warnings"] == ["unknown fields were ignored: chat_tempalte."]


def test_a_disconnect_ends_the_text_at_once(text_server: RunningServer) -> None:
    body = {"messages": says("a fox"), "stream": True, "min_tokens": 1900, "max_tokens": 1900, "n": 16}
    with httpx.stream("POST", f"{text_server.url}{CHAT}", json=body, timeout=SOON_S) as stream:
        lines = stream.iter_lines()  # a dropped iterator would close the connection
        heard = next(lines)
        assert heard.startswith("data: "), heard
        assert '"error"' not in heard, heard
        wait_for(text_server.num_requests, SOON_S, "the text in the engine")
    wait_for(lambda: text_server.num_requests() == 0, SOON_S, "the cancellation")
    ticks = text_server.client.post(CHAT, json={"messages": says("a fox"), "temperature": 0})
    assert ticks.json()["choices"][0]["message"]["content"] == FOX


def test_a_disconnect_without_streaming_ends_the_text_too(text_server: RunningServer) -> None:
    body = {"messages": says("a fox"), "min_tokens": 1900, "max_tokens": 1900, "n": 16}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{text_server.url}{CHAT}", json=body, timeout=httpx.Timeout(SOON_S, read=0.5))
    wait_for(lambda: text_server.num_requests() == 0, SOON_S, "the cancellation")
