"""The safety filter as the front door knows it: a process beside, asked about prompts and pictures before anybody sees
them. It fails closed: what it did not judge, because it hung, crashed, or is not there, is not delivered.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from diffserve.config import Settings
from diffserve.errors import ConfigError, EngineUnavailable, ModerationBlocked
from diffserve.logs import reason_of
from diffserve.safety import FilterReady, Judgement, SafetyQuestion, Said, Trouble, receive, send
from diffserve.types import ImageResult

MODULE: Final = "diffserve.engine.safety_process"
CODE: Final = "safety_filter_unavailable"
RETRY_AFTER_S: Final = 5.0
SAID_OF_PROMPT: Final = "the safety filter does not allow the prompt; ask for something else."
SAID_OF_PICTURE: Final = "the safety filter withholds the picture; ask for something else."

log = logging.getLogger("diffserve.safety")


class Safety:
    """The filter called ``name``. Every call takes a while: make it in a thread, from as many as you like."""

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
        """Is told what was judged ("prompt", "picture"), and how: "allowed", "blocked", "unavailable"."""

    @classmethod
    def of(cls, settings: Settings) -> Safety | None:
        """As ``settings`` say, ready to judge; ``None`` for none. Raises ConfigError for one that cannot be loaded."""
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
        """The same for the length of the block."""
        filter_ = cls.of(settings)
        try:
            yield filter_
        finally:
            if filter_ is not None:
                filter_.stop()

    def start(self) -> None:
        """Load it. Raises ConfigError where that cannot be."""
        with self._lock:
            try:
                self._begin()
                ready = self._hear(time.monotonic() + self._startup_s)
            except (OSError, _LostError) as error:
                self._end()
                said = f"safety_filter {self.name!r} cannot be used: {error or 'it took too long to load'}"
                raise ConfigError(said, param="safety_filter") from None
            self._learn(ready)

    def stop(self) -> None:
        """End its process."""
        with self._lock:
            self._end()

    def check_prompt(self, prompt: str) -> None:
        """Raises ModerationBlocked where it is not allowed, EngineUnavailable where nobody can tell."""
        if self.judges_prompts and self._is_told_blocked("prompt", SafetyQuestion(prompt)):
            raise ModerationBlocked(SAID_OF_PROMPT, param="prompt")

    def check(self, result: ImageResult) -> None:
        """The same of a picture, and of a prompt that it was rewritten to."""
        if result.original_prompt is not None:
            self.check_prompt(result.prompt)
        if self._is_told_blocked("picture", SafetyQuestion(result.picture)):
            raise ModerationBlocked(SAID_OF_PICTURE)

    def _is_told_blocked(self, stage: str, question: SafetyQuestion) -> bool:
        try:
            is_blocked = self._is_blocked(question)
        except EngineUnavailable:
            self.tell(stage, "unavailable")
            raise
        self.tell(stage, "blocked" if is_blocked else "allowed")
        return is_blocked

    def _is_blocked(self, question: SafetyQuestion) -> bool:
        deadline_s = time.monotonic() + self._timeout_s
        with self._turn():
            try:
                if self._process is None or self._process.poll() is not None:
                    self._end()
                    self._begin()
                if self._ready is None:
                    self._learn(self._hear(deadline_s))
                assert self._connection is not None
                self._connection.settimeout(max(0.001, deadline_s - time.monotonic()))
                send(self._connection, question)
                answer = self._hear(deadline_s)
                if not isinstance(answer, Judgement):
                    raise _LostError("it answered something else")
            except (OSError, ValueError, _LostError) as error:
                is_loading = isinstance(error, TimeoutError) and self._ready is None
                if not (is_loading and time.monotonic() - self._begun_s < self._startup_s):
                    self._end()
                log.error("safety filter failed", extra={"reason": reason_of(str(error) or "it took too long")})
                raise _unavailable() from None
            return answer.is_blocked

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        if not self._lock.acquire(timeout=self._timeout_s):
            raise _unavailable()
        try:
            yield
        finally:
            self._lock.release()

    def _learn(self, ready: Said) -> None:
        if not isinstance(ready, FilterReady):
            raise _LostError("it answered something else")
        self._ready, self.judges_prompts = ready, ready.judges_prompts

    def _begin(self) -> None:
        ours, theirs = socket.socketpair()
        told = ("--fd", str(theirs.fileno()), "--filter", self.name, "--model", self._model)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, *told],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"},
            )
        self._connection, self._ready, self._begun_s = ours, None, time.monotonic()

    def _hear(self, deadline_s: float) -> Said:
        assert self._connection is not None
        self._connection.settimeout(max(0.001, deadline_s - time.monotonic()))
        said = receive(self._connection)
        if said is None:
            raise _LostError("its process ended")
        if isinstance(said, Trouble):
            raise _LostError(said.reason)
        return said

    def _end(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = self._connection = self._ready = None


class _LostError(Exception):
    """The filter gives no answer any more."""


def _unavailable() -> EngineUnavailable:
    said = "the safety filter gives no answer, and without it nothing is delivered; please try again in a moment."
    error = EngineUnavailable(said, retry_after_s=RETRY_AFTER_S)
    error.code = CODE
    return error
