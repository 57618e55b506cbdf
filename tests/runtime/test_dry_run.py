"""Work counted on the meta device: against arithmetic done by hand, and against torch's own counter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.random_models import save_hollow_model
from diffserve.api.errors import ConfigError
from diffserve.runtime import load_model
from diffserve.runtime.dry_run import GPUS, HostSyncError, MixedDevicesError, dry_run, find_gpu
from diffserve.runtime.footprint import footprint_of
from diffserve.runtime.loading.checkpoint import Checkpoint
from diffserve.runtime.transfer import fetch, send
from diffserve.runtime.unet.random_rows import random_inputs
from diffserve.settings.config import EngineConfig

META = torch.device("meta")


def shaped(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """Return a tensor without data."""
    return torch.empty(shape, dtype=dtype, device=META)


def test_a_product_is_counted_as_by_hand() -> None:
    left, right = shaped(32, 64), shaped(64, 128)
    work = dry_run(lambda: left @ right)
    [kernel] = work.kernels
    assert kernel.flops == 2 * 32 * 64 * 128
    assert kernel.moved_bytes == 2 * (32 * 64 + 64 * 128 + 32 * 128)
    assert work.peak_bytes == 2 * 32 * 128
    assert (work.copies, work.held_bytes) == (0, 0)


def test_attention_is_one_kernel_that_holds_no_scores() -> None:
    query, keys = shaped(2, 8, 4096, 40), shaped(2, 8, 77, 40)
    work = dry_run(lambda: F.scaled_dot_product_attention(query, keys, keys))
    assert len(work.kernels) == 1
    assert work.flops == 2 * 2 * 8 * 4096 * 77 * 40 * 2
    assert work.peak_bytes == query.nbytes


def test_views_launch_nothing_and_what_is_dropped_is_not_held() -> None:
    tensor = shaped(1024, 1024)
    work = dry_run(lambda: (tensor.view(-1).unsqueeze(0).expand(4, -1), tensor.T[:10]))
    assert (work.kernels, work.peak_bytes) == ([], 0)

    def chain() -> torch.Tensor:
        value = tensor + 1
        for _ in range(5):
            value = value + 1
        return value

    assert dry_run(chain).peak_bytes == 2 * tensor.nbytes


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).all()),
        lambda x: x.cpu(),
        lambda x: x.to("cpu", torch.float32),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.empty(4).copy_(x),
        lambda x: x.tolist(),
        lambda x: torch.equal(x, x),
    ],
)
def test_whatever_waits_for_the_device_raises(wait: Callable[[torch.Tensor], object]) -> None:
    x = shaped(4)
    with pytest.raises((HostSyncError, NotImplementedError, RuntimeError)):
        dry_run(lambda: wait(x))


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x + torch.ones(4),
        lambda x: x.index_select(0, torch.tensor([1])),
        lambda x: torch.cat([x, torch.ones(4)]),
    ],
)
def test_a_tensor_of_main_memory_in_a_kernel_raises(mix: Callable[[torch.Tensor], object]) -> None:
    x = shaped(4, dtype=torch.float32)
    with pytest.raises(MixedDevicesError):
        dry_run(lambda: mix(x))


@pytest.mark.parametrize(
    "copy",
    [
        lambda x: torch.ones(4).to(META),
        lambda x: torch.tensor([1.0, 2.0], device=META),
        lambda x: x[[0, 1]],
        lambda x: x.copy_(torch.ones(4)),
        lambda x: send(torch.ones(4), META),
    ],
)
def test_every_way_to_the_device_is_counted_once(copy: Callable[[torch.Tensor], object]) -> None:
    x = shaped(4, dtype=torch.float32)
    assert dry_run(lambda: copy(x)).copies == 1


def test_what_is_fetched_in_the_background_is_counted_and_waits_for_nothing() -> None:
    x = shaped(4)
    work = dry_run(lambda: fetch(torch.isfinite(x)))
    assert (work.fetches, work.copies) == (1, 0)
    assert fetch(torch.tensor([3, 4])).read().tolist() == [3, 4]


def test_the_unet_is_counted_as_torch_counts_it_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = save_hollow_model("tiny-random", tmp_path, dtype=torch.float32)
    model = load_model(path, device="meta", dtype="float32")
    inputs = random_inputs(model, (128, 128, 77), 2)
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model.unet.predict(**inputs)
    work = dry_run(lambda: model.unet.predict(**inputs))
    assert work.flops == pytest.approx(counter.get_total_flops())
    assert (work.held_bytes, work.copies) == (0, 0)


@pytest.mark.slow
def test_needs_are_known_from_files_that_hold_nothing_and_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpoint, "read", None)
    path = save_hollow_model("sd15-random", tmp_path, dtype=torch.float16)
    disk_bytes = sum(file.stat().st_blocks for file in path.rglob("*.safetensors")) * 512
    assert disk_bytes < 1 << 22, "the holes are filled"
    footprint = footprint_of(path, dtype="float16", config=EngineConfig(), profile=None, rows=(1, 2))
    assert footprint.weights_bytes == pytest.approx(2.13e9, rel=0.01)
    first_step, two = footprint.steps[1], footprint.steps[2]
    assert first_step.flops == pytest.approx(0.803e12, rel=0.01)  # the text's keys and values are made beforehand
    assert two.flops == pytest.approx(2 * first_step.flops)
    assert len(first_step.kernels) == len(two.kernels) < 900
    assert footprint.decode.flops == pytest.approx(2.52e12, rel=0.01)
    assert footprint.peak_bytes > footprint.weights_bytes + footprint.page_pool_bytes + footprint.decode.peak_bytes - 1
    h100 = find_gpu("H100")
    assert 0.8e-3 < h100.seconds(first_step, torch.float16) < h100.seconds(two, torch.float16) < 4e-3
    assert h100.seconds(two, torch.float32) > h100.seconds(two, torch.float16)


def test_a_gpu_nobody_knows_is_named_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'h1000'.*h100.*rtx4090"):
        find_gpu("h1000")
    assert all(gpu.tflops_16 > gpu.tflops_32 for gpu in GPUS.values())


def test_a_meta_layer_needs_no_weights() -> None:
    with torch.device("meta"):
        layer = nn.Conv2d(4, 8, 3, padding=1)
    x = shaped(1, 4, 16, 16, dtype=torch.float32)
    assert dry_run(lambda: layer(x)).flops == 2 * 16 * 16 * 8 * 4 * 9
