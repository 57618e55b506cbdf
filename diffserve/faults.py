"""Fault injection for tests of real processes, by the environment variable ``DIFFSERVE_FAULTS``."""

from __future__ import annotations

import os
import re
import signal
from typing import Final, NamedTuple

from diffserve.api.errors import ConfigError

FAULTS_VARIABLE: Final = "DIFFSERVE_FAULTS"
"""Faults with commas between them, such as ``unet.sticky@20,kill.job_claimed@2``.

``unet.KIND@N`` counts UNet calls from 1 once the engine is ready. error: call N raises. sticky, broken: call N and all
later ones raise CUDA's message of a failed assertion, or an unknown error. hang: call N never returns.
``kill.POINT@N`` sends SIGKILL to the process that reaches ``POINT`` for the Nth time, be it a server or its engine. The
variable is read when a process starts to serve.
"""

KINDS: Final = ("error", "sticky", "broken", "hang")

SERVER_POINTS: Final = (
    "job_inserted",  # its row is written but not committed
    "job_added",  # its row is on the disk, and the client has no answer
    "job_claimed",
    "capture_written",  # its file has its temporary name
    "capture_renamed",
    "capture_read",
    "result_written",  # its file has its temporary name
    "result_renamed",  # the row still says that the job is running
    "job_finished",  # the captures are not removed
    "captures_removed",
    "job_released",
    "job_drained",
    "job_deleted",  # its result is not removed
)
ENGINE_POINTS: Final = ("engine_stepped", "engine_captured", "engine_painted")
"""After a step, before a captured state is sent, and before a finished image is sent."""

FORM: Final = re.compile(rf"(unet)\.({'|'.join(KINDS)})@([1-9]\d{{0,8}})|(kill)\.([a-z_]+)@([1-9]\d{{0,8}})")


class Fault(NamedTuple):
    """A fault of ``place``, "unet" or "kill": of the kind or at the point ``name``, at the call or arrival ``at``."""

    place: str
    name: str
    at: int


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Parse the faults in ``text``. Raises ConfigError for an invalid one."""
    faults = []
    for word in filter(None, text.replace(" ", "").split(",")):
        match = FORM.fullmatch(word)
        if match is None:
            kinds = ", ".join(KINDS)
            message = f"{FAULTS_VARIABLE} holds {word!r}; a fault is unet.KIND@CALL, KIND of {kinds}, or kill.POINT@N."
            raise ConfigError(message)
        place, name, at = filter(None, match.groups())
        if place == "kill" and name not in (*SERVER_POINTS, *ENGINE_POINTS):
            points = ", ".join((*SERVER_POINTS, *ENGINE_POINTS))
            raise ConfigError(f"{FAULTS_VARIABLE} holds {word!r}; the points are {points}.")
        faults.append(Fault(place, name, int(at)))
    return tuple(faults)


_arrivals_left: dict[str, int] = {}
"""How many arrivals at each point are left until the process is killed."""


def install_kills() -> None:
    """Set the points of ``DIFFSERVE_FAULTS`` at which this process kills itself.

    Raises:
        ConfigError: The variable is invalid.
    """
    faults = parse_faults(os.environ.get(FAULTS_VARIABLE, ""))
    _arrivals_left.update({fault.name: fault.at for fault in faults if fault.place == "kill"})


def reach(point: str) -> None:
    """Kill this process if a fault says so; ``point`` is one of ``SERVER_POINTS`` and ``ENGINE_POINTS``."""
    if point in _arrivals_left:
        _arrivals_left[point] -= 1
        if _arrivals_left[point] <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
