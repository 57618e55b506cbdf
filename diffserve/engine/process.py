"""The engine in a process of its own: ``python -m diffserve.engine.process --fd N``.

One thread reads commands from the socket it was born with, so that a ping is answered in the middle of a tick and the
death of the parent ends the process at once. The main thread ticks, takes what has arrived between two ticks, and
sleeps while there is nothing to do; before that it proves that no page is lost.
"""

from __future__ import annotations

import argparse
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from diffserve import ipc
from diffserve.engine_stats import EngineStats
from diffserve.errors import DiffserveError, ModelLoadError, QueueFull
from diffserve.rewrite_types import RewriteRequest
from diffserve.text_types import TextRequest
from diffserve.types import DiffusionParams, GenerationRequest, ModelInfo, Picture

if TYPE_CHECKING:
    from diffserve.engine.engine import Engine
    from diffserve.engine.studio import Studio

COUNT_EVERY_S = 0.2
SUBMISSIONS = (ipc.Submit, ipc.SubmitText, ipc.SubmitRewrite)
AnyRequest = TypeVar("AnyRequest", GenerationRequest, TextRequest, RewriteRequest)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve the parent at the other end of the socket until it closes it."""
    parser = argparse.ArgumentParser(prog="diffserve-engine", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="the inherited socket to the parent")
    options = parser.parse_args(arguments)
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent decides: its end of the socket is the off switch
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=options.fd) as connection:
        return EngineProcess(ipc.EngineEnd(connection)).run()


class EngineProcess:
    """A studio behind a socket. ``run`` blocks; the process leaves when the other side does."""

    def __init__(self, end: ipc.EngineEnd) -> None:
        self._end = end
        self._inbox: queue.SimpleQueue[ipc.Command] = queue.SimpleQueue()
        self._studio: Studio | None = None
        self._stats: EngineStats | None = None
        self._counted_s = 0.0
        self._num_arrived = 0  # the listener's count of requests, against the main thread's
        self._num_taken = 0

    def run(self) -> int:
        """Load, paint a trial picture, report Ready and serve. 1 where the model cannot be loaded."""
        threading.Thread(target=self._listen, name="commands", daemon=True).start()
        load = self._inbox.get()
        if not isinstance(load, ipc.Load):
            raise TypeError(f"the first command must be Load, not {type(load).__name__}.")
        try:
            studio = self._studio = open_studio(load)
        except Exception as error:
            self._end.send(_load_failed(error))
            return 1
        self._end.send(ipc.Ready(info=studio.info, language=studio.text_info))
        while True:
            if not studio.has_work:
                studio.check_integrity()
            self._count(studio)
            self._take_commands(studio)
            for event in studio.tick():
                self._end.send(event)

    def _listen(self) -> None:
        """Read commands until the other side is gone, then leave without a word: nobody is there to hear it."""
        try:
            for command in self._end.commands():
                match command:
                    case ipc.Ping(number=number):
                        self._end.send(ipc.Pong(number=number, num_requests=self._num_requests()))
                    case ipc.ReadStats(number=number):
                        self._end.send(ipc.Stats(number=number, stats=self._stats))
                    case _:
                        self._num_arrived += isinstance(command, SUBMISSIONS)
                        self._inbox.put(command)
        except OSError:
            pass
        except Exception:
            traceback.print_exc()
        os._exit(0)

    def _num_requests(self) -> int:
        """How many requests are here, those included that wait for the end of the tick to be taken."""
        num_live = 0 if self._studio is None else self._studio.num_live
        return num_live + self._num_arrived - self._num_taken

    def _count(self, studio: Studio) -> None:
        """Have numbers ready for whoever asks in the middle of a tick; fresh ones when all is quiet."""
        now_s = time.monotonic()
        if now_s - self._counted_s >= COUNT_EVERY_S or not studio.has_work:
            self._stats, self._counted_s = studio.stats(), now_s

    def _take_commands(self, studio: Studio) -> None:
        """Obey everything that has arrived; wait for something where there is nothing to do."""
        while not studio.has_work or not self._inbox.empty():
            command = self._inbox.get()
            match command:
                case ipc.Submit():
                    self._submit(studio.submit, command.request)
                case ipc.SubmitText():
                    self._submit(studio.submit_text, command.request)
                case ipc.SubmitRewrite():
                    self._submit(studio.submit_rewrite, command.request)
                case ipc.Cancel():
                    studio.cancel(command.request_id)
                case ipc.ReadTrace():
                    self._end.send(ipc.Trace(number=command.number, unet_calls=unet_calls_of(studio.engine)))
                case _:
                    raise TypeError(f"{type(command).__name__} is not a command for a running engine.")

    def _submit(self, submit: Callable[[AnyRequest], str], request: AnyRequest) -> None:
        try:
            submit(request)
        except DiffserveError as error:
            self._end.send(
                ipc.Rejected(
                    request_id=request.request_id,
                    code=error.code,
                    message=error.message,
                    param=error.param,
                    retry_after_s=error.retry_after_s if isinstance(error, QueueFull) else None,
                )
            )
        except Exception as error:  # a mistake of ours costs this request, not everybody's engine
            traceback.print_exc()
            message = f"taking this request raised {type(error).__name__}: {error}"
            self._end.send(
                ipc.Rejected(request_id=request.request_id, code=DiffserveError.default_code, message=message)
            )
        finally:
            self._num_taken += 1


def open_studio(load: ipc.Load) -> Studio:
    """The studio that ``load`` describes, warm, and proven by a trial picture of one step."""
    from diffserve.engine.studio import Studio

    studio = Studio.load(load.model, load.engine, load.text)
    studio.warm_up()
    studio.engine.generate(trial(studio.info))
    return studio


def trial(info: ModelInfo) -> GenerationRequest:
    """One step at the model's native size; a grey picture to repaint where the model knows nothing else."""
    width_px, height_px = info.good_sizes[0]
    grey = Picture.from_array(np.full((height_px, width_px, 3), 128, dtype=np.uint8))
    return GenerationRequest(
        prompt="a trial picture",
        seed=0,
        diffusion=DiffusionParams(num_steps=1, strength=1.0),
        init_image=grey if info.is_inpainting else None,
        mask_image=Picture.from_array(np.full((height_px, width_px), 255, dtype=np.uint8))
        if info.is_inpainting
        else None,
    )


def unet_calls_of(engine: Engine) -> list[list[str]]:
    """Per recent UNet call, the request id of every row."""
    return [[row.request_id for row in call.rows] for tick in engine.trace for call in tick.calls]


def _load_failed(error: Exception) -> ipc.LoadFailed:
    if isinstance(error, DiffserveError):
        return ipc.LoadFailed(code=error.code, message=error.message)
    traceback.print_exc()
    return ipc.LoadFailed(code=ModelLoadError.default_code, message=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    sys.exit(main())
