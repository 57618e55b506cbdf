"""``pytest --device``: which tests run, on what, and what the simulated device finds without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import device
from tests.missing_packages import ROOT

MIXING = """
import pytest, torch
from tests.simulated_device import register
register()
there, here = torch.ones(3, device="simulated"), torch.ones(3)
assert (there + 1).device.type == "simulated" and (there + 1).cpu().tolist() == [2, 2, 2]
assert (there * torch.tensor(2.0)).cpu().tolist() == [2, 2, 2], "a CPU scalar is allowed"
assert there[torch.tensor([0])].tolist() == [1], "a CPU index is allowed"
for mix in (lambda: there + here, lambda: torch.equal(there, here), lambda: here[there.long()]):
    with pytest.raises(RuntimeError, match="same device"):
        mix()
with pytest.raises(TypeError, match="numpy"):
    there.numpy()
view = there.view(3, 1)
view[0] = 5
assert there.cpu().tolist() == [5, 1, 1], "views share their values"
layer = torch.nn.Linear(3, 2).to("simulated").half()
assert layer(there.half()).dtype == torch.float16
"""


RECORDINGS = """
from types import SimpleNamespace
import torch
from diffserve.settings.config import EngineConfig
from diffserve.engine.image import compiled_groups
from tests.device import prepare
compiled_groups.CudaRecord = lambda device: None
model = SimpleNamespace(device=torch.device("cuda"), choice=SimpleNamespace(is_unet_whole=True))
config = EngineConfig(compile="off")
assert compiled_groups.CompiledGroups(model, config).graphs is not None
prepare()
assert compiled_groups.CompiledGroups(model, config).graphs is None
"""


def run_pytest(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in a process of its own, in the root folder."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "TEST_DEVICE"))}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "0", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=550)


def test_the_simulated_device_refuses_what_a_gpu_refuses() -> None:
    done = subprocess.run([sys.executable, "-c", MIXING], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_tests_on_a_gpu_make_every_call_by_the_network() -> None:
    done = subprocess.run([sys.executable, "-c", RECORDINGS], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_models_engines_and_pages_run_on_the_device_of_the_option() -> None:
    tests = (
        "tests/engine/test_engine.py::test_weights_and_pages_are_on_the_chosen_device",
        "tests/engine/test_parity.py::test_latents_are_those_of_diffusers_alone_and_in_a_mixed_batch_of_eight[sd15]",
        "tests/engine/text/test_parity.py::test_alone[llama]",
        "tests/runtime/test_cross_attention_pages.py",
    )
    done = run_pytest("--device", "simulated", *tests)
    assert done.returncode == 0, done.stdout[-5000:]


@pytest.mark.slow
def test_only_tests_that_may_use_the_device_are_collected() -> None:
    done = run_pytest("--device", "simulated", "--collect-only", "-q")
    assert done.returncode == 0, done.stdout[-5000:]
    files = set(re.findall(r"^tests/(.+?)::", done.stdout, re.MULTILINE))
    assert {file.partition("/")[0] for file in files} == {"engine", "runtime"}
    assert {"engine/test_parity.py", "runtime/kv/test_random_walk.py", "runtime/test_single_file.py"} <= files
    assert files.isdisjoint({"engine/test_policy.py", "runtime/test_prompt.py", "runtime/decoding/test_choose.py"})


def test_every_test_that_only_a_cpu_runs_exists() -> None:
    for part in device.CPU_ONLY:
        file, _, name = part.partition("::")
        if "/" in file:
            text = (Path(__file__).parent / file).read_text(encoding="utf-8")
            assert not name or f"def {name}" in text, part


def test_tests_of_a_cpu_are_skipped_elsewhere_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "tests/runtime/test_threads.py::test_anything"
    assert device.cpu_only_reason(name) is None
    monkeypatch.setattr(device, "DEVICE", "cuda")
    assert device.cpu_only_reason(name) == "measures threads of a CPU"
    assert device.cpu_only_reason("tests/engine/test_parity.py::test_anything") is None
    assert device.tolerance(1e-5) == pytest.approx(device.GPU_TOLERANCE_FACTOR * 1e-5)
