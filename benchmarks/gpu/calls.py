"""What one UNet call costs on the device, by way of making it: plainly, recorded, compiled; and what is in its time."""

from __future__ import annotations

import re
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.cost_curve import measure_cost_curve
from benchmarks.gpu.worker import Bench, NotMeasurableError
from diffserve.disk_cache import DiskCache
from diffserve.engine.image.task import GroupKey
from diffserve.runtime import DiffusionModel
from diffserve.runtime.text.conditioning import Conditioner, make_conditioner
from diffserve.runtime.unet.batch_invariance import Predict
from diffserve.runtime.unet.call import Recorder
from diffserve.runtime.unet.compiled import CompiledUNet, Packages
from diffserve.runtime.unet.graphs import CallGraphs, CudaRecord
from diffserve.runtime.unet.memory_format import FORMATS, store_as
from diffserve.runtime.unet.random_rows import random_call, random_rows
from diffserve.settings.config import EngineConfig

KERNEL_KINDS: Final = {
    "attention": r"flash|fmha|attention|sdpa",
    "convolution": r"conv|implicit|wgrad|dgrad|nchw|nhwc",
    "matrix product": r"gemm|cutlass|cublas|nvjet|matmul",
    "normalization": r"norm|welford|moments",
    "copy": r"memcpy|memset|copy|cat",
    "elementwise": r"elementwise|vectorized|triton|reduce|softmax|index",
}
"""Kinds of kernels by their names; the first that matches counts."""

PROFILES: Final = "profiles.txt"
PROFILE_ROWS: Final = 40


def native_group(model: DiffusionModel) -> GroupKey:
    """Pictures of the native size with short prompts."""
    width_px, height_px = model.info.good_sizes[0]
    return GroupKey(height_px, width_px, model.text.window_tokens)


def conditioner_of(bench: Bench, model: DiffusionModel) -> Conditioner:
    """Text conditions by keys and values on pages, as the engine makes them."""
    return make_conditioner(model, EngineConfig(cache_dir=str(bench.work / "cache")), is_exact=False)


def plain_calls(bench: Bench, model: DiffusionModel, num_rows: int) -> Predict:
    """Plain calls of the network, of up to ``num_rows`` rows of the native size."""
    bench.as_served(model)
    return random_rows(model, native_group(model).shape, num_rows, conditioner_of(bench, model))


def cost_curve(bench: Bench, model: DiffusionModel, *, most_rows: int, repeats: int = 5) -> dict[str, Any]:
    """Milliseconds of a call at each number of rows, and the share of the measured peak."""
    with torch.inference_mode():
        predict = plain_calls(bench, model, most_rows)
        return measure_cost_curve(model, predict, repeats=repeats, most_rows=most_rows)


def compare_places(bench: Bench, model: DiffusionModel, sizes: Sequence[int]) -> dict[str, Any]:
    """Whether rows have the same bytes in every place of a call, and the same as alone, by number of rows."""
    with torch.inference_mode():
        predict = plain_calls(bench, model, max(sizes))
        alone = torch.cat([predict(range(row, row + 1)) for row in range(max(sizes))])
        figures: dict[str, Any] = {"any place": {}, "as alone": {}}
        for size in sizes:
            forwards, backwards = predict(range(size)), predict(range(size - 1, -1, -1)).flip(0)
            figures["any place"][str(size)] = int(torch.equal(forwards, backwards))
            figures["as alone"][str(size)] = int(torch.equal(forwards, alone[:size]))
    return figures


def compare_calls(arms: Mapping[str, Predict], num_rows: int, *, repeats: int) -> dict[str, Any]:
    """Each arm of calls in turns: the fastest call in milliseconds a row, and how far its output is from the first's.

    The difference is the norm of the difference over the norm; 0 where the bytes are the same.
    """
    rows = range(num_rows)
    outputs: dict[str, Tensor] = {}
    for name, predict in arms.items():
        for _ in range(2):  # the second call of a recording is the first replay
            outputs[name] = predict(rows).float()
    least_s = dict.fromkeys(arms, float("inf"))
    for _ in range(repeats):
        for name, predict in arms.items():
            started_s = time.perf_counter()
            predict(rows)
            least_s[name] = min(least_s[name], time.perf_counter() - started_s)
    first = next(iter(arms))
    expected = outputs[first]
    return {
        "rows": num_rows,
        "row_ms": {name: round(1e3 * seconds / num_rows, 3) for name, seconds in least_s.items()},
        "speedup": {name: round(least_s[first] / seconds, 3) for name, seconds in least_s.items() if name != first},
        "difference": {
            name: float((output - expected).norm() / expected.norm())
            for name, output in outputs.items()
            if name != first
        },
    }


def recorder_of(bench: Bench) -> Recorder | None:
    """Return recordings of calls as CUDA graphs, each for its own number of rows; ``None`` on a CPU, which has none."""
    if not bench.on_gpu:
        return None
    return CallGraphs(CudaRecord(bench.device)).recorder("suite", is_padded=False)


def recorded_calls(bench: Bench, model: DiffusionModel, num_rows: int) -> Predict:
    """Return calls of the network that are recorded once and replayed."""
    bench.as_served(model)
    conditioner, recorder = conditioner_of(bench, model), recorder_of(bench)
    return random_rows(model, native_group(model).shape, num_rows, conditioner, recorder=recorder)


def compiled_calls(bench: Bench, model: DiffusionModel, num_rows: int, *, is_recorded: bool) -> Predict:
    """Return calls by the package of ``num_rows`` rows, recorded or not.

    Raises:
        NotMeasurableError: There is no such package.
    """
    bench.as_served(model)
    conditioner, group = conditioner_of(bench, model), native_group(model)
    packages = Packages(model, DiskCache(bench.work / "cache"))
    calls = CompiledUNet(packages)
    if not calls.load(random_call(model, group.shape, 1, conditioner).kind, (num_rows,)):
        reason = packages.reason or packages.missing_tools or "see the compile jobs"
        raise NotMeasurableError(f"there is no package of {num_rows} rows: {reason}")
    recorder = recorder_of(bench) if is_recorded else None
    return random_rows(model, group.shape, num_rows, conditioner, compiled=calls.run, recorder=recorder)


@torch.inference_mode()
def compare_layouts(bench: Bench, model: DiffusionModel, sizes: Sequence[int], *, repeats: int) -> dict[str, Any]:
    """Milliseconds a row with the weights of convolutions in each memory format; the model is left as it was."""
    predict = plain_calls(bench, model, max(sizes))
    original = model.unet.memory_format
    figures: dict[str, Any] = {"chosen": original}
    for name in FORMATS:
        store_as(model.unet.network, name)
        results = [compare_calls({name: predict}, num_rows, repeats=repeats) for num_rows in sizes]
        figures[name] = {str(result["rows"]): result["row_ms"][name] for result in results}
    store_as(model.unet.network, original)
    return figures


@torch.inference_mode()
def profile_step(bench: Bench, model: DiffusionModel, num_rows: int) -> dict[str, Any]:
    """Profile one call of ``num_rows`` rows into ``PROFILES``: where the device's time goes, by kernels and by kinds.

    ``busy_ms`` is the sum over all kernels; what is missing to ``wall_ms`` the device waited for the CPU.
    """
    predict = plain_calls(bench, model, num_rows)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * bench.on_gpu
    wall_ms = []
    for _ in range(3):
        started_s = time.perf_counter()
        predict(range(num_rows))
        wall_ms.append(1e3 * (time.perf_counter() - started_s))
    with profile(activities=activities) as recording:
        predict(range(num_rows))
    time_name = "self_device_time_total" if bench.on_gpu else "self_cpu_time_total"
    averages = recording.key_averages()
    table = averages.table(sort_by=time_name, row_limit=PROFILE_ROWS, max_name_column_width=90)
    title = f"== one call of {num_rows} rows of {model.model_id} in {model.choice.dtype}"
    bench.write(PROFILES, f"{title}\n{table}\n", append=True)
    device_type = DeviceType.CUDA if bench.on_gpu else DeviceType.CPU
    kernels = [each for each in averages if each.device_type == device_type and getattr(each, time_name) > 0]
    busy_ms = defaultdict[str, float](float)
    for kernel in kernels:
        busy_ms[_kind_of(kernel.key)] += 1e-3 * getattr(kernel, time_name)
    return {
        "rows": num_rows,
        "wall_ms": round(statistics.median(wall_ms), 2),
        "busy_ms": round(sum(busy_ms.values()), 2),
        "kernels": sum(kernel.count for kernel in kernels),
        "ms_by_kind": {kind: round(value, 2) for kind, value in sorted(busy_ms.items(), key=lambda item: -item[1])},
    }


def _kind_of(name: str) -> str:
    return next((kind for kind, words in KERNEL_KINDS.items() if re.search(words, name, re.IGNORECASE)), "other")
