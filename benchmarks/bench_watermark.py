"""Watermark benchmark: cost, visibility, robustness and false positives.

    python benchmarks/bench_watermark.py

Times are medians of turns: a PNG of 512 x 512 with the mark and without, and the mark alone, compared with one image of
that size by the embedded model. Photographs are simulated as colors with their spectrum, noise as itself. One JSON
document to stdout and to results/.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import typer
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bench_preview import in_turns
from benchmarks.report import default_path, head, summary, write
from diffserve import Engine, GenerationRequest
from diffserve.api.types import Picture
from diffserve.media.images import encode_image, stretch
from diffserve.media.watermark import detect, embed

SIDE_PX: Final = 512
NUM_NOISE: Final = 500
NUM_PHOTOS: Final = 200
MARKED: Final = 40
Change = Callable[[Picture], Picture]


def photo_like(seed: int, side_px: int) -> Picture:
    """Generate an image with the color correlation and the falling spectrum of photographs."""
    rng, steps = np.random.default_rng(seed), np.fft.fftfreq(side_px)
    falls = np.maximum(np.hypot(*np.meshgrid(steps, steps)), 1 / side_px)[..., None]
    noise = np.fft.fft2(rng.normal(size=(side_px, side_px, 3)), axes=(0, 1)) / falls
    waves = np.fft.ifft2(noise, axes=(0, 1)).real @ (0.4 * np.eye(3) + 0.2)
    return Picture.from_array((waves / waves.std() * 55 + rng.uniform(80, 170)).clip(0, 255).astype(np.uint8))


def saved(picture: Picture, kind: str, quality: int) -> Picture:
    """Return ``picture`` after encoding as JPEG or WebP."""
    file = BytesIO()
    Image.fromarray(picture.array).save(file, kind, quality=quality)
    return Picture.from_array(np.asarray(Image.open(file).convert("RGB")))


CHANGES: Final[dict[str, Change]] = {
    "png": lambda picture: picture,
    "jpeg 90": lambda picture: saved(picture, "JPEG", 90),
    "jpeg 80": lambda picture: saved(picture, "JPEG", 80),
    "jpeg 70": lambda picture: saved(picture, "JPEG", 70),
    "webp 80": lambda picture: saved(picture, "WEBP", 80),
    "jpeg 80, webp 80": lambda picture: saved(saved(picture, "JPEG", 80), "WEBP", 80),
    "resized to 90 %": lambda picture: stretch(picture, picture.width_px * 9 // 10, picture.height_px * 9 // 10),
}


def outlived(side_px: int) -> dict[str, Any]:
    """Count the marked images of a size in which the mark is detected after each change, and its visibility."""
    pictures = [photo_like(seed, side_px) for seed in range(MARKED)]
    marked = [embed(picture, "generated") for picture in pictures]
    pairs = zip(marked, pictures, strict=True)
    errors = [float(((image.array.astype(float) - original.array) ** 2).mean()) for image, original in pairs]
    detected = {name: sum(detect(change(image)) is not None for image in marked) for name, change in CHANGES.items()}
    psnr_db = [10 * float(np.log10(255**2 / error)) for error in errors]
    return {"side_px": side_px, "of": MARKED, "found": detected, "psnr_db": summary(psnr_db)}


def unmarked() -> Iterator[tuple[str, Picture]]:
    """Yield images without a mark."""
    for seed in range(NUM_NOISE):
        pixels = np.random.default_rng(seed).integers(0, 256, (SIDE_PX, SIDE_PX, 3), dtype=np.uint8)
        yield "noise", Picture.from_array(pixels)
    for seed in range(1000, 1000 + NUM_PHOTOS):
        yield "photographs", photo_like(seed, SIDE_PX)


def main(
    rounds: Annotated[int, typer.Option(help="Rounds, after a warm-up round.")] = 41,
    out: Annotated[Path | None, typer.Option(help="File for the JSON results.")] = None,
) -> None:
    """Measure, and print one JSON document as the last line of stdout."""
    engine = Engine.from_pretrained("embedded")
    document = head("watermark", "embedded", engine.info)
    request = GenerationRequest(prompt="a red fox on snow", seed=1, width_px=SIDE_PX, height_px=SIDE_PX)
    started_s = time.perf_counter()
    engine.generate(request)
    painted_s = time.perf_counter() - started_s
    document["command"] = f"python benchmarks/bench_watermark.py --rounds {rounds}"
    picture = photo_like(0, SIDE_PX)
    calls: dict[str, Callable[[], Any]] = {
        "png": lambda: encode_image(picture),
        "marked png": lambda: encode_image(embed(picture, "generated")),
        "mark": lambda: embed(picture, "generated"),
        "detect": lambda: detect(picture),
    }
    times = in_turns(calls, rounds)
    document["ms"] = {name: summary(values) for name, values in times.items()}
    document["painted_s"] = round(painted_s, 3)
    document["share_of_request"] = round(statistics.median(times["mark"]) / (1e3 * painted_s), 5)
    document["outlived"] = [outlived(side_px) for side_px in (SIDE_PX, 128)]
    wrong = {"noise": 0, "photographs": 0}
    for kind, image in unmarked():
        wrong[kind] += detect(image) is not None
    document["false_positives"] = {
        "noise": [wrong["noise"], NUM_NOISE],
        "photographs": [wrong["photographs"], NUM_PHOTOS],
    }
    write(document, out or default_path(document))
    print(json.dumps(document))


if __name__ == "__main__":
    typer.run(main)
