"""A file as an answer, read in threads as fast as it is taken."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import BinaryIO, Final

from starlette.responses import Response, StreamingResponse

from diffserve.service.threads import FILES

CHUNK_BYTES: Final = 256 * 1024
HEADERS: Final = {"Content-Security-Policy": "default-src 'none'; sandbox"}


def send_file(file: BinaryIO, num_bytes: int, media_type: str, headers: dict[str, str]) -> Response:
    """The open ``file``, which is closed then."""
    headers = {"Content-Length": str(num_bytes), **HEADERS, **headers}
    return StreamingResponse(_chunks(file), headers=headers, media_type=media_type)


async def _chunks(file: BinaryIO) -> AsyncIterator[bytes]:
    with file:
        while chunk := await FILES.run(file.read, CHUNK_BYTES):
            yield chunk
