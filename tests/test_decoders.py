"""Image decoder processes: limits of time and memory, cancellation, and replacement of crashed processes."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Iterator
from io import BytesIO

import numpy as np
import psutil
import pytest
from PIL import Image

from diffserve.api.errors import InvalidRequest
from diffserve.api.types import Picture
from diffserve.media import decoder_process, decoders, images
from diffserve.media.decoders import Decoders, ImageDecoder
from diffserve.media.provenance import examine
from tests.image_bombs import scans

EXIT_TIMEOUT_S = 30.0


def file_of(picture: Picture) -> bytes:
    return images.encode_image(picture, infotext="a fox\nSteps: 5, Sampler: DDIM, Seed: 1")


def noise(side_px: int = 64, channels: int = 3) -> Picture:
    return Picture.from_array(np.random.default_rng(0).integers(0, 256, (side_px, side_px, channels), dtype=np.uint8))


def transparent_file(side_px: int = 64) -> bytes:
    file = BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (side_px, side_px, 4), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def decoder() -> Iterator[ImageDecoder]:
    decoder = ImageDecoder()
    yield decoder
    decoder.close()


def process_of(decoder: ImageDecoder) -> psutil.Process:
    decoder.decode_image(file_of(noise(8)))
    assert decoder._process is not None
    return psutil.Process(decoder._process.pid)


def spin(decoder: ImageDecoder) -> None:
    """Decode a file that takes minutes to decode."""
    decoder.decode_image(slow_file())


def decode_many(decoder: ImageDecoder, num_files: int) -> None:
    file = file_of(noise(512))
    for _ in range(num_files):
        decoder.decode_image(file)


def slow_file() -> bytes:
    """Return a file that passes the structure checks only if they are disabled."""
    return scans(4096, 100_000)


@pytest.fixture
def slow_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start decoder processes with the structure checks disabled."""
    program = (
        "import sys; from diffserve.media import image_structure, decoder_process; "
        "image_structure.MIN_SCANS = image_structure.MAX_SCANS = image_structure.MAX_SEGMENTS = 10**9; "
        "sys.exit(decoder_process.main())"
    )
    monkeypatch.setattr(decoders, "COMMAND", ("-c", program))


def test_a_decoder_process_returns_the_same_results_as_direct_calls(decoder: ImageDecoder) -> None:
    file, transparent = file_of(noise()), transparent_file()
    assert decoder.decode_image(file) == images.decode_image(file)
    assert decoder.decode_mask(transparent) == images.decode_mask(transparent)
    assert decoder.decode_with_mask(transparent) == images.decode_with_mask(transparent)
    assert decoder.decode_with_mask(file) == (images.decode_image(file), None)
    assert decoder.read_infotext(file) == images.read_infotext(file)
    assert decoder.read_infotext(transparent) is None
    assert decoder.has_transparency(transparent)
    assert not decoder.has_transparency(file)
    assert decoder.examine(file) == examine(file)


def test_a_decoder_process_raises_the_same_errors_as_direct_calls(decoder: ImageDecoder) -> None:
    for data in (b"GIF89a", b"\x89PNG\r\n\x1a\n", scans(64, 101)):
        with pytest.raises(InvalidRequest) as expected:
            images.decode_image(data, name="controlnets[1].image")
        with pytest.raises(InvalidRequest) as refused:
            decoder.decode_image(data, name="controlnets[1].image")
        facts = [(error.value.message, error.value.param, error.value.code) for error in (expected, refused)]
        assert facts[0] == facts[1]


def test_the_process_is_reused_is_small_and_inherits_no_secrets(
    decoder: ImageDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIFFSERVE_API_KEY", "a secret of the server")
    process = process_of(decoder)
    assert process_of(decoder).pid == process.pid
    assert "DIFFSERVE_API_KEY" not in process.environ()
    assert process.memory_info().rss < 100_000_000
    assert process.rlimit(psutil.RLIMIT_AS) == (decoder_process.MEMORY_BYTES, decoder_process.MEMORY_BYTES)


def test_a_crashed_process_is_replaced(decoder: ImageDecoder) -> None:
    first = process_of(decoder)
    first.send_signal(signal.SIGSEGV)
    first.wait(EXIT_TIMEOUT_S)
    assert decoder.decode_image(file_of(noise())) == noise()
    assert process_of(decoder).pid != first.pid


def test_the_largest_image_fits_into_the_memory_limit(decoder: ImageDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    file = BytesIO()
    Image.new("RGBA", (4096, 4096), (1, 2, 3, 4)).save(file, "PNG")
    picture, mask = decoder.decode_with_mask(file.getvalue())
    assert (picture.width_px, mask is not None) == (4096, True)
    decoder.close()
    program = (
        "import sys; from diffserve.media import decoder_process; decoder_process.MEMORY_BYTES = 300 << 20; "
        "sys.exit(decoder_process.main())"
    )
    monkeypatch.setattr(decoders, "COMMAND", ("-c", program))
    with pytest.raises(InvalidRequest, match=r"damaged or too large|too much memory"):
        decoder.decode_with_mask(file.getvalue())
    assert decoder.decode_image(file_of(noise())) == noise(), "the process continues"


@pytest.mark.slow
def test_the_cpu_time_of_a_request_is_shared_by_its_files(
    slow_process: None, decoder: ImageDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoders, "CPU_S", 1.0)
    decoder.begin()
    with pytest.raises(InvalidRequest, match="takes more than 1 s") as refused:
        spin(decoder)
    assert (refused.value.param, refused.value.code) == ("image", "image_too_complex")
    with pytest.raises(InvalidRequest, match="takes more than 1 s"):
        decode_many(decoder, 10_000)
    decoder.begin()
    assert decoder.decode_image(file_of(noise())) == noise()


@pytest.mark.slow
def test_cancellation_frees_the_decoder_immediately(slow_process: None) -> None:
    async def run() -> None:
        pool = Decoders(1)
        spinning = asyncio.create_task(pool.run("a", spin))
        waiting = asyncio.create_task(pool.run("b", lambda decoder: decoder.decode_image(file_of(noise()))))
        await asyncio.sleep(2.0)
        assert not waiting.done()
        started_s = time.monotonic()
        spinning.cancel()
        assert await waiting == noise()
        assert time.monotonic() - started_s < 5.0, "including the start of a new process"
        assert spinning.cancelled()
        pool.close()

    asyncio.run(run())


def test_a_decoder_is_not_reused_while_a_request_that_was_cancelled_twice_still_uses_it() -> None:
    async def run() -> list[ImageDecoder]:
        pool, used, may_end = Decoders(2), list[ImageDecoder](), threading.Event()

        def read(decoder: ImageDecoder) -> None:
            used.append(decoder)
            may_end.wait(EXIT_TIMEOUT_S)

        first = asyncio.create_task(pool.run("a", read))
        for _ in range(3):
            await asyncio.sleep(0.05)
            first.cancel()
        await asyncio.sleep(0.05)
        second = asyncio.create_task(pool.run("b", read))
        await asyncio.sleep(0.05)
        may_end.set()
        await asyncio.gather(first, second, return_exceptions=True)
        pool.close()
        return used

    first_decoder, second_decoder = asyncio.run(run())
    assert first_decoder is not second_decoder


@pytest.mark.slow
def test_slow_files_of_one_client_do_not_block_other_clients(slow_process: None) -> None:
    async def run() -> None:
        pool = Decoders(2)
        await pool.run("b", lambda decoder: decoder.decode_image(file_of(noise())))  # warm
        slow = [asyncio.create_task(pool.run("a", spin)) for _ in range(4)]
        await asyncio.sleep(0.5)
        started_s = time.monotonic()
        for _ in range(5):
            assert await pool.run("b", lambda decoder: decoder.decode_image(file_of(noise()))) == noise()
        assert time.monotonic() - started_s < 5.0
        assert not any(task.done() for task in slow)
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        pool.close()

    asyncio.run(run())


def test_the_process_exits_when_the_parent_closes_the_connection(decoder: ImageDecoder) -> None:
    process = process_of(decoder)
    assert decoder._connection is not None
    decoder._connection.close()
    process.wait(EXIT_TIMEOUT_S)
