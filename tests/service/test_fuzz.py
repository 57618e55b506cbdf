"""Mutated valid requests: no answer has a status of 500 or more, and no error is logged.

``TEST_MUTATIONS`` sets their number. The seed is fixed, and each mutation has its own.
"""

from __future__ import annotations

import json
import os
import random
import re
import socket
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.service.server import RunningServer

pytestmark = pytest.mark.slow

NUM_MUTATIONS = int(os.environ.get("TEST_MUTATIONS", "400"))
SEED = 12
NUM_CLIENTS = 8
ANSWER_S = 0.4  # many mutations are requests that never end
FORM = (
    '--b\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\nContent-Type: image/png\r\n\r\n'
    "hi\r\n--b--\r\n"
)
PAINT = (
    '{"prompt": "a fox", "size": "64x64", "num_inference_steps": 1, "n": 1, "seed": 7, "sampler": "ddim", "eta": 0.5}'
)
CHAT = '{"messages": [{"role": "user", "content": "a fox"}], "max_tokens": 2, "temperature": 0.5, "stop": ["x"]}'
RESPONSE = (
    '{"input": [{"role": "user", "content": [{"type": "input_text", "text": "a fox"}]}], "max_output_tokens": 2, '
    '"tool_choice": "none", "tools": [{"type": "image_generation", "size": "64x64", "num_inference_steps": 1}]}'
)
EVENT = '{"data": ["a fox", "x", null, 1], "fn_index": 12, "session_hash": "fuzz", "event_data": {"index": 1}}'
JSON = "application/json"


def request(line: str, body: str = "", media_type: str = JSON, extra: str = "") -> bytes:
    """Return one valid request."""
    length = f"Content-Type: {media_type}\r\nContent-Length: {len(body)}\r\n" if body else ""
    return f"{line} HTTP/1.1\r\nHost: localhost\r\n{length}{extra}\r\n{body}".encode()


def chunked(line: str, body: str) -> bytes:
    head = f"{line} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {JSON}\r\nTransfer-Encoding: chunked\r\n\r\n"
    return f"{head}{len(body):x}\r\n{body}\r\n0\r\n\r\n".encode()


GOOD = (
    request("GET /livez"),
    request("GET /v1/models"),
    request("GET /v1/models/embedded"),
    request("GET /openapi.json"),
    request("GET /metrics"),
    request("OPTIONS /v1/images/generations", extra="Origin: http://localhost:1\r\n"),
    request("POST /v1/images/generations", PAINT),
    request("POST /v1/images/generations", PAINT.replace("}", ', "stream": true, "partial_images": 1}')),
    request("POST /v1/images/generations", PAINT.replace("}", ', "prompt_rewriter": {"style": "embedded"}}')),
    chunked("POST /v1/images/generations", PAINT),
    request("POST /v1/images/generations/img-1/cancel"),
    request("POST /v1/chat/completions", CHAT),
    request("POST /v1/completions", '{"prompt": ["a", "b"], "max_tokens": 1, "n": 2, "logprobs": 1, "top_k": 3}'),
    request("POST /v1/prompts/rewrite", '{"prompt": "2 doggos", "n": 1, "seed": 3, "force": true}'),
    request("POST /v1/responses", RESPONSE),
    request("POST /v1/responses", RESPONSE.replace('"tool_choice": "none", ', "")),
    request("GET /v1/responses/resp_1/input_items?limit=3&order=asc"),
    request("DELETE /v1/responses/resp_1"),
    request("POST /v1/embeddings", '{"input": ["a fox", "a dog"], "dimensions": 8, "encoding_format": "base64"}'),
    request("POST /v1/embeddings", '{"input": [[1, 2], [3]], "model": "embedded"}'),
    request("GET /"),
    request("GET /config?deep_link=x"),
    request("GET /theme.css", extra="Accept-Encoding: gzip, br\r\n"),
    request("GET /static/img/logo.svg", extra="Range: bytes=0-10\r\nIf-None-Match: x\r\n"),
    request("GET /assets/nothing.js"),
    request("GET /gradio_api/info"),
    request("GET /gradio_api/file=/tmp/x.png", extra="Range: bytes=1-\r\n"),
    request("GET /gradio_api/heartbeat/fuzz"),
    request("GET /gradio_api/queue/data?session_hash=fuzz"),
    request("GET /gradio_api/upload_progress?upload_id=x"),
    request("POST /gradio_api/queue/join", EVENT),
    request("POST /gradio_api/queue/join?__theme=light", EVENT.replace("12", "5")),
    request("POST /gradio_api/run/predict", EVENT),
    request("POST /gradio_api/run/compare", EVENT.replace('"fn_index": 12, ', "")),
    request("POST /gradio_api/cancel", '{"session_hash": "fuzz", "fn_index": 5, "event_id": "x"}'),
    request("POST /gradio_api/reset", '{"event_id": "x"}'),
    request("POST /gradio_api/upload?upload_id=x", FORM, "multipart/form-data; boundary=b"),
)
ODD_VALUES = (
    *(
        b"null",
        b"true",
        b"-1",
        b"0",
        b"1e999",
        b"NaN",
        b"99999999999999999999",
        b'""',
        b"[]",
        b"{}",
        b'"\\ud800"',
        b"1.5",
    ),
    *(b'"\\u0000"', b'{"a": [[[]]]}', b'"' + b"a" * 3000 + b'"', b"[" * 50 + b"]" * 50, b'{"a": 1, "a": 2}', b"-0.0"),
)
ODD_BYTES = (
    *(
        b"\r\n",
        b"\n",
        b"\r",
        b"\0",
        b"\xff",
        b"%2f",
        b"%00",
        b"..",
        b":",
        b" ",
        b"\t",
        b"?",
        b"#",
        b"%",
        b"\xe2\x80\xae",
    ),
    *(b"\r\nContent-Length: 7\r\n", b"\r\nTransfer-Encoding: chunked\r\n", b"\r\nHost: evil\r\n", b"\r\n X: folded"),
    *(b"\r\nExpect: 100-continue\r\n", b"\r\nConnection: upgrade\r\nUpgrade: websocket\r\n", b"\r\nOrigin: null\r\n"),
    *(
        b"\r\nRange: bytes=0-1,3-4\r\n",
        b"\r\nX-Forwarded-Host: [\r\n",
        b"\r\nCookie: \xff=\xfe\r\n",
        b" HTTP/1.0\r\nX: ",
    ),
)


def flip(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]


def insert(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data))
    return data[:at] + chance.choice(ODD_BYTES) + data[at:]


def cut(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data))
    return data[:at] + data[at + chance.randrange(1, 20) :]


def repeat(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data))
    end = at + chance.randrange(1, 60)
    return data[:end] + data[at:end] * chance.choice((1, 2, 50)) + data[end:]


def splice(data: bytes, chance: random.Random) -> bytes:
    other = chance.choice(GOOD)
    return data[: chance.randrange(len(data))] + other[chance.randrange(len(other)) :]


def pipeline(data: bytes, chance: random.Random) -> bytes:
    return data + chance.choice(GOOD) * chance.randrange(1, 4)


def revalue(data: bytes, chance: random.Random) -> bytes:
    """Replace one JSON value and correct the content length, so that the request reaches a route."""
    head, separator, body = data.partition(b"\r\n\r\n")
    values = list(re.finditer(rb'(?<=[:\[,] )(?:"[^"]*"|-?[\d.]+|null|true|\[[^\]]*\])|(?<=\[)[^\],]+', body))
    if not values or b"chunked" in head:
        return insert(data, chance)
    place = chance.choice(values)
    body = body[: place.start()] + chance.choice(ODD_VALUES) + body[place.end() :]
    return re.sub(rb"Content-Length: \d+", b"Content-Length: %d" % len(body), head) + separator + body


MUTATIONS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    *(flip, insert, cut, repeat, splice, pipeline),
    *(revalue, revalue, revalue),
)


def mutant(number: int) -> bytes:
    """Return the mutated request with this number."""
    chance = random.Random(SEED * 1_000_003 + number)
    data = chance.choice(GOOD)
    for _ in range(chance.choice((1, 1, 2, 4))):
        data = chance.choice(MUTATIONS)(data, chance) or b"\r\n"
    return data


def answers(port: int, data: bytes) -> list[int]:
    """Return the statuses of the answers that arrive within a moment."""
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        try:
            connection.sendall(data)
            connection.settimeout(ANSWER_S)
            while len(received) < 1 << 20 and (part := connection.recv(65536)):
                received += part
        except (TimeoutError, ConnectionResetError, BrokenPipeError):
            pass
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", received)]


def test_no_mutated_request_causes_a_server_error(page_server: RunningServer) -> None:
    start, port = page_server.errors.stat().st_size, page_server.port
    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        replies = list(clients.map(lambda number: answers(port, mutant(number)), range(NUM_MUTATIONS)))
    counts = Counter(status for statuses in replies for status in statuses)
    failed = [number for number, statuses in enumerate(replies) if any(status >= 500 for status in statuses)]
    assert not failed, [(number, replies[number], mutant(number)[:300]) for number in failed[:5]]
    assert counts[200] > 0
    assert counts[400] > NUM_MUTATIONS // 10
    lines = page_server.errors.read_bytes()[start:].decode("utf-8", "replace").splitlines()
    records = [json.loads(line) for line in lines if line.startswith("{")]
    assert not [line for line in lines if "Traceback" in line][:3]
    assert not [record for record in records if record["level"] in ("error", "critical")][:3]
    assert not [record for record in records if record.get("status", 0) >= 500][:3]
    assert page_server.status("/readyz") == 200
