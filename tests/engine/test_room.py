"""Memory known beforehand: rows are capped before they run out, pictures decoded in tiles, and refused at the door."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from diffserve.api.errors import InvalidRequest
from diffserve.api.types import Picture
from diffserve.disk_cache import DiskCache
from diffserve.engine.image.buckets import NO_LIMIT
from diffserve.engine.image.room import LOOK_EVERY_S
from diffserve.runtime.footprint import (
    Activations,
    decode_work,
    encode_work,
    kept_features,
    margin,
    meta_copy,
    step_work,
)
from diffserve.runtime.memory import free_bytes
from diffserve.runtime.precision import cpu_bf16_unit, cpu_int8_unit
from diffserve.runtime.text.conditioning import make_conditioner
from diffserve.runtime.vae.vae import VAERunner
from diffserve.settings.config import EngineConfig
from tests.engine.conftest import MakeEngine
from tests.engine.pipelines import image_request

MEASURED = """
from diffserve.runtime.loading.library_imports import import_lean
import_lean()
import json, os, sys, torch
from diffserve.settings.config import EngineConfig
from diffserve.disk_cache import DiskCache
from diffserve.runtime import load_model
from diffserve.runtime.footprint import Activations, margin
from diffserve.runtime.memory import give_heap_back
from diffserve.runtime.text.conditioning import make_conditioner
from diffserve.runtime.unet.random_rows import random_rows
from tests.device import DEVICE

def status(name):
    [line] = [line for line in open("/proc/self/status") if line.startswith(name)]
    return 1024 * int(line.split()[1])

def ratio(run, num_bytes):
    run()
    give_heap_back()
    open("/proc/self/clear_refs", "w").write("5")
    before = status("VmRSS")
    run()
    return (status("VmHWM") - before) / num_bytes

@torch.inference_mode()
def tell(dtype):
    model = load_model("embedded", device=DEVICE, dtype=dtype)
    config = EngineConfig(kv_pool_bytes=1 << 24)
    known = Activations.of(model, config, DiskCache(None))
    conditioner = make_conditioner(model, config, is_exact=False)
    ratios = []
    for side, rows in ((256, 4), (512, 1)):
        cells = (side // model.vae.factor) ** 2
        predict = random_rows(model, (side, side, model.text.window_tokens), rows, conditioner)
        ratios.append(ratio(lambda: predict(range(rows)), rows * known.of_row(cells, 0)))
    latents = torch.randn(1, model.vae.latent_channels, 40, 40)
    ratios.append(ratio(lambda: model.vae.decode(latents), known.picture_cell_bytes * 40 * 40))
    print(json.dumps([dtype, ratios, margin(model)]), flush=True)

load_model("embedded", device="meta")  # all that is imported, before there are threads
for dtype in sys.argv[1:]:
    child = os.fork()
    if not child:
        tell(dtype)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, dtype
"""


def test_one_dry_run_tells_of_every_size_and_number_of_rows(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine()
    cache, config = DiskCache(tmp_path), EngineConfig()
    actual = Activations.of(engine.model, config, cache)
    assert Activations.of(engine.model, config, cache) == actual
    twin = meta_copy(engine.model)
    size, num_rows, cells = (96, 160), 3, 12 * 20
    features = kept_features(twin, size, num_rows)
    assert features is not None
    conditioner = make_conditioner(twin, config, is_exact=False)
    full = step_work(twin, conditioner, size, num_rows).peak_bytes
    shallow = step_work(twin, conditioner, size, num_rows, features).peak_bytes + features.nbytes
    assert num_rows * actual.of_row(cells, 0) == pytest.approx(full, rel=0.03)
    assert num_rows * actual.of_row(cells, 0, is_shallow=True) == pytest.approx(shallow, rel=0.03)
    assert actual.picture_cell_bytes * cells == pytest.approx(decode_work(twin, size).peak_bytes, rel=0.03)
    assert actual.encoded_cell_bytes * cells == pytest.approx(encode_work(twin, size).peak_bytes, rel=0.03)
    bound = Activations.at_most(engine.model)
    assert bound.row_cell_bytes > max(actual.row_cell_bytes, actual.shallow_row_cell_bytes)
    assert bound.picture_cell_bytes > 1.5 * max(actual.picture_cell_bytes, actual.encoded_cell_bytes)


def test_what_is_free_is_what_the_tightest_control_group_leaves(tmp_path: Path) -> None:
    def put(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    cpu = torch.device("cpu")
    assert free_bytes(cpu, tmp_path) is None
    put("proc/meminfo", "MemTotal: 4096 kB\nMemAvailable: 2048 kB\n")
    assert free_bytes(cpu, tmp_path) == 2048 * 1024
    put("proc/self/cgroup", "0::/box/job\n")
    put("sys/fs/cgroup/box/job/memory.max", "max\n")
    put("sys/fs/cgroup/box/job/memory.current", "1000\n")
    put("sys/fs/cgroup/box/job/memory.stat", "anon 700\ninactive_file 300\n")
    assert free_bytes(cpu, tmp_path) == 2048 * 1024, "no limit is no number"
    put("sys/fs/cgroup/box/memory.max", "5000\n")
    put("sys/fs/cgroup/box/memory.current", "4000\n")
    put("sys/fs/cgroup/box/memory.stat", "inactive_file 500\n")
    assert free_bytes(cpu, tmp_path) == 5000 - 4000 + 500
    put("proc/self/cgroup", "5:cpu:/\n4:memory:/old\n")
    put("sys/fs/cgroup/memory/old/memory.limit_in_bytes", "900\n")
    put("sys/fs/cgroup/memory/old/memory.usage_in_bytes", "880\n")
    put("sys/fs/cgroup/memory/old/memory.stat", "total_inactive_file 5\n")
    assert free_bytes(cpu, tmp_path) == 25
    assert free_bytes(torch.device("meta"), tmp_path) is None
    assert (free_bytes(cpu) or 0) > 1 << 20


def test_rows_are_capped_before_they_run_and_no_byte_changes(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [image_request("sd15", "euler_a", seed=seed, num_steps=2, guidance_scale=5.0) for seed in range(4)]
    free = make_engine(max_rows=8)
    free.warm_up()
    expected = [result.picture.data for result in free.generate(requests)]
    group = next(iter(free.buckets))
    assert free.runners.room.rows(group) == NO_LIMIT, "there is plenty: nothing is worked out"
    assert "activations" not in vars(free.runners.room)
    model = free.model
    cells = group.height_px * group.width_px // model.vae.factor**2
    activations = Activations.of(model, free.config, DiskCache(None))
    row = margin(model) * activations.of_row(cells, group.num_tokens)
    bucket = free.runners.groups.facts_of(group).curve.buckets[0]
    engine = make_engine(max_rows=8)
    monkeypatch.setattr(engine.runners.room, "_look", lambda: int((bucket + 0.5) * row))
    engine.runners.room._looked_s -= LOOK_EVERY_S
    assert engine.runners.room.rows(group) == bucket
    asked_rows: list[int] = []

    def watch(_: Any, args: tuple[Any, ...], __: Any) -> None:
        asked_rows.append(args[0].shape[0])

    handle = engine.model.unet.network.register_forward_pre_hook(watch, with_kwargs=True)
    try:
        pictures = [result.picture.data for result in engine.generate(requests)]
    finally:
        handle.remove()
    assert max(asked_rows) <= max(bucket, 4), "a first look is at four rows"
    assert pictures == expected
    trace = [call.num_padded + len(call.rows) for tick in engine.trace for call in tick.calls]
    assert max(trace) == bucket


def test_a_picture_is_decoded_in_tiles_that_fit_and_refused_where_none_does(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make_engine()
    activations = Activations.of(plain.model, plain.config, DiskCache(None))
    factor = plain.model.vae.factor
    num_bytes = int(margin(plain.model) * activations.picture_cell_bytes * 150)
    engine = make_engine(activation_bytes=num_bytes)
    cells: list[int] = []
    decode = engine.model.vae.network.decode

    def watch(z: torch.Tensor, **kwargs: Any) -> Any:
        cells.append(z.shape[-1] * z.shape[-2])
        return decode(z, **kwargs)

    monkeypatch.setattr(engine.model.vae.network, "decode", watch)
    size = {"width_px": 16 * factor, "height_px": 16 * factor}
    assert engine.generate(image_request("sd15", "ddim", seed=3, num_steps=1, **size))
    assert cells
    assert max(cells) <= 150

    tight = make_engine(activation_bytes=num_bytes // 100)
    with pytest.raises(InvalidRequest, match=r"128x128 px takes \d+ MiB .* \d+ MiB are free: ask for \d+x\d+") as no:
        tight.submit(image_request("sd15", "ddim", seed=3, num_steps=1, **size))
    assert (no.value.param, no.value.code) == ("size", "invalid_size")
    assert no.value.message.endswith("or raise engine.activation_bytes.")
    monkeypatch.setattr("diffserve.engine.image.room.free_bytes", lambda _: num_bytes // 100)
    place = "disk" if plain.model.device.type == "cpu" else "cpu"
    with pytest.raises(InvalidRequest, match=rf"or start with --offload {place}\.$"):
        make_engine().runners.check_room(128, 128, False)


def test_a_start_image_is_encoded_in_tiles_that_fit(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = make_engine()
    activations, factor = Activations.of(plain.model, plain.config, DiskCache(None)), plain.model.vae.factor
    needed_bytes = int(margin(plain.model) * activations.encoded_cell_bytes * 150)
    scarce = make_engine(activation_bytes=needed_bytes)
    size = {"width_px": 128, "height_px": 128}
    start = Picture.from_array(np.random.default_rng(0).integers(0, 256, (128, 128, 3), dtype=np.uint8))
    request = image_request("sd15", "ddim", seed=3, num_steps=2, strength=0.5, init_image=start, **size)
    pixels: list[int] = []
    encode = plain.model.vae.network.encode

    def watch(images: torch.Tensor) -> Any:
        pixels.append(images.shape[-1] * images.shape[-2])
        return encode(images)

    monkeypatch.setattr(plain.model.vae.network, "encode", watch)
    [untiled] = plain.generate(request)
    assert pixels == [128 * 128]
    pixels.clear()
    [tiled] = scarce.generate(replace(request, request_id="tiled"))
    assert len(pixels) > 1
    assert max(pixels) <= 150 * factor**2
    assert tiled.picture != untiled.picture
    with_company = scarce.generate([replace(request, request_id="again"), image_request("sd15", "ddim", seed=4)])
    assert with_company[0].picture == tiled.picture


def test_what_a_decode_holds_is_kept_for_the_dtype_of_the_vae(make_engine: MakeEngine, tmp_path: Path) -> None:
    model, config, cache = make_engine().model, EngineConfig(), DiskCache(tmp_path)
    vae = VAERunner(model.vae.network, device=model.device, dtype=torch.bfloat16)
    full = Activations.of(model, config, cache)
    half = Activations.of(dataclasses.replace(model, vae=vae), config, cache)
    assert half.picture_cell_bytes < 0.75 * full.picture_cell_bytes
    assert half.row_cell_bytes == full.row_cell_bytes


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the high-water mark cannot be reset here")
def test_what_a_process_takes_is_within_the_margin(tmp_path: Path) -> None:
    """Measure the peak memory before and after a call, in a process for each dtype."""
    dtypes = ["float32"]
    dtypes += ["bfloat16"] if cpu_bf16_unit() else []  # else a call takes minutes
    dtypes += ["int8_dynamic"] if cpu_int8_unit() else ["int8"]
    outcome = subprocess.run(
        [sys.executable, "-c", MEASURED, *dtypes], capture_output=True, text=True, cwd=tmp_path, timeout=600, check=True
    )
    reports = [json.loads(line) for line in outcome.stdout.splitlines()]
    assert [dtype for dtype, _, _ in reports] == dtypes
    for dtype, ratios, allowed in reports:
        assert len(ratios) == 3
        assert min(ratios) > 0.5, dtype
        assert max(ratios) < 1.4 * allowed, f"{dtype}: the heap of a process is not the same twice"
