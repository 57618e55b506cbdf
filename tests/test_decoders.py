"""Decoders: processes that read image files, limited in time and memory, and replaced when they end."""

from __future__ import annotations

import asyncio
import signal
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
from diffserve.media.decoders import Decoder, Decoders
from diffserve.media.provenance import examine
from tests.image_bombs import scans

SOON_S = 30.0


def file_of(picture: Picture) -> bytes:
    return images.encode_image(picture, infotext="a fox\nSteps: 5, Sampler: DDIM, Seed: 1")


def noise(side_px: int = 64, channels: int = 3) -> Picture:
    return Picture.from_array(np.random.default_rng(0).integers(0, 256, (side_px, side_px, channels), dtype=np.uint8))


def transparent_file(side_px: int = 64) -> bytes:
    file = BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (side_px, side_px, 4), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def decoder() -> Iterator[Decoder]:
    decoder = Decoder()
    yield decoder
    decoder.close()


def process_of(decoder: Decoder) -> psutil.Process:
    decoder.decode_image(file_of(noise(8)))
    assert decoder._process is not None
    return psutil.Process(decoder._process.pid)


def spin(decoder: Decoder) -> None:
    """Decode a file that takes minutes."""
    decoder.decode_image(slow_file())


def decode_many(decoder: Decoder, num_files: int) -> None:
    file = file_of(noise(512))
    for _ in range(num_files):
        decoder.decode_image(file)


def slow_file() -> bytes:
    """A file that the checks of its structure let pass only where they are switched off."""
    return scans(4096, 100_000)


@pytest.fixture
def slow_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start processes that decode files of any number of scans."""
    program = (
        "import sys; from diffserve.media import image_structure, decoder_process; "
        "image_structure.MIN_SCANS = image_structure.MAX_SCANS = image_structure.MAX_SEGMENTS = 10**9; "
        "sys.exit(decoder_process.main())"
    )
    monkeypatch.setattr(decoders, "COMMAND", ("-c", program))


def test_another_process_reads_what_this_one_would(decoder: Decoder) -> None:
    file, see_through = file_of(noise()), transparent_file()
    assert decoder.decode_image(file) == images.decode_image(file)
    assert decoder.decode_mask(see_through) == images.decode_mask(see_through)
    assert decoder.decode_with_mask(see_through) == images.decode_with_mask(see_through)
    assert decoder.decode_with_mask(file) == (images.decode_image(file), None)
    assert decoder.read_infotext(file) == images.read_infotext(file)
    assert decoder.read_infotext(see_through) is None
    assert decoder.examine(file) == examine(file)


def test_a_refusal_of_the_process_is_the_one_of_this_process(decoder: Decoder) -> None:
    for data in (b"GIF89a", b"\x89PNG\r\n\x1a\n", scans(64, 101)):
        with pytest.raises(InvalidRequest) as expected:
            images.decode_image(data, name="controlnets[1].image")
        with pytest.raises(InvalidRequest) as refused:
            decoder.decode_image(data, name="controlnets[1].image")
        facts = [(error.value.message, error.value.param, error.value.code) for error in (expected, refused)]
        assert facts[0] == facts[1]


def test_the_process_stays_warm_and_small_and_knows_no_secrets(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIFFSERVE_API_KEY", "a secret of the server")
    process = process_of(decoder)
    assert process_of(decoder).pid == process.pid
    assert "DIFFSERVE_API_KEY" not in process.environ()
    assert process.memory_info().rss < 100_000_000
    assert process.rlimit(psutil.RLIMIT_AS) == (decoder_process.MEMORY_BYTES, decoder_process.MEMORY_BYTES)


def test_a_process_that_crashes_is_an_error_of_the_file_and_replaced(decoder: Decoder) -> None:
    first = process_of(decoder)
    first.send_signal(signal.SIGSEGV)
    first.wait(SOON_S)
    assert decoder.decode_image(file_of(noise())) == noise()
    assert process_of(decoder).pid != first.pid


def test_the_largest_images_fit_into_the_memory_and_larger_needs_are_refused(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert decoder.decode_image(file_of(noise())) == noise(), "the process goes on"


@pytest.mark.slow
def test_a_request_has_its_cpu_time_for_all_its_files(
    slow_process: None, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
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
def test_cancelled_work_frees_its_place_and_its_process_at_once(slow_process: None) -> None:
    async def run() -> None:
        pool = Decoders(1)
        spinning = asyncio.create_task(pool.run("a", spin))
        waiting = asyncio.create_task(pool.run("b", lambda decoder: decoder.decode_image(file_of(noise()))))
        await asyncio.sleep(2.0)
        assert not waiting.done()
        started_s = time.monotonic()
        spinning.cancel()
        assert await waiting == noise()
        assert time.monotonic() - started_s < 5.0, "with the start of a new process"
        assert spinning.cancelled()
        pool.close()

    asyncio.run(run())


@pytest.mark.slow
def test_slow_files_of_one_client_leave_a_place_for_others(slow_process: None) -> None:
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


def test_no_process_outlives_the_one_that_started_it(decoder: Decoder) -> None:
    process = process_of(decoder)
    assert decoder._connection is not None
    decoder._connection.close()
    process.wait(SOON_S)
