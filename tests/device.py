"""The torch device of the tests of the engine and the runtime: ``pytest --device cuda``.

``pytest_configure`` in ``tests/conftest.py`` sets the environment variable before this module is imported.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import pytest

    from diffserve.engine.image.compiled_groups import CompiledGroups
    from diffserve.runtime import DiffusionModel
    from diffserve.settings.config import EngineConfig

DEVICE: Final = os.environ.get("TEST_DEVICE", "cpu")

TOLERANCE_FACTORS: Final = {"cpu": 1.0, "simulated": 1.0}
"""Device -> how much farther apart than on a CPU results may be; other devices: ``GPU_TOLERANCE_FACTOR``."""

GPU_TOLERANCE_FACTOR: Final = 20.0
"""Convolutions and products of a GPU choose their algorithm, and so the order of sums, by shape."""


def tolerance(on_cpu: float) -> float:
    """Return the allowed difference of float32 results on ``DEVICE``, from the one that a CPU keeps."""
    return on_cpu * TOLERANCE_FACTORS.get(DEVICE, GPU_TOLERANCE_FACTOR)


CPU_ONLY: Final = {
    "engine/test_compiled.py": "makes compiled packages for a CPU",
    "engine/test_inductor.py": "compiles for a CPU that stands in for other devices",
    "engine/test_thread_choice.py": "measures threads of a CPU",
    "engine/test_determinism.py::test_deterministic_is_the_default_on_a_cpu": "is about the default of a CPU",
    "engine/test_determinism.py::test_a_large_model": "is about the work that a CPU does to check a model",
    "engine/test_determinism.py::test_rows_of_a_model_that": "is about the work that a CPU does to check a model",
    "int8_static": "multiplies in int8 with kernels of a CPU",
    "runtime/language/test_runner.py::test_calls_of_all_lengths": "only a CPU's calls are padded to few lengths",
    "runtime/test_device_map.py": "spreads a model over simulated devices of its own",
    "runtime/test_gated_layers.py::test_two_products": "a GPU's model has such layers already",
    "runtime/test_gated_layers.py::test_compilers_see": "a GPU's model has such layers already",
    "runtime/test_lean_imports.py": "starts commands on the CPU",
    "runtime/test_offload.py": "compares offloading to main memory and disk on a CPU",
    "runtime/test_precision.py": "is about the arithmetic of a CPU",
    "runtime/test_quantization.py::test_a_layer_of_measured": "is about int8_static, which only a CPU multiplies",
    "runtime/test_quantization.py::test_ranges_are_measured": "measures ranges for int8_static",
    "runtime/test_quantization.py::test_zeros_stay_exact": "is about int8_static, which only a CPU multiplies",
    "runtime/test_steady_layers.py": "is about layers that only a CPU uses",
    "runtime/test_threads.py": "measures threads of a CPU",
}
"""Part of a test's id -> why another device skips it. Tests marked ``gpu`` are not skipped."""


def prepare() -> None:
    """Make ``DEVICE`` compute what the tests expect.

    That is full float32, images that do not depend on others, and UNet calls by the network itself: a replay of a CUDA
    graph or a compiled call runs none of its hooks. The tests of the graphs, which are marked gpu, make their own.
    """
    import torch
    from msgspec.structs import replace

    from diffserve.engine.image import compiled_groups

    if DEVICE == "simulated":
        from tests.simulated_device import register

        register()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    previous = compiled_groups.is_deterministic
    for module in list(sys.modules.values()):  # everywhere that imports it by name
        if vars(module).get("is_deterministic") is previous:
            module.is_deterministic = _is_deterministic  # type: ignore[attr-defined]
    initialize = compiled_groups.CompiledGroups.__init__

    def as_on_a_cpu(groups: CompiledGroups, model: DiffusionModel, config: EngineConfig) -> None:
        how = "warm" if config.compile == "auto" else config.compile  # a GPU would compile in the background
        initialize(groups, model, replace(config, cuda_graphs=False, compile=how))

    compiled_groups.CompiledGroups.__init__ = as_on_a_cpu  # type: ignore[method-assign, assignment]


def _is_deterministic(model: DiffusionModel, config: EngineConfig) -> bool:
    """Return whether images are reproducible: "auto", which is so on a CPU only, is so here too."""
    return config.deterministic in (True, "auto")


def cpu_only_reason(node_id: str) -> str | None:
    """Return why ``DEVICE`` skips the test with the id ``node_id``, if it does."""
    if DEVICE == "cpu":
        return None
    return next((reason for part, reason in CPU_ONLY.items() if part in node_id), None)


def uses_device(item: pytest.Item) -> bool:
    """Return whether a test may use ``DEVICE``: its file, a helper in it or one of its fixtures imports this module."""
    info: Any = vars(item).get("_fixtureinfo")
    definitions = [] if info is None else [fixture for some in info.name2fixturedefs.values() for fixture in some]
    fixtures = [fixture.func for fixture in definitions]
    test_module = sys.modules[item.function.__module__]  # type: ignore[attr-defined]
    names = {getattr(value, "__module__", "") for value in (*vars(test_module).values(), *fixtures)}
    return any(_imports_this_module(str(name)) for name in names | {test_module.__name__})


@functools.cache
def _imports_this_module(name: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None)
    return name.startswith("tests.") and file is not None and __name__ in Path(file).read_text(encoding="utf-8")
