"""Process of an experiment: ``python -m diffserve.experiments.served.process --fd N``.

It leaves the cores to the engines: it has a low priority and a single thread (``OMP_NUM_THREADS``, set by the server).
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from diffserve.api.errors import DiffserveError
from diffserve.experiments.run import SweepProgress
from diffserve.experiments.served.engine import Connection, ServedEngine, ServerGoneError
from diffserve.experiments.served.messages import Advanced, Begin, Over
from diffserve.experiments.served.run import run_served
from diffserve.processes import leave_stopping_to_parent

NICENESS: Final = 5
DISK: Final = "the results cannot be stored; free some disk space of the server."
OTHER: Final = "it was begun by another version of the server or with another model; start it again."
WORDS: Final = {"painting": "generating"}
"""Phases as the API calls them, where the command has another word."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one experiment for the server at the other end of the socket."""
    parser = argparse.ArgumentParser(prog="diffserve-experiment", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="the inherited socket to the server")
    options = parser.parse_args(arguments)
    leave_stopping_to_parent()
    os.nice(NICENESS)
    with socket.socket(fileno=options.fd) as end:
        connection = Connection(end)
        try:
            connection.send(_run(connection))
        except ServerGoneError:
            return 0
    return 0


def _run(connection: Connection) -> Over:
    begin = connection.receive()
    assert isinstance(begin, Begin)

    def tell(now: SweepProgress, num_images: int) -> None:
        phase = WORDS.get(now.phase, now.phase)
        connection.send(Advanced(phase=phase, rows_done=now.rows_done, num_rows=now.num_rows, num_images=num_images))

    try:
        run_served(ServedEngine(connection, begin), begin.plan, Path(begin.folder), tell, connection.send)
    except ServerGoneError:
        raise
    except OSError as error:
        return Over(code=DiffserveError.default_code, message=DISK, trace=str(error))
    except DiffserveError as error:
        message = error.message
        if error.param == "output":  # that message names a path of the server
            message = DISK if message.startswith("cannot write") else OTHER
        return Over(code=error.code, message=message, trace=error.message)
    except Exception:
        return Over(code=DiffserveError.default_code, message="internal server error.", trace=traceback.format_exc())
    return Over()


if __name__ == "__main__":
    sys.exit(main())
