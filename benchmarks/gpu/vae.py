"""What decoding an image costs: by precision and layout of the weights, together or alone, whole or in tiles."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from benchmarks.device_timing import call_seconds
from benchmarks.gpu.worker import Bench
from diffserve.runtime import DiffusionModel
from diffserve.runtime.vae.vae import VAERunner

TILED_SIDES: Final = (1024, 1536, 2048)
QUICK_SIDES: Final = (128,)


def _latents(bench: Bench, model: DiffusionModel, count: int, side_px: int) -> torch.Tensor:
    cells = side_px // model.vae.factor
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randn((count, model.vae.latent_channels, cells, cells), generator=generator).to(bench.device)


def _milliseconds(bench: Bench, call: Callable[[], object], repeats: int = 3) -> float:
    return round(1e3 * statistics.median(call_seconds(call, bench.device, 1 if bench.quick else repeats)), 2)


def _peak_gb(bench: Bench, call: Callable[[], object]) -> float | None:
    """Gigabytes that ``call`` holds at most, beyond what is held before it."""
    if not bench.on_gpu:
        return None
    torch.cuda.reset_peak_memory_stats(bench.device)
    before = torch.cuda.memory_allocated(bench.device)
    call()
    return round((torch.cuda.max_memory_allocated(bench.device) - before) / 1e9, 3)


@torch.inference_mode()
def compare_decoders(bench: Bench, model: DiffusionModel, counts: Sequence[int]) -> dict[str, Any]:
    """Milliseconds an image, by precision, layout and number of images in a call, and the error against float32.

    The error is the norm of the difference over the norm, of one image.
    """
    names = ("float32",) if bench.quick else ("float32", "bfloat16", "float16")
    side_px = model.native_size[0]
    figures: dict[str, Any] = {
        "as_loaded": str(model.vae.dtype).removeprefix("torch."),
        "ms_per_image": {},
        "error": {},
    }
    expected = None
    for name in names:
        dtype = getattr(torch, name)
        for layout in ("contiguous_format", "channels_last"):
            network = copy.deepcopy(model.vae.network).to(dtype=dtype, memory_format=getattr(torch, layout))
            image = network.decode(_latents(bench, model, 1, side_px).to(dtype), return_dict=False)[0].float()
            expected = image if expected is None else expected
            key = f"{name} {layout.removesuffix('_format')}"
            figures["error"][key] = float((image - expected).norm() / expected.norm())
            for count in counts:
                latents = _latents(bench, model, count, side_px).to(dtype)
                taken_ms = _milliseconds(bench, lambda: network.decode(latents, return_dict=False))  # noqa: B023
                figures["ms_per_image"][f"{key} x{count}"] = round(taken_ms / count, 2)
    return figures


@torch.inference_mode()
def compare_tiles(bench: Bench, model: DiffusionModel) -> dict[str, Any]:
    """Milliseconds and gigabytes of decoding large images in one piece and in tiles of the first size that is tried."""
    runner: VAERunner = model.vae
    figures = {}
    for side_px in QUICK_SIDES if bench.quick else TILED_SIDES:
        latents = _latents(bench, model, 1, side_px)

        def in_one_piece(latents: torch.Tensor = latents) -> object:
            return runner.decode(latents)

        def in_tiles(latents: torch.Tensor = latents) -> object:
            return runner.decode_in_tiles(latents)

        figures[str(side_px)] = {
            name: {"ms": _milliseconds(bench, call, repeats=2), "peak_gb": _peak_gb(bench, call)}
            for name, call in (("one_piece", in_one_piece), ("tiles", in_tiles))
        }
    return figures
