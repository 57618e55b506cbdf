"""What both clients share: every call that can be made, its address, its body, and how its answer is read; and what is
set up for it. Nothing is sent from here."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Generic, NamedTuple, TypedDict, TypeVar
from urllib.parse import quote, urlsplit

import httpx
import msgspec

from diffserve.client.answers import Chat, ChatDelta, ChatMessage, ImageEvent, Images, Model, RewriteEvent, Rewrites
from diffserve.client.errors import error_of_answer, unexpected
from diffserve.client.events import ChatReader, Reader, image_reader, rewrite_reader
from diffserve.client.recipe import ImageFields, RewriterFields, StreamedImageFields
from diffserve.errors import ConfigError, EngineUnavailable

DEFAULT_URL: Final = "http://127.0.0.1:8000"
TIMEOUT_S: Final = 660.0
"""A little more than a server takes before it gives a request up itself."""

CONNECT_S: Final = 5.0
SILENCE_S: Final = 60.0
"""A stream is never silent for so long: the server sends comments."""

KEEP_ALIVE_S: Final = 2.0  # a server hangs up after five
JSON: Final = {"Content-Type": "application/json"}

GENERATIONS: Final = "/v1/images/generations"
REWRITE: Final = "/v1/prompts/rewrite"
CHAT: Final = "/v1/chat/completions"
AnswerT = TypeVar("AnswerT")
EventT = TypeVar("EventT")


class RewriteFields(RewriterFields, total=False):
    """What a request to rewrite may say beside the wish."""

    model: str
    n: int


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
    repetition_penalty: float
    stop: str | list[str]
    seed: int


class Call(NamedTuple, Generic[AnswerT]):
    """A request with one answer. ``otherwise``: what errors mean that are answers too, by their codes."""

    method: str
    path: str
    body: bytes | None
    decode: Callable[[bytes], AnswerT]
    otherwise: Mapping[str, AnswerT] = MappingProxyType({})


class StreamCall(NamedTuple, Generic[EventT]):
    """A request with an answer in pieces."""

    path: str
    body: bytes
    reader: Reader[EventT]


def generate(prompt: str, fields: ImageFields) -> Call[Images]:
    """Paint, and wait for all pictures."""
    return _post(GENERATIONS, {"prompt": prompt, **fields}, Images)


def generate_stream(prompt: str, fields: StreamedImageFields) -> StreamCall[ImageEvent]:
    """Paint, and watch."""
    body = {"prompt": prompt, **fields, "stream": True}
    return StreamCall(GENERATIONS, msgspec.json.encode(body), image_reader(fields.get("n", 1)))


def cancel(request_id: str) -> Call[bool]:
    """End a request for pictures; False where it is over already, or was never there."""
    path = f"{GENERATIONS}/{quote(request_id, safe='')}/cancel"
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


def models() -> Call[tuple[Model, ...]]:
    """Every name that a request may give as its model."""
    return Call("GET", "/v1/models", None, lambda data: msgspec.json.decode(data, type=_Models).data)


def model(name: str) -> Call[Model]:
    """One of them."""
    return Call("GET", f"/v1/models/{quote(name)}", None, lambda data: msgspec.json.decode(data, type=Model))


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


def settings(url: str, timeout_s: float) -> dict[str, Any]:
    """For httpx' clients. A server on this machine is never looked for behind a proxy."""
    return {
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
