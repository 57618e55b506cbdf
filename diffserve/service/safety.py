"""Client of the safety filter process. It fails closed: images without a decision are not delivered."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import psutil

from diffserve.api.errors import ConfigError, EngineUnavailable, ModerationBlocked
from diffserve.api.types import ImageResult, Picture
from diffserve.logs import reason_of
from diffserve.media.safety import FilterReady, Judgement, SafetyMessage, SafetyQuestion, Trouble, encode, receive
from diffserve.settings.config import Settings

MODULE: Final = "diffserve.engine.safety_process"
CODE: Final = "safety_filter_unavailable"
RETRY_AFTER_S: Final = 5.0
STOPPED_S: Final = 5.0
"""Seconds after which a stopped process is abandoned, even if ``safety_timeout_s`` is longer."""

LOOK_EVERY_S: Final = 0.5
SAID_OF_PICTURE: Final = "the safety filter blocked the image; change the prompt."

log = logging.getLogger("diffserve.media.safety")


class Safety:
    """Safety filter in a process; its blocking methods may be called from several threads."""

    def __init__(self, name: str, model: str, *, timeout_s: float, startup_s: float) -> None:
        self.name = name
        self._model = model
        self._timeout_s = timeout_s
        self._startup_s = startup_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._ready: FilterReady | None = None
        self._begun_s = 0.0
        self.judges_prompts = False
        self.tell: Callable[[str, str], None] = lambda *_: None
        """Called with the judged kind ("prompt", "picture") and the decision: "allowed", "blocked" or "unavailable"."""

    @classmethod
    def of(cls, settings: Settings) -> Safety | None:
        """Start the configured filter; None if there is none. Raises ConfigError if it cannot be loaded."""
        serve = settings.serve
        if not serve.safety_filter:
            return None
        filter_ = cls(
            serve.safety_filter, settings.model.path,
            timeout_s=serve.safety_timeout_s, startup_s=serve.startup_timeout_s,
        )  # fmt: skip
        filter_.start()
        return filter_

    @classmethod
    @contextlib.contextmanager
    def running(cls, settings: Settings) -> Iterator[Safety | None]:
        """Run the configured filter for the length of the block."""
        filter_ = cls.of(settings)
        try:
            yield filter_
        finally:
            if filter_ is not None:
                filter_.stop()

    def start(self) -> None:
        """Load the filter. Raises ConfigError."""
        with self._lock:
            try:
                self._start_process()
                ready = self._receive(time.monotonic() + self._startup_s)
            except (OSError, _LostError) as error:
                self._stop_process()
                message = f"safety_filter {self.name!r} cannot be used: {error or 'it took too long to load'}"
                raise ConfigError(message, param="safety_filter") from None
            self._accept(ready)

    def stop(self) -> None:
        """End the process."""
        with self._lock:
            self._stop_process()

    def check_texts(self, texts: Mapping[str, str]) -> None:
        """Judge the prompts of an image, by field name and "#" with a number for further ones; blank ones are skipped.

        Raises:
            ModerationBlocked: One of them is not allowed; ``param`` is the name of its field.
            EngineUnavailable: The filter gives no answer.
        """
        for key, text in texts.items():
            field = key.partition("#")[0]
            question = SafetyQuestion(text, is_negative=field.endswith("negative_prompt"))
            if self.judges_prompts and text.strip() and self._judge("prompt", question):
                message = f"the safety filter does not allow the {field.replace('_', ' ')}; change it."
                raise ModerationBlocked(message, param=field)

    def check(self, result: ImageResult) -> None:
        """Check an image, and its prompt if it was rewritten. Raises as ``check_texts`` does."""
        if result.original_prompt is not None:
            self.check_texts({"prompt": result.prompt})
        self.check_picture(result.picture)

    def check_picture(self, picture: Picture) -> None:
        """Check an image. Raises as ``check_texts`` does."""
        if self._judge("picture", SafetyQuestion(picture)):
            raise ModerationBlocked(SAID_OF_PICTURE)

    def _judge(self, stage: str, question: SafetyQuestion) -> bool:
        try:
            is_blocked = self._is_blocked(question)
        except EngineUnavailable:
            self.tell(stage, "unavailable")
            raise
        self.tell(stage, "blocked" if is_blocked else "allowed")
        return is_blocked

    def _is_blocked(self, question: SafetyQuestion) -> bool:
        deadline_s = time.monotonic() + self._timeout_s
        with self._exclusive():
            try:
                if self._process is None or self._process.poll() is not None:
                    self._stop_process()
                    self._start_process()
                if self._ready is None:
                    self._accept(self._receive(deadline_s))
                assert self._connection is not None
                self._send(encode(question), deadline_s)
                answer = self._receive(deadline_s)
                if not isinstance(answer, Judgement):
                    raise _LostError("it sent an unexpected message")
            except (OSError, ValueError, _LostError) as error:
                is_loading = isinstance(error, TimeoutError) and self._ready is None
                if not (is_loading and time.monotonic() - self._begun_s < self._startup_s):
                    self._stop_process()
                log.error("safety filter failed", extra={"reason": reason_of(str(error) or "it took too long")})
                raise _unavailable() from None
            return answer.is_blocked

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        if not self._lock.acquire(timeout=self._timeout_s):
            raise _unavailable()
        try:
            yield
        finally:
            self._lock.release()

    def _accept(self, ready: SafetyMessage) -> None:
        if not isinstance(ready, FilterReady):
            raise _LostError("it sent an unexpected message")
        self._ready, self.judges_prompts = ready, ready.judges_prompts

    def _start_process(self) -> None:
        our_end, their_end = socket.socketpair()
        arguments = ("--fd", str(their_end.fileno()), "--filter", self.name, "--model", self._model)
        with their_end:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, *arguments],
                pass_fds=(their_end.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"},
            )
        self._connection, self._ready, self._begun_s = our_end, None, time.monotonic()

    def _send(self, frame: bytes, deadline_s: float) -> None:
        assert self._connection is not None
        self._connection.setblocking(False)
        unsent = memoryview(frame)
        while unsent:
            self._wait(select.POLLOUT, deadline_s)
            unsent = unsent[self._connection.send(unsent) :]

    def _wait(self, event: int, deadline_s: float) -> None:
        """Wait until the connection can be written or read.

        Raises:
            TimeoutError: ``deadline_s`` passed.
            _LostError: The process has been stopped (SIGSTOP) for ``STOPPED_S``.
        """
        assert self._connection is not None
        ready = select.poll()
        ready.register(self._connection, event)
        stopped_since_s: float | None = None
        while True:
            now_s = time.monotonic()
            if ready.poll(1000 * max(0.001, min(deadline_s - now_s, LOOK_EVERY_S))):
                return
            now_s = time.monotonic()
            if now_s >= deadline_s:
                raise TimeoutError
            stopped_since_s = (stopped_since_s or now_s - LOOK_EVERY_S) if self._is_stopped() else None
            if stopped_since_s is not None and now_s - stopped_since_s >= STOPPED_S:
                raise _LostError(f"its process has been stopped for {STOPPED_S:g} s")

    def _is_stopped(self) -> bool:
        try:
            return self._process is not None and psutil.Process(self._process.pid).status() == psutil.STATUS_STOPPED
        except psutil.Error:
            return False

    def _receive(self, deadline_s: float) -> SafetyMessage:
        assert self._connection is not None
        self._wait(select.POLLIN, deadline_s)
        self._connection.settimeout(max(0.001, deadline_s - time.monotonic()))
        message = receive(self._connection)
        if message is None:
            raise _LostError("its process ended")
        if isinstance(message, Trouble):
            raise _LostError(message.reason)
        return message

    def _stop_process(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = self._connection = self._ready = None


class _LostError(Exception):
    """Error of a filter process that no longer answers."""


def _unavailable() -> EngineUnavailable:
    message = (
        "the safety filter does not respond, and images are not returned without it; please try again in a moment."
    )
    error = EngineUnavailable(message, retry_after_s=RETRY_AFTER_S)
    error.code = CODE
    return error
