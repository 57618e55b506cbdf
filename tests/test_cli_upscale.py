"""Tests of ``diffserve upscale`` on this machine and on a server."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from diffserve.api.types import Picture
from diffserve.media.images import encode_image, read_infotext
from diffserve.media.infotext import parse_infotext
from diffserve.media.provenance import examine
from diffserve.media.upscaling import FLATTENED
from diffserve.models.upscalers import EMBEDDED_UPSCALER
from tests.service.server import RunningServer
from tests.test_cli import Run
from tests.test_cli import run as run
from tests.upscalers import write_upscaler

INFOTEXT = "a fox\nSteps: 2, Sampler: Euler, CFG scale: 3, Seed: 5, Size: 48x32, Model: tiny"


@pytest.fixture
def image(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=np.uint8)
    file = tmp_path / "fox.png"
    file.write_bytes(encode_image(Picture.from_array(pixels), infotext=INFOTEXT))
    return file


def size_of(file: Path) -> tuple[int, int]:
    with Image.open(file) as opened:
        return opened.size


def test_the_shipped_upscaler_enlarges_four_times_and_keeps_the_parameters(run: Run, image: Path) -> None:
    done = run("upscale", image)
    assert done.code == 0, done.err
    file = image.with_name("fox-upscaled.png")
    assert "192x128, upscaled by embedded-4x" in done.out
    assert size_of(file) == (192, 128)
    infotext = parse_infotext(read_infotext(file.read_bytes()) or "")
    assert (infotext.prompt, infotext.fields["Seed"]) == ("a fox", "5")
    assert infotext.fields["Upscale"] == f"{EMBEDDED_UPSCALER} x4"
    assert examine(file.read_bytes()).is_generated
    again = run("upscale", image)
    assert "fox-upscaled-2.png" in again.out, "a file is not replaced"


def test_options_choose_upscaler_scale_size_and_format(run: Run, image: Path, tmp_path: Path) -> None:
    write_upscaler(tmp_path / "upscalers" / "small.safetensors")
    folder = ("--upscaler-dir", tmp_path / "upscalers")
    for words, size in (
        (("--upscaler", "small", *folder), (96, 64)),
        (folder, (96, 64)),
        (("--upscaler", "lanczos", "--scale", "1.5"), (72, 48)),
        (("--upscaler", "nearest", "--size", "64x64"), (64, 64)),
    ):
        done = run("upscale", image, "-o", "large.webp", "--overwrite", *words)
        assert done.code == 0, done.err
        assert size_of(tmp_path / "large.webp") == size
    listed = run("list", "upscalers", *folder)
    assert listed.out.split() == ["small", EMBEDDED_UPSCALER, "lanczos", "nearest"]


def test_a_note_says_that_transparency_was_removed(run: Run, image: Path, tmp_path: Path) -> None:
    with Image.open(image) as opened:
        opened.putalpha(0)
        opened.save(tmp_path / "clear.png")
    done = run("upscale", "clear.png", "--upscaler", "nearest")
    assert done.code == 0
    assert done.err == f"note: IMAGE {FLATTENED}\n"
    with Image.open(tmp_path / "clear-upscaled.png") as opened:
        assert (opened.mode, opened.getextrema()) == ("RGB", ((255, 255),) * 3)
    assert run("upscale", image, "--upscaler", "nearest").err == ""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("nothing.png",), "nothing.png"),
        (("fox.png", "--upscaler", "warp"), "there is no upscaler 'warp'; the known ones are"),
        (("fox.png", "--scale", "99"), "scale is 99; it must be more than 0 and at most 16."),
        (("fox.png", "--scale", "2", "--size", "64x64"), "scale and size are both given"),
        (("fox.png", "--upscaler-dir", "none"), "there is no such folder"),
        (("fox.png", "-o", "a.gif"), "no known file extension"),
        (("text.png",), "not a PNG, JPEG or WebP"),
    ],
)
def test_mistakes_are_one_line_and_write_no_file(
    run: Run, image: Path, tmp_path: Path, words: tuple[str, ...], expected: str
) -> None:
    (tmp_path / "text.png").write_text("a text")
    before = set(tmp_path.iterdir())
    done = run("upscale", *words)
    assert done.code == 2
    assert expected in done.err
    assert done.err.count("\n") == 1
    assert set(tmp_path.iterdir()) == before


def test_filters_load_no_torch_and_write_to_standard_output(image: Path) -> None:
    code = (
        "import sys; from diffserve.cli import main\n"
        f"try: main(['upscale', {str(image)!r}, '--upscaler', 'lanczos', '-o', '-'])\n"
        "finally: assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120, check=True)
    assert Image.open(io.BytesIO(done.stdout)).size == (96, 64)
    assert b"96x64" in done.stderr


@pytest.mark.slow
def test_a_server_upscales_instead(run: Run, image: Path, server: RunningServer, tmp_path: Path) -> None:
    done = run("upscale", image, "--server", server.url, "--upscaler", EMBEDDED_UPSCALER, "-o", "large.png")
    assert done.code == 0, done.err
    assert size_of(tmp_path / "large.png") == (192, 128)
    refused = run("upscale", image, "--server", server.url, "--upscaler-dir", tmp_path)
    assert "leave --upscaler-dir or the server out" in refused.err
