"""Image decoder process: ``python -m diffserve.media.decoder_process --fd N``.

The process handles one request after another until the parent closes the socket. Its memory is limited. A request that
exceeds its CPU time ends the process, even inside a C library.
"""

from __future__ import annotations

import argparse
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from diffserve.api.errors import InvalidRequest
from diffserve.api.types import Picture
from diffserve.media.images import decode_image, decode_mask, decode_with_mask, has_transparency, read_infotext
from diffserve.media.provenance import ProvenanceReport, examine
from diffserve.processes import frame_of, leave_stopping_to_parent, read_frame

MEMORY_BYTES: Final = 1 << 30
"""Limit of the address space. The largest accepted image needs half of it."""


class Function(NamedTuple):
    """Function that reads an image file, and the type of its result."""

    call: Callable[..., Any]
    answer: Any


FUNCTIONS: Final = {
    "decode_image": Function(decode_image, Picture),
    "decode_mask": Function(decode_mask, Picture),
    "decode_with_mask": Function(decode_with_mask, tuple[Picture, Picture | None]),
    "has_transparency": Function(has_transparency, bool),
    "read_infotext": Function(read_infotext, str | None),
    "examine": Function(examine, ProvenanceReport),
}


class DecodeRequest(msgspec.Struct, frozen=True):
    """Request to call ``function`` on the file ``data`` with ``options``, within ``cpu_s`` seconds of CPU time."""

    function: str
    data: bytes
    options: dict[str, Any]
    cpu_s: float


class Answer(msgspec.Struct, frozen=True, tag=True):
    """Result of a request: the return value as msgpack, and the CPU time used."""

    value: msgspec.Raw
    cpu_s: float


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """Error of a request: the fields of the InvalidRequest that was raised, and the CPU time used."""

    message: str
    param: str | None
    code: str
    cpu_s: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Handle requests until the parent closes the socket."""
    parser = argparse.ArgumentParser(prog="diffserve-decoder", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="the inherited socket to the parent")
    options = parser.parse_args(arguments)
    leave_stopping_to_parent()
    for kind, limit in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(kind, (limit, limit))
    decoder = msgspec.msgpack.Decoder(DecodeRequest)
    with socket.socket(fileno=options.fd) as connection:
        while (frame := read_frame(connection)) is not None:
            connection.sendall(frame_of(msgspec.msgpack.encode(_answer(decoder.decode(frame)))))
    return 0


def _answer(question: DecodeRequest) -> Answer | Refusal:
    started_s = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, question.cpu_s)  # SIGPROF has no handler and ends the process
    try:
        value = FUNCTIONS[question.function].call(question.data, **question.options)
        encoded = msgspec.msgpack.encode(value, enc_hook=str)  # Pillow returns PNG text as a subclass of str
        return Answer(msgspec.Raw(encoded), time.process_time() - started_s)
    except InvalidRequest as error:
        refusal = error
    except MemoryError:
        name = str(question.options.get("name", "image"))
        refusal = InvalidRequest(f"{name} needs too much memory to be read.", param=name, code="image_too_complex")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
    return Refusal(refusal.message, refusal.param, refusal.code, time.process_time() - started_s)


if __name__ == "__main__":
    sys.exit(main())
