"""Tests of the synchronous client: threads, interruption, closing, and signatures."""

from __future__ import annotations

import gc
import inspect
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from diffserve.client import AsyncClient, Client, ServerLost

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
PROGRESS = b'data: {"type":"image_generation.progress","id":"img-1","step":1,"steps":2}\n\n'
SOON_S = 10.0
NUM_THREADS = 20


def client_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "diffserve-client"]


class SilentServer:
    """Server that sends ``answer`` on every connection and waits until the client closes it."""

    def __init__(self, answer: bytes = b"") -> None:
        self.answer = answer
        self.received, self.disconnected = threading.Event(), threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(65536)
                connection.sendall(self.answer)
                self.received.set()
                while connection.recv(65536):
                    pass
                self.disconnected.set()


@pytest.fixture
def silent_server() -> Iterator[SilentServer]:
    server = SilentServer()
    yield server
    server.close()


class ReadyHandler(BaseHTTPRequestHandler):
    """Handler that answers once as many requests are open as there are threads."""

    all_open = threading.Barrier(NUM_THREADS)

    def do_GET(self) -> None:
        self.all_open.wait(SOON_S)
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        pass


def test_threads_share_a_client_and_their_requests_overlap() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), ReadyHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        with Client(f"http://127.0.0.1:{server.server_port}") as client, ThreadPoolExecutor(NUM_THREADS) as pool:
            assert all(pool.map(lambda _: client.is_ready(), range(NUM_THREADS)))
        server.shutdown()
        thread.join()


def test_close_ends_the_thread_and_later_calls_fail(silent_server: SilentServer) -> None:
    client = Client(silent_server.url)
    assert len(client_threads()) == 1
    client.close()
    client.close()
    assert client_threads() == []
    with pytest.raises(RuntimeError, match="the client is closed"):
        client.is_ready()


def test_an_abandoned_client_ends_its_thread() -> None:
    client = Client()
    [thread] = client_threads()
    del client
    gc.collect()
    thread.join(SOON_S)
    assert not thread.is_alive()


def test_close_ends_the_requests_of_other_threads(silent_server: SilentServer) -> None:
    client = Client(silent_server.url)
    errors: list[BaseException] = []

    def request() -> None:
        try:
            client.models()
        except ServerLost as error:
            errors.append(error)

    thread = threading.Thread(target=request)
    thread.start()
    assert silent_server.received.wait(SOON_S)
    client.close()
    thread.join(SOON_S)
    assert [str(error) for error in errors] == ["the client was closed before the answer was complete."]


def test_an_interrupt_cancels_the_request(silent_server: SilentServer) -> None:
    def interrupt() -> None:
        silent_server.received.wait(SOON_S)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with Client(silent_server.url) as client, pytest.raises(KeyboardInterrupt):
        client.models()
    thread.join()
    assert silent_server.disconnected.wait(SOON_S)


def test_a_stream_keeps_its_client_and_closes_its_connection(silent_server: SilentServer) -> None:
    silent_server.answer = HEAD + PROGRESS
    stream = Client(silent_server.url).generate_stream("a fox")
    gc.collect()
    assert next(stream).id == "img-1"
    closer = threading.Timer(0.1, stream.close)
    closer.start()
    assert list(stream) == []
    closer.join()
    assert silent_server.disconnected.wait(SOON_S)


def test_methods_have_the_parameters_and_docstrings_of_the_asynchronous_client() -> None:
    assert inspect.signature(Client.generate) == inspect.signature(AsyncClient.generate)
    assert Client.generate.__doc__ == AsyncClient.generate.__doc__
    assert not inspect.iscoroutinefunction(Client.generate)
