"""Rows of the GPU suite on captures of unfinished images, reference images, and large images."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from msgspec.structs import replace
from safetensors.torch import save_file

from benchmarks.bench_captures import make_requests, share_percent
from benchmarks.bench_lora import learn_sizes
from benchmarks.bench_references import TOKENS, measure, measure_calls, same_bytes
from benchmarks.gpu.worker import Bench
from benchmarks.random_models import adapter_tensors, save_image_encoder
from diffserve.api import ipc
from diffserve.api.types import Captured, DiffusionParams, GenerationRequest, ImageFinished, new_request_id
from diffserve.engine import Engine
from diffserve.models.upscalers import RrdbShape
from diffserve.runtime import DiffusionModel, choose_device
from diffserve.runtime.footprint import meta_copy, plan_large_image
from diffserve.runtime.upscaling.network import Upscaler, build_network
from diffserve.settings.config import EngineConfig

PAIRS: Final = 6
EVERY_S: Final = 1.0
REFERENCE_ROWS: Final = 8
LARGE_PX: Final = 2048
RRDB: Final = RrdbShape(features=64, growth=32, num_blocks=23, num_doublings=2)
"""Shape of the published ESRGAN and Real-ESRGAN networks of scale 4."""

QUICK_RRDB: Final = RrdbShape(features=8, growth=4, num_blocks=1, num_doublings=2)


def captures(bench: Bench) -> None:
    """Throughput with a capture of every image each second against none, and images that continue from captures."""
    sd15 = bench.model("sd15")
    embedded = partial(Engine.from_pretrained, "embedded", device=str(bench.device))
    bench.point("embedded", lambda: _cost(bench, embedded(), 2 if bench.quick else 32), needs_s=40)
    bench.point(
        "sd15", lambda: _cost(bench, bench.engine(sd15, cuda_graphs=True), 2 if bench.quick else 32), needs_s=60
    )
    for name, settings in {"deterministic": {"deterministic": True}, "free": {}}.items():
        engine = partial(bench.engine, sd15, cuda_graphs=True, **settings)
        bench.point(f"continued-{name}", partial(_continue, bench, engine), needs_s=10)


def references(bench: Bench) -> None:
    """Eight rows with eight reference images against plain ones; bytes among neighbors and alone."""
    for name in ("sd15", "sdxl"):
        for kind in TOKENS:
            bench.point(f"{name}-{kind}", partial(_references, bench, name, kind), needs_s=15)
    bench.point("sd15-bytes", partial(_reference_bytes, bench), needs_s=10)


def large(bench: Bench) -> None:
    """SDXL at 2048 px in one piece and in tiles, with memory as planned and as used; an ESRGAN network of scale 4."""
    model = bench.model("sdxl")
    native_px = model.info.good_sizes[0][0]
    large_px = 2 * native_px if bench.quick else LARGE_PX
    untiled = GenerationRequest(
        prompt="a fox", seed=1, width_px=large_px, height_px=large_px, diffusion=_few_steps(bench)
    )
    bench.point("2048", partial(_large, bench, model, untiled, (large_px, large_px)), needs_s=20)
    hires = {"hires_scale": large_px / native_px, "tile_size": native_px, "hires_strength": 0.5}
    tiled = replace(untiled, width_px=native_px, height_px=native_px, diffusion=replace(_few_steps(bench), **hires))
    bench.point("1024-to-2048-tiles", partial(_large, bench, model, tiled, (large_px, large_px)), needs_s=30)
    bench.point("rrdb-512-to-2048", partial(_upscale, bench, 32 if bench.quick else 512), needs_s=10)


def _few_steps(bench: Bench) -> DiffusionParams:
    return DiffusionParams(sampler="dpmpp_2m", num_steps=2 if bench.quick else 20)


def _run(engine: Engine, requests: Sequence[GenerationRequest], every_s: float) -> tuple[float, int, int]:
    """Generate ``requests`` together; return seconds, and number and bytes of captures, encoded as for a server."""
    started_s, sizes = time.perf_counter(), list[int]()
    for request in requests:
        engine.submit(replace(request, request_id=new_request_id(), capture_every_s=every_s))
    for event in engine.events():
        if isinstance(event, Captured):
            sizes.append(len(ipc.frame(event)))
    return time.perf_counter() - started_s, len(sizes), sum(sizes)


def _cost(bench: Bench, engine: Engine, num_images: int) -> dict[str, Any]:
    """Return the share of throughput that captures cost in alternating pairs of runs."""
    every_s = 0.01 if bench.quick else EVERY_S
    requests = make_requests(num_images, 4 if bench.quick else 30)
    pairs: list[tuple[float, float]] = []
    counts: list[tuple[int, int]] = []
    while len(pairs) < (2 if bench.quick else PAIRS + 1) and (bench.quick or bench.left_s > 10):
        taken_s: dict[bool, float] = {}
        for is_captured in (True, False) if len(pairs) % 2 else (False, True):
            seconds, count, num_bytes = _run(engine, requests, every_s if is_captured else 0.0)
            taken_s[is_captured] = seconds
            if is_captured:
                counts.append((count, num_bytes))
        pairs.append((taken_s[True], taken_s[False]))
    engine.close()
    pairs, counts = pairs[1:], counts[1:]  # the first pair warms up
    num_captures = sum(count for count, _ in counts)
    return {
        "images": num_images,
        "every_s": every_s,
        "lost_throughput_percent": share_percent(pairs),
        "run_s": round(statistics.median(without for _, without in pairs), 3),
        "captures_per_run": num_captures / len(pairs),
        "bytes_per_capture": sum(num_bytes for _, num_bytes in counts) / max(1, num_captures),
        "problems": [] if num_captures else ["no image was captured"],
    }


def _continue(bench: Bench, make_engine: partial[Engine]) -> dict[str, Any]:
    """Capture a mixed batch at every step, and continue each image in a new engine from a capture in its middle.

    Bytes are promised in the deterministic mode only: otherwise the calls have other numbers of rows.
    """
    engine = make_engine()
    requests = [
        replace(each, request_id=new_request_id(), capture_every_s=1e-9)
        for each in make_requests(4, 6 if bench.quick else 20)
    ]
    for request in requests:
        engine.submit(request)
    data: dict[str, list[bytes]] = {request.request_id: [] for request in requests}
    expected = {}
    while engine.has_work:
        for event in engine.tick():
            if isinstance(event, Captured):
                data[event.request_id].append(event.data)
            elif isinstance(event, ImageFinished):
                expected[event.request_id] = event.result.picture
        time.sleep(0.01)  # for the captures to be finished
    engine.close()
    engine = make_engine()
    resumed = [replace(each, resume_from=data[each.request_id][len(data[each.request_id]) // 2]) for each in requests]
    results = engine.generate(resumed)
    engine.close()
    same = sum(
        result.picture == expected[request.request_id] for result, request in zip(results, requests, strict=True)
    )
    differences = [
        int(np.abs(result.picture.array.astype(int) - expected[request.request_id].array.astype(int)).max())
        for result, request in zip(results, requests, strict=True)
    ]
    is_wrong = engine.is_deterministic and same < len(requests)
    problems = [f"{len(requests) - same} of {len(requests)} images differ"] if is_wrong else []
    return {"images": len(requests), "same_bytes": same, "largest_difference": max(differences), "problems": problems}


def _with_adapter(bench: Bench, name: str, kind: str) -> DiffusionModel:
    """Return the model ``name`` with a folder that has an IP-Adapter of ``kind`` with random weights."""
    model, folder = bench.model(name), bench.work / f"references-{name}-{kind}"
    if not folder.is_dir():
        save_image_encoder(folder / "image_encoder")
        save_file(adapter_tensors(model.unet.network, kind, 1, TOKENS[kind]), folder / "adapter.safetensors")
    profile = replace(model.profile, reference_dir=str(folder))
    changed: DiffusionModel = dataclasses.replace(model, profile=profile)
    return changed


def _references(bench: Bench, name: str, kind: str) -> dict[str, Any]:
    model = _with_adapter(bench, name, kind)
    engine = bench.engine(model)
    rows, side_px = 2 if bench.quick else REFERENCE_ROWS, model.info.good_sizes[0][0]
    group = engine.runners.group_of_short_prompts(side_px, side_px)
    learn_sizes(engine, {"plain": group}, rows)
    calls = measure_calls(engine, group, rows, 2 if bench.quick else 20)
    images = measure(engine, rows, 2 if bench.quick else 10, side_px, 2 if bench.quick else 4)
    engine.close()
    return {"call": calls, **images}


def _reference_bytes(bench: Bench) -> dict[str, Any]:
    model = _with_adapter(bench, "sd15", "plus")
    engine = bench.engine(model, deterministic=True)
    rows = 2 if bench.quick else REFERENCE_ROWS
    same = same_bytes(engine, rows, model.info.good_sizes[0][0])
    engine.close()
    problems = [] if same == rows else [f"{rows - same} of {rows} images depend on their neighbors"]
    return {"images": rows, "same_bytes": same, "problems": problems}


def _large(bench: Bench, model: DiffusionModel, request: GenerationRequest, size: tuple[int, int]) -> dict[str, Any]:
    """Generate one large image after one of a step; compare the memory with that of the dry run."""
    config = EngineConfig(cache_dir=str(bench.work / "cache"))
    plan = plan_large_image(meta_copy(model), config, size, request.diffusion)
    engine = bench.engine(model)
    short = replace(request, request_id=new_request_id(), diffusion=replace(request.diffusion, num_steps=2))
    engine.generate(short)
    before = 0
    if bench.on_gpu:
        torch.cuda.reset_peak_memory_stats(bench.device)
        before = torch.cuda.memory_allocated(bench.device)
    started_s = time.perf_counter()
    [result] = engine.generate(request)
    seconds = time.perf_counter() - started_s
    used = torch.cuda.max_memory_allocated(bench.device) - before if bench.on_gpu else 0
    ticks = [tick.wall_s for tick in engine.trace]
    engine.close()
    problems = [] if result.picture.width_px == size[0] else [f"the image has {result.picture.width_px} px"]
    return {
        "s": round(seconds, 2),
        "tick_ms": round(1e3 * statistics.median(ticks), 1),
        "used_gb": round(used / 1e9, 2),
        "planned_row_gb": round(plan.row.peak_bytes / 1e9, 2),
        "planned_decode_gb": round(plan.decode.peak_bytes / 1e9, 2),
        "planned_decode_tile_gb": round(plan.decode_tile.peak_bytes / 1e9, 2),
        "tiles": 0 if plan.tiles is None else plan.tiles.num_tiles,
        "warnings": list(result.warnings),
        "problems": problems,
    }


def _upscale(bench: Bench, side_px: int) -> dict[str, Any]:
    """Enlarge a random image by a network of the ESRGAN family with random weights."""
    path = bench.work / "rrdb.safetensors"
    save_file(build_network(QUICK_RRDB if bench.quick else RRDB).state_dict(), path)
    upscaler = Upscaler.load(path, choose_device(str(bench.device), "auto"))
    pixels = np.random.default_rng(0).integers(0, 256, (side_px, side_px, 3), dtype=np.uint8)
    taken_s: list[float] = []
    for _ in range(3):
        started_s = time.perf_counter()
        large_pixels = upscaler.upscale(pixels)
        taken_s.append(time.perf_counter() - started_s)
    problems = [] if large_pixels.shape == (4 * side_px, 4 * side_px, 3) else [f"shape {large_pixels.shape}"]
    return {"first_s": round(taken_s[0], 3), "s": round(min(taken_s), 3), "problems": problems}
