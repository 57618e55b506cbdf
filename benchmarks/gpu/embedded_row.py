"""The embedded model and the rewriter on the device against a CPU in float32, and how the engine lives with the device.

Every kind of request is painted once by the reference and once in each precision of the device, from the same noise.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch

from benchmarks.gpu.images import invariance
from benchmarks.gpu.worker import QUICK_ROWS, Bench
from diffserve.api.errors import DiffserveError
from diffserve.api.rewrite_types import RewriteRequest
from diffserve.api.types import (
    DiffusionParams,
    Failed,
    GenerationRequest,
    ImageFailed,
    ImageFinished,
    ImageResult,
    ModelProfile,
    Picture,
    new_request_id,
)
from diffserve.cli.rewrite import open_rewriter
from diffserve.engine import Engine
from diffserve.engine.image.shape_groups import MOST_ROWS_DEVICE
from diffserve.models.controlnets import Control
from diffserve.models.loras import Lora
from diffserve.models.vocabulary import EMBEDDED_DIRECTORY
from diffserve.runtime import DiffusionModel, load_model
from diffserve.runtime.loading.library_imports import import_quietly
from diffserve.settings.config import EngineConfig
from diffserve.settings.layers import load_settings
from diffserve.training.wishes import wishes

TOLERANCES: Final = {"float32": 0.01, "float16": 0.03, "bfloat16": 0.15}
"""Of latents: the norm of the difference from the CPU's float32 over the norm. On a CPU float16 is 0.002 away from
float32, and bfloat16 0.015; TF32, which CUDA's convolutions use for float32, rounds like float16."""

POSTERIOR_NOISE: Final = 0.05
"""Added to the tolerance of inpainting in 16 bits. The kept half is one draw of the VAE's posterior, whose standard
deviation is 0.05. It is drawn in the VAE's dtype, as in diffusers, and up to torch 2.11 a seed draws other numbers in
16 bits than in float32: latents are then 0.047 away on any device, and the pixels of the kept half are not."""

PROMPT: Final = "a red fox on the beach"
SIZE_PX: Final = 128
CONTROLNET: Final = "edges"
WISHES: Final = 8
WISHES_SEED: Final = 777_001
CROWD: Final = 24
HEADROOM_SHARE: Final = 0.4
"""Of the memory that a call of the most rows takes, what is left to the process when memory is made scarce. That is
enough for an image alone."""


def run(bench: Bench) -> None:
    """Exactness of every kind of request, batch invariance, recovery from running out of memory, and texts."""
    profile = _profile(bench)
    requests = _requests(bench, profile)
    reference = bench.point(
        "reference", lambda: _Painted(_paint(bench, load("cpu", "float32", profile), requests)), needs_s=10
    )
    for name in ("float32",) if bench.quick else tuple(TOLERANCES):
        if reference is not None:
            exactness = partial(_exactness, bench, profile, requests, reference.results, name)
            bench.point(f"exactness-{name}", exactness, needs_s=6)
    bench.point("invariance", lambda: _invariance(bench, profile, requests), needs_s=8)
    bench.point("graphs by kind", lambda: _graphs_by_kind(bench, profile, requests), needs_s=12)
    bench.point("out of memory", lambda: _out_of_memory(bench, profile), needs_s=8)
    bench.point("rewriter", lambda: _rewriter(bench), needs_s=10)


class _Painted:
    """Results of the reference, which are compared and not written down."""

    def __init__(self, results: dict[str, ImageResult]) -> None:
        self.results = results


def load(device: str, dtype: str, profile: ModelProfile) -> DiffusionModel:
    """Measure the embedded model."""
    return load_model("embedded", device=device, dtype=dtype, profile=profile)


def _profile(bench: Bench) -> ModelProfile:
    """Return the embedded model's, with itself as its refiner and a folder with a random ControlNet."""
    folder = bench.work / "controlnets"
    settings = load_settings(model="embedded", env={}).model
    profile = msgspec.structs.replace(settings, controlnet_dir=str(folder), refiner=str(EMBEDDED_DIRECTORY))
    if not folder.is_dir():
        unet = load("cpu", "float32", settings).unet.network
        save_controlnet(unet, folder / CONTROLNET)
    return profile


def save_controlnet(unet: Any, directory: Path) -> None:
    """Return a ControlNet that fits ``unet``, with random numbers where a new one has zeros."""
    torch.manual_seed(1)
    network = import_quietly("diffusers", "ControlNetModel").from_unet(unet, load_weights_from_unet=False)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.startswith(("controlnet_down", "controlnet_mid", "controlnet_cond_embedding.conv_out")):
                parameter.copy_(torch.randn(parameter.shape) / parameter[0].numel() ** 0.5)
    network.save_pretrained(str(directory))


def _requests(bench: Bench, profile: ModelProfile) -> dict[str, GenerationRequest]:
    """One request of each kind; images that others start from are painted by the reference first."""
    steps = 2 if bench.quick else 10
    plain = DiffusionParams(sampler="ddim", num_steps=steps, guidance_scale=3.0)
    engine = Engine(load("cpu", "float32", msgspec.structs.replace(profile, refiner="")), _config(bench))
    [start] = engine.generate(GenerationRequest(prompt="a boat on the lake", seed=9, diffusion=plain))
    mask = np.zeros((SIZE_PX, SIZE_PX), dtype=np.uint8)
    mask[:, SIZE_PX // 2 :] = 255
    fields: dict[str, dict[str, Any]] = {
        "txt2img": {},
        "img2img": {"strength": 0.6, "init_image": start.picture},
        "inpaint": {"strength": 0.8, "init_image": start.picture, "mask_image": Picture.from_array(mask)},
        "lora gift": {"loras": (Lora("gift"),)},
        "lora sepia": {"loras": (Lora("sepia"),)},
        "controlnet": {"controlnets": (Control(CONTROLNET),), "control_images": (start.picture,)},
        "refiner": {"switch_at": 0.5},
        "deep cache": {"cache_interval": 2},
    }
    requests = {}
    for seed, (name, extra) in enumerate(fields.items()):
        params = {key: value for key, value in extra.items() if key in DiffusionParams.__struct_fields__}
        images = {key: value for key, value in extra.items() if key not in params}
        diffusion = msgspec.structs.replace(plain, **params)
        requests[name] = GenerationRequest(prompt=PROMPT, seed=seed, diffusion=diffusion, return_latents=True, **images)
    return requests


def _config(bench: Bench, **changes: Any) -> EngineConfig:
    """No compiled calls, few rows, and nothing that was measured earlier."""
    rows = QUICK_ROWS if bench.quick else 8
    settings: dict[str, Any] = {"compile": "off", "cuda_graphs": False, "cache_dir": "", "max_rows": rows}
    return EngineConfig(**(settings | changes))


def _paint(bench: Bench, model: DiffusionModel, requests: dict[str, GenerationRequest]) -> dict[str, ImageResult]:
    """Paint all ``requests`` together, in the mode that promises no bytes: it measures less before it begins."""
    engine = Engine(model, _config(bench, deterministic=False))
    return dict(zip(requests, engine.generate(list(requests.values())), strict=True))


def _exactness(
    bench: Bench,
    profile: ModelProfile,
    requests: dict[str, GenerationRequest],
    expected: dict[str, ImageResult],
    dtype: str,
) -> dict[str, Any]:
    return compare(expected, _paint(bench, load(str(bench.device), dtype, profile), requests), dtype)


def compare(expected: dict[str, ImageResult], results: dict[str, ImageResult], dtype: str) -> dict[str, Any]:
    """Measure the error of latents and the signal-to-noise ratio of pixels, by kind of request."""
    figures: dict[str, Any] = {"tolerance": TOLERANCES[dtype], "error": {}, "psnr_db": {}, "problems": []}
    for name, result in results.items():
        reference = expected[name]
        assert result.latents is not None
        assert reference.latents is not None
        difference = np.linalg.norm(result.latents.array - reference.latents.array)
        error = float(difference / np.linalg.norm(reference.latents.array))
        squared = np.square(result.picture.array.astype(float) - reference.picture.array).mean()
        figures["error"][name] = round(error, 5)
        figures["psnr_db"][name] = round(float(10.0 * np.log10(255.0**2 / max(squared, 1e-3))), 1)
        tolerance = TOLERANCES[dtype] + POSTERIOR_NOISE * (name == "inpaint" and dtype != "float32")
        if not error <= tolerance:
            figures["problems"].append(f"{name} in {dtype} is {error:.3g} away, more than {tolerance:.3g}")
    return figures


def _invariance(bench: Bench, profile: ModelProfile, requests: dict[str, GenerationRequest]) -> dict[str, Any]:
    """Bytes alone and among neighbors, in the deterministic mode and in the precision that is served."""
    model = load(str(bench.device), "float32" if bench.quick else "auto", profile)
    engine = Engine(
        model, _config(bench, deterministic=True, cuda_graphs=bench.on_gpu, cache_dir=str(bench.work / "cache"))
    )
    kinds = ("txt2img", "img2img") if bench.quick else tuple(requests)
    return invariance(engine, [requests[name] for name in kinds])


def _graphs_by_kind(bench: Bench, profile: ModelProfile, requests: dict[str, GenerationRequest]) -> dict[str, Any]:
    """Milliseconds a row of requests of one kind, eager and recorded, after a warm-up; and memory of the recordings."""
    model = load(str(bench.device), "float32" if bench.quick else "auto", profile)
    kinds = ("lora gift",) if bench.quick else ("txt2img", "lora gift", "controlnet", "deep cache")
    count = 1 if bench.quick else 8
    figures: dict[str, Any] = {}
    for name in kinds:
        for has_graphs in (False, True):
            engine = Engine(model, _config(bench, deterministic=False, cuda_graphs=has_graphs))
            row_ms = []
            for _ in range(2):
                started_s = time.perf_counter()
                results = engine.generate([_again(requests[name], seed) for seed in range(count)])
                rows = sum(result.num_evaluations for result in results)
                row_ms.append(1e3 * (time.perf_counter() - started_s) / rows)
            figures[f"{name} {'recorded' if has_graphs else 'eager'}"] = round(row_ms[-1], 3)
            graphs = engine.runners.groups.compiled.graphs
            if graphs is not None:
                figures[f"{name} graphs"] = graphs.num_graphs
                figures[f"{name} graphs_mb"] = round(graphs.num_bytes / 1e6, 1)
            engine.close()
    return figures


def _again(request: GenerationRequest, seed: int) -> GenerationRequest:
    return msgspec.structs.replace(request, seed=seed, request_id=new_request_id())


@contextlib.contextmanager
def scarce_memory(bench: Bench, model: DiffusionModel, headroom_bytes: int) -> Iterator[Callable[[], int]]:
    """Leave the process ``headroom_bytes`` on the device beyond what its tensors take; on a CPU, large calls fail.

    Yields a function that returns how often memory ran out so far.
    """
    if bench.on_gpu:
        device = bench.device
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(device).total_memory
        # free parts of segments that are in use count as headroom, although a large tensor may not fit into one
        allowed = max(torch.cuda.memory_allocated(device) + headroom_bytes, torch.cuda.memory_reserved(device))
        before = _num_ooms(device)
        torch.cuda.set_per_process_memory_fraction(allowed / total, device)
        try:
            yield lambda: _num_ooms(device) - before
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
        return
    refused: list[int] = []

    def refuse(_module: Any, arguments: tuple[Any, ...], _arguments: dict[str, Any]) -> None:
        if len(arguments[0]) > 2:
            refused.append(len(arguments[0]))
            raise torch.OutOfMemoryError(f"no room for {len(arguments[0])} rows")

    handle = model.unet.network.register_forward_pre_hook(refuse, with_kwargs=True)
    try:
        yield lambda: len(refused)
    finally:
        handle.remove()


def _num_ooms(device: torch.device) -> int:
    """How often torch's allocator found no memory since the process began."""
    return int(torch.cuda.memory_stats(device).get("num_ooms", 0))


def _out_of_memory(bench: Bench, profile: ModelProfile) -> dict[str, Any]:
    """Paint large images with little memory: each is painted or refused with a reason, later ones have all of it."""
    model = load(str(bench.device), "float32" if bench.quick else "auto", profile)
    side_px, count, steps = (SIZE_PX, 3, 1) if bench.quick else (model.info.max_side_px, CROWD, 3)
    rows = QUICK_ROWS if bench.quick else MOST_ROWS_DEVICE
    engine = Engine(model, _config(bench, max_rows=rows, cuda_graphs=bench.on_gpu, deterministic=False))
    params = DiffusionParams(sampler="ddim", num_steps=steps, guidance_scale=3.0)
    crowd = [
        GenerationRequest(prompt=PROMPT, seed=seed, diffusion=params, width_px=side_px, height_px=side_px)
        for seed in range(count)
    ]
    small = GenerationRequest(prompt=PROMPT, seed=1, diffusion=params)
    before = engine.generate(small)[0].picture
    graphs = engine.runners.groups.compiled.graphs
    if graphs is not None:  # measured sizes allow calls of many rows, and a replay would take no memory
        with graphs.bypassed():
            engine.runners.groups.learn(engine.runners.group_of_short_prompts(side_px, side_px))
    row_bytes = engine.runners.room.activations.of_row((side_px // model.vae.factor) ** 2, model.text.window_tokens)
    headroom_bytes = int(HEADROOM_SHARE * rows * row_bytes)
    painted, reasons = 0, set()
    with scarce_memory(bench, model, headroom_bytes) as num_ooms:
        for request in crowd:
            engine.submit(request)
        for event in engine.events():
            painted += isinstance(event, ImageFinished)
            if isinstance(event, (Failed, ImageFailed)):
                reasons.add(event.message[:200])
        times_out = num_ooms()
    again = [engine.generate(request) for request in crowd[:2]]
    after = engine.generate(small)[0].picture
    difference = int(np.abs(after.array.astype(int) - before.array.astype(int)).max())
    problems = []
    if difference > 8:
        problems.append("an image is another one after memory ran out")
    if times_out == 0:
        problems.append(f"memory never ran out with {headroom_bytes / 1e6:.0f} MB")
    if painted == 0:
        problems.append("no image was painted with little memory")
    return {
        "images": count,
        "side_px": side_px,
        "headroom_mb": round(headroom_bytes / 1e6, 1),
        "ran_out": times_out,
        "painted_with_little": painted,
        "reasons": sorted(reasons),
        "painted_later": len(again),
        "largest_difference_of_a_pixel": difference,
        "graphs_afterwards": None if graphs is None else graphs.num_graphs,
        "problems": problems,
    }


def _rewriter(bench: Bench) -> dict[str, Any]:
    """Rewrites of the same wishes on a CPU in float32 and on the device, and tokens a second of many at once."""
    count = 2 if bench.quick else WISHES
    texts = [wish.text for wish in islice(wishes(WISHES_SEED, held_out=False), count)]
    expected = _rewrites("cpu", "float32", texts)
    figures: dict[str, Any] = {"wishes": count, "same_prompts": {}}
    for name in ("float32",) if bench.quick else ("float32", "float16", "bfloat16"):
        prompts = _rewrites(str(bench.device), name, texts)
        figures["same_prompts"][name] = sum(left == right for left, right in zip(expected, prompts, strict=True))
    exact = figures["same_prompts"]["float32"]
    return figures | {
        "problems": [] if exact >= count - 1 else [f"{count - exact} of {count} prompts differ in float32"]
    }


def _rewrites(device: str, dtype: str, texts: list[str]) -> list[str]:
    rewriter = open_rewriter("embedded", None, device=device, dtype=dtype)
    try:
        answers = rewriter.answer([RewriteRequest(wish=wish) for wish in texts])
    except DiffserveError as error:
        raise RuntimeError(f"rewriting on {device} in {dtype}: {error}") from error
    return [answer.rewrites[0].prompt for answer in answers]
