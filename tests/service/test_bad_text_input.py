"""Invalid requests to the language model get OpenAI's error object, and the engine keeps running."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.service.server import RunningServer, error_of
from tests.service.test_chat import CHAT, says

pytestmark = pytest.mark.slow

COMPLETIONS, REWRITE = "/v1/completions", "/v1/prompts/rewrite"
JSON = {"Content-Type": "application/json"}
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"messages": says("a fox")},
    COMPLETIONS: {"prompt": "a"},
    REWRITE: {"prompt": "a fox"},
}


JSON_SCHEMA = "response_format.json_schema.schema"


def schema_body(schema: Any) -> dict[str, Any]:
    """Return a response format with ``schema``."""
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}}


def refused(server: RunningServer, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the error for a valid body with ``fields`` changed; ``...`` removes a field."""
    body = {name: value for name, value in (GOOD[path] | fields).items() if value is not ...}
    response = server.client.post(path, content=json.dumps(body), headers=JSON)
    assert response.status_code == 400, response.text[:300]
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 1000
    return error


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("fields", "param", "code", "words"),
    [
        ({"max_tokens": 0}, "max_tokens", "invalid_value", "0"),
        ({"max_tokens": -1}, "max_tokens", "invalid_value", "-1"),
        ({"max_tokens": 1.5}, "max_tokens", "invalid_value", "whole number"),
        ({"temperature": -1}, "temperature", "invalid_value", "-1"),
        ({"temperature": float("nan")}, "temperature", "invalid_value", "NaN"),
        ({"temperature": float("inf")}, "temperature", "invalid_value", "Infinity"),
        ({"temperature": "hot"}, "temperature", "invalid_value", '"hot"'),
        ({"user": 5}, "user", "invalid_value", "5; it must be text"),
        ({"store": "yes"}, "store", "invalid_value", "true or false"),
        ({"metadata": []}, "metadata", "invalid_value", "an object"),
        ({"tool_choice": "required"}, "tool_choice", "unsupported_value", "does not call tools"),
        ({"top_p": 1.5}, "top_p", "invalid_value", "1.5"),
        ({"top_k": -2}, "top_k", "invalid_value", "-2"),
        ({"presence_penalty": 3}, "presence_penalty", "invalid_value", "3"),
        ({"n": 0}, "n", "invalid_value", "0"),
        ({"n": 10**6}, "n", "invalid_value", "1000000"),
        ({"seed": 2**63}, "seed", "invalid_value", str(2**63)),
        ({"stop": ["a"] * 17}, "stop", "array_above_max_length", "17"),
        ({"stop_token_ids": [2**64]}, "stop_token_ids[0]", "invalid_value", str(2**64)),
        ({"top_k": 2**64}, "top_k", "invalid_value", str(2**64)),
        ({"stop": [""]}, "stop", "invalid_value", "''"),
        ({"stop": [7]}, "stop[0]", "invalid_value", "7"),
        ({"stop": "x" * 10_000}, "stop", "invalid_value", "x"),
        ({"num_beams": 2}, "num_beams", "invalid_value", "temperature"),
        ({"best_of": 4}, "best_of", "unsupported_value", "4"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value", "stream"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "invalid_value", "101"),
        ({"logit_bias": {str(2**40): 1}}, "logit_bias", "invalid_value", str(2**40)),
        ({"logit_bias": {"99999999": 1}}, "logit_bias", "invalid_value", "has tokens from 0 to"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "invalid_value", "whole number of 0 or more"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias", "array_above_max_length", "1025"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "invalid_value", '"yaml"'),
        ({"response_format": {"type": "json_schema"}}, f"{JSON_SCHEMA[:-7]}", "missing_required_parameter", "name"),
        (schema_body({"type": "objekt"}), JSON_SCHEMA, "invalid_json_schema", "objekt"),
        (schema_body({"items": {"not": {}}}), f"{JSON_SCHEMA}.items", "invalid_json_schema", "not"),
        (schema_body({"const": float("nan")}), JSON_SCHEMA, "invalid_value", "finite"),
        (schema_body([]), JSON_SCHEMA, "invalid_value", "[]"),
        (schema_body({"a": "x" * 70_000}), JSON_SCHEMA, "string_above_max_length", "65536"),
        ({"guided_json": {}, "structured_outputs": {"json": {}}}, "structured_outputs", "unsupported_parameter", "sch"),
        ({"guided_regex": ".*"}, "guided_regex", "unsupported_parameter", "json_schema"),
    ],
)
def test_an_invalid_value_is_reported(
    text_server: RunningServer, path: str, fields: dict[str, Any], param: str, code: str, words: str
) -> None:
    error = refused(text_server, path, fields)
    assert (error["param"], error["code"]) == (param, code)
    assert words in error["message"]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"messages": ...}, "messages", "missing_required_parameter"),
        ({"messages": []}, "messages", "empty_array"),
        ({"messages": "a fox"}, "messages", "invalid_value"),
        ({"messages": ["a fox"]}, "messages[0]", "invalid_value"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
        ({"messages": [{"role": "god", "content": "a"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "invalid_value"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
            "messages[0].content[0].type",
            "invalid_value",
        ),
        ({"messages": says("a" * 3000)}, "messages", "context_length_exceeded"),
        ({"chat_template": "{{ messages }}"}, "chat_template", "unsupported_parameter"),
        ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs", "unsupported_parameter"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "unsupported_parameter"),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
            "tools",
            "unsupported_parameter",
        ),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "unsupported_value"),
        ({"modalities": ["audio"]}, "modalities[0]", "invalid_value"),
        ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "invalid_value"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "invalid_value"),
    ],
)
def test_an_invalid_conversation_is_reported(
    text_server: RunningServer, fields: dict[str, Any], param: str, code: str
) -> None:
    error = refused(text_server, CHAT, fields)
    assert (error["param"], error["code"]) == (param, code)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"prompt": ...}, "prompt", "missing_required_parameter"),
        ({"prompt": ""}, "prompt", "empty_prompt"),
        ({"prompt": []}, "prompt", "empty_prompt"),
        ({"prompt": None}, "prompt", "invalid_value"),
        ({"prompt": ["a"] * 65}, "prompt", "array_above_max_length"),
        ({"prompt": ["a"] * 8, "n": 9}, "n", "invalid_value"),
        ({"prompt": [10**9]}, "prompt", "invalid_value"),
        ({"prompt": [-1]}, "prompt[0]", "invalid_value"),
        ({"prompt": [2**64]}, "prompt[0]", "invalid_value"),
        ({"prompt": "a" * 3000}, "prompt", "context_length_exceeded"),
        ({"prompt": [1] * 200_000}, "prompt", "context_length_exceeded"),
        ({"logprobs": 21}, "logprobs", "invalid_value"),
        ({"logprobs": True}, "logprobs", "invalid_value"),
        ({"echo": True}, "echo", "unsupported_parameter"),
        ({"suffix": "b"}, "suffix", "unsupported_parameter"),
    ],
)
def test_an_invalid_prompt_is_reported(
    text_server: RunningServer, fields: dict[str, Any], param: str, code: str
) -> None:
    error = refused(text_server, COMPLETIONS, fields)
    assert (error["param"], error["code"]) == (param, code)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"prompt": ...}, "prompt", "missing_required_parameter"),
        ({"prompt": ""}, "prompt", "empty_prompt"),
        ({"prompt": " \n"}, "prompt", "empty_prompt"),
        ({"prompt": "a" * 32_001}, "prompt", "string_above_max_length"),
        ({"prompt": "a" * 3000}, "prompt", "context_length_exceeded"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 65}, "n", "invalid_value"),
        ({"style": "rococo"}, "style", "unknown_style"),
        ({"style": "../../serve"}, "style", "unknown_style"),
        ({"seed": "x"}, "seed", "invalid_value"),
        ({"force": 1}, "force", "invalid_value"),
    ],
)
def test_an_invalid_wish_is_reported(text_server: RunningServer, fields: dict[str, Any], param: str, code: str) -> None:
    error = refused(text_server, REWRITE, fields)
    assert (error["param"], error["code"]) == (param, code)


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ("yes", "prompt_rewriter"),
        (True, "prompt_rewriter"),
        ({"style": "rococo"}, "prompt_rewriter.style"),
        ({"seed": -2}, "prompt_rewriter.seed"),
        ({"sytem": "x"}, "prompt_rewriter.sytem"),
    ],
)
def test_an_invalid_rewriter_option_is_reported(text_server: RunningServer, choice: object, param: str) -> None:
    response = text_server.paint(prompt_rewriter=choice)
    assert response.status_code == 400
    assert error_of(response)["param"] == param


def test_a_million_messages_are_refused(text_server: RunningServer) -> None:
    too_many = b'{"messages": [' + b",".join([b'{"role":"user","content":"a"}'] * 1_000_000) + b"]}"
    response = text_server.client.post(CHAT, content=too_many, headers=JSON)
    assert (response.status_code, error_of(response)["code"]) == (413, "body_too_large")
    shorter = b'{"messages": [' + b",".join([b"{}"] * 300_000) + b"]}"
    assert text_server.client.post(CHAT, content=shorter, headers=JSON).status_code == 400
    error = refused(text_server, CHAT, {"messages": says("a") * 4900})
    assert (error["code"], "4900" in error["message"]) == ("array_above_max_length", True)


def test_a_list_with_only_invalid_entries_does_not_stall_the_server(text_server: RunningServer) -> None:
    stalls = text_server.num_stalls()
    for name, entry in (("modalities", b"1,"), ("modalities", b'"",'), ("stop", b'"",'), ("stop_token_ids", b'"",')):
        raw_body = b'{"messages":[{"role":"user","content":"a"}],"%s":[' % name.encode()
        body = raw_body + entry * 120_000 + entry[:-1] + b"]}"
        assert text_server.client.post(CHAT, content=body, headers=JSON).status_code == 400
    assert text_server.num_stalls() == stalls


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, REWRITE])
@pytest.mark.parametrize("name", ["nope", "../../etc/passwd", "sd15", "dall-e-3", ""])
def test_an_unknown_language_model_is_a_404(text_server: RunningServer, path: str, name: str) -> None:
    response = text_server.client.post(path, json={**GOOD[path], "model": name})
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "talker" in error["message"]


def test_the_language_model_generates_no_images(text_server: RunningServer) -> None:
    response = text_server.paint(model="talker")
    assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")
    assert "is a language model" in error_of(response)["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, REWRITE])
def test_without_a_language_model_the_error_names_the_option(server: RunningServer, path: str) -> None:
    response = server.client.post(path, json=GOOD[path])
    error = error_of(response)
    assert (response.status_code, error["code"]) == (404, "model_not_found")
    assert "[text] model" in error["message"]


def test_openai_client_parses_the_errors(text_client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        text_client.chat.completions.create(model="talker", messages=says("a" * 3000), stream=True)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as missing:
        text_client.chat.completions.create(model="nobody", messages=says("a"))
    assert missing.value.code == "model_not_found"


def test_the_log_has_no_server_error_and_no_prompt_afterwards(text_server: RunningServer) -> None:
    text_server.client.post(CHAT, json={"messages": says("a very secret wish")})
    text_server.client.post(REWRITE, json={"prompt": "a very secret wish"})
    lines = text_server.errors.read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if "secret" in line]
    records = [json.loads(line) for line in lines if line.startswith("{")]
    assert not [record for record in records if record["level"] in ("error", "critical")]
