"""The engine in a process of its own: ``python -m diffserve.engine.process --fd N``.

A thread reads commands from the inherited socket, so that pings are answered during a tick and the process ends when
its parent does. The main thread ticks, runs commands between two ticks, and checks that no page is lost when it becomes
idle. A process whose device is lost ends with a reason, since a new process may be able to use the device.
"""

from __future__ import annotations

import argparse
import logging
import os
import queue
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NoReturn

import numpy as np

from diffserve.api import ipc
from diffserve.api.engine_stats import EngineStats
from diffserve.api.errors import (
    DeadlineUnreachable,
    DeviceLost,
    DiffserveError,
    ModelLoadError,
    NumericalError,
    QueueFull,
)
from diffserve.api.types import (
    Asks,
    Captured,
    DiffusionParams,
    Failed,
    GenerationRequest,
    ImageFailed,
    ImageFinished,
    ModelInfo,
    Picture,
)
from diffserve.faults import install_kills, reach
from diffserve.logs import MACHINE, json_logs
from diffserve.processes import leave_stopping_to_parent

if TYPE_CHECKING:
    from diffserve.engine.combined_engine import CombinedEngine
    from diffserve.runtime.device_health import DeviceProbe

logger = logging.getLogger(__name__)

COUNT_EVERY_S = 0.2
TIDY_EVERY_S = 10.0
QUIET_S = 3.0
"""Seconds without work after which an engine begins to measure shapes."""
EXIT_DEVICE_LOST = 75  # EX_TEMPFAIL: try again
UNEXPECTED = (DiffserveError.default_code, NumericalError.default_code)
"""Error codes that a lost device may cause."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve the parent at the other end of the socket until it closes it."""
    parser = argparse.ArgumentParser(prog="diffserve-engine", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="the inherited socket to the parent")
    options = parser.parse_args(arguments)
    leave_stopping_to_parent()
    with json_logs("info", trusted=MACHINE), socket.socket(fileno=options.fd) as connection:
        return EngineProcess(ipc.EngineEnd(connection)).run()


class EngineProcess:
    """An engine behind a socket; ``run`` blocks until the other side closes it."""

    def __init__(self, end: ipc.EngineEnd) -> None:
        self._end = end
        self._inbox: queue.SimpleQueue[ipc.Command] = queue.SimpleQueue()
        self._engine: CombinedEngine | None = None
        self._stats: EngineStats | None = None
        self._pulse = Pulse(least_s=1.0)  # replaced by what Load says
        self._counted_s = self._tidied_s = 0.0
        self._num_arrived = 0  # the listener's count of requests, against the main thread's
        self._num_taken = 0
        self._num_changes = 0

    def run(self) -> int:
        """Load the model, generate a trial image, report Ready and serve; returns 1 if the model cannot be loaded.

        If the device is lost while serving, the process exits here without the interpreter's shutdown, which could
        hang.
        """
        threading.Thread(target=self._listen, name="commands", daemon=True).start()
        import_libraries()
        from diffserve.engine.image import compiling

        load = self._inbox.get()
        if not isinstance(load, ipc.Load):
            raise TypeError(f"the first command must be Load, not {type(load).__name__}.")
        self._pulse = Pulse(load.hang_after_s)
        compiling.on_build.append(lambda timeout_s: self._end.send(ipc.Building(timeout_s=timeout_s)))
        try:
            engine = self._engine = open_engine(load, self._pulse)
            probe = open_probe(engine)
        except (Exception, DeviceLost) as error:
            self._end.send(_load_failed(error))
            return 1
        self._end.send(ipc.Ready(info=engine.info, language=engine.text_info, models=engine.images.served))
        try:
            self._serve(engine, probe)
        except DeviceLost as error:
            logger.error("the device is lost", exc_info=error)
            self._end.send(ipc.Lost(reason=str(error)))
            os._exit(EXIT_DEVICE_LOST)

    def _serve(self, engine: CombinedEngine, probe: DeviceProbe) -> NoReturn:
        """Tick forever. After an unexpected failure the device is checked before any event is sent."""
        while True:
            if not engine.has_work:
                engine.check_integrity()
            self._count(engine)
            self._take_commands(engine)
            with self._pulse.ticking(scale_of(engine)):
                events = engine.tick()
            if any(isinstance(event, (ImageFailed, Failed)) and event.code in UNEXPECTED for event in events):
                probe.check()
            reach("engine_stepped")
            for event in events:
                if isinstance(event, (Captured, ImageFinished)):
                    reach("engine_captured" if isinstance(event, Captured) else "engine_painted")
                self._end.send(event)
            if engine.images.num_changes != self._num_changes:
                probe = self._tell_models(engine, probe)

    def _listen(self) -> None:
        """Read commands until the other side closes the socket, then exit without a message."""
        try:
            for command in self._end.commands():
                match command:
                    case ipc.Ping(number=number):
                        self._end.send(self._pong(number))
                    case ipc.ReadStats(number=number):
                        self._end.send(ipc.Stats(number=number, stats=self._stats))
                    case _:
                        self._num_arrived += isinstance(command, Asks)
                        self._inbox.put(command)
        except OSError:
            pass
        except Exception:
            logger.exception("commands from the server could not be read")
        os._exit(0)

    def _pong(self, number: int) -> ipc.Pong:
        pulse, num_live = self._pulse, 0 if self._engine is None else self._engine.num_live
        return ipc.Pong(
            number=number,
            num_requests=num_live + self._num_arrived - self._num_taken,  # with those that wait for the tick to end
            num_ticks=pulse.num_ticks,
            tick_s=pulse.running_s,
            patience_s=pulse.patience_s,
        )

    def _count(self, engine: CombinedEngine) -> None:
        """Refresh the statistics that are served during ticks, and return unused heap memory to the system."""
        now_s = time.monotonic()
        if now_s - self._counted_s >= COUNT_EVERY_S or not engine.has_work:
            self._stats, self._counted_s = engine.stats(), now_s
        if now_s - self._tidied_s >= TIDY_EVERY_S:
            from diffserve.runtime.memory import give_heap_back

            give_heap_back()
            self._tidied_s = now_s

    def _tell_models(self, engine: CombinedEngine, probe: DeviceProbe) -> DeviceProbe:
        """Report loaded and unloaded models, and return a device probe that uses a loaded model."""
        self._num_changes = engine.images.num_changes
        self._end.send(ipc.NewModels(models=engine.images.served))
        return type(probe)(engine.images.loaded[0].model) if probe.is_gone and engine.images.loaded else probe

    def _take_commands(self, engine: CombinedEngine) -> None:
        """Run all commands that have arrived; without work, measure shapes or wait for the next command."""
        active_s = time.monotonic()
        is_studied = False
        while not engine.has_work or not self._inbox.empty():
            quiet_in_s = max(0.0, active_s + QUIET_S - time.monotonic())
            if self._inbox.empty() and not is_studied and not quiet_in_s:
                is_studied = not self._study(engine)
                continue
            waits_s = [engine.images.next_wakeup_s, None if is_studied else quiet_in_s]
            try:
                command = self._inbox.get(
                    timeout=min((wait_s for wait_s in waits_s if wait_s is not None), default=None)
                )
            except queue.Empty:  # a model has been idle for long enough, or it is time to measure
                continue
            active_s, is_studied = time.monotonic(), False
            match command:
                case Asks():
                    self._submit(engine, command)
                case ipc.Cancel():
                    engine.cancel(command.request_id)
                case ipc.Interrupt():
                    engine.interrupt(command.request_id)
                case ipc.LookAgain():
                    engine.images.retry_load(command.name)
                case ipc.ReadTrace():
                    ticks = [tick for image_engine in engine.images.loaded for tick in image_engine.trace]
                    calls = [[row.request_id for row in call.rows] for tick in ticks for call in tick.calls]
                    self._end.send(ipc.Trace(number=command.number, unet_calls=calls))
                case _:
                    raise TypeError(f"{type(command).__name__} is not a command for a running engine.")

    def _study(self, engine: CombinedEngine) -> bool:
        """Use idle time for one measurement, which the next command interrupts; return whether one was made."""
        with self._pulse.ticking():
            return engine.study(lambda: not self._inbox.empty())

    def _submit(self, engine: CombinedEngine, request: ipc.AnyRequest) -> None:
        try:
            engine.submit(request)
        except Exception as error:
            refusal = error
            self._num_taken += 1
            if not isinstance(refusal, DiffserveError):  # a bug fails this request, not the engine
                logger.exception("taking a request failed", extra={"request_id": request.request_id})
                refusal = DiffserveError(f"taking this request raised {type(error).__name__}: {error}")
            self._end.send(
                ipc.Rejected(
                    request_id=request.request_id,
                    code=refusal.code,
                    message=refusal.message,
                    param=refusal.param,
                    retry_after_s=refusal.retry_after_s
                    if isinstance(refusal, (QueueFull, DeadlineUnreachable))
                    else None,
                    predicted_s=refusal.predicted_s if isinstance(refusal, DeadlineUnreachable) else None,
                )
            )
        else:
            self._num_taken += 1


def import_libraries() -> None:
    """Import all libraries of the engine; a spare engine does so before it gets a model."""
    from diffserve.runtime.loading.library_imports import import_lean

    import_lean()  # only in a process that runs nothing else
    import diffserve.engine.loading  # noqa: F401  # with all that it stands on


def open_engine(load: ipc.Load, pulse: Pulse) -> CombinedEngine:
    """Create the engine that ``load`` describes, warm it up, and time a trial image of one step with ``pulse``."""
    from diffserve.engine.combined_engine import CombinedEngine

    engine = CombinedEngine.load(load.model, load.engine, load.text, load.models, unload_after_s=load.unload_after_s)
    engine.warm_up()
    with pulse.trial():
        engine.try_out(trial(engine.info))
    return engine


def open_probe(engine: CombinedEngine) -> DeviceProbe:
    """Create the device check, and then install the faults of tests."""
    from diffserve.runtime.device_health import DeviceProbe, install_faults

    probe = DeviceProbe(engine.engine.model)
    install_faults(engine.engine.model.unet)
    install_kills()
    return probe


def scale_of(engine: CombinedEngine) -> float:
    """Return how much longer a tick may take than one of the first model at its native size.

    Attention grows with the square of the pixels, and a call with the parameters of the network.
    """
    first = engine.info
    width_px, height_px = first.good_sizes[0]
    return max(
        (
            (image_engine.most_pixels / (width_px * height_px)) ** 2
            * image_engine.info.num_parameters
            / first.num_parameters
            for image_engine in engine.images.loaded
        ),
        default=1.0,
    )


def trial(info: ModelInfo) -> GenerationRequest:
    """Return a request of one step at the model's native size, with a gray init image for inpainting models."""
    width_px, height_px = info.good_sizes[0]
    gray = Picture.from_array(np.full((height_px, width_px, 3), 128, dtype=np.uint8))
    mask = Picture.from_array(np.full((height_px, width_px), 255, dtype=np.uint8))
    return GenerationRequest(
        prompt="a test image",
        seed=0,
        diffusion=DiffusionParams(num_steps=1, strength=1.0),
        init_image=gray if info.is_inpainting else None,
        mask_image=mask if info.is_inpainting else None,
    )


def _load_failed(error: BaseException) -> ipc.LoadFailed:
    if isinstance(error, DiffserveError):
        return ipc.LoadFailed(code=error.code, message=error.message)
    logger.error("the model could not be loaded", exc_info=error)
    return ipc.LoadFailed(code=ModelLoadError.default_code, message=f"{type(error).__name__}: {error}")


TICKS_KEPT: Final = 1000
TIMES_USUAL: Final = 10.0
USUAL_SHARE: Final = 0.99


class Pulse:
    """Progress of the main thread.

    Args:
        least_s: Shortest time after which a tick may count as hanging.

    Attributes:
        num_ticks: Number of finished ticks.
    """

    def __init__(self, least_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_ticks = 0
        self.least_s = least_s
        self._clock = clock
        self._trial_s = 0.0
        self._usual: deque[float] = deque(maxlen=TICKS_KEPT)  # seconds of a tick at scale 1
        self._running: tuple[float, float] | None = None  # since when, at what scale; replaced whole

    @property
    def running_s(self) -> float:
        """Seconds that the running tick has taken, 0 between two."""
        running = self._running
        return 0.0 if running is None else self._clock() - running[0]

    @property
    def patience_s(self) -> float:
        """Return the seconds after which the running tick counts as hanging.

        This is the largest of ``least_s``, ten times the 99th percentile of ticks, and ten times the trial image. The
        latter two grow with the scale of the tick.
        """
        running = self._running
        scale = 1.0 if running is None else running[1]
        usual = sorted(tuple(self._usual))
        usual_s = usual[int(USUAL_SHARE * (len(usual) - 1))] if usual else 0.0
        return max(self.least_s, TIMES_USUAL * scale * max(usual_s, self._trial_s))

    @contextmanager
    def ticking(self, scale: float = 1.0) -> Iterator[None]:
        """Time a tick; ``scale`` is how much longer it may take than one at the model's native size."""
        started_s = self._clock()
        self._running = started_s, max(1.0, scale)
        try:
            yield
        finally:
            self._running = None
            self._usual.append((self._clock() - started_s) / max(1.0, scale))
            self.num_ticks += 1

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Time the trial image, which counts for all later ticks."""
        started_s = self._clock()
        yield
        self._trial_s = self._clock() - started_s


if __name__ == "__main__":
    sys.exit(main())
