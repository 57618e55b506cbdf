"""Load generators: requests sent on schedule (open loop), and clients that wait for responses (closed loop).

Plain sockets, one connection a request: what is measured is the server, as little as possible of the client.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

GENERATIONS = "/v1/images/generations"
HANG_UP_S = 600.0
REFUSED_AGAIN_S = 0.05


@dataclass(frozen=True)
class Answer:
    """Response to a request; ``status`` is 0 if the connection broke.

    Times are in seconds, ``started_s`` on the common clock.
    """

    status: int
    started_s: float
    seconds: float
    retry_after_s: int | None = None

    @property
    def ended_s(self) -> float:
        """End of the request on the common clock."""
        return self.started_s + self.seconds


async def ask(url: str, body: dict[str, Any], *, key: str = "load", path: str = GENERATIONS) -> Answer:
    """Send ``body`` and wait for the whole answer."""
    started_s = time.perf_counter()
    parts = urlsplit(url)
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    try:
        async with asyncio.timeout(HANG_UP_S):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 22)
            try:
                writer.write(head.encode() + content)
                response_head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                while await reader.read(1 << 20):
                    pass
            finally:
                writer.close()
    except (OSError, asyncio.IncompleteReadError, TimeoutError):
        return Answer(0, started_s, time.perf_counter() - started_s)
    lines = response_head.split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
    retry_after_s = int(headers["retry-after"]) if "retry-after" in headers else None
    return Answer(int(lines[0].split()[1]), started_s, time.perf_counter() - started_s, retry_after_s)


async def flood(send: Callable[[int], Awaitable[Answer]], *, rate_per_s: float, seconds: float) -> list[Answer]:
    """Call ``send(number)`` at ``rate_per_s`` for ``seconds``; return all responses."""
    started_s = time.perf_counter()
    sent: list[asyncio.Future[Answer]] = []
    while (due_s := started_s + len(sent) / rate_per_s) < started_s + seconds:
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        sent.append(asyncio.ensure_future(send(len(sent))))
    return list(await asyncio.gather(*sent))


async def saturate(send: Callable[[int], Awaitable[Answer]], *, num_workers: int, seconds: float) -> list[Answer]:
    """Keep ``num_workers`` requests in flight for ``seconds``; a rejected request is repeated after a short pause."""
    until_s = time.perf_counter() + seconds
    answers: list[Answer] = []

    async def work(worker: int) -> None:
        number = worker
        while time.perf_counter() < until_s:
            answer = await send(number)
            answers.append(answer)
            number += num_workers
            if answer.status != 200:
                await asyncio.sleep(REFUSED_AGAIN_S)

    await asyncio.gather(*(work(worker) for worker in range(num_workers)))
    return answers


def goodput(answers: Sequence[Answer], from_s: float, until_s: float) -> float:
    """Compute the images per second between two clock readings."""
    painted = sum(answer.status == 200 and from_s <= answer.ended_s < until_s for answer in answers)
    return painted / (until_s - from_s)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which ``share`` of ``values`` lie; 0 for no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
