"""The clients of a diffserve server: asynchronous, and synchronous by an event loop in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar
from urllib.parse import quote

import msgspec

from diffserve.api.errors import DiffserveError, EngineUnavailable
from diffserve.client.adapters import AdapterMethods
from diffserve.client.capabilities import Model, ServerCapabilities
from diffserve.client.errors import ServerLost
from diffserve.client.experiments import ExperimentMethods
from diffserve.client.images import ImageMethods
from diffserve.client.jobs import JobMethods
from diffserve.client.responses import ResponseMethods
from diffserve.client.stored import StoredDataMethods
from diffserve.client.texts import TextMethods
from diffserve.client.transport import DEFAULT_URL, TIMEOUT_S, AsyncStream
from diffserve.client.webhooks import WebhookMethods

P = ParamSpec("P")
AnswerT = TypeVar("AnswerT")
EventT = TypeVar("EventT")


class _Models(msgspec.Struct, frozen=True):
    data: tuple[Model, ...]


class AsyncClient(
    ImageMethods,
    TextMethods,
    ResponseMethods,
    StoredDataMethods,
    ExperimentMethods,
    JobMethods,
    WebhookMethods,
    AdapterMethods,
):
    """Asynchronous client of a diffserve server, for asyncio.

    It raises the same exceptions as ``Client``. Methods that return an ``AsyncStream`` are not coroutines: enter the
    stream with ``async with``, then iterate over it with ``async for``. Close the client after use, or use it as an
    asynchronous context manager.

    Args:
        url: The address of the server, with or without ``/v1``.
        timeout_s: How long to wait for an answer, in seconds. Streams fail after 60 seconds without any data.
        api_key: The API key. None reads the environment variable ``DIFFSERVE_API_KEY``.

    Attributes:
        url: The address without ``/v1``.

    Raises:
        ConfigError: ``url`` is not an HTTP address.
    """

    async def models(self) -> tuple[Model, ...]:
        """List every model name that a request may use.

        Returns:
            The models, the image model first.
        """
        return (await self._call("GET", "/v1/models", _Models)).data

    async def capabilities(self) -> ServerCapabilities:
        """Fetch the capabilities of the server.

        Returns:
            The fields of each endpoint with their bounds, and the models, limits and price of the server.
        """
        return await self._call("GET", "/v1/capabilities", ServerCapabilities)

    async def model(self, name: str) -> Model:
        """Fetch one model with its capabilities.

        Args:
            name: The name of the model or an alias.

        Returns:
            The model.

        Raises:
            ModelNotFound: The server has no such model.
        """
        return await self._call("GET", f"/v1/models/{quote(name)}", Model)

    async def is_ready(self) -> bool:
        """Return whether the server accepts work now; it does not while it loads its models.

        Returns:
            True if it is ready.
        """
        return await self._succeeds("GET", "/readyz", EngineUnavailable.default_code)


class _LoopThread:
    """Daemon thread whose event loop runs the requests of one client. All methods are thread-safe."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self.is_closed = False
        self._thread = threading.Thread(target=self._main, name="diffserve-client", daemon=True)
        self._thread.start()

    def run(self, request: Coroutine[Any, Any, AnswerT]) -> AnswerT:
        """Run ``request`` in the event loop and wait for its result; an exception while waiting cancels it."""
        with self._lock:  # a coroutine that is submitted after the loop has stopped would never end
            if self.is_closed:
                request.close()
                raise RuntimeError("the client is closed; create a new one.")
            future = asyncio.run_coroutine_threadsafe(request, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise ServerLost("the client was closed before the answer was complete.") from None
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel all requests, close the connections and end the thread."""
        with self._lock:
            if not self.is_closed:
                self.is_closed = True
                self._loop.call_soon_threadsafe(self._stopped.set)
        if threading.current_thread() is not self._thread:  # garbage collection may run in any thread
            self._thread.join()

    def _main(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        async with self._client:
            await self._stopped.wait()


class Stream(Generic[EventT]):
    """Events of a request in order of arrival; an iterator that can be used once.

    Leaving its ``with`` block, or ``close``, cancels the request.

    Attributes:
        request_id: The ID for ``Client.cancel`` and ``Client.interrupt``.

    Raises:
        ServerLost: While iterating: the connection ended before the last event.
        DiffserveError: While iterating: the server reported an error; its class depends on the error code.
    """

    def __init__(self, client: Client, stream: AsyncStream[EventT]) -> None:
        self._client = client  # keeps the client from being collected, which would close it
        self._loop = client._loop
        self._stream = self._loop.run(stream.__aenter__())
        self._events = aiter(self._stream)
        self.request_id = self._stream.request_id

    def __iter__(self) -> Iterator[EventT]:
        return self

    def __next__(self) -> EventT:
        try:
            return self._loop.run(_next(self._events))
        except StopAsyncIteration:
            self.close()
            raise StopIteration from None
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection and end the iteration; the server cancels the request at its next step.

        Can be called from any thread.
        """
        if not self._loop.is_closed:
            self._loop.run(self._close())

    async def _close(self) -> None:
        await self._stream.close()
        with contextlib.suppress(DiffserveError, RuntimeError):  # another thread may be reading, and stops now
            async for _ in self._events:  # the closed connection ends httpx's generators inside this one
                pass


async def _next(events: AsyncIterator[EventT]) -> EventT:
    return await anext(events)


def _blocking(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, AnswerT]],
) -> Callable[Concatenate[Client, P], AnswerT]:
    """Return a method of ``Client`` that runs ``method`` and waits for its result."""

    @functools.wraps(method)
    def call(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> AnswerT:
        return self._loop.run(method(self._client, *args, **kwargs))

    return call


def _opening(
    method: Callable[Concatenate[AsyncClient, P], AsyncStream[EventT]],
) -> Callable[Concatenate[Client, P], Stream[EventT]]:
    """Return a method of ``Client`` that opens the stream of ``method``."""

    @functools.wraps(method)
    def call(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Stream[EventT]:
        return Stream(self, method(self._client, *args, **kwargs))

    return call


class Client:
    """Synchronous client of a diffserve server.

    It has the methods of ``AsyncClient`` as ordinary functions that wait for the answer. Methods that return an
    ``AsyncStream`` there return a ``Stream`` here; they send the request at once. A client can be shared between
    threads. Close it after use, or use it as a context manager.

    Every method raises ``ServerUnreachable`` if no server answers, ``ServerLost`` if the connection ends before the
    answer is complete, and otherwise the exception that matches the server's error code: ``InvalidRequest``,
    ``ModelNotFound``, ``QueueFull``, ``EngineUnavailable``, ``DeadlineExceeded``, ``DeadlineUnreachable``,
    ``RequestCancelled`` or their base class ``DiffserveError``.

    Args:
        url: The address of the server, with or without ``/v1``.
        timeout_s: How long to wait for an answer, in seconds. Streams fail after 60 seconds without any data.
        api_key: The API key. None reads the environment variable ``DIFFSERVE_API_KEY``.

    Attributes:
        url: The address without ``/v1``.

    Raises:
        ConfigError: ``url`` is not an HTTP address.
    """

    def __init__(self, url: str = DEFAULT_URL, *, timeout_s: float = TIMEOUT_S, api_key: str | None = None) -> None:
        self._client = AsyncClient(url, timeout_s=timeout_s, api_key=api_key)
        self._loop = _LoopThread(self._client)
        self.url = self._client.url
        weakref.finalize(self, self._loop.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._loop.close()

    generate = _blocking(AsyncClient.generate)
    generate_stream = _opening(AsyncClient.generate_stream)
    edit = _blocking(AsyncClient.edit)
    edit_stream = _opening(AsyncClient.edit_stream)
    vary = _blocking(AsyncClient.vary)
    upscale = _blocking(AsyncClient.upscale)
    verify = _blocking(AsyncClient.verify)
    cancel = _blocking(AsyncClient.cancel)
    interrupt = _blocking(AsyncClient.interrupt)
    rewrite = _blocking(AsyncClient.rewrite)
    rewrite_stream = _opening(AsyncClient.rewrite_stream)
    chat = _blocking(AsyncClient.chat)
    chat_stream = _opening(AsyncClient.chat_stream)
    respond = _blocking(AsyncClient.respond)
    respond_stream = _opening(AsyncClient.respond_stream)
    response = _blocking(AsyncClient.response)
    cancel_response = _blocking(AsyncClient.cancel_response)
    forget_response = _blocking(AsyncClient.forget_response)
    embed = _blocking(AsyncClient.embed)
    models = _blocking(AsyncClient.models)
    capabilities = _blocking(AsyncClient.capabilities)
    model = _blocking(AsyncClient.model)
    upload = _blocking(AsyncClient.upload)
    files = _blocking(AsyncClient.files)
    file = _blocking(AsyncClient.file)
    file_content = _blocking(AsyncClient.file_content)
    delete_file = _blocking(AsyncClient.delete_file)
    begin_batch = _blocking(AsyncClient.begin_batch)
    batch = _blocking(AsyncClient.batch)
    batches = _blocking(AsyncClient.batches)
    cancel_batch = _blocking(AsyncClient.cancel_batch)
    history = _blocking(AsyncClient.history)
    history_entry = _blocking(AsyncClient.history_entry)
    history_picture = _blocking(AsyncClient.history_picture)
    history_thumbnail = _blocking(AsyncClient.history_thumbnail)
    add_favorite = _blocking(AsyncClient.add_favorite)
    remove_favorite = _blocking(AsyncClient.remove_favorite)
    forget = _blocking(AsyncClient.forget)
    forget_all = _blocking(AsyncClient.forget_all)
    usage = _blocking(AsyncClient.usage)
    usage_by_key = _blocking(AsyncClient.usage_by_key)
    begin_experiment = _blocking(AsyncClient.begin_experiment)
    plan_experiment = _blocking(AsyncClient.plan_experiment)
    experiments = _blocking(AsyncClient.experiments)
    experiment = _blocking(AsyncClient.experiment)
    experiment_events = _opening(AsyncClient.experiment_events)
    cancel_experiment = _blocking(AsyncClient.cancel_experiment)
    delete_experiment = _blocking(AsyncClient.delete_experiment)
    experiment_file = _blocking(AsyncClient.experiment_file)
    begin_job = _blocking(AsyncClient.begin_job)
    put_job = _blocking(AsyncClient.put_job)
    jobs = _blocking(AsyncClient.jobs)
    job = _blocking(AsyncClient.job)
    job_events = _opening(AsyncClient.job_events)
    job_result = _blocking(AsyncClient.job_result)
    cancel_job = _blocking(AsyncClient.cancel_job)
    cancel_jobs = _blocking(AsyncClient.cancel_jobs)
    pause_job = _blocking(AsyncClient.pause_job)
    resume_job = _blocking(AsyncClient.resume_job)
    retry_job = _blocking(AsyncClient.retry_job)
    delete_job = _blocking(AsyncClient.delete_job)
    webhook_event_types = _blocking(AsyncClient.webhook_event_types)
    create_webhook_endpoint = _blocking(AsyncClient.create_webhook_endpoint)
    webhook_endpoints = _blocking(AsyncClient.webhook_endpoints)
    webhook_endpoint = _blocking(AsyncClient.webhook_endpoint)
    update_webhook_endpoint = _blocking(AsyncClient.update_webhook_endpoint)
    rotate_webhook_secret = _blocking(AsyncClient.rotate_webhook_secret)
    test_webhook_endpoint = _blocking(AsyncClient.test_webhook_endpoint)
    delete_webhook_endpoint = _blocking(AsyncClient.delete_webhook_endpoint)
    loras = _blocking(AsyncClient.loras)
    prompt_styles = _blocking(AsyncClient.prompt_styles)
    control_map = _blocking(AsyncClient.control_map)
    is_ready = _blocking(AsyncClient.is_ready)
