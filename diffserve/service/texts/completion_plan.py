"""Conversion of chat and completion bodies to requests for the language model."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any, Final

from diffserve.api.bounds import check
from diffserve.api.errors import InvalidRequest
from diffserve.api.json_schemas import ANY_OBJECT, check_schema, max_tokens_of, no_json
from diffserve.api.sampling_params import SamplingParams
from diffserve.api.text_types import MAX_TEXTS, ChatMessage, LanguageModelInfo, TextRequest
from diffserve.service.endpoint import RequestPlan
from diffserve.service.http.bodies import show
from diffserve.service.texts.schemas import (
    DEFAULT_CHAT_TOKENS,
    DEFAULT_COMPLETION_TOKENS,
    ChatBody,
    CompletionBody,
    Format,
    Message,
    SamplingBody,
)
from diffserve.settings.config import ServeConfig

SAME_NAMES: Final = (
    *("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("min_tokens", "num_beams", "length_penalty", "early_stopping"),
)
"""Fields that the body and :class:`SamplingParams` call the same."""


class CompletionPlan(RequestPlan, frozen=True, kw_only=True):
    """A checked body: one request for each prompt, and how the answer is to look.

    ``created`` in seconds since 1970; ``end_ids``: the tokens that end a text, which are not part of it.
    """

    answer_id: str
    created: int
    model: str
    fingerprint: str
    requests: tuple[TextRequest, ...]
    has_usage_chunk: bool
    end_ids: frozenset[int]


def plan_chat(body: ChatBody, info: LanguageModelInfo, config: ServeConfig, request_id: str) -> CompletionPlan:
    """Convert ``body`` to requests. Raises InvalidRequest for unsupported values."""
    _refuse_unsupported(body)
    message = "top_logprobs is given without logprobs; set logprobs to true."
    check(body.top_logprobs is None or bool(body.logprobs), message, "top_logprobs")
    max_tokens, older = body.max_completion_tokens, body.max_tokens
    message = f"max_completion_tokens is {max_tokens} but max_tokens is {older}; they mean the same, give one of them."
    check(None in (max_tokens, older) or max_tokens == older, message, "max_completion_tokens")
    request = TextRequest(
        messages=tuple(_message(message) for message in body.messages),
        params=_params(
            body, info, max_tokens or older or DEFAULT_CHAT_TOKENS, (body.top_logprobs or 0) if body.logprobs else None
        ),
        num_texts=body.n or 1,
        deltas=bool(body.stream),
        cache_salt=(body.cache_salt or "").encode(),
        **body.urgency(config.request_timeout_s),
        request_id=f"txt-{_suffix(request_id)}",
    )
    return _plan(body, info, config, f"chatcmpl-{_suffix(request_id)}", (request,))


def plan_completion(
    body: CompletionBody, info: LanguageModelInfo, config: ServeConfig, request_id: str
) -> CompletionPlan:
    """Convert ``body`` to requests. Raises InvalidRequest for unsupported values."""
    _refuse_unsupported(body)
    params = _params(body, info, body.max_tokens or DEFAULT_COMPLETION_TOKENS, body.logprobs)
    prompts = list(_prompts(body))
    message = (
        f"{len(prompts)} prompts with n {body.n} make {len(prompts) * (body.n or 1)} texts; "
        f"ask for at most {MAX_TEXTS} in one request."
    )
    check(len(prompts) * (body.n or 1) <= MAX_TEXTS, message, "n")
    requests = tuple(
        TextRequest(
            prompt=prompt if isinstance(prompt, str) else "",
            token_ids=() if isinstance(prompt, str) else prompt,
            params=params,
            num_texts=body.n or 1,
            add_special_tokens=body.add_special_tokens is not False,
            deltas=bool(body.stream),
            cache_salt=(body.cache_salt or "").encode(),
            **body.urgency(config.request_timeout_s),
            request_id=f"txt-{_suffix(request_id)}-{index}",
        )
        for index, prompt in enumerate(prompts)
    )
    return _plan(body, info, config, f"cmpl-{_suffix(request_id)}", requests)


def _plan(
    body: SamplingBody,
    info: LanguageModelInfo,
    config: ServeConfig,
    answer_id: str,
    requests: tuple[TextRequest, ...],
) -> CompletionPlan:
    return CompletionPlan(
        answer_id=answer_id,
        created=int(time.time()),
        model=info.model_id,
        fingerprint=f"fp_{info.digest.rpartition(':')[2][:10]}",
        requests=requests,
        is_stream=bool(body.stream),
        has_usage_chunk=body.stream_options is not None and bool(body.stream_options.include_usage),
        end_ids=frozenset(info.end_ids) | frozenset(body.stop_token_ids or ()),
        warnings=tuple(body.warnings),
        price=config.price,
    )


def _refuse_unsupported(body: SamplingBody) -> None:
    for name in ("tool_choice", "function_call"):
        choice = getattr(body, name)
        message = f"{name} is {show(choice)}; this server does not call tools: give none or auto, or leave it out."
        check(choice in (None, "none", "auto"), message, name, "unsupported_value")
    message = "stream_options is given without stream; set stream to true."
    check(body.stream_options is None or bool(body.stream), message, "stream_options")
    message = f"best_of is {body.best_of} and n {body.n or 1}; all texts are returned: leave best_of out."
    check(body.best_of in (None, body.n or 1), message, "best_of", "unsupported_value")


def _schema_of(body: SamplingBody, info: LanguageModelInfo) -> str | None:
    """Return the JSON Schema that the output must follow, or None. Raises InvalidRequest."""
    form = body.response_format or Format(type="text")
    if form.type != "json_schema":
        return schema_text(form.type, form.object_schema, info, "response_format", "response_format.schema")
    name = "response_format.json_schema"
    message = f'{name} is missing; give {{"name": ..., "schema": ...}}.'
    check(form.json_schema is not None, message, name, "missing_required_parameter")
    schema = None if form.json_schema is None else form.json_schema.json_schema
    return schema_text(form.type, schema, info, "response_format", f"{name}.schema")


def schema_text(
    kind: str, schema: dict[str, Any] | None, info: LanguageModelInfo, param: str, place: str
) -> str | None:
    """Return the JSON Schema that a text must follow.

    Args:
        kind: "text" for none, "json_object" or "json_schema".
        schema: The schema; None allows any object.
        info: The language model.
        param: The field of the body that asks for it.
        place: The field of the schema.

    Raises:
        InvalidRequest: The schema is invalid, or cannot be enforced by this model.
    """
    if kind == "text":
        return None
    if not info.speaks_json:
        raise no_json(info.model_id, param)
    if schema is None:
        return ANY_OBJECT
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        raise InvalidRequest(
            f"{place} has a number that is not finite; JSON does not allow that.", param=place
        ) from None
    check_schema(text, place)
    return text


def _params(body: SamplingBody, info: LanguageModelInfo, max_tokens: int, logprobs: int | None) -> SamplingParams:
    """Return the body's sampling parameters, with defaults for the missing ones."""
    settings = {name: getattr(body, name) for name in SAME_NAMES if getattr(body, name) is not None}
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    for token_id in body.logit_bias or {}:
        message = f"logit_bias names token {token_id}; {info.model_id} has tokens from 0 to {info.vocab_size - 1}."
        check(int(token_id) < info.vocab_size, message, "logit_bias")
    schema = _schema_of(body, info)
    return SamplingParams(
        **settings,
        top_k=max(body.top_k or 0, 0),
        max_tokens=max_tokens_of(schema, max_tokens),
        stop=tuple(stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logit_bias=tuple((int(token_id), value) for token_id, value in (body.logit_bias or {}).items()),
        seed=None if body.seed in (None, -1) else body.seed,
        logprobs=logprobs,
        json_schema=schema,
    )


def _message(message: Message) -> ChatMessage:
    parts = message.content if isinstance(message.content, list) else None
    text = message.content if isinstance(message.content, str) else "".join(part.text for part in parts or ())
    return ChatMessage(role=message.role, content=text)


def _prompts(body: CompletionBody) -> Iterator[str | tuple[int, ...]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        yield prompt
        return
    token_ids = tuple(item for item in prompt if isinstance(item, int))
    if token_ids or not prompt:  # a list has either token ids or prompts
        yield token_ids
    for item in prompt:
        if not isinstance(item, int):
            yield item if isinstance(item, str) else tuple(item)


def _suffix(request_id: str) -> str:
    """Return the part of a request ID that all IDs of the request share."""
    return request_id.rpartition("-")[2]
