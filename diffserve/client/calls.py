"""What both clients share: every call that can be made, its address, its body, and how its answer is read; and what is
set up for it. Nothing is sent from here."""

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
"""A little more than a server takes before it gives a request up itself."""

CONNECT_S: Final = 5.0
SILENCE_S: Final = 60.0
"""A stream is never silent for so long: the server sends comments."""

KEEP_ALIVE_S: Final = 2.0  # a server hangs up after five
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
    """What a request to rewrite may say beside the wish."""

    model: str
    n: int
    priority: Literal["interactive", "batch"]
    deadline_s: float


class ChatFields(TypedDict, total=False):
    """What a conversation may say beside its messages."""

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
    """A request with one answer. ``otherwise``: what errors mean that are answers too, by their codes; ``headers``: of
    one with a body."""

    method: str
    path: str
    body: bytes | None
    decode: Callable[[bytes], AnswerT]
    otherwise: Mapping[str, AnswerT] = MappingProxyType({})
    headers: Mapping[str, str] = JSON

    def under(self, idempotency_key: str | None) -> Call[AnswerT]:
        """The same, that is answered once however often it is sent by that key within a day."""
        told = {} if idempotency_key is None else {"Idempotency-Key": idempotency_key}
        return self._replace(headers={**self.headers, **told})


class StreamCall(NamedTuple, Generic[EventT]):
    """A request with an answer in pieces."""

    path: str
    body: bytes
    reader: Reader[EventT]
    headers: Mapping[str, str] = JSON


def generate(prompt: str, fields: ImageFields) -> Call[Images]:
    """Paint, and wait for all pictures."""
    return _post(GENERATIONS, {"prompt": prompt, **fields}, Images)


def generate_stream(prompt: str, fields: StreamedImageFields) -> StreamCall[ImageEvent]:
    """Paint, and watch."""
    body = {"prompt": prompt, **fields, "stream": True}
    return StreamCall(GENERATIONS, msgspec.json.encode(body), image_reader(fields.get("n", 1)))


def edit(prompt: str, image: bytes, mask: bytes | None, fields: EditFields) -> Call[Images]:
    """Paint from a picture, and wait."""
    body, headers = _edit(prompt, image, mask, fields)
    return Call("POST", EDITS, body, _images, headers=headers)


def edit_stream(prompt: str, image: bytes, mask: bytes | None, fields: StreamedEditFields) -> StreamCall[ImageEvent]:
    """The same, and watch."""
    body, headers = _edit(prompt, image, mask, {**fields, "stream": True})
    return StreamCall(EDITS, body, image_reader(fields.get("n", 1), "image_edit"), headers)


def vary(image: bytes, fields: EditFields) -> Call[Images]:
    """Paint a picture again, otherwise."""
    return _post(VARIATIONS, {"image": _base64(image), **fields}, Images)


def verify(image: bytes) -> Call[Provenance]:
    """What a picture says of where it is from."""
    return _post(VERIFY, {"image": _base64(image)}, Provenance)


def cancel(request_id: str) -> Call[bool]:
    """End a request for pictures; False where it is over already, or was never there."""
    path = f"{GENERATIONS}/{quote(request_id, safe='')}/cancel"
    return Call("POST", path, None, lambda _: True, {"request_not_found": False})


def interrupt(request_id: str) -> Call[bool]:
    """End a request for pictures early, with unfinished pictures; False where it is over already."""
    path = f"{GENERATIONS}/{quote(request_id, safe='')}/interrupt"
    return Call("POST", path, None, lambda _: True, {"request_not_found": False})


def rewrite(prompt: str, fields: RewriteFields) -> Call[Rewrites]:
    """Turn a wish into prompts."""
    return _post(REWRITE, {"prompt": prompt, **fields}, Rewrites)


def rewrite_stream(prompt: str, fields: RewriteFields) -> StreamCall[RewriteEvent]:
    """The same, and watch."""
    return StreamCall(REWRITE, msgspec.json.encode({"prompt": prompt, **fields, "stream": True}), rewrite_reader())


def chat(messages: str | Sequence[ChatMessage], fields: ChatFields) -> Call[Chat]:
    """Have a conversation answered."""
    return _post(CHAT, {"messages": _turns(messages), **fields}, Chat)


def chat_stream(messages: str | Sequence[ChatMessage], fields: ChatFields) -> StreamCall[ChatDelta]:
    """The same, and watch."""
    body = {"messages": _turns(messages), **fields, "stream": True}
    return StreamCall(CHAT, msgspec.json.encode(body), ChatReader())


def respond(given: str | Sequence[Mapping[str, Any]], fields: ResponseFields) -> Call[Response]:
    """Have something said, or painted, within a conversation."""
    return _post(RESPONSES, {"input": given, **fields}, Response)


def respond_stream(given: str | Sequence[Mapping[str, Any]], fields: ResponseFields) -> StreamCall[ResponseEvent]:
    """The same, and watch."""
    body = msgspec.json.encode({"input": given, **fields, "stream": True})
    return StreamCall(RESPONSES, body, response_reader())


def response(response_id: str) -> Call[Response]:
    """One that the server keeps."""
    path = f"{RESPONSES}/{quote(response_id, safe='')}"
    return Call("GET", path, None, lambda data: msgspec.json.decode(data, type=Response))


def cancel_response(response_id: str) -> Call[Response]:
    """End one in the background."""
    path = f"{RESPONSES}/{quote(response_id, safe='')}/cancel"
    return Call("POST", path, None, lambda data: msgspec.json.decode(data, type=Response))


def forget_response(response_id: str) -> Call[bool]:
    """Have it forgotten; False where it is not there."""
    path = f"{RESPONSES}/{quote(response_id, safe='')}"
    return Call("DELETE", path, None, lambda _: True, {"response_not_found": False})


def embed(texts: str | Sequence[str], fields: EmbeddingFields) -> Call[Embeddings]:
    """Turn texts into vectors."""
    return _post(EMBEDDINGS, {"input": texts, **fields}, Embeddings)


def models() -> Call[tuple[Model, ...]]:
    """Every name that a request may give as its model."""
    return Call("GET", "/v1/models", None, lambda data: msgspec.json.decode(data, type=_Models).data)


def model(name: str) -> Call[Model]:
    """One of them."""
    return Call("GET", f"/v1/models/{quote(name)}", None, lambda data: msgspec.json.decode(data, type=Model))


def capabilities() -> Call[ServerCapabilities]:
    """What the server takes."""
    return Call("GET", "/v1/capabilities", None, lambda data: msgspec.json.decode(data, type=ServerCapabilities))


def ready() -> Call[bool]:
    """Whether a request would be worked on now."""
    return Call("GET", "/readyz", None, lambda _: True, {EngineUnavailable.default_code: False})


def read(call: Call[AnswerT], url: str, response: httpx.Response) -> AnswerT:
    """What the ``response`` of the server at ``url`` says. Raises what it says went wrong."""
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
    """For httpx' clients. A server on this machine is never looked for behind a proxy."""
    key = os.environ.get(KEY_VARIABLE, "") if api_key is None else api_key
    return {
        "headers": {"Authorization": f"Bearer {key}"} if key else {},
        "base_url": url,
        "timeout": httpx.Timeout(timeout_s, connect=CONNECT_S),
        "limits": httpx.Limits(max_connections=None, keepalive_expiry=KEEP_ALIVE_S),
        "trust_env": not _is_here(urlsplit(url).hostname or ""),
    }


def stream_timeout(timeout_s: float) -> httpx.Timeout:
    """Of an answer in pieces: how long it may be silent."""
    return httpx.Timeout(min(timeout_s, SILENCE_S), connect=CONNECT_S)


def base_url(url: str) -> str:
    """``url`` without what the paths begin with; ConfigError where it is no address."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_address = False
    if not is_address:
        raise ConfigError(f"the server is {url[:200]!r}; give its address, such as http://127.0.0.1:8000.", param="url")
    return url.rstrip("/").removesuffix("/v1")


def _edit(prompt: str, image: bytes, mask: bytes | None, fields: Mapping[str, Any]) -> tuple[bytes, Mapping[str, str]]:
    """The body and its headers: a form, where that can say all of it, for its files are shorter."""
    files = {"image": image} | ({} if mask is None else {"mask": mask})
    asked = {"prompt": prompt, **fields}
    texts = texts_of(asked)
    if texts is None:
        return msgspec.json.encode(asked | {name: _base64(file) for name, file in files.items()}), JSON
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
