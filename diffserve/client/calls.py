"""Requests of both clients: path, body and decoder of every call, and the HTTP settings.

This module builds requests and decodes answers; ``sync`` and ``asynchronous`` send them.
"""

from __future__ import annotations

import base64
import ipaddress
import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Generic, Literal, NamedTuple, TypedDict, TypeVar
from urllib.parse import quote, urlsplit

import httpx
import msgspec

from diffserve.api.errors import ConfigError, EngineUnavailable
from diffserve.client.answers import (
    Chat,
    ChatDelta,
    ChatMessage,
    ImageEvent,
    Images,
    Model,
    Provenance,
    RewriteEvent,
    Rewrites,
    ServerCapabilities,
)
from diffserve.client.errors import error_of_answer, unexpected
from diffserve.client.events import ChatReader, Reader, image_reader, rewrite_reader
from diffserve.client.forms import Upload, form_of, texts_of
from diffserve.client.recipe import EditFields, ImageFields, RewriterFields, StreamedEditFields, StreamedImageFields
from diffserve.client.responses import (
    EmbeddingFields,
    Embeddings,
    Response,
    ResponseEvent,
    ResponseFields,
    response_reader,
)

DEFAULT_URL: Final = "http://127.0.0.1:8000"
TIMEOUT_S: Final = 660.0
"""Slightly longer than the request timeout of the server."""

CONNECT_S: Final = 5.0
SILENCE_S: Final = 60.0
"""Read timeout of streams; the server sends keep-alive comments more often than this."""

KEEP_ALIVE_S: Final = 2.0  # the server closes idle connections after 5 s
JSON: Final = {"Content-Type": "application/json"}

KEY_VARIABLE: Final = "DIFFSERVE_API_KEY"
GENERATIONS: Final = "/v1/images/generations"
EDITS: Final = "/v1/images/edits"
VARIATIONS: Final = "/v1/images/variations"
VERIFY: Final = "/v1/provenance/verify"
REWRITE: Final = "/v1/prompts/rewrite"
CHAT: Final = "/v1/chat/completions"
RESPONSES: Final = "/v1/responses"
EMBEDDINGS: Final = "/v1/embeddings"
AnswerT = TypeVar("AnswerT")
EventT = TypeVar("EventT")


class RewriteFields(RewriterFields, total=False):
    """Optional fields of a prompt rewrite."""

    model: str
    n: int
    priority: Literal["interactive", "batch"]
    deadline_s: float


class ChatFields(TypedDict, total=False):
    """Optional fields of a chat completion."""

    model: str
    n: int
    max_completion_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: dict[str, float]
    repetition_penalty: float
    stop: str | list[str]
    seed: int
    response_format: dict[str, Any]
    priority: Literal["interactive", "batch"]
    deadline_s: float


class Call(NamedTuple, Generic[AnswerT]):
    """Request with a single answer.

    Attributes:
        method: The HTTP method.
        path: The path, with its query.
        body: The body, if any.
        decode: Decodes the body of a successful answer.
        otherwise: Results for error codes that are not failures, such as False for "request_not_found".
        headers: Headers that are sent if there is a body.
    """

    method: str
    path: str
    body: bytes | None
    decode: Callable[[bytes], AnswerT]
    otherwise: Mapping[str, AnswerT] = MappingProxyType({})
    headers: Mapping[str, str] = JSON

    def under(self, idempotency_key: str | None) -> Call[AnswerT]:
        """Return this call with an ``Idempotency-Key`` header if a key is given."""
        extra_headers = {} if idempotency_key is None else {"Idempotency-Key": idempotency_key}
        return self._replace(headers={**self.headers, **extra_headers})


class StreamCall(NamedTuple, Generic[EventT]):
    """Request whose answer is a stream of events."""

    path: str
    body: bytes
    reader: Reader[EventT]
    headers: Mapping[str, str] = JSON


def generate(prompt: str, fields: ImageFields) -> Call[Images]:
    """Build the call that generates images."""
    return _post(GENERATIONS, {"prompt": prompt, **fields}, Images)


def generate_stream(prompt: str, fields: StreamedImageFields) -> StreamCall[ImageEvent]:
    """Build the streaming call that generates images."""
    body = {"prompt": prompt, **fields, "stream": True}
    return StreamCall(GENERATIONS, msgspec.json.encode(body), image_reader(fields.get("n", 1)))


def edit(prompt: str, image: bytes, mask: bytes | None, fields: EditFields) -> Call[Images]:
    """Build the call that generates images from an image."""
    body, headers = _edit(prompt, image, mask, fields)
    return Call("POST", EDITS, body, _images, headers=headers)


def edit_stream(prompt: str, image: bytes, mask: bytes | None, fields: StreamedEditFields) -> StreamCall[ImageEvent]:
    """Build the streaming call that generates images from an image."""
    body, headers = _edit(prompt, image, mask, {**fields, "stream": True})
    return StreamCall(EDITS, body, image_reader(fields.get("n", 1), "image_edit"), headers)


def vary(image: bytes, fields: EditFields) -> Call[Images]:
    """Build the call that generates variations of an image."""
    return _post(VARIATIONS, {"image": _base64(image), **fields}, Images)


def verify(image: bytes) -> Call[Provenance]:
    """Build the call that reads the provenance marks of an image."""
    return _post(VERIFY, {"image": _base64(image)}, Provenance)


def cancel(request_id: str) -> Call[bool]:
    """Build the call that cancels an image request; False if it is finished or unknown."""
    path = f"{GENERATIONS}/{quote(request_id, safe='')}/cancel"
    return Call("POST", path, None, lambda _: True, {"request_not_found": False})


def interrupt(request_id: str) -> Call[bool]:
    """Build the call that stops an image request early; False if it is finished or unknown."""
    path = f"{GENERATIONS}/{quote(request_id, safe='')}/interrupt"
    return Call("POST", path, None, lambda _: True, {"request_not_found": False})


def rewrite(prompt: str, fields: RewriteFields) -> Call[Rewrites]:
    """Build the call that rewrites a prompt."""
    return _post(REWRITE, {"prompt": prompt, **fields}, Rewrites)


def rewrite_stream(prompt: str, fields: RewriteFields) -> StreamCall[RewriteEvent]:
    """Build the streaming call that rewrites a prompt."""
    return StreamCall(REWRITE, msgspec.json.encode({"prompt": prompt, **fields, "stream": True}), rewrite_reader())


def chat(messages: str | Sequence[ChatMessage], fields: ChatFields) -> Call[Chat]:
    """Build the call that answers a conversation."""
    return _post(CHAT, {"messages": _turns(messages), **fields}, Chat)


def chat_stream(messages: str | Sequence[ChatMessage], fields: ChatFields) -> StreamCall[ChatDelta]:
    """Build the streaming call that answers a conversation."""
    body = {"messages": _turns(messages), **fields, "stream": True}
    return StreamCall(CHAT, msgspec.json.encode(body), ChatReader())


def respond(response_input: str | Sequence[Mapping[str, Any]], fields: ResponseFields) -> Call[Response]:
    """Build the call that creates a response."""
    return _post(RESPONSES, {"input": response_input, **fields}, Response)


def respond_stream(
    response_input: str | Sequence[Mapping[str, Any]], fields: ResponseFields
) -> StreamCall[ResponseEvent]:
    """Build the streaming call that creates a response."""
    body = msgspec.json.encode({"input": response_input, **fields, "stream": True})
    return StreamCall(RESPONSES, body, response_reader())


def response(response_id: str) -> Call[Response]:
    """Build the call that fetches a stored response."""
    path = f"{RESPONSES}/{quote(response_id, safe='')}"
    return Call("GET", path, None, lambda data: msgspec.json.decode(data, type=Response))


def cancel_response(response_id: str) -> Call[Response]:
    """Build the call that cancels a background response."""
    path = f"{RESPONSES}/{quote(response_id, safe='')}/cancel"
    return Call("POST", path, None, lambda data: msgspec.json.decode(data, type=Response))


def forget_response(response_id: str) -> Call[bool]:
    """Build the call that deletes a stored response; False if it does not exist."""
    path = f"{RESPONSES}/{quote(response_id, safe='')}"
    return Call("DELETE", path, None, lambda _: True, {"response_not_found": False})


def embed(texts: str | Sequence[str], fields: EmbeddingFields) -> Call[Embeddings]:
    """Build the call that embeds texts."""
    return _post(EMBEDDINGS, {"input": texts, **fields}, Embeddings)


def models() -> Call[tuple[Model, ...]]:
    """Build the call that lists the models."""
    return Call("GET", "/v1/models", None, lambda data: msgspec.json.decode(data, type=_Models).data)


def model(name: str) -> Call[Model]:
    """Build the call that fetches one model."""
    return Call("GET", f"/v1/models/{quote(name)}", None, lambda data: msgspec.json.decode(data, type=Model))


def capabilities() -> Call[ServerCapabilities]:
    """Build the call that fetches the capabilities of the server."""
    return Call("GET", "/v1/capabilities", None, lambda data: msgspec.json.decode(data, type=ServerCapabilities))


def ready() -> Call[bool]:
    """Build the call that checks whether the server is ready; False while it is not."""
    return Call("GET", "/readyz", None, lambda _: True, {EngineUnavailable.default_code: False})


def read(call: Call[AnswerT], url: str, response: httpx.Response) -> AnswerT:
    """Decode the ``response`` of the server at ``url`` to ``call``.

    Raises:
        DiffserveError: The server reported an error, or the answer cannot be decoded.
    """
    if response.status_code != httpx.codes.OK:
        error = error_of_answer(url, response)
        if error.code not in call.otherwise:
            raise error
        return call.otherwise[error.code]
    try:
        return call.decode(response.content)
    except msgspec.MsgspecError as error:
        raise unexpected(url) from error


def settings(url: str, timeout_s: float, api_key: str | None) -> dict[str, Any]:
    """Return the arguments of an httpx client. Proxy settings are ignored for a server on this machine."""
    key = os.environ.get(KEY_VARIABLE, "") if api_key is None else api_key
    return {
        "headers": {"Authorization": f"Bearer {key}"} if key else {},
        "base_url": url,
        "timeout": httpx.Timeout(timeout_s, connect=CONNECT_S),
        "limits": httpx.Limits(max_connections=None, keepalive_expiry=KEEP_ALIVE_S),
        "trust_env": not _is_here(urlsplit(url).hostname or ""),
    }


def stream_timeout(timeout_s: float) -> httpx.Timeout:
    """Return the timeouts of a stream, which may pause for at most ``SILENCE_S`` seconds."""
    return httpx.Timeout(min(timeout_s, SILENCE_S), connect=CONNECT_S)


def base_url(url: str) -> str:
    """Return the server address ``url`` without ``/v1``.

    Raises:
        ConfigError: ``url`` is not an HTTP address.
    """
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_address = False
    if not is_address:
        raise ConfigError(f"url must be an address such as http://127.0.0.1:8000, got {url[:200]!r}.", param="url")
    return url.rstrip("/").removesuffix("/v1")


def _edit(prompt: str, image: bytes, mask: bytes | None, fields: Mapping[str, Any]) -> tuple[bytes, Mapping[str, str]]:
    """Return body and headers of an edit: a form if it can represent all fields, because its files are shorter."""
    files = {"image": image} | ({} if mask is None else {"mask": mask})
    body = {"prompt": prompt, **fields}
    texts = texts_of(body)
    if texts is None:
        return msgspec.json.encode(body | {name: _base64(file) for name, file in files.items()}), JSON
    return form_of(texts, {name: Upload(file, name) for name, file in files.items()})


def _images(data: bytes) -> Images:
    return msgspec.json.decode(data, type=Images)


def _base64(file: bytes) -> str:
    return base64.b64encode(file).decode("ascii")


class _Models(msgspec.Struct, frozen=True):
    data: tuple[Model, ...]


def _post(path: str, body: dict[str, Any], kind: type[AnswerT]) -> Call[AnswerT]:
    return Call("POST", path, msgspec.json.encode(body), lambda data: msgspec.json.decode(data, type=kind))


def _turns(messages: str | Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    return (ChatMessage(role="user", content=messages),) if isinstance(messages, str) else messages


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
